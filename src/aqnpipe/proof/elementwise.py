"""Results of softmax, activations and norms, recomputed for sampled elements in float64; see `recompute`."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from aqnpipe.error_bounds import gamma
from aqnpipe.proof.random_numbers import FloatArray, IntArray
from aqnpipe.proof.recompute import Arguments, Draw, Indices, Recompute, Sampled, at, of_elements, unchanged, wide
from aqnpipe.proof.recompute import with_rounding as _sampled

_ROWS = 3
_UNIT = 2.0**-24
_erf = np.vectorize(math.erf, otypes=[float])


class Rows(NamedTuple):
    """Exact rows [rows, length] of a softmax along `dim`, and the indices of the other dimensions."""

    dim: int
    lead: tuple[IntArray, ...]
    exact: FloatArray

    def place(self) -> tuple[IntArray, ...]:
        """Return the indices of all elements of the rows."""
        count, length = self.exact.shape
        found = [np.repeat(index, length) for index in self.lead]
        found.insert(self.dim, np.tile(np.arange(length), count))
        return tuple(found)


def _softmax(arguments: Arguments, result: Tensor, draw: Draw) -> list[Sampled | None]:
    scores, dim, *_ = arguments.values()
    if not result.dim() or not result.numel():
        return [None]
    dim %= result.dim()
    others = [size for axis, size in enumerate(result.shape) if axis != dim]
    number = draw.rng.integers(0, int(np.prod(others)), min(_ROWS, int(np.prod(others))))
    lead = np.unravel_index(number, tuple(others)) if others else ()
    length = result.shape[dim]
    rows = Rows(dim, lead, np.zeros((len(number) if others else 1, length)))
    values = at(scores, rows.place()).reshape(rows.exact.shape)
    with np.errstate(invalid="ignore"):
        below = values - values.max(-1, keepdims=True)
        powers = np.exp(below)
        exact = powers / powers.sum(-1, keepdims=True)
    if "half_to_float" not in arguments:
        # A row of which everything is masked is zero, not undefined.
        exact = np.where(np.isneginf(values).all(-1, keepdims=True), 0.0, exact)
    result.untyped_storage()._proof_rows = rows._replace(exact=exact)  # type: ignore[attr-defined]
    finite = np.where(np.isfinite(below), np.abs(below), 0.0)
    unit = 2.0**-53 if result.dtype == torch.float64 else _UNIT
    slack = exact * ((2 * finite + 8) * unit + gamma(length, unit))
    return [_sampled(result, rows.place(), exact.reshape(-1), slack.reshape(-1), row=length)]


def _softmax_backward(arguments: Arguments, result: Tensor, draw: Draw) -> list[Sampled | None]:
    gradient, noised, *_ = arguments.values()
    rows: Rows | None = getattr(noised.untyped_storage(), "_proof_rows", None)
    if rows is None:
        return [None]
    towards = at(gradient, rows.place()).reshape(rows.exact.shape)
    exact = rows.exact * (towards - (rows.exact * towards).sum(-1, keepdims=True))
    size = rows.exact * (np.abs(towards) + (rows.exact * np.abs(towards)).sum(-1, keepdims=True))
    slack = size * (2 * gamma(rows.exact.shape[-1] + 8) + 2 * torch.finfo(noised.dtype).eps)
    chosen = draw.rng.integers(0, exact.size, min(draw.num_elements, exact.size))
    place = tuple(axis[chosen] for axis in rows.place())
    return [_sampled(result, place, exact.reshape(-1)[chosen], slack.reshape(-1)[chosen])]


def _sigmoid(x: FloatArray) -> FloatArray:
    found: FloatArray = 0.5 * (1 + np.tanh(0.5 * x))
    return found


def _gelu_parts(x: FloatArray, approximate: str) -> tuple[FloatArray, FloatArray]:
    """Return what GELU multiplies x with, and its derivative by x."""
    if approximate == "tanh":
        scale = np.sqrt(2 / np.pi)
        tanh = np.tanh(scale * (x + 0.044715 * x**3))
        return 0.5 * (1 + tanh), 0.5 * (1 - tanh**2) * scale * (1 + 3 * 0.044715 * x**2)
    return 0.5 * (1 + _erf(x / np.sqrt(2))), np.exp(-0.5 * x**2) / np.sqrt(2 * np.pi)


def _activation(name: str, arguments: Arguments, x: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the factor of x in an activation, and the derivative of that factor."""
    if name == "gelu":
        return _gelu_parts(x, str(arguments.get("approximate", "none")))
    factor = _sigmoid(x)
    return factor, factor * (1 - factor)


def _forward_of(name: str) -> Recompute:
    def values(arguments: Arguments, result: Tensor, place: Indices) -> Sampled:
        x = at(next(iter(arguments.values())), place)
        return _sampled(result, place, x * _activation(name, arguments, x)[0], 32 * _UNIT * np.abs(x))

    return of_elements(values)


def _backward_of(name: str) -> Recompute:
    def values(arguments: Arguments, result: Tensor, place: Indices) -> Sampled:
        towards, x = (at(operand, place) for operand in list(arguments.values())[:2])
        factor, slope = _activation(name, arguments, x)
        return _sampled(result, place, towards * (factor + x * slope), 64 * _UNIT * np.abs(towards) * (1 + np.abs(x)))

    return of_elements(values)


def _rows_of(tensor: Tensor, rows: Any, width: int) -> FloatArray:
    return wide(tensor.reshape(-1, width)[torch.from_numpy(np.asarray(rows))])


def _standardised(arguments: Arguments, x: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return rows with mean 0 and variance 1, and the reciprocals of their standard deviations."""
    centred = x - x.mean(-1, keepdims=True)
    scale = 1 / np.sqrt((centred**2).mean(-1, keepdims=True) + float(arguments["eps"]))
    return centred * scale, scale


def _layer_norm(arguments: Arguments, result: Any, draw: Draw) -> list[Sampled | None]:
    output, width = result[0], int(np.prod(arguments["normalized_shape"]))
    if not output.numel():
        return [None]
    rows = draw.rng.integers(0, output.numel() // width, _ROWS)
    x = _rows_of(arguments["input"], rows, width)
    found, scale = _standardised(arguments, x)
    size = (np.abs(x) + np.abs(x).mean(-1, keepdims=True)) * scale
    weight, bias = arguments["weight"], arguments["bias"]
    if weight is not None:
        found, size = found * wide(weight.reshape(-1)), size * np.abs(wide(weight.reshape(-1)))
    if bias is not None:
        found, size = found + wide(bias.reshape(-1)), size + np.abs(wide(bias.reshape(-1)))
    return [_of_rows(output, rows, found, 4 * gamma(width + 8) * size, draw)]


def _layer_norm_backward(arguments: Arguments, result: Any, draw: Draw) -> list[Sampled | None]:
    gradient, inputs, weight = (arguments[name] for name in ("grad_out", "input", "weight"))
    width = int(np.prod(arguments["normalized_shape"]))
    mean, scale = wide(arguments["mean"]).reshape(-1, 1), wide(arguments["rstd"]).reshape(-1, 1)
    found: list[Sampled | None] = []
    of_input, *of_parameters = result
    epsilon = torch.finfo(inputs.dtype).eps
    if of_input is not None and of_input.numel():
        rows = draw.rng.integers(0, of_input.numel() // width, _ROWS)
        towards = _rows_of(gradient, rows, width) * (1.0 if weight is None else wide(weight.reshape(-1)))
        x = (_rows_of(inputs, rows, width) - mean[rows]) * scale[rows]
        along = (towards * x).mean(-1, keepdims=True)
        exact = (towards - towards.mean(-1, keepdims=True) - x * along) * scale[rows]
        size = np.abs(towards) + np.abs(towards).mean(-1, keepdims=True)
        size += np.abs(x) * np.abs(towards * x).mean(-1, keepdims=True)
        slack = (4 * gamma(width + 8) + epsilon) * size * scale[rows]
        found.append(_of_rows(of_input, rows, exact, slack, draw))
    for of_weight, parameter in zip((True, False), of_parameters, strict=True):
        if parameter is None or not parameter.numel():
            continue
        columns = draw.rng.integers(0, width, min(draw.num_elements, width))
        index = torch.from_numpy(columns)
        terms = wide(gradient.reshape(-1, width)[:, index])
        if of_weight:
            terms = terms * (wide(inputs.reshape(-1, width)[:, index]) - mean) * scale
        slack = (4 * gamma(len(terms) + 8) + epsilon) * np.abs(terms).sum(0)
        place = np.unravel_index(columns, tuple(parameter.shape))
        found.append(_sampled(parameter, place, terms.sum(0), slack))
    return found


def _of_rows(result: Tensor, rows: IntArray, exact: FloatArray, slack: FloatArray, draw: Draw) -> Sampled:
    row, column = (draw.rng.integers(0, size, draw.num_elements) for size in exact.shape)
    place = np.unravel_index(rows[row] * exact.shape[1] + column, tuple(result.shape))
    return _sampled(result, place, exact[row, column], slack[row, column])


def _norm(arguments: Arguments, result: Tensor, place: Indices) -> Sampled:
    (operand,) = arguments.values()
    return unchanged(operand, result, place)


ELEMENTWISE: Mapping[str, Recompute] = {
    "_softmax": _softmax,
    "_safe_softmax": _softmax,
    "_softmax_backward_data": _softmax_backward,
    "silu": _forward_of("silu"),
    "gelu": _forward_of("gelu"),
    "silu_backward": _backward_of("silu"),
    "gelu_backward": _backward_of("gelu"),
    "native_layer_norm": _layer_norm,
    "native_layer_norm_backward": _layer_norm_backward,
    "norm": of_elements(_norm),
    "norm_gradient": of_elements(_norm),
}
"""How the results of softmax, activations and norms are recomputed. Those of norms are operators of this package."""
