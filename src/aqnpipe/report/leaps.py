"""Leaps: steps at which a metric of a run is far from its neighbours; a running mean would make plateaus of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import polars as pl

from aqnpipe.report import numbers
from aqnpipe.report.inputs import Run
from aqnpipe.report.tables import Row, Table
from aqnpipe.report.words import Words

METRICS = ("kl", "loss")
MAX_SHOWN = 3
_NEIGHBOURS = 9
_TIMES_USUAL = 10.0
_SMALLEST_SPREAD = 0.05
"""Deviations are compared with at least this, in nats: a curve without any variance has no usual deviation."""


@dataclass(frozen=True)
class Leap:
    """One step of one run whose metric is `value`, while its neighbours are about `usual`."""

    model: str
    arm: str
    seed: int
    metric: str
    step: int
    value: float
    usual: float


def leaps(runs: Sequence[Run]) -> list[Leap]:
    """Return the leaps of KL and loss of all runs, the farthest first.

    A value leaps if it is farther from the median of its 9 neighbours than 10 times the run's usual deviation from
    that median (the median absolute deviation, scaled to a standard deviation), and than 0.5 nats.
    """
    found = [leap for run in runs for metric in METRICS for leap in _leaps_of(run, metric)]
    return sorted(found, key=lambda leap: (-abs(leap.value - leap.usual), leap.arm, leap.seed, leap.step))


def leap_sentence(leap: Leap, words: Words) -> str:
    """Return what leapt where, from which value to which."""
    return words(
        "training.leap",
        metric=words(f"metric.{leap.metric}"),
        run=words("run.name", arm=leap.arm, seed=leap.seed),
        step=leap.step,
        value=numbers.metric(leap.value),
        usual=numbers.metric(leap.usual),
    )


def leap_sentences(found: Sequence[Leap], words: Words) -> list[str]:
    """Return a sentence for each of the farthest leaps, and how many more there are."""
    sentences = [leap_sentence(leap, words) for leap in found[:MAX_SHOWN]]
    return sentences + ([words("training.more_leaps", count=len(found) - MAX_SHOWN)] if len(found) > MAX_SHOWN else [])


def leap_table(found: Sequence[Leap], words: Words) -> Table:
    """Return every leap with its neighbours' value."""
    rows = tuple(
        Row(
            (
                words("run.name", arm=leap.arm, seed=leap.seed),
                words(f"metric.{leap.metric}"),
                str(leap.step),
                numbers.metric(leap.value),
                numbers.metric(leap.usual),
            )
        )
        for leap in found
    )
    names = ("run", "metric", "step", "value", "usual")
    return Table("leaps", words("training.leaps"), tuple(words(f"column.{name}") for name in names), rows, 2)


def _leaps_of(run: Run, metric: str) -> Iterator[Leap]:
    table = run.metrics.select("step", metric).drop_nulls().sort("step")
    if len(table) < 3:
        return
    values = table[metric].cast(pl.Float64)
    usual = values.rolling_median(_NEIGHBOURS, min_samples=1, center=True)
    distance = (values - usual).abs()
    spread = max(1.4826 * float(distance.median() or 0.0), _SMALLEST_SPREAD)  # type: ignore[arg-type]
    for step, value, nearby, far in zip(table["step"], values, usual, distance > _TIMES_USUAL * spread, strict=True):
        if far:
            yield Leap(run.model, run.arm, run.seed, metric, step, value, nearby)
