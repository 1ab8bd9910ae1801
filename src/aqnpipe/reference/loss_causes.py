"""The cause where the derivatives of a trainer's loss are not those of the plain one: which mistake explains them."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aqnpipe.config.training import TrainingConfig
from aqnpipe.reference.grpo import KL, Tokens, kl_slopes, policy_slopes, slopes, unclipped_slopes


@dataclass(frozen=True)
class Observed:
    """Derivatives that reached the logits at `tokens`, and how far each may be from the study's by rounding.

    misfit: the share of the observed gradient that no derivative by the log-probability explains.
    """

    tokens: Tokens
    slopes: Tensor
    allowed: Tensor
    misfit: Tensor

    @classmethod
    def together(cls, parts: "Sequence[Observed]") -> "Observed":
        """Return the places of all parts."""
        columns = [[getattr(part.tokens, field.name) for part in parts] for field in dataclasses.fields(Tokens)]
        slopes, allowed, misfit = ([getattr(part, name) for part in parts] for name in ("slopes", "allowed", "misfit"))
        return cls(Tokens(*map(torch.cat, columns)), torch.cat(slopes), torch.cat(allowed), torch.cat(misfit))

    def explained_by(self, candidate: Tensor) -> bool:
        """Return whether the derivatives are those of `candidate`."""
        return bool(((self.slopes - candidate).abs() <= 20 * self.allowed).all())


def cause_of(seen: Observed, training: TrainingConfig) -> str:
    """Return which part of the loss explains derivatives that are not the study's."""
    beta = training.kl_coefficient
    policy, kl = policy_slopes(seen.tokens, training), kl_slopes(seen.tokens, training)
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
    clipped, unclipped = policy_slopes(tokens, training), unclipped_slopes(tokens, training)
    beta = training.kl_coefficient
    kl = beta * kl_slopes(tokens, training)
    scale = torch.where(tokens.centred == 0, 1e4, tokens.advantage / tokens.centred)
    for cause, advantage in (
        ("the advantages are not divided by the standard deviation of their group", tokens.centred),
        ("the advantages are the rewards themselves, not normalised in their groups", tokens.reward),
        ("the sign of the advantages is flipped", -tokens.advantage),
        ("the mean of the group is not subtracted from the rewards", tokens.reward * scale),
    ):
        yield cause, slopes(tokens.with_advantage(advantage), training)
    yield "ratios are not clipped", unclipped + kl
    yield "ratios above 1 are not clipped", torch.where(tokens.ratio > 1, unclipped, clipped) + kl
    yield "ratios below 1 are not clipped", torch.where(tokens.ratio > 1, clipped, unclipped) + kl
    if training.clip_ratio_c is not None:
        single = training.model_copy(update={"clip_ratio_c": None})
        yield "ratios are not limited to clip_ratio_c where the advantage is negative", slopes(tokens, single)
    if bool((tokens.weight != 1).any()):
        unweighted = dataclasses.replace(tokens, weight=torch.ones_like(tokens.weight))
        yield "the importance sampling correction is missing", slopes(unweighted, training)
    if bool(tokens.unfinished.any()):
        kept = slopes(tokens, training) * (1 - tokens.unfinished)
        yield "completions without an end token are left out of the loss", kept
    if beta:
        for name, estimate in _OTHER_KL.items():
            yield name, clipped + beta * kl_slopes(tokens, training, estimate)


_OTHER_KL: dict[str, KL] = {
    "the KL term has another form (k1, log ratio)": lambda gap: -gap,
    "the KL term has another form (k2, half the squared log ratio)": lambda gap: gap.square() / 2,
    "the KL term is that of the other direction (reference and policy are swapped)": lambda gap: (-gap).exp() + gap - 1,
}


def _by_completion(seen: Observed, training: TrainingConfig) -> str:
    """Return the cause where each completion, or each token, has a factor of its own; see `cause_of`."""
    tokens, kl = seen.tokens, training.kl_coefficient * kl_slopes(seen.tokens, training)
    averaged = slopes(tokens, training) / tokens.row_tokens
    if seen.explained_by(_share(seen.slopes, averaged) * averaged):
        return "every completion has the same weight: the loss is averaged per completion, not over tokens"
    # Which ratios are clipped depends on the sign.
    sign = torch.where(tokens.advantage < 0, -1.0, 1.0)
    unit = policy_slopes(tokens.with_advantage(sign), training) * sign
    rows, place = tokens.row.unique(return_inverse=True)
    products = torch.zeros(2, len(rows), dtype=unit.dtype)
    products.index_add_(1, place, torch.stack([(seen.slopes - kl) * unit, unit.square()]))
    implied = (products[0] / products[1]).nan_to_num()[place]
    differs = (seen.slopes - kl - implied * unit).abs() > 20 * seen.allowed + 1e-3 * (unit * implied).abs()
    if not differs.any():
        other = "the advantages are not those of the rewards graded again from the texts (those of other completions?)"
        # A ratio changes no sign.
        return (
            f"{other}{'' if (implied * tokens.advantage < 0).any() else ', or old log-probabilities of other tokens'}"
        )
    if training.kl_coefficient and (differs & (tokens.advantage == 0)).any():
        # No ratio matters where the advantage is 0.
        return "the KL term has log-probabilities of another reference, or of other tokens"
    return (
        "it is not that of the study's loss: old log-probabilities of other tokens, or the log-probabilities of the KL "
        "term's reference, or the ratios, are rounded"
    )
