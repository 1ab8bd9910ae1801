"""A fault as hardware engineers look at it: flipped bits, wrong calls, and the period of its channels."""

from collections.abc import Sequence

import torch
from torch import Tensor

from aqnpipe.artifacts.diagnoses import FaultBits, TilePlace
from aqnpipe.diagnosis.checks import Mismatch, differs

TILE_WIDTHS = (16, 32, 64, 128)
"""Widths of the tiles of matrix units, in channels."""

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def fault_bits(mismatch: Mismatch) -> FaultBits | None:
    """Return the bits of the wrong values; None if no wrong value was kept."""
    wrong = differs(mismatch.expected, mismatch.observed)
    if not wrong.any():
        return None
    expected, observed = _words(mismatch.expected[wrong], mismatch), _words(mismatch.observed[wrong], mismatch)
    flipped = expected ^ observed
    width = mismatch.dtype.itemsize * 8
    counts = {bit: int(((flipped >> bit) & 1).sum()) for bit in range(width)}
    return FaultBits(
        expected=_hex(expected[0], width),
        observed=_hex(observed[0], width),
        xor_mask=_hex(flipped[0], width),
        flipped={bit: count for bit, count in counts.items() if count},
        values=len(flipped),
    )


def tile_place(channels: Sequence[int], num_channels: int) -> TilePlace | None:
    """Return the smallest tile width with which the channels are periodic; None without a period of at least two."""
    found = set(channels)
    for width in TILE_WIDTHS:
        offsets = {channel % width for channel in found}
        every = {channel for channel in range(num_channels) if channel % width in offsets}
        if num_channels >= 2 * width and len(offsets) < width and found == every:
            return TilePlace(width=width, offsets=tuple(sorted(offsets)))
    return None


def wrong_calls(mismatch: Mismatch) -> int:
    """Return the number of calls with a wrong value."""
    wrong = differs(mismatch.expected, mismatch.observed).any(1)
    return sum(bool(part.any()) for part in wrong.chunk(mismatch.calls))


def _words(values: Tensor, mismatch: Mismatch) -> Tensor:
    """Return the bit patterns of float64 `values` in the dtype of the mismatch, as non-negative int64."""
    words = values.to(mismatch.dtype).view(_INTEGERS[mismatch.dtype.itemsize]).long()
    width = mismatch.dtype.itemsize * 8
    return words & ((1 << width) - 1) if width < 64 else words


def _hex(word: Tensor, width: int) -> str:
    return f"0x{int(word) % (1 << width):0{width // 4}x}"
