"""A plain GRPO step: advantages, importance weights, the loss of a token, its derivative, and what explains others.

For a token with log-probability l of the trained policy, l_old of the policy that the ratio r = exp(l - l_old) refers
to, l_ref of the reference, advantage A, importance weight w (Yao et al. 2025; 1 without the correction), and N tokens
per optimiser step, the loss (Shao et al. 2024, token mean as in DAPO) is

    (-min(r A, clip(r, 1 - e, 1 + e) A) w + beta (exp(l_ref - l) - (l_ref - l) - 1)) / N

With dual clip (Ye et al. 2020), a negative advantage gives at most a loss of -c A w. autograd differentiates it here,
so that the formula is written once. By the chain rule, the gradient at the logits is dL/dl (one-hot - softmax) / T.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

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


class Tokens(NamedTuple):
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

    def at(self, places: Sequence[int]) -> "Tokens":
        """Return some of the places."""
        return Tokens(*(column[list(places)] for column in self))


def k3(gap: Tensor) -> Tensor:
    """Return GRPO's estimate of the KL divergence."""
    return gap.exp() - gap - 1


def parts(tokens: Tokens, training: TrainingConfig, kl: KL = k3) -> tuple[Tensor, Tensor]:
    """Return the derivatives by the log-probability of every token: of the policy term, and of the KL term / beta."""
    with torch.enable_grad():
        change = torch.zeros_like(tokens.ratio, requires_grad=True)
        ratio, gap = tokens.ratio * change.exp(), (tokens.gap - change).clamp(max=700.0)
        clipped = ratio.clamp(1 - training.clip_ratio, 1 + training.clip_ratio)
        policy = torch.min(ratio * tokens.advantage, clipped * tokens.advantage)
        if training.clip_ratio_c is not None:
            limited = torch.max(policy, training.clip_ratio_c * tokens.advantage)
            policy = torch.where(tokens.advantage < 0, limited, policy)
        share = (1 - tokens.padding) / tokens.total
        losses = (-policy * tokens.weight * share).sum(), (kl(gap) * share).sum()
        of_policy, of_kl = (torch.autograd.grad(loss, change)[0] for loss in losses)
    return of_policy, of_kl


def slopes(tokens: Tokens, training: TrainingConfig) -> Tensor:
    """Return the derivative of the loss by the log-probability of every token."""
    policy, kl = parts(tokens, training)
    return policy + training.kl_coefficient * kl


def unclipped(tokens: Tokens, training: TrainingConfig) -> Tensor:
    """Return the derivative of the policy term without clipping."""
    return parts(tokens, training.model_copy(update={"clip_ratio": math.inf, "clip_ratio_c": None}))[0]


def at_the_clip(tokens: Tokens, training: TrainingConfig) -> Tensor:
    """Return, for every place, whether rounding decides if its ratio is clipped."""
    limits = (1 + training.clip_ratio, 1 - training.clip_ratio, training.clip_ratio_c or math.inf)
    return torch.stack([(tokens.ratio - limit).abs() < 1e-4 for limit in limits]).any(0)


# -- causes of other derivatives ---------------------------------------------------------------------------------------


class Observed(NamedTuple):
    """Derivatives that reached the logits at `tokens`, and how far each may be from the study's by rounding.

    misfit: the share of the observed gradient that no derivative by the log-probability explains.
    """

    tokens: Tokens
    slopes: Tensor
    allowed: Tensor
    misfit: Tensor

    @classmethod
    def together(cls, seen: "Sequence[Observed]") -> "Observed":
        """Return the places of all of them."""
        tokens, *others = zip(*seen, strict=True)
        return cls(Tokens(*map(torch.cat, zip(*tokens, strict=True))), *map(torch.cat, others))

    def explained_by(self, candidate: Tensor) -> bool:
        """Return whether the derivatives are those of `candidate`."""
        return bool(((self.slopes - candidate).abs() <= 20 * self.allowed).all())


def cause_of(seen: Observed, training: TrainingConfig) -> str:
    """Return which part of the loss explains derivatives that are not the study's."""
    beta, (policy, kl) = training.kl_coefficient, parts(seen.tokens, training)
    if bool((seen.misfit * seen.slopes.abs() > 20 * seen.allowed).any()):
        return (
            f"it is not that of log-probabilities at temperature {training.temperature:g}: another temperature, "
            "or a term besides policy and KL (entropy?)"
        )
    for cause, candidate in _mistakes(seen.tokens, training):
        if seen.explained_by(candidate):
            return cause
    found = _share(seen.slopes - policy, kl)
    if math.isfinite(found) and seen.explained_by(policy + found * kl):
        if beta and abs(found + beta) <= 0.05 * beta:
            return f"the KL term has the wrong sign (coefficient {found:.3g}, the study asks for {beta:g})"
        shown = 0.0 if abs(found) < 0.01 * max(beta, 1e-12) else found
        return f"the KL term has coefficient {shown:.3g}, the study asks for {beta:g}"
    for name, scaled, rest in (("loss", policy + beta * kl, 0.0 * kl), ("policy term", policy, beta * kl)):
        factor = _share(seen.slopes - rest, scaled)
        if math.isfinite(factor) and seen.explained_by(factor * scaled + rest):
            if abs(factor + 1) < 1e-3:
                return "the sign of the advantages or of the loss is flipped"
            return f"the {name} is scaled by {factor:.4g} (another denominator?)"
    return _by_completion(seen, training)


def _share(of: Tensor, part: Tensor) -> float:
    return float((of * part).sum() / part.square().sum()) if bool(part.any()) else math.nan


def _mistakes(tokens: Tokens, training: TrainingConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield known mistakes with the derivatives that they give."""
    beta, free, is_above = training.kl_coefficient, unclipped(tokens, training), tokens.ratio > 1
    policy, kl = parts(tokens, training)
    scale = torch.where(tokens.centred == 0, 1e4, tokens.advantage / tokens.centred)
    for cause, advantage in (
        ("the advantages are not divided by the standard deviation of their group", tokens.centred),
        ("the advantages are the rewards themselves, not normalised in their groups", tokens.reward),
        ("the sign of the advantages is flipped", -tokens.advantage),
        ("the mean of the group is not subtracted from the rewards", tokens.reward * scale),
    ):
        yield cause, slopes(tokens._replace(advantage=advantage), training)
    yield "ratios are not clipped", free + beta * kl
    yield "ratios above 1 are not clipped", torch.where(is_above, free, policy) + beta * kl
    yield "ratios below 1 are not clipped", torch.where(is_above, policy, free) + beta * kl
    if training.clip_ratio_c is not None:
        single = training.model_copy(update={"clip_ratio_c": None})
        yield "ratios are not limited to clip_ratio_c where the advantage is negative", slopes(tokens, single)
    if bool((tokens.weight != 1).any()):
        unweighted = tokens._replace(weight=torch.ones_like(tokens.weight))
        yield "the importance sampling correction is missing", slopes(unweighted, training)
    if bool(tokens.unfinished.any()):
        kept = slopes(tokens, training) * (1 - tokens.unfinished)
        yield "completions without an end token are left out of the loss", kept
    for name, estimate in _OTHER_KL.items() if beta else ():
        yield name, policy + beta * parts(tokens, training, estimate)[1]


_OTHER_KL: dict[str, KL] = {
    "the KL term has another form (k1, log ratio)": lambda gap: -gap,
    "the KL term has another form (k2, half the squared log ratio)": lambda gap: gap.square() / 2,
    "the KL term is that of the other direction (reference and policy are swapped)": lambda gap: (-gap).exp() + gap - 1,
}


def _by_completion(seen: Observed, training: TrainingConfig) -> str:
    """Return the cause where each completion, or each token, has a factor of its own; see `cause_of`."""
    tokens, kl = seen.tokens, training.kl_coefficient * parts(seen.tokens, training)[1]
    averaged = slopes(tokens, training) / tokens.row_tokens
    if seen.explained_by(_share(seen.slopes, averaged) * averaged):
        return "every completion has the same weight: the loss is averaged per completion, not over tokens"
    # Which ratios are clipped depends on the sign.
    sign = torch.where(tokens.advantage < 0, -1.0, 1.0)
    unit = parts(tokens._replace(advantage=sign), training)[0] * sign
    rows, place = tokens.row.unique(return_inverse=True)
    products = torch.zeros(2, len(rows), dtype=unit.dtype)
    products.index_add_(1, place, torch.stack([(seen.slopes - kl) * unit, unit.square()]))
    implied = (products[0] / products[1]).nan_to_num()[place]
    differs = (seen.slopes - kl - implied * unit).abs() > 20 * seen.allowed + 1e-3 * (unit * implied).abs()
    if not differs.any():
        # A ratio changes no sign.
        others = "" if (implied * tokens.advantage < 0).any() else ", or old log-probabilities of other tokens"
        return (
            "the advantages are not those of the rewards graded again from the texts (those of other completions?)"
            f"{others}"
        )
    if training.kl_coefficient and (differs & (tokens.advantage == 0)).any():
        # No ratio matters where the advantage is 0.
        return "the KL term has log-probabilities of another reference, or of other tokens"
    return (
        "it is not that of the study's loss: old log-probabilities of other tokens, or the log-probabilities of the KL "
        "term's reference, or the ratios, are rounded"
    )
