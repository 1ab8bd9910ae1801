"""Attention and its gradients in float64 on the host, and how far a healthy device may be from them.

The bounds are first order in the roundings of scores, probabilities, products and results, with a quarter to spare.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from aqnpipe.diagnosis.reference import FLOAT32_EPS, operand_bits

_SPARE = 1.25


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
