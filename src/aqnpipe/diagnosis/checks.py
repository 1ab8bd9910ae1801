"""Comparison of observed with expected tensors, channel by channel."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from aqnpipe.errors import ModelError

Probe = Literal["identity", "linear", "norm", "attention", "mlp", "integer", "monomial", "repeat"]

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
    """A comparison at one site of one layer: the number of values compared, and the mismatch if there is one."""

    probe: Probe
    layer: int
    site: str
    num_channels: int
    elements_per_channel: int
    mismatch: Mismatch | None

    @property
    def deviation(self) -> float:
        """Largest relative deviation; 0 if all bits agree."""
        return float(self.mismatch.deviations.max()) if self.mismatch else 0.0


def compare(probe: Probe, layer: int, site: str, expected: Tensor, observed: Tensor, calls: int = 1) -> Check:
    """Compare tensors [..., channels] from `calls` calls value by value; -0 equals 0 and NaN equals NaN.

    Raises ModelError if a module computes something else than its name says, so that the shapes differ.
    """
    found = tuple(observed.shape) if isinstance(observed, Tensor) else type(observed).__name__
    if not isinstance(observed, Tensor) or expected.numel() != observed.numel():
        raise ModelError(
            f"the diagnosis does not support the {site} of decoder layer {layer}: probe {probe} expected "
            f"{tuple(expected.shape)}, found {found}; use a model of another family"
        )
    num_channels = observed.shape[-1]
    expected = expected.to(observed.device, observed.dtype).reshape(-1, num_channels)
    observed = observed.detach().reshape(-1, num_channels)
    mismatch = None if torch.equal(expected, observed) else _mismatch(expected, observed, calls)
    return Check(probe, layer, site, num_channels, len(observed), mismatch)


def differs(expected: Tensor, observed: Tensor) -> Tensor:
    """Return for each element whether the numbers differ; NaN equals NaN."""
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
