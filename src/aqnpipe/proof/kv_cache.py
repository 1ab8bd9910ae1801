"""Proof that every key and value that attention reads is a rounded one, in every pass and every layer.

What attention hands to a cache is rounded here a second time, by integers and float64 in place of the kernels' float8.
Each result has a fingerprint, a sum of its bits with secret weights. All that the cache returns must have one of these,
whatever rows have left, moved or were read from a window since; and all new ones must be among what it returns.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from aqnpipe.config.noise import CacheFormat
from aqnpipe.models.parts import Update

_E4M3_MAX, _E4M3_MIN_EXPONENT, _E4M3_MANTISSA_BITS = 448.0, -6, 3
_INT8_MAX, _MIN_INT8_SCALE = 127, 1e-6
_MOST_CHANNELS = 4096
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class CacheAudit:
    """Verifies the keys and values of one phase. `note(layer=..., **columns)` gets what was found; see `Row`."""

    def __init__(
        self,
        number_format: CacheFormat,
        draws: np.random.Generator,
        note: Callable[..., None],
        *,
        reads_back: bool = True,
    ) -> None:
        """`reads_back`: the cache returns earlier keys and values too; otherwise only those of the call."""
        self._format: CacheFormat = number_format
        self._reads_back = reads_back
        # Odd, so that none takes a bit away.
        self._weights = torch.from_numpy(draws.integers(-(2**62), 2**62, _MOST_CHANNELS) * 2 + 1)
        self._note = note
        self._known: dict[tuple[int, str], Tensor] = {}

    def compared(self, layer: int, keys: Tensor, values: Tensor, update: Update) -> tuple[Tensor, Tensor]:
        """Return what `update` does, verified; to be put in front of caches behind the machine, nearer to attention."""
        # What is computed here is no part of the pass that other audits observe by a mode.
        with torch.no_grad(), _disable_current_modes():
            expected = [_rounded(one.detach(), self._format) for one in (keys, values)]
            sums = [_sums(exact.detach(), rounded) for exact, rounded in zip((keys, values), expected, strict=True)]
        read = update(keys, values)
        with torch.no_grad(), _disable_current_modes():
            for what, new, found in zip(("keys", "values"), expected, read, strict=True):
                self._compare(layer, what, new, found.detach())
        # A layer that is computed again is verified, and counted once.
        if torch._C._current_autograd_node() is None:
            squares, exact_squares = (first + second for first, second in zip(*sums, strict=True))
            self._note(layer=layer, calls=1, squares=squares, expected_squares=exact_squares)
        return read

    def _compare(self, layer: int, what: str, new: Tensor, found: Tensor) -> None:
        wanted, read = self._fingerprints(new), self._fingerprints(found)
        known = wanted.flatten()
        if self._reads_back:
            # Places that nothing has been written to are zeros, and masked.
            known = torch.cat([self._known.get((layer, what), wanted.new_zeros(1)), known])
            self._known[layer, what] = known
        wrong, missing = ((~torch.isin(one, among)).sum() for one, among in ((read, known), (wanted, read)))
        self._note(layer=layer, recomputed=wanted.numel(), elements=read.numel(), wrong=wrong, escaped=missing)

    def _fingerprints(self, vectors: Tensor) -> Tensor:
        """Return a number for each of the vectors [..., channels]."""
        # A NaN has one pattern of bits.
        bits = vectors.masked_fill(vectors.isnan(), torch.nan).view(_INTEGERS[vectors.dtype.itemsize])
        self._weights = self._weights.to(vectors.device)
        return (bits.long() * self._weights[: vectors.shape[-1]]).sum(-1)


def _sums(exact: Tensor, rounded: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of squares of what rounding adds, and of the exact values."""
    wide = exact.double()
    return (rounded.double() - wide).square().sum(), wide.square().sum()


def _rounded(values: Tensor, number_format: CacheFormat) -> Tensor:
    """Return keys or values [..., channels] as a cache of that format gives them back, in their dtype."""
    rounded = _e4m3(values.float()) if number_format == "fp8" else _int8(values.double())
    return rounded.to(values.dtype)


def _e4m3(values: Tensor) -> Tensor:
    """Round float32 to E4M3: multiples of 2^(e - 3) for a leading bit 2^e, which is at least 2^-6; at most 448."""
    exponent = values.frexp().exponent.clamp_min(_E4M3_MIN_EXPONENT + 1) - 1 - _E4M3_MANTISSA_BITS
    # Steps of normal numbers of E4M3 are normal numbers of float32; of larger ones the result is 448 anyway.
    step = ((exponent.clamp_max(127) + 127) << 23).view(torch.float32)
    return ((values / step).round() * step).clamp(-_E4M3_MAX, _E4M3_MAX)


def _int8(values: Tensor) -> Tensor:
    """Round float64 by a float32 scale for the last dimension; every step is rounded to float32, as a kernel's."""
    scale = (values.abs().amax(-1, keepdim=True) / _INT8_MAX).float().clamp_min(_MIN_INT8_SCALE).double()
    scaled = (values * scale.reciprocal().float().double()).float().double()
    halved = (scaled + torch.full_like(scaled, 0.5).copysign(scaled)).float().double()
    # An integer has no negative zero; the sum with 0 makes it a positive one.
    return (halved.trunc().clamp(-_INT8_MAX - 1, _INT8_MAX) + 0.0).mul(scale).float()
