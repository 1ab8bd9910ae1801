"""Expected result of an operator: the exact result in float64 and how far correct computations may be from it.

Every function takes the inputs that the operator was really given, so the difference to its result is the operator's
own error. Two bounds come with each result (u: half the spacing of numbers at 1 in the output's dtype):

- `strict`: all arithmetic in float32, in any order, and one rounding of the result;
- `loose`: intermediate results rounded to the dtype as well, as a chain of separate operations would do.

What exceeds `loose` is no rounding. `reduced` (float32 only) is the bound for operands rounded to 10 bits, which is how
GPUs compute float32 products in TF32.

In 16 bits an operator can be computed in ways that differ in what they round. Each of these algorithms is computed here
on the operator's own inputs. Arithmetic in float32 that is rounded once gives nearly the same bits in any order of
summation: the right candidate agrees in almost all elements, the others in about three quarters.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from aqnpipe.error_bounds import FLOAT32_ROUNDOFF, gamma

_TF32_ROUNDOFF = 2.0**-11
_SMALLEST = torch.finfo(torch.float32).tiny

Candidates = Mapping[str, Callable[[], Tensor]]

CAST_BEFORE = "cast before the weight"
CAST_AFTER = "cast after the weight"
EACH_STEP = "every step rounded"
ONE_ROUNDING = "one rounding"
COS_SIN_ROUNDED = "cos and sin rounded, products in float32"
ACTIVATION_ROUNDED = "activation rounded, then multiplied"
SCORES_ROUNDED = "scores and probabilities rounded"
PROBABILITIES_ROUNDED = "scores in float32, probabilities rounded"
ALL_FLOAT32 = "scores and probabilities in float32"


@dataclass(frozen=True)
class Expected:
    """The exact results [rows, channels] in float64, and the bounds of correct computations in the same shape."""

    exact: Tensor
    strict: Tensor
    loose: Tensor
    reduced: Tensor | None = None

    def at(self, channels: Tensor) -> "Expected":
        """Return the results and bounds of some channels."""
        reduced = None if self.reduced is None else self.reduced[:, channels]
        return Expected(self.exact[:, channels], self.strict[:, channels], self.loose[:, channels], reduced)


def half_ulp(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return half the spacing of numbers of `dtype` at `values` (float64)."""
    # The spacing changes at powers of two: rounding may carry a value across one.
    size = values.abs().clamp_min(_SMALLEST) * (1 + torch.finfo(dtype).eps)
    return torch.finfo(dtype).eps / 2 * torch.exp2(torch.floor(torch.log2(size)))


def ulps(differences: Tensor, values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return |differences| in units of the spacing of numbers of `dtype` at `values`."""
    return differences.abs() / (2 * half_ulp(values, dtype))


def _roundoff(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Expected:
    """Return x @ weight.T + bias for `x` [rows, in] and the sampled rows of the weight, [channels, in]."""
    x, weight = x.double(), weight.double()
    exact, size = x @ weight.T, x.abs() @ weight.abs().T
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    sums = gamma(x.shape[-1] + 1) * size
    strict = sums + half_ulp(exact.abs() + sums, dtype)
    # A kernel may round parts of the sum, and the product before it adds the bias.
    loose = strict + 2 * _roundoff(dtype) * size
    reduced = strict + 2 * _TF32_ROUNDOFF * size if dtype == torch.float32 else None
    return Expected(exact, strict, loose, reduced)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype) -> Expected:
    """Return x / rms(x) * weight over the last dimension; `weight` includes a constant of 1 where the model adds it."""
    x = x.double()
    exact = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight.double()
    arithmetic = exact.abs() * (8 * FLOAT32_ROUNDOFF + gamma(x.shape[-1]))
    strict = arithmetic + half_ulp(exact.abs() + arithmetic, dtype)
    return Expected(exact, strict, strict + 6 * _roundoff(dtype) * exact.abs())


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, dtype: torch.dtype) -> Expected:
    """Return the LayerNorm of `x` over the last dimension."""
    x = x.double()
    mean = x.mean(-1, keepdim=True)
    scale = torch.rsqrt((x - mean).square().mean(-1, keepdim=True) + epsilon)
    constant = torch.zeros_like(weight, dtype=torch.float64) if bias is None else bias.double()
    exact = (x - mean) * scale * weight.double() + constant
    size = (x.abs() + x.abs().mean(-1, keepdim=True)) * scale * weight.double().abs() + constant.abs()
    arithmetic = size * (8 * FLOAT32_ROUNDOFF + 2 * gamma(x.shape[-1]))
    strict = arithmetic + half_ulp(exact.abs() + arithmetic, dtype)
    return Expected(exact, strict, strict + 6 * _roundoff(dtype) * size)


def rotary(
    x: Tensor,
    positions: Tensor,
    inverse_frequencies: Tensor,
    scaling: float,
    head_dim: int,
    dtype: torch.dtype,
    *,
    interleaved: bool,
) -> Expected:
    """Return the rotation of `x` [rows, heads * head_dim] by `positions` [rows]; channels behind the pairs are kept.

    Frequencies are float32 in every engine, so the rounding of an angle grows with the position.
    """
    heads = x.double().reshape(len(x), -1, head_dim)
    angles = positions.double()[:, None] * inverse_frequencies.double()
    num_pairs = inverse_frequencies.numel()
    cos, sin = scaling * angles.cos()[:, None], scaling * angles.sin()[:, None]
    drift = 2 * FLOAT32_ROUNDOFF * angles.abs()[:, None]
    rotated, kept = heads[..., : 2 * num_pairs], heads[..., 2 * num_pairs :]
    if interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    else:
        first, second = rotated.chunk(2, -1)
    parts = (first * cos - second * sin, second * cos + first * sin)
    size = first.abs() + second.abs()
    join = (lambda a, b: torch.stack((a, b), -1).flatten(-2)) if interleaved else (lambda a, b: torch.cat((a, b), -1))
    exact = torch.cat((join(*parts), kept), -1).flatten(1)
    zero = torch.zeros_like(kept)
    sizes = torch.cat((join(size, size), zero), -1).flatten(1)
    drifts = torch.cat((join(size * drift, size * drift), zero), -1).flatten(1)
    arithmetic = abs(scaling) * (8 * FLOAT32_ROUNDOFF * sizes + drifts)
    strict = arithmetic + half_ulp(exact.abs() + arithmetic, dtype)
    return Expected(exact, strict, strict + 4 * _roundoff(dtype) * abs(scaling) * sizes)


def addition(first: Tensor, second: Tensor, dtype: torch.dtype) -> Expected:
    """Return first + second, rounded once."""
    exact, size = first.double() + second.double(), first.double().abs() + second.double().abs()
    strict = FLOAT32_ROUNDOFF * size + half_ulp(exact.abs(), dtype)
    return Expected(exact, strict, strict + _roundoff(dtype) * size)


def activation(values: Tensor, factor: Tensor | None, exact_values: Tensor, dtype: torch.dtype) -> Expected:
    """Return act(values) * factor, where `exact_values` is act(values) in float64; without factor, act(values)."""
    other = torch.ones_like(exact_values) if factor is None else factor.double()
    exact, size = exact_values * other, values.double().abs() * other.abs()
    # exp(-x) has |x| times the relative error of x. tanh and erf cancel for negative values.
    arithmetic = size * (16 + values.double().abs()) * FLOAT32_ROUNDOFF
    strict = arithmetic + half_ulp(exact.abs() + arithmetic, dtype)
    return Expected(exact, strict, strict + 4 * _roundoff(dtype) * size)


def copy(exact: Tensor, dtype: torch.dtype) -> Expected:
    """Return what a lookup must return; a scale of the embedding may be rounded."""
    exact = exact.double()
    strict = FLOAT32_ROUNDOFF * exact.abs() + half_ulp(exact.abs(), dtype)
    return Expected(exact, strict, strict + 2 * _roundoff(dtype) * exact.abs())


@dataclass(frozen=True)
class AttentionFacts:
    """Facts that a call of attention depends on beside queries, keys and values."""

    scaling: float
    window: int | None = None
    soft_cap: float | None = None


def attention(query: Tensor, key: Tensor, value: Tensor, facts: AttentionFacts, dtype: torch.dtype) -> Expected:
    """Return causal attention of one sequence: `query` [tokens, heads, dim], `key` and `value` [tokens, groups, dim].

    The error of a score is that of a sum of `dim` products. A relative error d of every probability changes the result
    by at most d times the sum of |p v|, and scores wrong by at most e change probabilities by at most exp(2 e) - 1.
    """
    tokens, heads, _ = query.shape
    repeats = heads // key.shape[1]
    key, value = (t.double().repeat_interleave(repeats, 1).transpose(0, 1) for t in (key, value))
    query = query.double().transpose(0, 1)
    scores = query @ key.transpose(1, 2) * facts.scaling
    sizes = query.abs() @ key.abs().transpose(1, 2) * abs(facts.scaling)
    if facts.soft_cap is not None:
        scores = facts.soft_cap * torch.tanh(scores / facts.soft_cap)
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
    visible = (distance >= 0) if facts.window is None else (distance >= 0) & (distance < facts.window)
    probabilities = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    exact = (probabilities @ value).transpose(0, 1).flatten(1)
    spread = (probabilities @ value.abs()).transpose(0, 1).flatten(1)
    seen_sizes = sizes.masked_fill(~visible, 0).amax(-1)
    seen_scores = scores.abs().masked_fill(~visible, 0).amax(-1)
    dim = query.shape[-1]

    def bound(score_roundoff: float, probability_roundoff: float) -> Tensor:
        error = seen_sizes * (gamma(dim + 2) + score_roundoff) + seen_scores * (4 * FLOAT32_ROUNDOFF + score_roundoff)
        per_head = torch.expm1(2 * error) + gamma(tokens + 4) + probability_roundoff
        return spread * per_head.transpose(0, 1).repeat_interleave(dim_of_value, 1)

    dim_of_value = value.shape[-1]
    u = _roundoff(dtype)
    rounding = half_ulp(exact.abs(), dtype)
    reduced = bound(2 * _TF32_ROUNDOFF, 2 * _TF32_ROUNDOFF) + rounding if dtype == torch.float32 else None
    # Fused kernels round the probabilities before the second product.
    half = 0.0 if dtype == torch.float32 else u
    return Expected(exact, bound(0.0, half) + rounding, bound(2 * u, 3 * u) + 2 * rounding, reduced)


def rms_norms(x: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype) -> Candidates:
    """Return the ways to compute an RMSNorm of `x` with this weight."""
    normalised = _normalised(x.float(), epsilon)

    def each_step() -> Tensor:
        low = x.to(dtype)
        return low * torch.rsqrt(low.pow(2).mean(-1, keepdim=True) + epsilon) * weight.to(dtype)

    return {
        CAST_BEFORE: lambda: weight.to(dtype) * normalised.to(dtype),
        CAST_AFTER: lambda: (normalised * weight.float()).to(dtype),
        EACH_STEP: each_step,
    }


def _normalised(x: Tensor, epsilon: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)


def rotations(
    x: Tensor, positions: Tensor, inverse_frequencies: Tensor, scaling: float, head_dim: int, dtype: torch.dtype
) -> Candidates:
    """Return the ways to rotate `x` [rows, heads * head_dim], with pairs in the two halves of a head."""
    angles = positions.float()[:, None] * inverse_frequencies.float()
    cos, sin = (torch.cat((part, part), -1)[:, None] for part in (angles.cos() * scaling, angles.sin() * scaling))
    num_rotated = cos.shape[-1]

    def rotated(cos: Tensor, sin: Tensor, working: torch.dtype) -> Tensor:
        heads = x.reshape(len(x), -1, head_dim)
        part, kept = heads[..., :num_rotated].to(working), heads[..., num_rotated:].to(dtype)
        first, second = part.chunk(2, -1)
        turned = part * cos + torch.cat((-second, first), -1) * sin
        return torch.cat((turned.to(dtype), kept), -1).flatten(1)

    return {
        EACH_STEP: lambda: rotated(cos.to(dtype), sin.to(dtype), dtype),
        COS_SIN_ROUNDED: lambda: rotated(cos.to(dtype).float(), sin.to(dtype).float(), torch.float32),
        ONE_ROUNDING: lambda: rotated(cos, sin, torch.float32),
    }


def activations(act: Callable[[Tensor], Tensor], values: Tensor, factor: Tensor, dtype: torch.dtype) -> Candidates:
    """Return the ways to compute act(values) * factor."""
    return {
        ACTIVATION_ROUNDED: lambda: act(values.float()).to(dtype) * factor.to(dtype),
        ONE_ROUNDING: lambda: (act(values.float()) * factor.float()).to(dtype),
    }


def attentions(query: Tensor, key: Tensor, value: Tensor, scaling: float, dtype: torch.dtype) -> Candidates:
    """Return the ways to compute causal attention of one sequence, [tokens, heads or groups, dim]."""
    tokens, heads, _ = query.shape
    key, value = (t.repeat_interleave(heads // key.shape[1], 1).transpose(0, 1).float() for t in (key, value))
    query = query.transpose(0, 1).float()
    hidden = torch.arange(tokens)[:, None] < torch.arange(tokens)

    def attended(rounds_scores: bool, rounds_probabilities: bool) -> Tensor:
        scores = query @ key.transpose(1, 2)
        scores = (scores.to(dtype) * scaling).float() if rounds_scores else scores * scaling
        scores = scores.masked_fill(hidden, -torch.inf)
        if rounds_scores:
            probabilities = scores.softmax(-1).to(dtype).float()
            result = probabilities @ value
        elif rounds_probabilities:
            # Fused kernels divide by the sum of the exponentials last.
            exponentials = torch.exp(scores - scores.amax(-1, keepdim=True))
            result = exponentials.to(dtype).float() @ value / exponentials.sum(-1, keepdim=True)
        else:
            result = scores.softmax(-1) @ value
        return result.to(dtype).transpose(0, 1).flatten(1)

    return {
        SCORES_ROUNDED: lambda: attended(True, True),
        PROBABILITIES_ROUNDED: lambda: attended(False, True),
        ALL_FLOAT32: lambda: attended(False, False),
    }


def equal_shares(output: Tensor, candidates: Candidates) -> dict[str, int]:
    """Return the number of elements of `output` that each candidate gives bit for bit."""
    return {name: int((compute().to(output.dtype) == output).sum()) for name, compute in candidates.items()}
