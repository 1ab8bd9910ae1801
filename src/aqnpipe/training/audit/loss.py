"""The gradient of GRPO's loss with respect to the logits, by its formula, and the cause where the trainer's differs.

For a token with log-probability l of the trained policy, l_old of the policy that the ratio r = exp(l - l_old) refers
to, l_ref of the reference, advantage A, importance weight w (Yao et al. 2025; 1 without the correction), and N tokens
per optimiser step, the loss (Shao et al. 2024, token mean as in DAPO) is

    (-min(r A, clip(r, 1 - e, 1 + e) A) w + beta (exp(l_ref - l) - (l_ref - l) - 1)) / N

so its derivative by l is (-A r w [not clipped] + beta (1 - exp(l_ref - l))) / N. With dual clip (Ye et al. 2020), a
negative advantage gives at most a loss of -c A w: the first term is max(min(r A, clip(r, 1 - e, 1 + e) A), c A) there.

The graph of the loss is audited, too: it depends on the weights through the logits, and through nothing else. A term
such as a penalty of the weights, or of the hidden states, does not reach the logits.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from aqnpipe.config.arm import ImportanceSampling
from aqnpipe.config.run import TrainingSpec
from aqnpipe.config.training import TrainingConfig

_PASSED_ON = "_DDPSink"
"""Node in which data parallelism passes the outputs of the network on."""


@dataclass(frozen=True)
class Token:
    """One place of one completion: what the loss depends on, and the slope that reached the logits there.

    `slope`: dL/dl that explains the observed gradient best; `misfit`: the part that no slope explains. `step_tokens` is
    N. `is_padding`: the place is behind the completion. `row` numbers the completion.
    """

    row: int
    row_tokens: int
    is_padding: bool
    is_unfinished: bool
    advantage: float
    reward: float
    centred_reward: float
    ratio: float
    weight: float
    reference_gap: float | None
    step_tokens: float
    slope: float = math.nan
    allowed: float = 0.0
    misfit: float = 0.0


def policy_slope(token: Token, clips: TrainingConfig | None) -> float:
    """Return the derivative of the policy term, clipped as `clips` says; None: without clipping."""
    if token.is_padding:
        return 0.0
    is_clipped = clips is not None and (
        (token.advantage > 0 and token.ratio > 1 + clips.clip_ratio)
        or (token.advantage < 0 and not 1 - clips.clip_ratio <= token.ratio <= (clips.clip_ratio_c or math.inf))
    )
    return 0.0 if is_clipped else -token.advantage * token.ratio * token.weight / token.step_tokens


def kl_slope(token: Token) -> float:
    """Return the derivative of the KL term at coefficient 1."""
    if token.is_padding or token.reference_gap is None:
        return 0.0
    return -math.expm1(min(token.reference_gap, 700.0)) / token.step_tokens


def slope(token: Token, spec: TrainingSpec) -> float:
    """Return the derivative of the study's loss by the log-probability of `token`."""
    training = spec.training
    return policy_slope(token, training) + training.kl_coefficient * kl_slope(token)


def is_at_the_clip(token: Token, clips: TrainingConfig) -> bool:
    """Return whether rounding decides if the ratio is clipped."""
    limits = (1 + clips.clip_ratio, 1 - clips.clip_ratio, clips.clip_ratio_c or math.inf)
    return min(abs(token.ratio - limit) for limit in limits) < 1e-4


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


def cause_of(tokens: Sequence[Token], spec: TrainingSpec) -> str:
    """Return which part of the loss explains slopes that are not the study's."""
    clips, beta = spec.training, spec.training.kl_coefficient
    observed = _vector(token.slope for token in tokens)
    allowed = _vector(20 * token.allowed for token in tokens)
    policy = _vector(policy_slope(token, clips) for token in tokens)
    kl = _vector(kl_slope(token) for token in tokens)

    def explains(candidate: Tensor) -> bool:
        return bool(((observed - candidate).abs() <= allowed).all())

    def share(of: Tensor, part: Tensor) -> float:
        return float((of * part).sum() / part.square().sum()) if part.any() else math.nan

    if any(token.misfit * abs(token.slope) > 20 * token.allowed for token in tokens):
        return (
            f"it is not that of log-probabilities at temperature {spec.training.temperature:g}: another temperature, "
            "or a term besides policy and KL (entropy?)"
        )
    for cause, candidate in _other_terms(tokens, spec):
        if explains(candidate):
            return cause
    found_beta = share(observed - policy, kl)
    if math.isfinite(found_beta) and explains(policy + found_beta * kl):
        if beta and abs(found_beta + beta) <= 0.05 * beta:
            return f"the KL term has the wrong sign (coefficient {found_beta:.3g}, the study asks for {beta:g})"
        shown = 0.0 if abs(found_beta) < 0.01 * max(beta, 1e-12) else found_beta
        return f"the KL term has coefficient {shown:.3g}, the study asks for {beta:g}"
    for name, scaled, rest in (("loss", policy + beta * kl, 0.0 * kl), ("policy term", policy, beta * kl)):
        factor = share(observed - rest, scaled)
        if math.isfinite(factor) and explains(factor * scaled + rest):
            if abs(factor + 1) < 1e-3:
                return "the sign of the advantages or of the loss is flipped"
            return f"the {name} is scaled by {factor:.4g} (another denominator?)"
    return _by_row(tokens, spec)


def _other_terms(tokens: Sequence[Token], spec: TrainingSpec) -> Iterator[tuple[str, Tensor]]:
    """Yield known mistakes with the slopes that they give."""
    clips, beta = spec.training, spec.training.kl_coefficient
    policy = _vector(policy_slope(token, clips) for token in tokens)
    kl = beta * _vector(kl_slope(token) for token in tokens)

    def with_advantage(of: Callable[[Token], float]) -> Tensor:
        return _vector(policy_slope(replace(token, advantage=of(token)), clips) for token in tokens) + kl

    def with_kl(of: Callable[[float], float]) -> Tensor:
        gaps = [0.0 if token.is_padding else token.reference_gap for token in tokens]
        return policy + beta * _vector(
            of(gap) / token.step_tokens if gap is not None and not token.is_padding else 0.0
            for token, gap in zip(tokens, gaps, strict=True)
        )

    yield (
        "the advantages are not divided by the standard deviation of their group",
        with_advantage(lambda token: token.centred_reward),
    )
    yield (
        "the advantages are the rewards themselves, not normalised in their groups",
        with_advantage(lambda token: token.reward),
    )
    yield "the sign of the advantages is flipped", with_advantage(lambda token: -token.advantage)
    yield (
        "the mean of the group is not subtracted from the rewards",
        with_advantage(
            lambda token: token.reward * (token.advantage / token.centred_reward if token.centred_reward else 1e4)
        ),
    )
    yield "ratios are not clipped", _vector(policy_slope(token, None) for token in tokens) + kl
    yield "ratios above 1 are not clipped", _one_sided(tokens, clips, above=False) + kl
    yield "ratios below 1 are not clipped", _one_sided(tokens, clips, above=True) + kl
    if clips.clip_ratio_c is not None:
        single = clips.model_copy(update={"clip_ratio_c": None})
        unlimited = _vector(policy_slope(token, single) for token in tokens) + kl
        yield "ratios are not limited to clip_ratio_c where the advantage is negative", unlimited
    if any(token.weight != 1 for token in tokens):
        unweighted = _vector(policy_slope(replace(token, weight=1.0), clips) for token in tokens) + kl
        yield "the importance sampling correction is missing", unweighted
    if any(token.is_unfinished for token in tokens):
        kept = _vector(0.0 if token.is_unfinished else slope(token, spec) for token in tokens)
        yield "completions without an end token are left out of the loss", kept
    if beta:
        yield "the KL term has another form (k1, log ratio)", with_kl(lambda gap: 1.0)
        yield "the KL term has another form (k2, half the squared log ratio)", with_kl(lambda gap: -gap)
        yield "the KL term has another form (ratio of the policy to the reference)", with_kl(lambda gap: 1 - gap)
        yield (
            "the KL term is that of the other direction (reference and policy are swapped)",
            with_kl(lambda gap: math.expm1(min(-gap, 700.0))),
        )


def _one_sided(tokens: Sequence[Token], clips: TrainingConfig, *, above: bool) -> Tensor:
    """Return the slopes of the policy term if only ratios above 1, or only those below 1, are clipped."""
    return _vector(policy_slope(token, clips if (token.ratio > 1) == above else None) for token in tokens)


def _by_row(tokens: Sequence[Token], spec: TrainingSpec) -> str:
    """Return the cause where each completion has a factor of its own; see `cause_of`."""
    found: dict[int, list[float]] = {}
    scales: dict[int, list[float]] = {}
    of_row = {token.row: token for token in tokens}
    clips, beta = spec.training, spec.training.kl_coefficient
    for token in tokens:
        # Which ratios are clipped depends on the sign.
        sign = math.copysign(1.0, token.advantage)
        unit = policy_slope(replace(token, advantage=sign), clips) * sign
        if unit:
            found.setdefault(token.row, []).append((token.slope - beta * kl_slope(token)) / unit)
        whole = slope(token, spec)
        if abs(whole) > 100 * token.allowed:
            scales.setdefault(token.row, []).append(token.slope / whole)
    lengths = {row: sum(values) / len(values) * of_row[row].row_tokens for row, values in scales.items()}
    differ = len({of_row[row].row_tokens for row in lengths}) > 1
    if differ and max(lengths.values()) - min(lengths.values()) < 0.01 * abs(max(lengths.values(), key=abs)):
        return "every completion has the same weight: the loss is averaged per completion, not over tokens"
    differing = {row for row, values in found.items() if _spread(values) > 1e-3 * (1 + max(map(abs, values)))}
    if differing:
        return _of_tokens({row: of_row[row].advantage for row in found}, differing, beta > 0)
    implied = {row: sum(values) / len(values) for row, values in found.items()}
    expected = {row: of_row[row].advantage for row in implied}
    return _of_advantages(implied, expected)


def _spread(values: Sequence[float]) -> float:
    return max(values) - min(values)


def _of_tokens(advantages: Mapping[int, float], differing: set[int], has_kl: bool) -> str:
    """Return the cause where tokens of the same completion need different factors; `differing`: those completions."""
    if has_kl and any(advantages[row] == 0 for row in differing):
        # No ratio matters where the advantage is 0.
        return "the KL term has log-probabilities of another reference, or of other tokens"
    if has_kl and all(advantages[row] != 0 for row in advantages):
        return (
            "it is not that of the study's loss (old log-probabilities, ratios or masks of other tokens, or a KL term "
            "with another reference?)"
        )
    return "it is not that of the study's loss (old log-probabilities, ratios or masks of other tokens?)"


def _of_advantages(implied: Mapping[int, float], expected: Mapping[int, float]) -> str:
    """Return the cause where each completion has a factor of its own, `implied` in place of `expected`."""
    if all(abs(implied[row] - expected[row]) < 0.01 for row in expected):
        return "the log-probabilities of the KL term's reference, or the ratios, are rounded"
    if all(abs(a - b) < 0.01 for a, b in zip(sorted(implied.values()), sorted(expected.values()), strict=True)):
        return "the advantages are those of other completions (shuffled, or of another group)"
    if all(abs(implied[row]) < 1e-3 if expected[row] == 0 else implied[row] * expected[row] >= 0 for row in expected):
        # A ratio changes neither a sign nor an advantage of 0.
        return (
            "the advantages are not those of the rewards graded again from the texts, or the ratios are to old "
            "log-probabilities of other tokens"
        )
    return "the advantages are not those of the rewards graded again from the texts"


def _vector(values: Iterable[float]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.float64)


def reaches_around(loss: Tensor, logits: Tensor) -> bool:
    """Return whether autograd gets from `loss` to a weight on a path that `logits` are not on."""
    seen: set[Any] = {logits.grad_fn, None}
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or _PASSED_ON in node.name():
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            return True
        waiting += [following for following, _ in node.next_functions]
    return False
