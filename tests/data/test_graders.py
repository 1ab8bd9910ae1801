"""Graders of an evaluation: the scorers of this package, and a function of a user's own, with its result checked."""

import pytest
from replacing import replaced

from aqnpipe.config.custom_code import load_function, located, source_digest
from aqnpipe.config.evaluation import EvaluationConfig
from aqnpipe.data.graders import columns_of, grader, graders_of, pairs, refuse_unusable_scorer
from aqnpipe.data.scoring import SCORERS, Graded
from aqnpipe.errors import ConfigError

SOURCE = """
import sys

def contains(response, gold_answer):
    return gold_answer in response

def last_word(response, gold_answer):
    words = response.split()
    return (words[-1] if words else None), words[-1:] == [gold_answer]

def zero_or_one(response, gold_answer):
    return 1.0

def half(response, gold_answer):
    return 0.5

def wrong_answer(response, gold_answer):
    return 7, True

def text(response, gold_answer):
    return "True"

def leaves(response, gold_answer):
    sys.exit(0)
"""


@pytest.fixture
def own(own_module):
    return own_module(SOURCE)


def of(function):
    return grader(function, source_digest(function))


def test_an_evaluation_applies_the_scorers_of_numbers_and_its_primary_one(own):
    assert tuple(graders_of("strict")) == SCORERS
    assert tuple(graders_of("boxed")) == (*SCORERS, "boxed")
    graders = graders_of(f"{own}:contains", source_digest(f"{own}:contains"))
    assert tuple(graders) == (*SCORERS, "own")
    assert columns_of(graders)[-2:] == ["answer_own", "correct_own"]
    found = pairs({name: grade("it is #### 7", "7") for name, grade in graders.items()})
    assert (found["answer_strict"], found["answer_own"], found["correct_own"]) == ("7", "it is #### 7", True)


def test_a_function_returns_a_verdict_or_an_answer_with_it(own):
    assert of(f"{own}:contains")("a rose", "rose") == Graded("a rose", True)
    assert of(f"{own}:contains")(" ", "rose") == Graded(None, False)
    assert of(f"{own}:last_word")("a rose", "rose") == Graded("rose", True)
    assert of(f"{own}:last_word")("", "rose") == Graded(None, False)
    assert of(f"{own}:zero_or_one")("a", "b").correct is True


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("half", "returned '0.5' (float) for the response 'a', expected True or False, or a pair"),
        ("wrong_answer", "returned '(7, True)' (tuple) for the response 'a', expected True or False, or a pair"),
        ("text", "returned 'True' (str) for the response 'a', expected True or False, or a pair"),
        ("leaves", "raised SystemExit: 0, for the response 'a' and the gold answer 'b'"),
    ],
)
def test_anything_else_is_one_line(own, name, message):
    with pytest.raises(ConfigError) as refused:
        of(f"{own}:{name}")("a", "b")
    assert str(refused.value).startswith(f"{own}:{name}: {message}")


def test_a_source_that_changed_after_planning_is_refused(own, tmp_path):
    planned = EvaluationConfig(primary_scorer=f"{own}:contains", max_response_tokens=4, batch_size=1).planned()
    assert planned.scorer_sha256 == source_digest(f"{own}:contains")
    refuse_unusable_scorer(planned)
    (tmp_path / f"{own}.py").write_text(replaced(SOURCE, "gold_answer in response", "True"))
    with pytest.raises(ConfigError, match=r"scorer_sha256 is .*, its source has"):
        planned.planned()
    with pytest.raises(ConfigError, match="its source changed after the run was planned"):
        grader(planned.primary_scorer, planned.scorer_sha256)


def test_a_module_beside_the_study_gets_its_folder(own, tmp_path):
    studies = tmp_path / "studies"
    (studies / "inner").mkdir(parents=True)
    for place in (studies / f"beside_{own}.py", studies / "inner" / f"inner_{own}.py"):
        place.write_text(SOURCE)
    folder = studies.relative_to(tmp_path)
    assert located(f"beside_{own}:contains", folder) == f"studies/beside_{own}:contains"
    # The working directory is a usual place; a folder in the name is relative to the study.
    assert located(f"{own}:contains", folder) == f"{own}:contains"
    assert located(f"inner/inner_{own}:contains", folder) == f"studies/inner/inner_{own}:contains"
    # What is nowhere, or no function at all, is refused later and stays as it is.
    assert located(f"nowhere_{own}:contains", folder) == f"nowhere_{own}:contains"
    assert located("strict", folder) == "strict"
    assert of(f"studies/beside_{own}:contains")("a rose", "rose").correct
    with pytest.raises(ConfigError, match=f"no module nowhere_{own} in studies"):
        load_function(f"studies/nowhere_{own}:contains")


def test_a_module_behind_another_of_its_name_is_refused(own, tmp_path):
    (tmp_path / "studies").mkdir()
    (tmp_path / "studies" / f"{own}.py").write_text(SOURCE)
    assert of(f"{own}:contains")("a", "a").correct
    with pytest.raises(ConfigError, match=r"is hidden by .*, which has its name: rename the module"):
        load_function(f"studies/{own}:contains")


def test_modules_of_one_name_in_two_places_are_refused(own, tmp_path, monkeypatch):
    (tmp_path / "studies").mkdir()
    copy = tmp_path / "studies" / f"{own}.py"
    copy.write_text(SOURCE)
    with pytest.raises(ConfigError, match=f"{own}:contains: found .* and .*expected one module of this name"):
        located(f"{own}:contains", (tmp_path / "studies").relative_to(tmp_path))
    monkeypatch.syspath_prepend(tmp_path / "studies")
    with pytest.raises(ConfigError, match="expected one module of this name"):
        of(f"{own}:contains")
    # The same file by two ways is one module.
    copy.unlink()
    copy.symlink_to(tmp_path / f"{own}.py")
    assert of(f"{own}:contains")("a", "a").correct


def test_a_helper_behind_another_of_its_name_is_refused(own_module, tmp_path):
    scorer = own_module("def right(response, gold):\n    import statistics\n    return True\n")
    assert of(f"{scorer}:right")("a", "a").correct
    (tmp_path / "statistics.py").write_text("")
    with pytest.raises(ConfigError, match=r"statistics\.py is hidden by .*statistics\.py, which has its name"):
        of(f"{scorer}:right")


def test_a_module_with_the_name_of_one_without_a_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sys.py").write_text(SOURCE)
    with pytest.raises(ConfigError, match=r"sys\.py is hidden by a module of Python"):
        load_function("sys:contains")
