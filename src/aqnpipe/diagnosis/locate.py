"""From checks to faults: what differs at one site of one layer, and what most layers share, which is the device's."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from aqnpipe.diagnosis.checks import OUTSIDE_LAYERS, Check, Mismatch

Evidence = dict[tuple[int, str], list[Check]]
"""Mismatching checks by (layer, site)."""


@dataclass(frozen=True)
class Suspect:
    """A site with wrong answers: in `layers`, of which the evidence is that of the first; shared by most or not."""

    site: str
    layers: tuple[int, ...]
    is_device_wide: bool
    evidence: tuple[Check, ...]


def mismatching(checks: Sequence[Check]) -> Evidence:
    """Return the checks with a mismatch, by place."""
    found: Evidence = defaultdict(list)
    for check in checks:
        if check.mismatch:
            found[check.layer, check.site].append(check)
    return dict(found)


def suspects(evidence: Evidence, checks: Sequence[Check]) -> list[Suspect]:
    """Return the suspects: one for a site whose same channels are wrong in most layers, else one for each layer.

    Most layers are more than half of those that have the site, at least two. Channels that are wrong in one layer only,
    at a site that is wrong in most, are that layer's own fault.
    """
    by_site: dict[str, dict[int, list[Check]]] = defaultdict(dict)
    for (layer, site), found in evidence.items():
        by_site[site][layer] = found
    result: list[Suspect] = []
    for site, layers in by_site.items():
        shared = _shared_channels(layers, _layers_of(site, checks))
        if not shared:
            result += [Suspect(site, (layer,), False, tuple(found)) for layer, found in layers.items()]
            continue
        wide = {layer: _restricted(found, shared, keep=True) for layer, found in layers.items()}
        wide = {layer: found for layer, found in wide.items() if found}
        own = {layer: rest for layer, found in layers.items() if (rest := _restricted(found, shared, keep=False))}
        result.append(Suspect(site, tuple(sorted(wide)), True, wide[min(wide)]))
        if 2 * len(own) < len(layers):  # in most layers, other channels come from a fault that is random
            result += [Suspect(site, (layer,), False, found) for layer, found in own.items()]
    return result


def _layers_of(site: str, checks: Sequence[Check]) -> set[int]:
    return {check.layer for check in checks if check.site == site and check.layer != OUTSIDE_LAYERS}


def _shared_channels(layers: Mapping[int, Sequence[Check]], probed: set[int]) -> set[int]:
    """Return the channels that are wrong in most of the probed layers."""
    counts: dict[int, int] = defaultdict(int)
    for found in layers.values():
        for channel in {int(c) for check in found if check.mismatch for c in check.mismatch.channels}:
            counts[channel] += 1
    most = max(2, len(probed) // 2 + 1)
    return {channel for channel, count in counts.items() if count >= most}


def _restricted(found: Sequence[Check], channels: set[int], *, keep: bool) -> tuple[Check, ...]:
    """Return the checks reduced to `channels`, or to all others, without those that have no mismatch left."""
    reduced = []
    for check in found:
        if check.mismatch is None:
            continue
        mask = [(int(channel) in channels) == keep for channel in check.mismatch.channels]
        if any(mask):
            reduced.append(replace(check, mismatch=_columns(check.mismatch, mask)))
    return tuple(reduced)


def _columns(mismatch: Mismatch, mask: Sequence[bool]) -> Mismatch:
    def kept(values: Tensor) -> Tensor:
        columns = [i for i in range(values.shape[1]) if mask[i]]
        return values[:, columns] if columns else values

    chosen = [i for i, keep in enumerate(mask) if keep]
    return replace(
        mismatch,
        channels=mismatch.channels[chosen],
        deviations=mismatch.deviations[chosen],
        expected=kept(mismatch.expected),
        observed=kept(mismatch.observed),
    )
