"""The gradient of a step is the sum of its micro-batches, to within the rounding of the number format."""

import re

import pytest
import torch
from tiny_training import training_spec
from torch import nn
from torch.nn.utils import clip_grad_norm_

from aqnpipe.training.audit.measure import Ledger
from aqnpipe.training.audit.updates import Updates

SEEDS = range(25)
PASSES = 8


def problems_of(seed, dtype, limit, mistake=lambda weights: None):
    """Return what the audit reports of two steps of eight micro-batches; `mistake` changes the clipped gradients."""
    spec = training_spec(micro_batch_size=1, max_grad_norm=limit, num_steps=2)
    assert spec.training.accumulation_steps == PASSES
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model, found = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).to(dtype), Ledger()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
        updates = Updates(spec, model, found, lambda step: True)
        updates.attach(optimizer)
        for _ in range(2):
            for _ in range(PASSES):
                (model(torch.randn(3, 6).to(dtype)).float().square().mean() / PASSES).backward()
                updates.end_micro_batch()
            clip_grad_norm_(model.parameters(), limit)
            mistake([weight.grad for weight in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
    return found.problems


@pytest.mark.parametrize("limit", [1e-3, 1e3], ids=["clipped", "not clipped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_of_the_sum_over_micro_batches_is_no_other_gradient(dtype, limit):
    assert [problems_of(seed, dtype, limit) for seed in SEEDS] == [[]] * len(SEEDS)


@pytest.mark.parametrize(
    ("limit", "factor", "expected"),
    [
        (1e3, 2.0, r"is 2\.\d* times the sum of its micro-batches|is 2 times|is 1\.9\d* times"),
        (1e3, 0.5, "gradient clipping"),
        (1e-3, 0.5, "gradient clipping"),
        (1e-3, 1.5, "gradient clipping"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_with_another_factor_is_named(dtype, limit, factor, expected):
    def scale(gradients):
        for gradient in gradients:
            gradient.mul_(factor)

    problem, *_ = problems_of(0, dtype, limit, scale)
    assert re.search(expected, problem)


@pytest.mark.parametrize(("name", "is_named"), [("e_score_correction_bias", False), ("q_bias", True)])
def test_only_a_bias_that_selects_experts_may_lack_a_gradient(name, is_named):
    found, model = Ledger(), nn.Linear(6, 6)
    model.register_parameter(name, nn.Parameter(torch.zeros(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    updates = Updates(training_spec(micro_batch_size=8), model, found, lambda step: True)
    updates.attach(optimizer)
    model(torch.ones(3, 6)).square().mean().backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert [f"{name} got the gradients of 0 micro-batches" in problem for problem in found.problems] == [
        True
    ] * is_named
