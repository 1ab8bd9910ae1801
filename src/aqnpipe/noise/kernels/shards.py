"""Noise on one tensor-parallel worker's share of a tensor: the share of the noise that the whole tensor would get.

A column-parallel module computes some columns of every row on each worker. Random numbers belong to elements of the
whole tensor, so workers draw different numbers, and several workers together get the noise of one.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from aqnpipe.config.noise import MantissaTruncation, SystematicBias, TensorError
from aqnpipe.noise.kernels.error_models import apply_error_
from aqnpipe.noise.kernels.stream import NoiseStream


class Shard(NamedTuple):
    """The columns `start` to `start + size` of rows of `width` elements."""

    start: int
    size: int
    width: int

    def of(self, whole: Tensor) -> Tensor:
        """Return this share of `whole` [..., width] as a view."""
        return whole.narrow(-1, self.start, self.size)

    def whole(self, shares: Tensor) -> Tensor:
        """Return [..., width] from the shares [..., workers * size] of all workers, in the order of their ranks.

        Several workers can hold the same share, as of few key and value heads; those have consecutive ranks.
        """
        copies = shares.shape[-1] // self.width
        if copies == 1:
            return shares
        return torch.cat(shares.split(self.size, -1)[::copies], -1)


def apply_error_to_shard_(tensor: Tensor, shard: Shard, error: TensorError, source: NoiseStream) -> Tensor:
    """Put the part of `error` on `tensor` in place that the whole tensor's columns `shard` would get.

    `tensor` has any shape whose elements, in the order of their indices, are rows of `shard.size`. The noise of all
    columns is drawn and the share is kept: the kernels number elements in groups that do not end with a row.
    """
    if isinstance(error, SystematicBias | MantissaTruncation):
        # Errors without random numbers are the same for an element wherever it lies.
        return apply_error_(tensor, error, source)
    rows = tensor.reshape(-1, shard.size)
    whole = rows.new_zeros(rows.shape[0], shard.width)
    own = shard.of(whole)
    own.copy_(rows)
    apply_error_(whole, error, source)
    return tensor.copy_(own.reshape(tensor.shape))
