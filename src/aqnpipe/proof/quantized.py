"""Products of operands in 4-bit and 8-bit formats, recomputed for sampled elements with a rounding of numpy.

MXFP4: blocks of 32 elements E2M1 with a power of two as scale (OCP Microscaling Formats v1.0, section 6.3). NVFP4:
blocks of 16 with an E4M3 scale, and a float32 scale for a whole matrix. FP8: elements E4M3, with a float32 scale for a
whole matrix, or for blocks of 128, which are 128 x 128 in weights.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from aqnpipe.config.noise import FakeQuantization
from aqnpipe.proof.operations import MatrixParameters, keeps_the_parameter
from aqnpipe.proof.random_numbers import FloatArray, IntArray
from aqnpipe.proof.recompute import Sampled, wide

_BLOCK = {"mxfp4": 32, "nvfp4": 16, "fp8": 128, "fp8_block": 128}
_E2M1_MAX, _E4M3_MAX, _E4M3_MIN_NORMAL = 6.0, 448.0, 2.0**-6


class Factor(NamedTuple):
    """An operand of a product. `rounded`: it must be rounded, with the scale of each matrix or of the whole tensor."""

    tensor: Tensor
    is_weight: bool
    rounded: bool


class Weights:
    """The weights of an observed pass and copies of them, and the other factors of products with a weight."""

    def __init__(self) -> None:
        self._weights, self._copies = MatrixParameters(), MatrixParameters()

    def note(self, function: Any, inputs: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """Note parameters among the inputs of an operator, and casts and copies of them among its results."""
        bases = [value if value._base is None else value._base for value in inputs]
        self._weights.start(base for base in bases if isinstance(base, nn.Parameter) and base.dim() > 1)
        if function is None or not keeps_the_parameter(function) or not any(value in self for value in inputs):
            return
        is_cast = function.overloadpacket.__name__ == "_to_copy" or function.is_view
        known = self._weights if is_cast and not any(value in self._copies for value in inputs) else self._copies
        known.update(value for value in results if value not in self)

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor.dim() > 1 and (tensor in self._weights or tensor in self._copies)

    def is_copy(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a copy of a weight that is no cast, such as experts selected by an index."""
        return tensor in self._copies

    def factors(
        self, error: FakeQuantization, operands: Sequence[Tensor], is_gradient: bool
    ) -> tuple[Factor, ...] | None:
        """Return the factors of a product with a weight; None for another product."""
        weights = [operand in self for operand in operands]
        others = [
            not weight and (not is_gradient or hasattr(operand.untyped_storage(), "_proof_factor"))
            for operand, weight in zip(operands, weights, strict=True)
        ]
        if not any(weights) and not (is_gradient and any(others)):
            return None
        if not is_gradient and torch.is_grad_enabled():
            for operand, other in zip(operands, others, strict=True):
                if other:
                    operand.untyped_storage()._proof_factor = True  # type: ignore[attr-defined]
        return tuple(
            Factor(operand, weight, (weight and error.weights) or (other and error.activations))
            for operand, weight, other in zip(operands, weights, others, strict=True)
        )


def with_rounded_factors(
    sampled: Sampled,
    factors: Sequence[Factor],
    error: FakeQuantization,
    is_gradient: bool,
    offsets: Tensor | None = None,
) -> Sampled:
    """Return samples of a product with the values that rounded factors give; `exact` stays that of exact ones.

    `offsets`: of a product in groups, the ends of the groups of rows.
    """
    expected, magnitude = np.zeros(len(sampled.exact)), np.zeros(len(sampled.exact))
    ends = None if offsets is None else offsets.cpu().numpy()
    for number, (*lead, row, column) in enumerate(zip(*sampled.place, strict=True)):
        lead = lead if ends is None else [np.searchsorted(ends, row, side="right")]
        terms = _line(factors[0], lead, row, error, True, is_gradient) * _line(
            factors[1], lead, column, error, False, is_gradient
        )
        expected[number], magnitude[number] = terms.sum(), np.abs(terms).sum()
    # The bound is in proportion to the sum of magnitudes, which rounding changes by less than half.
    return sampled._replace(expected=expected, slack=1.5 * sampled.slack)


def _line(
    factor: Factor, lead: list[Any], index: Any, error: FakeQuantization, is_first: bool, is_gradient: bool
) -> FloatArray:
    """Return the row of the first factor, or the column of the second, in float64."""
    matrix = factor.tensor[tuple(lead)] if factor.tensor.dim() > 2 else factor.tensor
    matrix = matrix if is_first else matrix.T
    if not factor.rounded:
        return wide(matrix[int(index)])
    whole = matrix if factor.is_weight else factor.tensor
    largest = np.float32(whole.detach().abs().max().float().item())
    size = _BLOCK[error.format]
    start = int(index) // size * size
    if error.format == "fp8_block" and factor.is_weight:
        return _tile_row(matrix[start : start + size], int(index) - start)
    if not is_gradient:
        return _rounded(matrix[int(index)], error, largest)
    # Blocks lie along the dimension of the forward pass, which is not the one that is summed over here.
    return _rounded(matrix[start : start + size].T, error, largest)[:, int(index) - start]


def _rounded(values: Tensor, error: FakeQuantization, largest: np.float32) -> FloatArray:
    """Return values [..., blocks of one length] rounded to the format and to their own dtype; the last may be short."""
    size, width = _BLOCK[error.format], values.shape[-1]
    rows: Any = wide(values).astype(np.float32).reshape(-1, width)
    blocks = np.pad(rows, ((0, 0), (0, -width % size))).reshape(-1, size)
    rounded = _blocks(blocks, error, largest)
    found = np.ascontiguousarray(rounded.reshape(len(rows), -1)[:, :width]).reshape(tuple(values.shape))
    return wide(torch.from_numpy(found).to(values.dtype))


def _blocks(blocks: FloatArray, error: FakeQuantization, largest: np.float32) -> FloatArray:
    match error.format:
        case "mxfp4":
            return _mxfp4(blocks)
        case "nvfp4":
            return _nvfp4(blocks, largest)
        case "fp8":
            return _fp8(blocks, largest)
        case "fp8_block":
            return _fp8(blocks, np.abs(blocks).max(-1, keepdims=True))


def _tile_row(rows: Tensor, number: int) -> FloatArray:
    """Return row `number` of the rows of one row of tiles, rounded to FP8 with the scale of each tile."""
    values = wide(rows).astype(np.float32)
    starts = np.arange(0, values.shape[1], _BLOCK["fp8_block"])
    largest = np.maximum.reduceat(np.abs(values).max(0), starts)
    rounded = _fp8(values[number], np.repeat(largest, _BLOCK["fp8_block"])[: values.shape[1]])
    return wide(torch.from_numpy(rounded).to(rows.dtype))


def _fp8(values: FloatArray, largest: Any) -> FloatArray:
    scale = np.maximum(np.asarray(largest, np.float32) / np.float32(_E4M3_MAX), np.float32(2.0**-126))
    elements = _e4m3(np.clip(values * (np.float32(1) / scale), -_E4M3_MAX, _E4M3_MAX))
    return elements.astype(np.float32) * scale


def _mxfp4(blocks: FloatArray) -> FloatArray:
    exponent = _exponent(np.abs(blocks).max(-1, keepdims=True)) - 2
    scale = np.ldexp(1.0, np.clip(exponent, -127, 126))
    return (_e2m1(blocks / scale) * scale).astype(np.float32)


def _nvfp4(blocks: FloatArray, largest: np.float32) -> FloatArray:
    one = np.float32
    of_matrix = np.maximum(largest / one(_E4M3_MAX * _E2M1_MAX), one(2.0**-121))
    of_block = np.abs(blocks).max(-1, keepdims=True) / one(_E2M1_MAX) / of_matrix
    of_block = _e4m3(np.clip(of_block, one(_E4M3_MIN_NORMAL), one(_E4M3_MAX))).astype(np.float32)
    elements = _e2m1(blocks * (one(1) / of_matrix / of_block)).astype(np.float32)
    return elements * (of_matrix * of_block)


def _e2m1(values: FloatArray) -> FloatArray:
    step = np.ldexp(0.5, _exponent(np.clip(np.abs(values), 1, _E2M1_MAX)))
    return np.rint(np.clip(values, -_E2M1_MAX, _E2M1_MAX) / step) * step


def _e4m3(values: FloatArray) -> FloatArray:
    step = np.ldexp(1.0, np.maximum(_exponent(np.abs(values)), -6) - 3)
    return np.rint(values / step) * step


def _exponent(values: FloatArray) -> IntArray:
    return np.frexp(np.where(values == 0, 2.0**-149, values))[1].astype(np.int64) - 1
