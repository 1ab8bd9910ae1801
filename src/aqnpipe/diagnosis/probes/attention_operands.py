"""Operands of the attention kernel whose answer is known, the answers, and how far a healthy device may be from them.

The sequences of a batch take turns with four kinds of operands:

- one-hot: every query meets one key with a score so far above the others that softmax is 1 and 0. The output is the
  value of that key, with all mantissa bits: a wrong key, row, head or mask entry shows. In 16 bits every bit agrees. In
  float32 the reciprocal of the sum enters, which devices round differently, so a few units in the last place are free.
- uniform: all queries are zero, so softmax is 1/n over the n allowed keys. One key too many or too few shows.
- ordinary: scores of a few units, from one or four channels of a query, so every step of scores, softmax and sum
  contributes. The bound is first order in the rounding of scores, probabilities and products.
- range: scores far below the largest one, on values that grow as fast as the exponential falls, so that every term of
  the softmax decides some output. Scores are exact where the scaling is a power of two.

Attention and its gradients are computed in float64 on the host. The bounds of what a healthy device may differ are
first order in the roundings of scores, probabilities, products and results, with a quarter to spare.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from aqnpipe.diagnosis.probes.patterns import FLOAT32_EPS, full_mantissas, operand_bits
from aqnpipe.error_bounds import gamma

KINDS = ("one-hot", "uniform", "ordinary", "range")

VALUE_BITS = 8
"""Significant bits of operands whose products are exact in every number format of a model."""
_CODED_CHANNELS = 14
_GAP = 40.0
"""Least distance of the chosen key's score from the others in the one-hot sequences; exp(-40) is far below 2^-24."""
_QUERY_CHANNELS = (1, 4)
"""Channels of an ordinary query that are not zero: with one, rounding of the scores is least against their size."""
_SCORE = 2.0
_STEPS_OF_RANGE = 16
"""Scores of the range sequences are multiples of 1/16 below 16, times a power of two."""
_SPANS = {torch.float16: (2.0**-3, 2.0**-1)}
_WIDE_SPANS = (2.0**-3, 1.0, 4.0, 8.0)
"""Factors of these scores: exp down to exp(-8) in float16. In formats with the exponents of float32 down to exp(-128),
through the numbers that are subnormal there."""
_GROWTHS = {torch.float16: (-8, 5)}
_WIDE_GROWTHS = (-60, 0)
"""Exponents of the values of the range sequences."""

_SPARE = 1.25


def kind_of(sequence: int, first_kind: int = 0) -> str:
    """Return the kind of the operands of a sequence, of which the first has that at `first_kind` of KINDS."""
    return KINDS[(sequence + first_kind) % len(KINDS)]


def known_operands(
    own: tuple[Tensor, Tensor, Tensor], scale: float, visible: Tensor, generator: torch.Generator, first_kind: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return test operands with the shapes and strides of `own`; the sequences take turns with KINDS."""
    q, k, v = own
    queries, keys = torch.zeros(q.shape, dtype=torch.float64), torch.zeros(k.shape, dtype=torch.float64)
    for sequence in range(len(q)):
        kind = kind_of(sequence, first_kind)
        if kind == "one-hot":
            queries[sequence], keys[sequence] = _one_hot(q, k, scale, visible[sequence], generator)
        elif kind == "range":
            queries[sequence], keys[sequence] = _far_apart(q, k, scale, generator)
        else:
            keys[sequence] = full_mantissas(tuple(k.shape[1:]), VALUE_BITS, generator)
        if kind == "ordinary":
            terms = torch.tensor(_QUERY_CHANNELS)[torch.arange(q.shape[2]) % len(_QUERY_CHANNELS)].unsqueeze(1)
            chosen = torch.rand(q.shape[1:], generator=generator).argsort(-1) < terms
            numbers = _SCORE * full_mantissas(tuple(q.shape[1:]), VALUE_BITS, generator) / scale / terms
            queries[sequence] = torch.where(chosen, numbers, 0.0)
    values = full_mantissas(tuple(v.shape), VALUE_BITS, generator)
    values *= 2.0 ** torch.randint(-4, 5, values.shape, generator=generator).double()
    for sequence in range(len(q)):
        if kind_of(sequence, first_kind) == "one-hot":
            values[sequence] = full_mantissas(tuple(v.shape[1:]), operand_bits(v.dtype), generator)
        elif kind_of(sequence, first_kind) == "range":
            values[sequence] = _growing(v, generator)
    return like(q, queries), like(k, keys), like(v, values)


def _far_apart(q: Tensor, k: Tensor, scale: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return queries of one channel each and keys, whose scores spread over the range of exp; products are exact."""
    keys = -torch.randint(0, 256, tuple(k.shape[1:]), generator=generator).double() / _STEPS_OF_RANGE
    spans = torch.tensor(_SPANS.get(q.dtype, _WIDE_SPANS), dtype=torch.float64)
    heads, length, width = q.shape[1:]
    chosen = torch.randint(0, width, (heads, length, 1), generator=generator)
    factors = spans[torch.randint(0, len(spans), (heads, length, 1), generator=generator)]
    return torch.zeros(heads, length, width, dtype=torch.float64).scatter_(-1, chosen, factors / scale), keys


def _growing(v: Tensor, generator: torch.Generator) -> Tensor:
    """Return values [heads, keys, channels]: every key has one channel, at a magnitude from a wide range."""
    heads, length, width = v.shape[1:]
    low, high = _GROWTHS.get(v.dtype, _WIDE_GROWTHS)
    exponents = torch.randint(low, high + 1, (heads, length, 1), generator=generator).double()
    channel = torch.rand(heads, length, width, generator=generator).argmax(-1, keepdim=True)
    values = full_mantissas((heads, length, 1), VALUE_BITS, generator) * 2.0**exponents
    return torch.zeros(heads, length, width, dtype=torch.float64).scatter_(-1, channel, values)


def _one_hot(q: Tensor, k: Tensor, scale: float, visible: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return queries [heads, queries, channels] and keys of which one per query has by far the largest score.

    Keys are distinct codes of +-1. A query is a multiple of the code of one of its visible keys, drawn at random.
    """
    num_heads, num_keys, width = k.shape[1:]
    coded = min(width, _CODED_CHANNELS)
    keys = 1 - 2.0 * torch.randint(0, 2, (num_heads, num_keys, width), generator=generator).double()
    for head in range(num_heads):
        code = torch.randperm(2**coded, generator=generator)[torch.arange(num_keys) % 2**coded]
        keys[head, :, :coded] = 1 - 2.0 * ((code.unsqueeze(1) >> torch.arange(coded)) & 1).double()
    overlap = (keys @ keys.transpose(1, 2)).masked_fill(torch.eye(num_keys, dtype=torch.bool), -width).max()
    peak = _GAP / max(1 - float(overlap) / width - 7 * torch.finfo(q.dtype).eps, 1e-3)
    factor = 2.0 ** math.ceil(math.log2(peak / (scale * width)))
    odds = visible.double() + (~visible.any(-1, keepdim=True)).double()
    drawn = torch.multinomial(odds, q.shape[1], replacement=True, generator=generator).T
    groups = q.shape[1] // num_heads
    key_head = torch.arange(q.shape[1]).unsqueeze(1) // groups
    return factor * keys[key_head, drawn], keys


def like(original: Tensor, values: Tensor) -> Tensor:
    """Return `values` with the device, dtype and strides of `original`."""
    return torch.empty_like(original).copy_(values)


@dataclass(frozen=True)
class Setting:
    """Settings of an attention kernel: factor and bound of the scores, visible keys [sequences, queries, keys]."""

    scale: float
    softcap: float | None
    visible: Tensor


@dataclass(frozen=True)
class _Attention:
    """Float64 operands with the key heads repeated, probabilities, and the errors of scores that healthy devices make.

    `factor`: derivative of a score with respect to the product of query and key; `off_factor`: the error that healthy
    devices make in it.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    weights: Tensor
    shift: Tensor
    factor: Tensor
    off_factor: Tensor


def reference(operands: tuple[Tensor, Tensor, Tensor], setting: Setting) -> tuple[Tensor, Tensor, Tensor]:
    """Return attention [sequences, heads, queries, channels], how far a healthy device may be from it, and the
    probabilities.

    Roundings to the dtype, each half an epsilon: of a probability and of the output, with one to spare. Sums are in
    float32.
    """
    number_format = torch.finfo(operands[0].dtype)
    own = _attention(operands, setting)
    weights, values = own.weights, own.values
    expected = weights @ values
    # First order: sum_j p_j shift_j |v_j - o|, bounded by Cauchy and Schwarz, or by |v_j| + |o|.
    scatter = (weights @ values.square() - expected.square()).clamp(min=0).sqrt()
    moved = (weights * own.shift.square()).sum(-1, keepdim=True).sqrt() * scatter
    shifted = weights * own.shift
    moved = torch.minimum(moved, shifted @ values.abs() + expected.abs() * shifted.sum(-1, keepdim=True))
    # A device may flush probabilities, products and results that are no normal numbers.
    flushed = number_format.tiny * (1 + (weights > 0).double() @ (values.abs() + (values != 0)))
    share = 1.5 * number_format.eps + _product_error(operands[0]) + FLOAT32_EPS * weights.shape[-1] ** 0.5
    return expected, _SPARE * moved + share * (weights @ values.abs()) + flushed, weights


def gradients(operands: tuple[Tensor, Tensor, Tensor], setting: Setting, given: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return the gradients of queries, keys and values, each with the error that a healthy device may make.

    `given`: gradient of the output [sequences, heads, queries, channels]. With probabilities p and g v = da, the
    gradient of the scores is ds = p (da - sum p da).
    """
    own = _attention(operands, setting)
    groups = own.queries.shape[1] // operands[1].shape[1]
    number_format = torch.finfo(operands[0].dtype)
    rounding, product = number_format.eps / 2, _product_error(operands[0])
    p = own.weights
    of_p = own.shift + (p * own.shift).sum(-1, keepdim=True) + 3 * rounding + 8 * FLOAT32_EPS
    da = given @ own.values.transpose(2, 3)
    off_da = (rounding + product) * (given.abs() @ own.values.abs().transpose(2, 3))
    mean = (p * da).sum(-1, keepdim=True)
    off_mean = (p * (of_p * da.abs() + off_da)).sum(-1, keepdim=True)
    # It is a sum over keys, in float32 and in any order.
    off_mean += gamma(p.shape[-1]) * (p * da.abs()).sum(-1, keepdim=True)
    # Flash attention has the mean from its output, which is rounded: sum p da = sum of given times output.
    off_mean += rounding * (given.abs() * (p @ own.values).abs()).sum(-1, keepdim=True)
    ds = p * (da - mean) * own.factor
    off_ds = (p * (of_p * (da - mean).abs() + off_da + off_mean) + 2 * rounding * p * (da.abs() + mean.abs())) * (
        own.factor.abs()
    ) + p * (da - mean).abs() * own.off_factor
    results = (2 + groups) * rounding + product
    found = []
    for gradient, off, other in (
        (ds, off_ds, own.keys),
        (ds.transpose(2, 3), off_ds.transpose(2, 3), own.queries),
        (p.transpose(2, 3), (p * of_p).transpose(2, 3), given),
    ):
        expected = gradient @ other
        allowed = _SPARE * ((off + results * gradient.abs()) @ other.abs())
        # Below the smallest normal number a device may flush every term.
        allowed += number_format.tiny * (1 + (gradient != 0).double() @ other.abs())
        found.append((expected, allowed))
    return [found[0]] + [(_of_groups(wanted, groups), _of_groups(allowed, groups)) for wanted, allowed in found[1:]]


def _of_groups(x: Tensor, groups: int) -> Tensor:
    """Return the sum over the query heads that share a key head."""
    return x.unflatten(1, (-1, groups)).sum(2)


def _attention(operands: tuple[Tensor, Tensor, Tensor], setting: Setting) -> _Attention:
    """Return probabilities and the error of the scores: two roundings of a product and its scaled value, three more
    where scores are capped, none where the dtype represents both.
    """
    dtype = operands[0].dtype
    groups = operands[0].shape[1] // operands[1].shape[1]
    queries, keys, values = (tensor.detach().double().cpu() for tensor in operands)
    keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    raw = queries @ keys.transpose(2, 3)
    scores = raw * setting.scale
    magnitudes = queries.abs() @ keys.abs().transpose(2, 3) * setting.scale
    factor, off_factor = torch.full_like(scores, setting.scale), torch.zeros_like(scores)
    rounding = torch.finfo(dtype).eps / 2
    off_products = _product_error(operands[0]) * magnitudes
    is_exact = _fits(raw, dtype) & _fits(scores, dtype) & (magnitudes == scores.abs())
    if setting.softcap:
        capped = torch.tanh(scores / setting.softcap)
        # 1 - tanh^2 of a capped score is the difference of two numbers near 1: a device may find 0 where it is tiny.
        slope = 1 - capped**2
        off_scores = (off_products + 2 * rounding * scores.abs()) / setting.softcap
        off_factor = 2 * factor * capped.abs() * (rounding + 4 * FLOAT32_EPS + slope * off_scores)
        scores, factor, is_exact = setting.softcap * capped, factor * slope, torch.zeros_like(is_exact)
    rounded = off_products + (5 if setting.softcap else 2) * rounding * scores.abs()
    shift = torch.where(is_exact, 4 * FLOAT32_EPS * scores.abs(), rounded) + 2.0**-20
    hidden = ~setting.visible.unsqueeze(1)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0.0)  # NaN: a query that sees no key
    return _Attention(queries, keys, values, weights, shift, factor, off_factor)


def _product_error(operand: Tensor) -> float:
    """Return the relative error of a product of matrices: float32 sums, of operands as narrow as torch allows."""
    bits = operand_bits(operand.dtype)
    is_narrow = operand.dtype == torch.float32 and bits < 24
    return 2.0 ** (1 - bits) if is_narrow else FLOAT32_EPS * operand.shape[-1]


def _fits(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return for each float64 value whether `dtype` represents it."""
    return values.to(dtype).double() == values
