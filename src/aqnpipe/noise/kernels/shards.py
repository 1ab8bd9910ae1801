"""Noise on one tensor-parallel worker's share of a tensor: the share of the noise that the whole tensor would get.

A column-parallel module computes some columns of every row on each worker. Random numbers belong to elements of the
whole tensor, so workers draw different numbers, and several workers together get the noise of one.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from aqnpipe.config.noise import TensorError
from aqnpipe.noise.kernels.error_models import apply_error_
from aqnpipe.noise.kernels.gaussian import NoiseStream


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


def apply_error_to_shards_(tensor: Tensor, shards: Sequence[Shard], error: TensorError, source: NoiseStream) -> Tensor:
    """Put the part of `error` on `tensor` in place that the whole tensor's columns `shards` would get.

    `tensor` [rows, ...] has these columns one after the other in each row; columns behind them, which pad a vocabulary,
    get nothing. The noise of all columns is drawn and the shares are kept: the kernels number elements in groups that
    do not end with a row.
    """
    rows = tensor.flatten(1)
    whole = rows.new_zeros(len(rows), shards[0].width)
    sizes = [shard.size for shard in shards]
    own = rows[:, : sum(sizes)].split(sizes, -1)
    for shard, part in zip(shards, own, strict=True):
        shard.of(whole).copy_(part)
    apply_error_(whole, error, source)
    for shard, part in zip(shards, own, strict=True):
        part.copy_(shard.of(whole))
    # Rows may be a copy of a tensor that has gaps.
    return tensor if rows.data_ptr() == tensor.data_ptr() else tensor.copy_(rows.view(tensor.shape))
