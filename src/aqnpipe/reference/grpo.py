"""A plain GRPO step: advantages, importance weights, the loss of a token, and its derivative.

For a token with log-probability l of the trained policy, l_old of the policy that the ratio r = exp(l - l_old) refers
to, l_ref of the reference, advantage A, importance weight w (Yao et al. 2025; 1 without the correction), and N tokens
per optimiser step, the loss (Shao et al. 2024, token mean as in DAPO) is

    (-min(r A, clip(r, 1 - e, 1 + e) A) w + beta (exp(l_ref - l) - (l_ref - l) - 1)) / N

With dual clip (Ye et al. 2020), a negative advantage gives at most a loss of -c A w. autograd differentiates it here,
so that the formula is written once. By the chain rule, the gradient at the logits is dL/dl (one-hot - softmax) / T.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aqnpipe.config.arm import ImportanceSampling
from aqnpipe.config.training import TrainingConfig

_STD_OFFSET = 1e-4
"""GRPO's constant that keeps the advantage finite where all rewards of a group are equal."""

KL = Callable[[Tensor], Tensor]
"""An estimate of the KL divergence from l_ref - l."""


def centred(rewards: Sequence[float], group_size: int) -> list[float]:
    """Return reward - mean within each group of consecutive rewards: advantages that are not normalised."""
    groups = [rewards[start : start + group_size] for start in range(0, len(rewards), group_size)]
    return [reward - math.fsum(group) / len(group) for group in groups for reward in group]


def advantages(rewards: Sequence[float], group_size: int) -> list[float]:
    """Return (reward - mean) / (standard deviation + 1e-4) within each group of consecutive rewards."""
    differences, found = centred(rewards, group_size), []
    for start in range(0, len(rewards), group_size):
        group = differences[start : start + group_size]
        deviation = math.sqrt(math.fsum(difference**2 for difference in group) / (len(group) - 1))
        found += [difference / (deviation + _STD_OFFSET) for difference in group]
    return found


def importance_weights(old: Sequence[float], sampled: Sequence[float], correction: ImportanceSampling) -> list[float]:
    """Return the weight of every token of a completion by the correction's mode; `old` and `sampled` are by token."""
    gaps = [a - b if math.isfinite(b) else 0.0 for a, b in zip(old, sampled, strict=True)]
    by_sequence = correction.mode.startswith("sequence")
    ratios = [math.exp(math.fsum(gaps))] * len(gaps) if by_sequence else [math.exp(gap) for gap in gaps]
    low = -math.inf if correction.clip_min is None else correction.clip_min
    high = math.inf if correction.clip_max is None else correction.clip_max
    if correction.mode.endswith("truncate"):
        return [min(max(ratio, low), high) for ratio in ratios]
    return [ratio if low <= ratio <= high else 0.0 for ratio in ratios]


@dataclass(frozen=True)
class Tokens:
    """Places of completions, an element of each tensor [places] (float64): what the loss there depends on.

    ratio: exp(l - l_old). weight: the importance weight. gap: l_ref - l. total: N. padding: 1 for places behind a
    completion. row: number of the completion, of `row_tokens` tokens; unfinished: 1 if it has no end token.
    """

    row: Tensor
    row_tokens: Tensor
    padding: Tensor
    unfinished: Tensor
    advantage: Tensor
    reward: Tensor
    centred: Tensor
    ratio: Tensor
    weight: Tensor
    gap: Tensor
    total: Tensor

    @classmethod
    def of(cls, places: Sequence[Mapping[str, float]]) -> "Tokens":
        """Return places, each given by the names of these fields, as tensors."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(*(torch.tensor([place[name] for place in places], dtype=torch.float64) for name in names))

    def with_advantage(self, advantage: Tensor) -> "Tokens":
        """Return the same places with other advantages."""
        return dataclasses.replace(self, advantage=advantage)

    def at(self, places: Sequence[int]) -> "Tokens":
        """Return some of the places."""
        return Tokens(*(getattr(self, field.name)[list(places)] for field in dataclasses.fields(self)))


def k3(gap: Tensor) -> Tensor:
    """Return GRPO's estimate of the KL divergence."""
    return gap.exp() - gap - 1


def slopes(tokens: Tokens, training: TrainingConfig, kl: KL = k3) -> Tensor:
    """Return the derivative of the loss by the log-probability of every token."""
    with torch.enable_grad():
        change = torch.zeros_like(tokens.ratio, requires_grad=True)
        ratio, gap = tokens.ratio * change.exp(), (tokens.gap - change).clamp(max=700.0)
        clipped = ratio.clamp(1 - training.clip_ratio, 1 + training.clip_ratio)
        policy = torch.min(ratio * tokens.advantage, clipped * tokens.advantage)
        if training.clip_ratio_c is not None:
            limited = torch.max(policy, training.clip_ratio_c * tokens.advantage)
            policy = torch.where(tokens.advantage < 0, limited, policy)
        loss = (-policy * tokens.weight + training.kl_coefficient * kl(gap)) / tokens.total
        (found,) = torch.autograd.grad((loss * (1 - tokens.padding)).sum(), change)
    return found


def at_the_clip(tokens: Tokens, training: TrainingConfig) -> Tensor:
    """Return, for every place, whether rounding decides if its ratio is clipped."""
    limits = (1 + training.clip_ratio, 1 - training.clip_ratio, training.clip_ratio_c or math.inf)
    return torch.stack([(tokens.ratio - limit).abs() < 1e-4 for limit in limits]).any(0)


def policy_slopes(tokens: Tokens, training: TrainingConfig) -> Tensor:
    """Return the part of the policy term."""
    return slopes(tokens, training.model_copy(update={"kl_coefficient": 0.0}))


def unclipped_slopes(tokens: Tokens, training: TrainingConfig) -> Tensor:
    """Return the part of the policy term without clipping."""
    return policy_slopes(tokens, training.model_copy(update={"clip_ratio": math.inf, "clip_ratio_c": None}))


def kl_slopes(tokens: Tokens, training: TrainingConfig, kl: KL = k3) -> Tensor:
    """Return the part of the KL term at coefficient 1."""
    alone = training.model_copy(update={"kl_coefficient": 1.0})
    return slopes(tokens.with_advantage(torch.zeros_like(tokens.ratio)), alone, kl)
