"""The plain GRPO step against values by hand and autograd, and the causes that it names."""

import math
import statistics

import pytest
import torch
from pydantic import ValidationError
from tiny_training import training_spec

from aqnpipe.config.arm import ImportanceSampling
from aqnpipe.reference.grpo import (
    Observed,
    Tokens,
    advantages,
    cause_of,
    centred,
    importance_weights,
    parts,
    slopes,
    unclipped,
)

CLIPS = training_spec(kl_coefficient=0.1, clip_ratio=0.2, temperature=1.0).training
DUAL = training_spec(kl_coefficient=0.0, clip_ratio=0.2, clip_ratio_c=3.0).training
ONE = {
    "row": 0,
    "row_tokens": 5,
    "padding": False,
    "unfinished": False,
    "advantage": 0.7,
    "reward": 1.0,
    "centred": 0.5,
    "ratio": 1.0,
    "weight": 1.0,
    "gap": 0.3,
    "total": 40.0,
}


def tokens_of(places) -> Tokens:
    columns = {name: torch.tensor([place[name] for place in places], dtype=torch.float64) for name in ONE}
    return Tokens(**columns)


def slope(training, **changes) -> float:
    return float(slopes(tokens_of([ONE | changes]), training))


def test_advantages_by_hand():
    """One group of three with one correct answer, and one without any."""
    found = advantages([1.0, 0.0, 0.0, 0.0, 0.0, 0.0], 3)
    deviation = statistics.stdev([1, 0, 0]) + 1e-4
    assert found == pytest.approx([2 / 3 / deviation, -1 / 3 / deviation, -1 / 3 / deviation, 0, 0, 0])
    assert centred([1.0, 0.0, 1.0, 1.0], 2) == [0.5, -0.5, 0.0, 0.0]


@pytest.mark.parametrize("advantage", [0.7, -0.7, 0.0])
@pytest.mark.parametrize("ratio", [0.5, 0.9, 1.0, 1.1, 1.5])
@pytest.mark.parametrize("weight", [1.0, 0.4])
def test_the_slope_is_the_derivative_by_hand(advantage, ratio, weight):
    is_clipped = (advantage > 0 and ratio > 1.2) or (advantage < 0 and ratio < 0.8)
    policy = 0.0 if is_clipped else -advantage * ratio * weight
    expected = (policy + 0.1 * (1 - math.exp(0.3))) / 40
    assert slope(CLIPS, advantage=advantage, ratio=ratio, weight=weight) == pytest.approx(expected, rel=1e-12)


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
    assert slope(DUAL, advantage=advantage, ratio=ratio, total=1.0) == pytest.approx(expected)


def test_a_missing_dual_clip_is_named():
    tokens = TOKENS._replace(ratio=torch.where(TOKENS.ratio == 1.5, 4.0, TOKENS.ratio))
    assert "not limited to clip_ratio_c" in cause_of(seen(parts(tokens, CLIPS)[0], tokens), DUAL)


def test_a_dual_clip_below_the_clip_is_refused():
    """TRL would limit the ratios of positive advantages to it, which verl does not."""
    with pytest.raises(ValidationError, match=r"clip_ratio_c 1.1: expected more than 1 \+ clip_ratio"):
        training_spec(clip_ratio=0.2, clip_ratio_c=1.1)


def test_padding_has_no_slope():
    assert slope(CLIPS, padding=True) == 0


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


TOKENS = tokens_of(
    [
        ONE
        | {"row": row, "advantage": advantage, "reward": reward, "centred": own, "row_tokens": length}
        | {"ratio": ratio, "gap": gap}
        for row, (advantage, reward, own, length) in enumerate(
            [(0.7, 1.0, 0.5, 5), (-0.7, 0.0, -0.5, 8), (1.4, 1.0, 0.75, 6), (-0.4, 0.0, -0.25, 9)]
        )
        for ratio, gap in [(1.0, 0.2), (1.1, -0.3), (1.5, 0.1), (0.6, -0.2)]
    ]
)


def seen(found, tokens=TOKENS) -> Observed:
    """Derivatives that a wrong loss gives."""
    return Observed(tokens, found, torch.full_like(found, 1e-9), torch.zeros_like(found))


def whole(tokens=TOKENS, **changes):
    return slopes(tokens._replace(**changes), CLIPS)


def policy(t):
    return parts(t, CLIPS)[0]


def kl(t):
    return parts(t, CLIPS)[1]


@pytest.mark.parametrize(
    ("of", "cause"),
    [
        (lambda t: policy(t) - 0.1 * kl(t), "the KL term has the wrong sign"),
        (policy, "the KL term has coefficient 0, the study asks for 0.1"),
        (lambda t: policy(t) + 0.3 * kl(t), "the KL term has coefficient 0.3"),
        (lambda t: policy(t) + 0.1 / 40, "k1"),
        (lambda t: policy(t) - 0.1 * t.gap / 40, "k2"),
        (lambda t: whole(advantage=-t.advantage), "the sign of the advantages is flipped"),
        (lambda t: -whole(), "the sign of the advantages or of the loss is flipped"),
        (lambda t: whole() / 3, "the loss is scaled by 0.3333"),
        (lambda t: unclipped(t, CLIPS) + 0.1 * kl(t), "ratios are not clipped"),
        (
            lambda t: torch.where(t.ratio > 1, unclipped(t, CLIPS), policy(t)) + 0.1 * kl(t),
            "ratios above 1 are not clipped",
        ),
        (lambda t: policy(t) + 0.1 * torch.expm1(-t.gap) / 40, "KL term is that of the other"),
        (lambda t: whole(advantage=t.centred), "not divided by the standard deviation"),
        (lambda t: whole(advantage=t.reward), "the rewards themselves"),
        (lambda t: whole() * 40 / t.row_tokens / 4, "averaged per completion"),
        (lambda t: whole(ratio=torch.ones_like(t.ratio)), "old log-probabilities"),
    ],
)
def test_a_wrong_loss_is_named(of, cause):
    assert cause in cause_of(seen(of(TOKENS)), CLIPS)


def of_places(chosen) -> Tokens:
    return TOKENS.at(chosen.nonzero()[:, 0].tolist())


def test_advantages_of_other_completions_are_named():
    tokens = of_places((TOKENS.ratio == 1.0) | (TOKENS.ratio == 1.1))
    others = torch.tensor([-0.4, 0.7, -0.7, 1.4], dtype=torch.float64)[tokens.row.long()]
    assert "those of other completions" in cause_of(seen(whole(tokens, advantage=others), tokens), CLIPS)


def test_log_probabilities_of_another_reference_are_named_as_such():
    tokens = TOKENS._replace(advantage=torch.where(TOKENS.row == 1, 0.0, TOKENS.advantage))
    gaps = torch.tensor([0.4, -0.3, 0.2, 0.1] * 4, dtype=torch.float64)
    assert "KL term has log-probabilities of another" in cause_of(seen(whole(tokens, gap=gaps), tokens), CLIPS)


def test_a_rounded_reference_is_not_reported_as_wrong_advantages():
    rounded = TOKENS.gap + 1e-3 * torch.tensor([1.0, -1.0] * 8, dtype=torch.float64)
    assert "reference, or the ratios, are rounded" in cause_of(seen(whole(gap=rounded)), CLIPS)


def test_ratios_to_other_tokens_are_not_reported_as_advantages_alone():
    """One token per completion: a ratio of 0.9 looks like an advantage that is 0.9 of the study's."""
    tokens = of_places(TOKENS.ratio == 1.0)
    ratios = torch.tensor([0.9, 0.85, 1.05, 0.95], dtype=torch.float64)
    assert "old log-probabilities of other tokens" in cause_of(seen(whole(tokens, ratio=ratios), tokens), CLIPS)
