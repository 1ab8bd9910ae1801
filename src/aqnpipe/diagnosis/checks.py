"""Answers compared with what was expected, channel by channel."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Probe = Literal["identity", "linear", "norm", "attention", "mlp", "integer", "monomial", "repeat"]

KEPT_CHANNELS = 64
"""Of a mismatch only so many channels are kept value by value; all are counted."""


@dataclass(frozen=True)
class Mismatch:
    """What differs: `channels` with their largest relative `deviations`, and values [elements, kept channels] as float64.

    maximum, mean and std are of the magnitudes and values of the whole expected tensor, healthy channels included. The
    elements come from `calls` calls of the module, one after the other.
    """

    channels: Tensor
    deviations: Tensor
    expected: Tensor
    observed: Tensor
    maximum: float
    mean: float
    std: float
    eps: float
    calls: int = 1

    def beyond(self, bound: float) -> "Mismatch | None":
        """Return the part of the mismatch on channels whose deviation exceeds `bound`, None if there is none."""
        keep = self.deviations > bound
        if keep.all():
            return self
        if not keep.any():
            return None
        kept = keep[: self.expected.shape[1]]
        return Mismatch(
            self.channels[keep],
            self.deviations[keep],
            self.expected[:, kept],
            self.observed[:, kept],
            self.maximum,
            self.mean,
            self.std,
            self.eps,
            self.calls,
        )


@dataclass(frozen=True)
class Check:
    """One comparison of one site in one layer: how much was compared and what did not agree."""

    probe: Probe
    layer: int
    site: str
    num_channels: int
    elements_per_channel: int
    mismatch: Mismatch | None

    @property
    def deviation(self) -> float:
        """Largest relative deviation; 0 where all bits agree."""
        return float(self.mismatch.deviations.max()) if self.mismatch else 0.0


def compare(probe: Probe, layer: int, site: str, expected: Tensor, observed: Tensor, calls: int = 1) -> Check:
    """Compare tensors [..., channels] of `calls` calls value by value; -0 equals 0 and NaN equals NaN."""
    num_channels = observed.shape[-1]
    expected = expected.to(observed.device, observed.dtype).reshape(-1, num_channels)
    observed = observed.detach().reshape(-1, num_channels)
    if expected.shape != observed.shape:
        raise ValueError(f"{probe} of {site}: expected shape {tuple(expected.shape)}, found {tuple(observed.shape)}")
    mismatch = None if torch.equal(expected, observed) else _mismatch(expected, observed, calls)
    return Check(probe, layer, site, num_channels, len(observed), mismatch)


def differs(expected: Tensor, observed: Tensor) -> Tensor:
    """Tell element by element what is not the same number."""
    return (expected != observed) & ~(expected.isnan() & observed.isnan())


def _mismatch(expected: Tensor, observed: Tensor, calls: int) -> Mismatch | None:
    changed = differs(expected, observed)
    channels = changed.any(0).nonzero().squeeze(1)
    if not len(channels):
        return None
    magnitudes = expected.double().abs()
    mean = float(magnitudes.mean())
    scale = magnitudes[:, channels]
    scale = torch.where(scale > 0, scale, mean or 1.0)
    relative = (observed[:, channels].double() - expected[:, channels].double()).abs() / scale
    relative = torch.where(changed[:, channels], relative.nan_to_num(nan=torch.inf), 0.0)
    kept = channels[:KEPT_CHANNELS]
    return Mismatch(
        channels=channels.cpu(),
        deviations=relative.amax(0).cpu(),
        expected=expected[:, kept].double().cpu(),
        observed=observed[:, kept].double().cpu(),
        maximum=float(magnitudes.max()),
        mean=mean,
        std=float(expected.double().std(correction=0)),
        eps=torch.finfo(observed.dtype).eps,
        calls=calls,
    )
