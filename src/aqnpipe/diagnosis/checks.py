"""Comparison of observed with expected tensors, channel by channel, within the tolerance of the probe.

The tolerance belongs to the probe and never to what the device or its other layers show, so a fault that all layers
share cannot widen it. There are two classes:

- exact: every bit agrees (the default), because every operation of the probe is exact in the dtype.
- bounded: a forward error bound of each element, for sums whose order is the device's choice (see error_bounds.py).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from aqnpipe.diagnosis.capture import on_host
from aqnpipe.errors import ModelError

OUTSIDE_LAYERS = -1
"""Layer of checks of the modules before and after the decoder layers: embedding, final norm, lm_head."""

CHECKSUM_PROBES = ("weights", "restored")
"""Probes that compare weights in memory. They say nothing of what the modules with these weights compute."""

KEPT_CHANNELS = 64
"""Number of channels of a mismatch whose values are kept; all channels are counted."""


@dataclass(frozen=True)
class Mismatch:
    """Channels that differ and their largest relative deviations; values [elements, kept channels] are float64.

    `maximum` and `mean` are of the magnitudes, `std` of the values, of the whole expected tensor including healthy
    channels. The elements come from `calls` consecutive calls of the module.
    """

    channels: Tensor
    deviations: Tensor
    expected: Tensor
    observed: Tensor
    maximum: float
    mean: float
    std: float
    dtype: torch.dtype
    calls: int = 1

    @property
    def eps(self) -> float:
        """Spacing of the numbers of the dtype at 1."""
        return torch.finfo(self.dtype).eps


@dataclass(frozen=True)
class Check:
    """A comparison at one site of one layer: the number of values compared, and the mismatch if there is one."""

    probe: str
    layer: int
    site: str
    num_channels: int
    elements_per_channel: int
    mismatch: Mismatch | None
    calls: int = 1

    @property
    def deviation(self) -> float:
        """Largest relative deviation of a value that is wrong; 0 if none is."""
        return float(self.mismatch.deviations.max()) if self.mismatch else 0.0


def compare(
    probe: str,
    layer: int,
    site: str,
    expected: Tensor,
    observed: Tensor,
    calls: int = 1,
    *,
    allowed: Tensor | float | Callable[[], Tensor | None] | None = None,
) -> Check:
    """Compare tensors [..., channels] from `calls` calls value by value; -0 equals 0.

    Rows in which both have NaN at one place say nothing of either and are not counted as compared; where the first NaN
    comes from is for probes of finite numbers to find.

    `allowed`: allowed absolute deviation, broadcast to `expected`, which then may be more precise than `observed`; a
    function is called only if they differ. Without it, every bit must agree. NaN and infinity are never close to a
    finite number.

    Raises ModelError if a module computes something else than its name says, so that the shapes differ.
    """
    found = tuple(observed.shape) if isinstance(observed, Tensor) else type(observed).__name__
    if not isinstance(observed, Tensor) or expected.numel() != observed.numel():
        raise ModelError(
            f"the diagnosis does not support the {site} of decoder layer {layer}: probe {probe} expected "
            f"{tuple(expected.shape)}, found {found}; use another model family"
        )
    num_channels = observed.shape[-1]
    with on_host():
        precise = expected.detach().reshape(-1, num_channels)
        observed = observed.detach().reshape(-1, num_channels)
        rounded = precise.to(observed.device, observed.dtype)
        mismatch, compared = None, len(observed)
        if not torch.equal(rounded, observed):
            compared -= int((rounded.isnan() & observed.isnan()).any(-1).sum())
            changed = differs(rounded, observed).cpu()
            if callable(allowed):
                allowed = allowed()
            if allowed is not None:
                bound = torch.as_tensor(allowed, dtype=torch.float64).cpu().expand(expected.shape)
                bound = bound.reshape(-1, num_channels)
                changed &= ~((observed.cpu().double() - precise.cpu().double()).abs() <= bound)
            mismatch = _mismatch(rounded, observed, changed, calls)
    return Check(probe, layer, site, num_channels, compared, mismatch, calls if compared or mismatch else 0)


@dataclass(frozen=True)
class Bench:
    """What the probes of one layer share: its index, the number format and device of its weights, and random numbers.

    `layer` is OUTSIDE_LAYERS for the modules before and after the layers.
    """

    layer: int
    dtype: torch.dtype
    device: torch.device
    generator: torch.Generator

    def compare(
        self, probe: str, site: str, expected: Tensor, observed: Tensor, allowed: Tensor | float | None = None
    ) -> Check:
        """Compare tensors at a site of the layer; see `compare`."""
        return compare(probe, self.layer, site, expected, observed, allowed=allowed)


def differs(expected: Tensor, observed: Tensor) -> Tensor:
    """Return for each element whether the numbers differ; of two NaN it is not known."""
    return (expected != observed) & ~(expected.isnan() & observed.isnan())


def _mismatch(expected: Tensor, observed: Tensor, changed: Tensor, calls: int) -> Mismatch | None:
    """Return the mismatch of the elements `changed` (on the CPU); others, within tolerance, count as expected."""
    channels = changed.any(0).nonzero().squeeze(1)
    if not len(channels):
        return None
    magnitudes = expected.double().abs().cpu()
    mean = float(magnitudes.mean())
    at = channels.to(expected.device)
    wanted, seen, wrong = expected[:, at].double().cpu(), observed[:, at].double().cpu(), changed[:, channels]
    scale = torch.where(wanted != 0, wanted.abs(), mean or 1.0)
    relative = torch.where(wrong, ((seen - wanted).abs() / scale).nan_to_num(nan=torch.inf), 0.0)
    return Mismatch(
        channels=channels,
        deviations=relative.amax(0),
        expected=wanted[:, :KEPT_CHANNELS],
        observed=torch.where(wrong, seen, wanted)[:, :KEPT_CHANNELS],
        maximum=float(magnitudes.max()),
        mean=mean,
        std=float(expected.double().std(correction=0)),
        dtype=observed.dtype,
        calls=calls,
    )
