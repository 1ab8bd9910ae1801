"""Norms over the whole range of their reciprocal root, with full mantissas in input, gain and bias.

The exact norm probe has a mean square of 1024 and gains that are powers of two, where neither the reciprocal root nor
the mantissas of a product can be wrong. This sweep has one mean square per row, from the smallest that epsilon leaves
to the largest that float32 squares, and compares with float64 on the host.
"""

import torch
from torch import Tensor, nn

from aqnpipe.diagnosis.checks import Check, compare
from aqnpipe.diagnosis.probes.layers import norm_offset, subtracts_mean
from aqnpipe.diagnosis.probes.reference import (
    FLOAT32_EPS,
    LEAST_ROWS,
    full_mantissas,
    gradients_of,
    mantissa_bits,
    substituted,
)
from aqnpipe.error_bounds import TWO_ROUNDINGS
from aqnpipe.models.layout import weight_of

_EXPONENTS = {torch.float16: (-12, 10)}
_WIDE_EXPONENTS = (-12, 48)
"""Exponents of the inputs: sums of squares stay finite in float32 with up to 2^28 channels."""

_ROWS_OF_GRADIENT = 32
_SHARE_OF_MEAN = 0.25
_EPSILON_NAMES = ("variance_epsilon", "eps", "epsilon")


def norm_sweep(
    module: nn.Module, layer: int, site: str, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> list[Check]:
    """Return the check of one norm against float64: rows of every exponent, each channel with random full mantissas.

    The norm may subtract the mean (LayerNorm) and may add 1 to its weight (Gemma). A norm without epsilon is not
    known and has no check.
    """
    epsilon = _epsilon(module)
    if epsilon is None:
        return []
    weight = weight_of(module)
    bias = getattr(module, "bias", None)
    x = _inputs(tuple(weight.shape), dtype, generator)
    bits = mantissa_bits(dtype)
    gain = full_mantissas(tuple(weight.shape), bits, generator).to(weight.device, weight.dtype)
    replaced: list[tuple[Tensor, Tensor]] = [(weight, gain)]
    offset = torch.zeros_like(gain)
    if isinstance(bias, nn.Parameter):
        offset = full_mantissas(tuple(bias.shape), bits, generator).to(bias.device, bias.dtype)
        replaced.append((bias, offset))
    unit = norm_offset(module, dtype, device) if not subtracts_mean(module) else 0.0
    with substituted(replaced):
        observed = module(x.to(device, dtype))
    factors, shift = gain.double().cpu() + unit, offset.double().cpu()
    expected, allowed = _answer(x, factors, shift, epsilon, dtype, centred=subtracts_mean(module))
    return [compare("norm_range", layer, site, expected, observed, allowed=allowed)]


def has_answer(module: nn.Module) -> bool:
    """Return whether the epsilon of a norm is known, so that its outputs can be compared."""
    return _epsilon(module) is not None


def norm_in_model(module: nn.Module, layer: int, site: str, unit: float, x: Tensor, observed: Tensor) -> Check:
    """Return the check of one call of a norm within the model, with its own gain, against float64.

    `unit` is 1 if the norm adds 1 to its weight. Rows that no healthy device squares in float32 are left out.
    """
    rows = x.detach().cpu().double()
    bias = getattr(module, "bias", None)
    factors = weight_of(module).detach().cpu().double() + unit
    shift = bias.detach().cpu().double() if isinstance(bias, Tensor) else torch.zeros_like(factors)
    centred = subtracts_mean(module)
    expected, allowed = _answer(rows, factors, shift, _epsilon(module) or 0.0, observed.dtype, centred=centred)
    if centred:  # a mean far above the scatter costs the variance its digits
        square, scatter = rows.square().mean(-1, keepdim=True), rows.var(-1, correction=0, keepdim=True)
        allowed = allowed * (1 + square / (scatter + (_epsilon(module) or 0.0)))
    if observed.dtype != torch.float32:  # a third rounding: fused kernels read a sum before it is rounded
        allowed = 1.5 * allowed
    plain = rows.abs().amax(-1, keepdim=True) < 2.0 ** _WIDE_EXPONENTS[1]  # not so where NaN
    seen = observed.detach().cpu()
    answers = torch.where(plain, expected, seen.double())
    return compare("norm_in_model", layer, site, answers, seen, allowed=torch.where(plain, allowed, 0.0))


def _answer(
    x: Tensor, factors: Tensor, shift: Tensor, epsilon: float, dtype: torch.dtype, *, centred: bool
) -> tuple[Tensor, Tensor]:
    """Return the output of a norm in float64, and the error that healthy devices make.

    The normalised value and its product with the gain are rounded to the dtype.
    """
    normal, magnitude = _normalised(x, epsilon, centred)
    share = TWO_ROUNDINGS * torch.finfo(dtype).eps + (8 + x.shape[-1] ** 0.5 / 4) * FLOAT32_EPS
    allowed = share * (magnitude * factors.abs() + shift.abs()) + torch.finfo(dtype).tiny
    return normal * factors + shift, allowed


def norm_gradient(
    module: nn.Module, layer: int, site: str, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> list[Check]:
    """Return the check of the gradient of the input of one norm against float64, at a mean square of about 1.

    Healthy devices round the gradient times the gain, the normalised value, and the result to the dtype, and a sum over
    the channels is in float32; all of it in proportion to the terms of the gradient. No check without epsilon or graph.
    """
    epsilon = _epsilon(module)
    if epsilon is None:
        return []
    weight, centred = weight_of(module), subtracts_mean(module)
    shape, bits = (_ROWS_OF_GRADIENT, 1, *weight.shape), mantissa_bits(dtype)
    x, gradient = (full_mantissas(shape, bits, generator) for _ in range(2))
    gain = full_mantissas(tuple(weight.shape), bits, generator).to(weight.device, weight.dtype)
    unit = norm_offset(module, dtype, device) if not centred else 0.0
    leaf = x.to(device, dtype).requires_grad_(True)
    with substituted([(weight, gain)]):
        (observed,) = gradients_of(lambda: module(leaf), [leaf], gradient)
    if observed is None:
        return []
    through = gradient * (gain.double().cpu() + unit)
    normal, _ = _normalised(x, epsilon, centred)
    mean = x.mean(-1, keepdim=True) if centred else 0.0
    root = ((x - mean).square().mean(-1, keepdim=True) + epsilon).rsqrt()
    expected = root * (through - normal * (through * normal).mean(-1, keepdim=True))
    terms = through.abs() + normal.abs() * (through * normal).abs().mean(-1, keepdim=True)
    if centred:
        expected = expected - root * through.mean(-1, keepdim=True)
        terms = terms + through.abs().mean(-1, keepdim=True)
    share = 2 * TWO_ROUNDINGS * torch.finfo(dtype).eps + (16 + x.shape[-1] ** 0.5 / 4) * FLOAT32_EPS
    allowed = share * root * terms + torch.finfo(dtype).tiny
    return [compare("backward", layer, f"{site}.input_gradient", expected, observed, allowed=allowed)]


def _epsilon(module: nn.Module) -> float | None:
    return next((float(value) for name in _EPSILON_NAMES if (value := getattr(module, name, None)) is not None), None)


def _inputs(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return [rows, 1, *shape]: full mantissas of one exponent per row, within three powers of two of each other."""
    low, high = _EXPONENTS.get(dtype, _WIDE_EXPONENTS)
    scales = 2.0 ** torch.arange(low, high + 1, dtype=torch.float64)
    scales = scales.repeat(-(-LEAST_ROWS // len(scales)))
    values = full_mantissas((len(scales), 1, *shape), mantissa_bits(dtype), generator)
    values *= 2.0 ** torch.randint(-2, 1, values.shape, generator=generator).double()
    values += _SHARE_OF_MEAN
    values *= scales.reshape(-1, 1, *[1] * len(shape))
    return values.to(dtype).double()


def _normalised(x: Tensor, epsilon: float, centred: bool) -> tuple[Tensor, Tensor]:
    """Return x over its root mean square, and the magnitude of the terms that were added for it."""
    mean = x.mean(-1, keepdim=True) if centred else torch.zeros_like(x[..., :1])
    root = ((x - mean).square().mean(-1, keepdim=True) + epsilon).rsqrt()
    of_mean = x.abs().mean(-1, keepdim=True) if centred else mean
    return (x - mean) * root, (x.abs() + of_mean) * root
