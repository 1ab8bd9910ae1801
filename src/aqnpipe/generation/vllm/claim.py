"""Claim of the injection about what it did to a tensor."""

from dataclasses import dataclass

import numpy as np

from aqnpipe.config.noise import TensorError
from aqnpipe.noise.audit.random_numbers import IntArray

HIDDEN_STATES = "aqn.hidden"
"""Name of AQN's noise on hidden states, as an operator and as a stream of keys."""

_HIDDEN, _FIRST_MODULE = 8, 16
"""Streams of random numbers: 0 for operators, one for hidden states; those of modules have numbers above the last."""


@dataclass(frozen=True)
class Claim:
    """The error that was put on a tensor, its draw, and the part of the storage that the tensor covers.

    `columns`: of a tensor-parallel worker's share of a tensor, its first column, its width and that of the whole.
    """

    operator: str
    layer: int | None
    error: TensorError
    key: int
    call: int
    stream: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    columns: tuple[int, int, int] | None = None

    def __str__(self) -> str:
        return f"{self.operator} layer {'lm_head' if self.layer is None else self.layer}"

    @property
    def is_of_module(self) -> bool:
        """Return whether it is module noise."""
        return self.operator.startswith("module.")

    @property
    def has_its_stream(self) -> bool:
        """Return whether the stream of the draw is the one of its kind: operators, hidden states, modules."""
        if self.is_of_module:
            return self.stream > _FIRST_MODULE
        return (self.call, self.stream) == (0, _HIDDEN) if self.operator == HIDDEN_STATES else self.stream == 0

    def elements_at(self, addresses: IntArray) -> tuple[IntArray, IntArray]:
        """Return which of `addresses` (offsets in the storage) the claimed tensor covers, and their element numbers.

        Elements are numbered as they lie in memory if the tensor has no gaps, otherwise in the order of its indices.
        Those of a share have the numbers that they have in the whole tensor.
        """
        relative, inside = addresses - self.offset, np.ones(addresses.shape, bool)
        number, rest = np.zeros_like(addresses), relative
        weights = np.cumprod([1, *self.shape[:0:-1]])[::-1]
        for stride, size, weight in sorted(zip(self.strides, self.shape, weights, strict=True), reverse=True):
            if size > 1:
                index, rest = np.divmod(rest, stride)
                inside &= (index >= 0) & (index < size)
                number = number + index * weight
        inside &= rest == 0
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        is_dense = last + 1 == np.prod(self.shape)
        covered = np.flatnonzero(inside)
        return covered, self._in_whole((relative if is_dense else number)[covered])

    def _in_whole(self, numbers: IntArray) -> IntArray:
        if self.columns is None:
            return numbers
        start, size, width = self.columns
        rows, columns = np.divmod(numbers, size)
        return rows * width + start + columns
