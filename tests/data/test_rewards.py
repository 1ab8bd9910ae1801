"""Rewards: scorers and functions of a user's own, weighted; each mistake in a function is one line."""

import pytest

from aqnpipe.config.custom_code import load_function, source_digest, source_of
from aqnpipe.config.training import Reward
from aqnpipe.data.graders import weighted_rewards
from aqnpipe.errors import ConfigError

SOURCE = """
from {helper} import bonus

def short(response, gold_answer):
    return bonus if len(response) < 20 else 0

def broken(response, gold_answer):
    raise KeyError("no such key")

def nothing(response, gold_answer):
    return None

def leaves(response, gold_answer):
    raise SystemExit(0)

def nan(response, gold_answer):
    return float("nan")

def text(response, gold_answer):
    return "1"

number = 3
"""


@pytest.fixture
def own(own_module):
    return own_module(SOURCE.format(helper=own_module("bonus = 0.5\n", "_helper")))


def test_scorers_and_functions_are_added_with_their_weights(own):
    rewards = [
        Reward(scorer="boxed"),
        Reward(scorer="strict", weight=2.0),
        Reward(function=f"{own}:short", weight=-0.2).planned(),
    ]
    responses = ["\\boxed{7} #### 7", "#### 7", "a long response that ends with \\boxed{7}"]
    assert weighted_rewards(rewards, responses, ["7"] * 3) == pytest.approx([1 + 2 - 0.1, 2 - 0.1, 1])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken", "raised KeyError: 'no such key', for the response 'a' and the gold answer 'b'"),
        ("leaves", "raised SystemExit: 0, for the response 'a' and the gold answer 'b'"),
        ("nothing", "returned 'None' (NoneType) for the response 'a', expected a finite number"),
        ("nan", "returned 'nan' (float) for the response 'a', expected a finite number"),
        ("text", "returned '1' (str) for the response 'a', expected a finite number"),
        ("number", "has no function number"),
        ("missing", "has no function missing"),
    ],
)
def test_a_function_that_does_not_do_its_work_is_one_line(own, name, message):
    with pytest.raises(ConfigError) as refused:
        weighted_rewards([Reward(function=f"{own}:{name}").planned()], ["a"], ["b"])
    assert message in str(refused.value)
    assert str(refused.value).startswith(f"{own}:{name}: ")


def test_modules_that_cannot_be_imported_are_one_line(own, tmp_path):
    with pytest.raises(ConfigError, match="no module gone_for_good in the working directory"):
        load_function("gone_for_good:f")
    with pytest.raises(ConfigError, match=f"no module {own}.inner in"):
        load_function(f"{own}.inner:f")
    with pytest.raises(ConfigError, match="has no Python source"):
        source_of("math:sqrt") if "math" not in __import__("sys").builtin_module_names else source_of("_ctypes:x")
    (tmp_path / f"{own}_raises.py").write_text("raise OSError('no license')\n")
    with pytest.raises(ConfigError, match=r"cannot be imported \(OSError: no license\)"):
        load_function(f"{own}_raises:f")
    (tmp_path / f"{own}_leaves.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(ConfigError, match=r"cannot be imported \(SystemExit: 0\)"):
        load_function(f"{own}_leaves:f")


def test_the_digest_follows_the_module_and_what_it_imports_beside_it(own, tmp_path):
    first = source_digest(f"{own}:short")
    (tmp_path / "unrelated.py").write_text("x = 1\n")
    assert source_digest(f"{own}:short") == first
    (tmp_path / f"{own}_helper.py").write_text("bonus = 0.6\n")
    assert source_digest(f"{own}:short") != first


def test_the_digest_of_a_package_covers_all_of_it(own, tmp_path):
    package = tmp_path / f"{own}_package"
    (package / "inner").mkdir(parents=True)
    for name in ("__init__.py", "inner/__init__.py", "inner/rewards.py"):
        (package / name).write_text("")
    first = source_digest(f"{own}_package.inner.rewards:f")
    (package / "other.py").write_text("x = 1\n")
    assert source_digest(f"{own}_package.inner.rewards:f") != first


def test_a_source_that_changed_after_planning_is_refused(own, tmp_path):
    reward = Reward(function=f"{own}:short").planned()
    assert reward.source_sha256 == source_digest(f"{own}:short")
    (tmp_path / f"{own}_helper.py").write_text("bonus = 0.7\n")
    with pytest.raises(ConfigError, match="its source changed after the run was planned"):
        weighted_rewards([reward], ["a"], ["b"])
    with pytest.raises(ConfigError, match=r"source_sha256 is .*, its source has"):
        reward.planned()


def test_a_function_without_a_digest_is_not_run(own):
    with pytest.raises(RuntimeError, match="without the digest"):
        weighted_rewards([Reward(function=f"{own}:short")], ["a"], ["b"])
