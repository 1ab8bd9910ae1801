"""Why checkpoints have equal weights: nothing was learned, or a seed was used twice."""

from typing import ClassVar

import pytest

from aqnpipe.comparison import lineage
from aqnpipe.config.plan import StudyPlan


class Stub(lineage._Lineage):
    """A study whose evaluations have these weights; the prepared model has the weights `start`."""

    weights: ClassVar[dict] = {}
    same_content = False

    def problems(self, checkpoint):
        self._weights[checkpoint] = self.weights.get(checkpoint, str(checkpoint))
        return []

    def _prepared_weights(self, model):
        return "start"


@pytest.fixture
def found(synthetic, monkeypatch):
    def problems(weights, same_content=False):
        monkeypatch.setattr(lineage, "_Lineage", Stub)
        monkeypatch.setattr(Stub, "weights", weights)
        monkeypatch.setattr(lineage, "is_untrained", lambda checkpoint, model: same_content)
        return {key: texts for key, texts in lineage.lineage_problems(StudyPlan(synthetic.study())).items() if texts}

    return problems


FIRST, SECOND = (("base", "E5", seed, 60) for seed in (0, 1))


def test_other_weights_have_no_problem(found):
    assert found({}) == {}
    assert found({("base", "pretrained", 0, 0): "start"}) == {}


def test_equal_weights_that_learned_are_one_seed_twice(found):
    problems = found({FIRST: "x", SECOND: "x"})
    assert set(problems) == {FIRST, SECOND}
    assert problems[FIRST] == ("arm E5: seed 0 has the weights of seed 1 too: a seed was used twice",)


@pytest.mark.parametrize("weights", [{FIRST: "start", SECOND: "start"}, {FIRST: "start"}])
def test_the_weights_of_the_prepared_model_are_nothing_learned(found, weights):
    problems = found(weights)
    assert set(problems) == set(weights)
    assert "nothing was learned" in problems[FIRST][0]
    assert "used twice" not in problems[FIRST][0]


def test_equal_weights_in_files_that_differ_are_nothing_learned(found):
    problems = found({FIRST: "x", SECOND: "x"}, same_content=True)
    assert all("nothing was learned" in texts[0] for texts in problems.values())
