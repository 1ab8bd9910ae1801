"""The distance between sampler and trained policy: where it comes from, arm by arm, or why that is not known."""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from aqnpipe.artifacts.sampler_distance import DistanceParts, ExplainedBy
from aqnpipe.report import numbers
from aqnpipe.report.inputs import Run
from aqnpipe.report.tables import Row, Table
from aqnpipe.report.words import Words

Key = TypeVar("Key", bound=Hashable)

MAX_SHOWN = 3
_LEAST_SHARE = 0.01
"""Smaller parts are not named."""


def growth_sentences(runs: Sequence[Run], words: Words) -> list[str]:
    """Return a sentence for each of the runs whose distance has grown the most, and how many more there are."""
    grown = []
    for run in runs:
        growth = run.record.training.sampler_distance.growth if run.record.training else None
        if growth is not None and growth.has_grown:
            grown.append((growth.last_mean - growth.first_mean, run, growth))
    grown.sort(key=lambda entry: (-entry[0], entry[1].arm, entry[1].seed))
    sentences = [
        words(
            "distance.grown",
            run=words("run.name", arm=run.arm, seed=run.seed),
            first=numbers.metric(growth.first_mean),
            last=numbers.metric(growth.last_mean),
            rollouts=growth.num_compared,
            error=numbers.metric(growth.standard_error),
        )
        for _, run, growth in grown[:MAX_SHOWN]
    ]
    return sentences + ([words("distance.more_grown", count=len(grown) - MAX_SHOWN)] if len(grown) > MAX_SHOWN else [])


def distance_table(runs: Sequence[Run], words: Words) -> Table | None:
    """Return the parts of the distance at the first and the last step, over the runs of an arm; None without runs.

    Shares are pooled: of the sum of squares of all tokens that were measured in the arm's runs. Below them are the runs
    of the arm without parts at one of the steps, and why.
    """
    if not runs:
        return None
    steps: dict[tuple[str, bool], list[DistanceParts]] = defaultdict(list)
    for run in runs:
        found = run.record.training.sampler_distance.steps if run.record.training else ()
        for parts in found:
            steps[run.arm, parts.step > 1].append(parts)
    missing: dict[str, Counter[str]] = defaultdict(Counter)
    for run in runs:
        if reason := _why_not(run, words):
            missing[run.arm][reason] += 1
    rows = []
    # Arms in the order of the runs, each with its first and its last step.
    for arm in dict.fromkeys(run.arm for run in runs):
        rows += [Row(_cells(arm, steps[arm, is_last], words)) for is_last in (False, True) if (arm, is_last) in steps]
        rows += [
            Row((arm, reason, *[numbers.MISSING] * 2, str(count), numbers.MISSING))
            for reason, count in missing[arm].items()
        ]
    names = ("arm", "distance_parts", "distance_places", "step", "runs", "distance")
    headers = tuple(words(f"column.{name}") for name in names)
    note = words.paragraph([words("distance.note"), *_mixed_invariance(runs, words)])
    return Table("distance", words("distance.table"), headers, tuple(rows), 3, note)


def _why_not(run: Run, words: Words) -> str | None:
    """Return why a run has no parts at one of the steps; None if it has them."""
    found = run.record.training.sampler_distance if run.record.training else None
    if found is not None and found.steps and found.why_not is None:
        return None
    reason = found.why_not if found is not None else None
    return words("distance.not_explained", reason=reason) if reason else words("distance.no_reason")


def _mixed_invariance(runs: Sequence[Run], words: Words) -> list[str]:
    """Return a sentence if only some of the runs on vLLM used its batch-invariant mode."""
    arms: dict[bool, dict[str, None]] = {True: {}, False: {}}
    for run in runs:
        if (mode := run.record.generation.get("batch_invariant")) is not None:
            arms[bool(mode)][run.arm] = None
    if not all(arms.values()):
        return []
    separator = words("list.separator")
    return [words("distance.mixed", on=separator.join(arms[True]), off=separator.join(arms[False]))]


def _cells(arm: str, measured: Sequence[DistanceParts], words: Words) -> tuple[str, ...]:
    tokens = sum(parts.num_tokens for parts in measured)
    mean = sum(parts.num_tokens * parts.mean_absolute for parts in measured) / tokens
    steps = sorted({parts.step for parts in measured})
    causes = {words(f"distance.cause.{cause}"): share for cause, share in _shares_of_causes(measured).items()}
    places = {_place(place, words): share for place, share in _shares_of_places(measured).items()}
    return (
        arm,
        _listed(causes, words),
        _listed(places, words, MAX_SHOWN) if places else numbers.MISSING,
        words("span", low=steps[0], high=steps[-1]) if len(steps) > 1 else str(steps[0]),
        str(len(measured)),
        numbers.metric(mean),
    )


def _shares_of_causes(measured: Sequence[DistanceParts]) -> dict[str, float]:
    """Return the share of every cause in the sum of squares of all tokens."""
    return _pooled(
        (part.cause, part.share, parts.num_tokens * parts.rms**2) for parts in measured for part in parts.parts
    )


def _shares_of_places(measured: Sequence[DistanceParts]) -> dict[ExplainedBy, float]:
    """Return what every group of layers, or kind of operators, explains of noise or of the rounding of decoding."""
    entries = []
    for parts in measured:
        of_noise = parts.num_tokens * sum(row.rms**2 for row in parts.noise_by_layers)
        entries += [(_without_size(row), row.share, of_noise) for row in parts.noise_by_layers]
        decoding = sum(part.rms**2 for part in parts.parts if part.cause == "decoding") * parts.num_tokens
        entries += [(_without_size(row), row.share, decoding) for row in parts.rounding_by_operator]
    return _pooled(entries)


def _pooled(entries: Iterable[tuple[Key, float | None, float]]) -> dict[Key, float]:
    """Return the mean share of every key, weighted by the squares that it is a share of; 0 without any."""
    weighted: dict[Key, float] = defaultdict(float)
    weights: dict[Key, float] = defaultdict(float)
    for key, share, weight in entries:
        weighted[key] += weight * (share or 0.0)
        weights[key] += weight
    return {key: weighted[key] / weights[key] if weights[key] else 0.0 for key in weights}


def _listed(shares: Mapping[str, float], words: Words, most: int | None = None) -> str:
    """Return the names with their shares, the largest first; a dash if none is worth a name."""
    order = sorted(shares, key=lambda name: -abs(shares[name]))[:most]
    named = [words("distance.share", name=name, share=shares[name]) for name in order if _is_named(shares[name])]
    return words("list.separator").join(named) or numbers.MISSING


def _is_named(share: float) -> bool:
    return abs(share) >= _LEAST_SHARE


def _place(place: ExplainedBy, words: Words) -> str:
    if place.operator is not None:
        return place.operator
    if place.first_layer is None:
        return words("distance.outside")
    if place.first_layer == place.last_layer:
        return words("distance.layer", layer=place.first_layer)
    return words("distance.layers", first=place.first_layer, last=place.last_layer)


def _without_size(place: ExplainedBy) -> ExplainedBy:
    return place.model_copy(update={"rms": 0.0, "share": None})
