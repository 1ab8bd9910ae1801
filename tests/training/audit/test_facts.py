"""Facts of a run against its study: schedules, settings, counts."""

import re

import pytest
import torch
from tiny_training import training_spec
from transformers import get_constant_schedule_with_warmup, get_linear_schedule_with_warmup

from aqnpipe.artifacts.training_facts import (
    RATES,
    Recomputed,
    TrainingFacts,
    audited_at_start,
    expected_learning_rate,
    fact_problems,
    recorded_fact_problems,
    required_recomputations,
)

SPEC = training_spec(num_steps=2, checkpoint_every=None)
RECOMPUTED = {name: Recomputed(compared=2, worst=0.5) for name in required_recomputations(SPEC)}


def facts(**changes) -> TrainingFacts:
    """Facts of an honest run of `SPEC`."""
    whole = {
        "num_workers": 1,
        "steps": 2,
        "audited_steps": (1, 2),
        "completions": 16,
        "correct": (4, 5),
        "validated": {2: 1},
        "checkpoints": {2: {"model.safetensors": "b"}},
        "recomputed": RECOMPUTED,
    }
    return TrainingFacts(**{**whole, **changes})


def test_the_facts_of_an_honest_run_have_no_problems():
    assert fact_problems(facts(), SPEC) == []


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"recomputed": RECOMPUTED | {RATES: Recomputed(compared=1, worst=0.0)}}, "learning rates: found 1"),
        ({"steps": 1}, "optimiser updates: found 1"),
        ({"audited_steps": (1,)}, r"steps \[2\] were not recomputed"),
        ({"correct": (4,)}, "rollouts: found 1"),
        ({"completions": 8}, "completions: found 8"),
        ({"checkpoints": {}}, "checkpoints compared with memory"),
        ({"validated": {}}, "validations"),
        ({"problems": ("it went wrong",)}, "it went wrong"),
        ({"num_workers": 2}, "workers: found 2"),
        ({"recomputed": {RATES: RECOMPUTED[RATES]}}, "never recomputed"),
    ],
)  # fmt: skip
def test_facts_of_another_run_are_refused(changes, problem):
    (found, *_) = fact_problems(facts(**changes), SPEC)
    assert re.search(problem, found)


@pytest.mark.parametrize("worst", [1.01, float("nan"), float("inf")])
def test_an_error_beyond_rounding_is_refused(worst):
    for name in required_recomputations(SPEC):
        recomputed = {**facts().recomputed, name: Recomputed(compared=3, worst=worst)}
        assert name in fact_problems(facts(recomputed=recomputed), SPEC)[0]


def test_a_record_without_facts_or_with_another_checkpoint_is_refused():
    outputs = {"checkpoints/step2/model.safetensors": "b"}
    assert recorded_fact_problems(facts(), SPEC.model_dump(mode="json"), outputs) == []
    assert "no facts" in recorded_fact_problems(None, SPEC.model_dump(mode="json"), outputs)[0]
    (problem,) = recorded_fact_problems(facts(), SPEC.model_dump(mode="json"), {})
    assert "the checkpoint of step 2 is not the weights that were in memory" in problem


def test_a_thousand_steps_stay_small():
    every = facts(
        steps=1000,
        correct=tuple(range(1000)),
        audited_steps=tuple(range(70)),
    )
    assert len(every.model_dump_json(indent=2)) < 200_000


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("kind", ["constant", "linear"])
def test_the_schedule_is_the_librarys(kind, warmup):
    spec = training_spec(num_steps=10, learning_rate_schedule=kind, warmup_steps=warmup)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=1e-3)
    schedule = (
        get_constant_schedule_with_warmup(optimizer, warmup)
        if kind == "constant"
        else get_linear_schedule_with_warmup(optimizer, warmup, 10)
    )
    for step in range(1, 11):
        assert expected_learning_rate(spec, step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"num_steps": 2}, [1, 2]),
        ({"num_steps": 9}, [1, 2, 3]),
        ({"num_steps": 9, "steps_per_rollout": 3}, [1, 2, 3]),
        # The first steps have a learning rate of 0, so the second rollout is the first that weights change on.
        ({"num_steps": 8, "steps_per_rollout": 2, "warmup_steps": 2}, [1, 2, 3, 4]),
        ({"num_steps": 12, "steps_per_rollout": 4, "warmup_steps": 1}, [1, 2, 3]),
        ({"num_steps": 12, "steps_per_rollout": 6, "warmup_steps": 1}, [1, 2, 3]),
    ],
)
def test_the_first_step_with_ratios_is_audited(settings, expected):
    assert audited_at_start(training_spec(**settings)) == expected
