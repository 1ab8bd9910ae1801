"""Classification of mismatches: type, channels and magnitude of the fault behind them.

Probe inputs are Latin squares of powers of two, so every channel carries large and small values. Each type of fault
changes them in its own way: a dead zone zeroes the smallest, a clamp cuts the largest, a gain multiplies all.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from scipy import stats
from torch import Tensor

from aqnpipe.artifacts.diagnoses import FaultBits, FaultKind, LocatedFault, TilePlace
from aqnpipe.diagnosis.checks import CHECKSUM_PROBES, OUTSIDE_LAYERS, Check, Mismatch, differs
from aqnpipe.noise.injection.faults import SPIKE_PROBABILITY

_MOST_INFORMATIVE = ("finite", "identity", "linear", "attention", "mlp", "norm", "mantissa", "integer", "accumulator")
"""Probes in order of how much their mismatch reveals about the type: known answers over a wide range come first."""

_LEAST_INFORMATIVE = ("chain", "repeat", "monomial")
"""Probes that compare the device with itself; those of neither list stand between."""

_RANKS = {probe: rank for rank, probe in enumerate((*_MOST_INFORMATIVE, "", *_LEAST_INFORMATIVE))}

_OF_ITSELF = (*_LEAST_INFORMATIVE, "logits")
"""Probes that show no fault which both sides of the comparison share; they count as calls only where they differ."""

_NOT_COUNTED = ("chain", "monomial")
"""Probes whose elements say nothing of a rate: one compares an output with its next reading, one permutes rows."""

_ROUNDINGS = 4.0
"""Tolerance of explanations in roundings: both the fault and its difference from the expected value are rounded."""

_TILE_WIDTHS = (16, 32, 64, 128)
"""Widths of the tiles of matrix units, in channels."""
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class _Suspect:
    """A site with wrong answers: in `layers`, of which the evidence is that of the first; shared by most or not."""

    site: str
    layers: tuple[int, ...]
    is_device_wide: bool
    evidence: tuple[Check, ...]


@dataclass(frozen=True)
class Mark:
    """The kind of a mismatch. `level` is absolute: a threshold, limit, offset or noise sigma.

    `magnitude` is the level relative to the maximum, mean or standard deviation of the expected tensor, as in
    noise/injection/faults.py; `low` and `high` bound it.
    """

    kind: FaultKind
    level: float | None = None
    magnitude: float | None = None
    low: float | None = None
    high: float | None = None


def classify(suspect: _Suspect, all_checks: Sequence[Check]) -> LocatedFault:
    """Return the fault behind a suspect; `all_checks` are those of its site in the layer of its evidence."""
    evidence = suspect.evidence
    informative = most_informative(evidence)
    mark = mark_of(informative)
    # Monomial probes, which permute rows, count only if there is no other.
    channels = sorted(_channels([check for check in evidence if check.probe != "monomial"] or evidence))
    if mark.kind == "spike":
        mark = _spike_rate(evidence, all_checks, len(channels))
    is_outside = suspect.layers[0] == OUTSIDE_LAYERS
    is_in_one = not (is_outside or suspect.is_device_wide)
    num_wrong, num_calls = _calls(evidence, all_checks)
    return LocatedFault(
        layer=suspect.layers[0] if is_in_one else None,
        site=suspect.site,
        scope="layer" if is_in_one else "model" if is_outside else "device",
        layers=() if is_outside else suspect.layers,
        type=mark.kind,
        num_faulty_channels=len(channels),
        faulty_channel_indices=tuple(channels),
        num_channels=evidence[0].num_channels,
        magnitude=mark.magnitude,
        magnitude_low=mark.low,
        magnitude_high=mark.high,
        threshold=None,
        probes=tuple(dict.fromkeys(check.probe for check in evidence)),
        evidence=_in_words(evidence, len(channels)),
        bits=fault_bits(informative),
        rate_per_call=num_wrong / num_calls if num_wrong else None,
        calls=num_calls if num_wrong else None,
        tile=tile_place(channels, evidence[0].num_channels),
    )


def _calls(evidence: Sequence[Check], all_checks: Sequence[Check]) -> tuple[int, int]:
    """Return the wrong and all compared calls, without weights in memory, of which no module is called."""
    wrong = sum(_wrong_calls(c.mismatch) for c in evidence if c.mismatch and c.probe not in CHECKSUM_PROBES)
    shown = (c for c in all_checks if c.probe not in CHECKSUM_PROBES and (c.mismatch or c.probe not in _OF_ITSELF))
    return wrong, sum(check.calls for check in shown)


def most_informative(evidence: Sequence[Check]) -> Mismatch:
    """Return the mismatch that reveals most about the type."""
    best = min(evidence, key=lambda check: (_RANKS.get(check.probe, len(_MOST_INFORMATIVE)), -check.deviation))
    if best.mismatch is None:
        raise ValueError(f"{best.probe} of {best.site} has no mismatch")
    return best.mismatch


def mark_of(mismatch: Mismatch) -> Mark:
    """Return the kind of a mismatch: the first explanation that fits every value on its channels."""
    expected, observed = mismatch.expected, mismatch.observed
    changed = differs(expected, observed)
    if observed[changed].isnan().any():
        return Mark("other")
    for explain in (_dead_zone, _saturation, _stuck, _gain, _bias, _noise_or_spike):
        mark = explain(mismatch, changed)
        if mark is not None:
            return mark
    return Mark("other")


def _dead_zone(mismatch: Mismatch, changed: Tensor) -> Mark | None:
    """Dead zone: all changed values are exactly 0, and they are the smallest ones."""
    magnitudes = mismatch.expected.abs()
    survivors = magnitudes[~changed & (magnitudes > 0)]
    if (mismatch.observed[changed] != 0).any() or not len(survivors):
        return None
    largest_zeroed, smallest_left = float(magnitudes[changed].max()), float(survivors.min())
    if largest_zeroed > smallest_left:
        return None
    low, high = largest_zeroed / mismatch.maximum, smallest_left / mismatch.maximum
    return Mark("dead_zone", largest_zeroed, (low * high) ** 0.5, low, high)


def _saturation(mismatch: Mismatch, changed: Tensor) -> Mark | None:
    """Saturation: all changed values are cut to one limit with their sign, and they are the largest ones."""
    expected, observed = mismatch.expected, mismatch.observed
    limit = float(observed[changed].abs().max())
    cut = (observed[changed].abs() == limit) & (observed[changed].sign() == expected[changed].sign())
    if limit == 0 or not cut.all() or (expected[changed].abs() <= limit).any():
        return None
    if (expected[~changed].abs() > limit).any():
        return None
    magnitude = 1 - limit / mismatch.maximum
    spread = mismatch.eps * (1 - magnitude)
    return Mark("saturation", limit, magnitude, max(magnitude - spread, 0.0), magnitude + spread)


def _stuck(mismatch: Mismatch, changed: Tensor) -> Mark | None:
    """Stuck: every channel outputs one constant value."""
    observed = mismatch.observed
    if len(observed) < 2 or not (observed == observed[:1]).all() or not changed.any(0).all():
        return None
    return Mark("stuck", float(observed[0].abs().max()))


def _gain(mismatch: Mismatch, changed: Tensor) -> Mark | None:
    """Gain: every value is multiplied by one factor."""
    expected, observed = mismatch.expected, mismatch.observed
    known = (expected != 0) & observed.isfinite()
    ratios = observed[known] / expected[known]
    if not len(ratios) or not changed[known].all():
        return None
    factor = float(ratios.median())
    if ((ratios - factor).abs() > _ROUNDINGS * mismatch.eps * abs(factor)).any():
        return None
    return Mark("gain", factor, factor)


def _bias(mismatch: Mismatch, changed: Tensor) -> Mark | None:
    """Bias: one constant per call is added. Values in which it is lost to rounding do not change."""
    if not mismatch.observed[changed].isfinite().all():
        return None
    differences = (mismatch.observed - mismatch.expected).abs()
    if (differences <= _ROUNDINGS * mismatch.eps * mismatch.expected.abs()).all():
        return None  # the last bits of large values, in which no constant shows
    offsets = []
    for expected, observed in zip(
        mismatch.expected.chunk(mismatch.calls), mismatch.observed.chunk(mismatch.calls), strict=True
    ):
        offset = _offset_at_smallest(expected, observed)
        allowed = _ROUNDINGS * mismatch.eps * (expected.abs() + abs(offset))
        if ((observed - expected - offset).abs() > allowed).any():
            return None
        if offset != 0:  # a call with only large values loses the constant to rounding
            offsets.append(offset)
    if not offsets:
        return None
    level = sum(offsets) / len(offsets)
    if mismatch.std == 0:
        return Mark("bias", level)
    magnitudes = [abs(offset) / mismatch.std for offset in offsets]
    low, high = min(magnitudes) * (1 - mismatch.eps), max(magnitudes) * (1 + mismatch.eps)
    return Mark("bias", level, abs(level) / mismatch.std, low, high)


def _noise_or_spike(mismatch: Mismatch, changed: Tensor) -> Mark | None:
    """Noise or spike: noise changes nearly all values small enough to show it, spikes change few."""
    expected, observed = mismatch.expected, mismatch.observed
    small = expected.abs() <= expected.abs().median()
    share = float(changed[small].double().mean()) if small.any() else 0.0
    if share <= 0.5:
        return Mark("spike")
    differences = (observed - expected)[small & observed.isfinite()]
    if not len(differences):
        return None
    sigma = float(differences.square().mean().sqrt())
    magnitude = sigma / mismatch.mean if mismatch.mean else None
    if magnitude is None:
        return Mark("noise", sigma)
    # 95 % interval of a standard deviation from independent draws
    degrees = len(differences)
    low, high = (magnitude * (degrees / stats.chi2.ppf(q, degrees)) ** 0.5 for q in (0.975, 0.025))
    return Mark("noise", sigma, magnitude, float(low), float(high))


def _spike_rate(evidence: Sequence[Check], all_checks: Sequence[Check], num_channels: int) -> Mark:
    """Return the magnitude, with exact 95 % interval, from the share of changed elements on the faulty channels."""
    changed = sum(
        int(differs(check.mismatch.expected, check.mismatch.observed).sum())
        for check in evidence
        if check.probe not in _NOT_COUNTED and check.mismatch
    )
    kept = min(num_channels, max((check.mismatch.expected.shape[1] for check in evidence if check.mismatch), default=1))
    seen = kept * sum(check.elements_per_channel for check in all_checks if check.probe not in _NOT_COUNTED)
    if not seen or changed > seen:
        return Mark("spike")
    interval = stats.binomtest(changed, seen).proportion_ci(0.95, "exact")
    rates = (changed / seen, float(interval.low), float(interval.high))
    return Mark("spike", None, *(rate / SPIKE_PROBABILITY for rate in rates))


def _offset_at_smallest(expected: Tensor, observed: Tensor) -> float:
    magnitudes = expected.abs()
    smallest = magnitudes <= magnitudes.min()
    return float(torch.median((observed - expected)[smallest]))


def _in_words(evidence: Sequence[Check], num_channels: int) -> str:
    worst = max(evidence, key=lambda check: check.deviation)
    probes = ", ".join(dict.fromkeys(check.probe for check in evidence))
    is_nan = any(bool(check.mismatch.observed.isnan().any()) for check in evidence if check.mismatch)
    deviation = "some values are NaN" if is_nan else f"largest relative deviation {worst.deviation:.3g}"
    return f"{num_channels} of {evidence[0].num_channels} channels are wrong ({probes}; {deviation})"


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
    for width in _TILE_WIDTHS:
        offsets = {channel % width for channel in found}
        every = {channel for channel in range(num_channels) if channel % width in offsets}
        if num_channels >= 2 * width and len(offsets) < width and found == every:
            return TilePlace(width=width, offsets=tuple(sorted(offsets)))
    return None


def _wrong_calls(mismatch: Mismatch) -> int:
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


def suspects(checks: Sequence[Check]) -> list[_Suspect]:
    """Return the suspects: one for a site whose same channels are wrong in most layers, else one for each layer.

    Most layers are more than half of those that have the site, at least two. Channels that are wrong in one layer only,
    at a site that is wrong in most, are that layer's own fault.
    """
    by_site: dict[str, dict[int, list[Check]]] = defaultdict(lambda: defaultdict(list))
    for check in checks:
        if check.mismatch:
            by_site[check.site][check.layer].append(check)
    result: list[_Suspect] = []
    for site, layers in by_site.items():
        probed = {check.layer for check in checks if check.site == site and check.layer != OUTSIDE_LAYERS}
        seen = Counter(channel for found in layers.values() for channel in _channels(found))
        shared = {channel for channel, count in seen.items() if count >= max(2, len(probed) // 2 + 1)}
        wide, own = ({n: _restricted(found, shared, keep) for n, found in layers.items()} for keep in (True, False))
        common = [layer for layer, found in wide.items() if found]
        if common:
            result.append(_Suspect(site, tuple(sorted(common)), True, wide[min(common)]))
        own = {layer: found for layer, found in own.items() if found}
        if not common or 2 * len(own) < len(layers):  # in most layers, other channels come from a fault that is random
            result += [_Suspect(site, (layer,), False, found) for layer, found in own.items()]
    return result


def _channels(found: Sequence[Check]) -> set[int]:
    return {int(channel) for check in found if check.mismatch for channel in check.mismatch.channels}


def _restricted(found: Sequence[Check], channels: set[int], keep: bool) -> tuple[Check, ...]:
    """Return the checks reduced to `channels`, or to all others, without those that have no mismatch left."""
    reduced = []
    for check in found:
        if check.mismatch:
            chosen = torch.tensor([(int(channel) in channels) == keep for channel in check.mismatch.channels])
            if chosen.any():
                reduced.append(replace(check, mismatch=_columns(check.mismatch, chosen)))
    return tuple(reduced)


def _columns(mismatch: Mismatch, chosen: Tensor) -> Mismatch:
    kept = chosen[: mismatch.expected.shape[1]]
    if not kept.any():  # the values of other channels stand for those that were not kept
        kept = torch.ones_like(kept)
    return replace(
        mismatch,
        channels=mismatch.channels[chosen],
        deviations=mismatch.deviations[chosen],
        expected=mismatch.expected[:, kept],
        observed=mismatch.observed[:, kept],
    )
