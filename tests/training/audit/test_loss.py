"""The formula of the loss's gradient against autograd, and the causes that it names."""

import math
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError
from tiny_training import training_spec

from aqnpipe.config.arm import ImportanceSampling
from aqnpipe.training.audit.loss import (
    Token,
    cause_of,
    importance_weights,
    kl_slope,
    policy_slope,
    reaches_around,
    slope,
)

SPEC = training_spec(kl_coefficient=0.1, clip_ratio=0.2, temperature=1.0)
CLIPS = SPEC.training
DUAL = training_spec(kl_coefficient=0.0, clip_ratio=0.2, clip_ratio_c=3.0)


def token(**changes) -> Token:
    whole = {
        "row": 0,
        "row_tokens": 5,
        "is_padding": False,
        "is_unfinished": False,
        "advantage": 0.7,
        "reward": 1.0,
        "centred_reward": 0.5,
        "ratio": 1.0,
        "weight": 1.0,
        "reference_gap": 0.3,
        "step_tokens": 40.0,
    }
    return Token(**{**whole, **changes})


@pytest.mark.parametrize("advantage", [0.7, -0.7, 0.0])
@pytest.mark.parametrize("ratio", [0.5, 0.9, 1.0, 1.1, 1.5])
@pytest.mark.parametrize("weight", [1.0, 0.4])
def test_the_slope_is_the_derivative_of_the_loss(advantage, ratio, weight):
    log_probability = torch.tensor(-1.3, dtype=torch.float64, requires_grad=True)
    old = log_probability.detach() - torch.tensor(ratio, dtype=torch.float64).log()
    reference = log_probability.detach() + 0.3
    current = (log_probability - old).exp()
    policy = -torch.min(current * advantage, current.clamp(0.8, 1.2) * advantage) * weight
    gap = reference - log_probability
    ((policy + 0.1 * (gap.exp() - gap - 1)) / 40).backward()
    found = slope(token(advantage=advantage, ratio=ratio, weight=weight), SPEC)
    assert found == pytest.approx(float(log_probability.grad), rel=1e-12)


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "expected"),
    [
        (-1.0, 0.5, 0.8, 0.0),  # clipped below 1 - 0.2
        (-1.0, 2.0, 2.0, 2.0),  # a negative advantage has no limit at 1 + 0.2
        (-1.0, 4.0, 3.0, 0.0),  # but one at c: the loss is 3 and not 4
        (-2.0, 4.0, 6.0, 0.0),
        (1.0, 4.0, -1.2, 0.0),  # a positive one is clipped before
        (1.0, 0.5, -0.5, -0.5),
    ],
)
def test_dual_clip_by_hand(advantage, ratio, loss, expected):
    """TRL's form of the loss, which limits every ratio to c, has the value and the slope of the formula."""
    gap = torch.tensor(math.log(ratio), dtype=torch.float64, requires_grad=True)
    found = -torch.min(gap.exp().clamp(max=3.0) * advantage, gap.exp().clamp(0.8, 1.2) * advantage)
    found.backward()
    assert (found.item(), gap.grad.item()) == pytest.approx((loss, expected))
    of_formula = slope(token(advantage=advantage, ratio=ratio, step_tokens=1.0), DUAL)
    assert of_formula == pytest.approx(expected)


def test_a_missing_dual_clip_is_named():
    tokens = [replace(item, ratio=4.0) if item.ratio == 1.5 else item for item in TOKENS]
    without = [replace(item, slope=policy_slope(item, CLIPS), allowed=1e-9) for item in tokens]
    assert "not limited to clip_ratio_c" in cause_of(without, DUAL)


def test_a_dual_clip_below_the_clip_is_refused():
    """TRL would limit the ratios of positive advantages to it, which verl does not."""
    with pytest.raises(ValidationError, match=r"clip_ratio_c 1.1: expected more than 1 \+ clip_ratio"):
        training_spec(clip_ratio=0.2, clip_ratio_c=1.1)


def test_padding_has_no_slope():
    assert slope(token(is_padding=True, reference_gap=None), SPEC) == 0


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token_truncate", [2.0, 0.5, 1.0]),
        ("token_mask", [0.0, 0.5, 1.0]),
        ("sequence_truncate", [2.0, 2.0, 2.0]),
        ("sequence_mask", [0.0, 0.0, 0.0]),
    ],
)
def test_importance_weights_by_hand(mode, expected):
    """Ratios 8, 1/2 and 1, whose product is 4; at most 2 is allowed."""
    old = torch.tensor([8.0, 0.5, 1.0]).log().tolist()
    found = importance_weights(old, [0.0, 0.0, 0.0], ImportanceSampling(mode=mode, clip_max=2.0))
    assert found == pytest.approx(expected, rel=1e-6)


TOKENS = [
    token(
        row=row,
        advantage=advantage,
        reward=reward,
        centred_reward=centred,
        ratio=ratio,
        reference_gap=gap,
        row_tokens=n,
    )
    for row, (advantage, reward, centred, n) in enumerate(
        [(0.7, 1.0, 0.5, 5), (-0.7, 0.0, -0.5, 8), (1.4, 1.0, 0.75, 6), (-0.4, 0.0, -0.25, 9)]
    )
    for ratio, gap in [(1.0, 0.2), (1.1, -0.3), (1.5, 0.1), (0.6, -0.2)]
]  # fmt: skip


def observed(of) -> list[Token]:
    """Tokens whose slopes are what a wrong loss gives."""
    return [replace(item, slope=of(item), allowed=1e-9) for item in TOKENS]


def whole(item, **changes):
    return slope(replace(item, **changes), SPEC)


OTHER_ADVANTAGES = {0: -0.4, 1: 0.7, 2: -0.7, 3: 1.4}


@pytest.mark.parametrize(
    ("of", "cause"),
    [
        (lambda t: policy_slope(t, CLIPS) - 0.1 * kl_slope(t), "the KL term has the wrong sign"),
        (lambda t: policy_slope(t, CLIPS), "the KL term has coefficient 0, the study asks for 0.1"),
        (lambda t: policy_slope(t, CLIPS) + 0.3 * kl_slope(t), "the KL term has coefficient 0.3"),
        (lambda t: policy_slope(t, CLIPS) + 0.1 / 40, "k1"),
        (lambda t: whole(t, advantage=-t.advantage), "the sign of the advantages is flipped"),
        (lambda t: -whole(t), "the sign of the advantages or of the loss is flipped"),
        (lambda t: whole(t) / 3, "the loss is scaled by 0.3333"),
        (lambda t: policy_slope(t, None) + 0.1 * kl_slope(t), "ratios are not clipped"),
        (
            lambda t: policy_slope(t, None if t.ratio > 1 else CLIPS) + 0.1 * kl_slope(t),
            "ratios above 1 are not clipped",
        ),
        (lambda t: policy_slope(t, CLIPS) + 0.1 * math.expm1(-t.reference_gap) / 40, "KL term is that of the other"),
        (lambda t: whole(t, advantage=t.centred_reward), "not divided by the standard deviation"),
        (lambda t: whole(t, advantage=t.reward), "the rewards themselves"),
        (lambda t: whole(t) * 40 / t.row_tokens / 4, "averaged per completion"),
        (lambda t: whole(t, ratio=1.0), "old log-probabilities"),
    ],
)
def test_a_wrong_loss_is_named(of, cause):
    assert cause in cause_of(observed(of), SPEC)


def test_advantages_of_other_completions_are_named():
    unclipped = [item for item in TOKENS if item.ratio in (1.0, 1.1)]
    shuffled = [
        replace(item, slope=whole(item, advantage=OTHER_ADVANTAGES[item.row]), allowed=1e-9) for item in unclipped
    ]
    assert "those of other completions" in cause_of(shuffled, SPEC)


def test_log_probabilities_of_another_reference_are_named_as_such():
    gaps = iter([0.4, -0.3, 0.2, 0.1] * 4)
    tokens = [replace(item, advantage=0.0) if item.row == 1 else item for item in TOKENS]
    other = [replace(item, slope=whole(item, reference_gap=next(gaps)), allowed=1e-9) for item in tokens]
    assert "KL term has log-probabilities of another reference" in cause_of(other, SPEC)


def test_a_rounded_reference_is_not_reported_as_wrong_advantages():
    tokens = [
        replace(item, slope=whole(item, reference_gap=item.reference_gap + 1e-3 * (-1) ** place), allowed=1e-9)
        for place, item in enumerate(TOKENS)
    ]
    assert "reference, or the ratios, are rounded" in cause_of(tokens, SPEC)


def test_ratios_to_other_tokens_are_not_reported_as_advantages_alone():
    """One token per completion: a ratio of 0.9 looks like an advantage that is 0.9 of the study's."""
    ratios = iter([0.9, 0.85, 1.05, 0.95])
    tokens = [item for item in TOKENS if item.ratio == 1.0]
    other = [replace(item, slope=whole(item, ratio=next(ratios)), allowed=1e-9) for item in tokens]
    assert "old log-probabilities of other tokens" in cause_of(other, SPEC)


@pytest.mark.parametrize(
    ("term", "expected"),
    [
        (lambda weights, hidden, logits: 0.0, False),
        (lambda weights, hidden, logits: logits.square().sum(), False),
        (lambda weights, hidden, logits: weights.detach().square().sum(), False),
        (lambda weights, hidden, logits: 1e-3 * weights.square().sum(), True),
        (lambda weights, hidden, logits: hidden.mean(), True),
    ],
)
def test_only_terms_that_bypass_the_logits_are_found(term, expected):
    weights = torch.randn(3, 3, requires_grad=True)
    hidden = torch.randn(2, 3) @ weights
    logits = hidden.tanh() @ weights
    loss = logits.log_softmax(-1)[:, 0].mean() + term(weights, hidden, logits)
    assert reaches_around(loss, logits) is expected
