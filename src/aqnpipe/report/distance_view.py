"""Sentences on the distance between sampler and trained policy."""

from collections.abc import Sequence

from aqnpipe.report import numbers
from aqnpipe.report.inputs import Run
from aqnpipe.report.words import Words

MAX_SHOWN = 3


def growth_sentences(runs: Sequence[Run], words: Words) -> list[str]:
    """Return a sentence for each of the runs whose distance has grown the most, and how many more there are."""
    grown = []
    for run in runs:
        growth = run.record.training.distance_growth if run.record.training else None
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


def invariance_sentences(runs: Sequence[Run], words: Words) -> list[str]:
    """Return a sentence if only some of the runs on vLLM used its batch-invariant mode."""
    arms: dict[bool, dict[str, None]] = {True: {}, False: {}}
    for run in runs:
        if (mode := run.record.generation.get("batch_invariant")) is not None:
            arms[bool(mode)][run.arm] = None
    if not all(arms.values()):
        return []
    separator = words("list.separator")
    return [words("distance.mixed", on=separator.join(arms[True]), off=separator.join(arms[False]))]
