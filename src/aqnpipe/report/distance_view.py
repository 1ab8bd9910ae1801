"""The distance between sampler and trained policy: where it comes from, arm by arm, or why that is not known."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from aqnpipe.artifacts.sampler_distance import DistanceParts
from aqnpipe.report import numbers
from aqnpipe.report.inputs import Run
from aqnpipe.report.tables import Row, Table
from aqnpipe.report.words import Words

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
            Row((arm, reason, numbers.MISSING, str(count), numbers.MISSING)) for reason, count in missing[arm].items()
        ]
    names = ("arm", "distance_parts", "step", "runs", "distance")
    headers = tuple(words(f"column.{name}") for name in names)
    note = words.paragraph([words("distance.note"), *_mixed_invariance(runs, words)])
    return Table("distance", words("distance.table"), headers, tuple(rows), 2, note)


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
    return (
        arm,
        _listed(causes, words),
        words("span", low=steps[0], high=steps[-1]) if len(steps) > 1 else str(steps[0]),
        str(len(measured)),
        numbers.metric(mean),
    )


def _shares_of_causes(measured: Sequence[DistanceParts]) -> dict[str, float]:
    """Return the share of every cause in the sum of squares of all tokens; 0 if that is 0."""
    weighted: dict[str, float] = defaultdict(float)
    weights: dict[str, float] = defaultdict(float)
    for parts in measured:
        for part in parts.parts:
            weighted[part.cause] += parts.num_tokens * parts.rms**2 * (part.share or 0.0)
            weights[part.cause] += parts.num_tokens * parts.rms**2
    return {cause: weighted[cause] / weights[cause] if weights[cause] else 0.0 for cause in weights}


def _listed(shares: Mapping[str, float], words: Words) -> str:
    """Return the names with their shares, the largest first; a dash if none is worth a name."""
    order = sorted(shares, key=lambda name: -abs(shares[name]))
    named = [words("distance.share", name=name, share=shares[name]) for name in order if _is_named(shares[name])]
    return words("list.separator").join(named) or numbers.MISSING


def _is_named(share: float) -> bool:
    return abs(share) >= _LEAST_SHARE
