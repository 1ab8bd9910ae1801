"""Cost of each arm, from the measurements of its jobs."""

from collections.abc import Sequence
from statistics import fmean

import polars as pl

from aqnpipe.report import numbers
from aqnpipe.report.costs import Cost
from aqnpipe.report.inputs import Evaluated, Run
from aqnpipe.report.tables import Row, Table
from aqnpipe.report.words import Words

MINUTE = 60.0


def cost_table(runs: Sequence[Run], evaluations: Sequence[Evaluated], words: Words) -> Table:
    """Return one row per arm with means over its runs, relative to the first arm that has measurements."""
    arms = list(dict.fromkeys((run.model, run.arm) for run in runs if run.cost))
    first = _mean_seconds_per_step(runs, *arms[0]) if arms else None
    rows = tuple(Row(_cells(model, arm, runs, evaluations, first, words)) for model, arm in arms)
    names = (
        *("arm", "runs", "seconds_per_run", "seconds_per_step", "times_first", "cpu_seconds"),
        *("peak_mb", "evaluation_seconds"),
    )
    headers = tuple(words(f"column.{name}") for name in names)
    return Table("costs", words("costs.table"), headers, rows, note=words("costs.note"))


def cost_rows(runs: Sequence[Run]) -> pl.DataFrame:
    """Return the columns arm, seed, minutes: wall time of every measured run."""
    rows = [{"arm": run.arm, "seed": run.seed, "minutes": run.cost.seconds / MINUTE} for run in runs if run.cost]
    return pl.DataFrame(rows, schema={"arm": pl.String, "seed": pl.Int64, "minutes": pl.Float64})


def total_minutes(runs: Sequence[Run], evaluations: Sequence[Evaluated]) -> tuple[float, float]:
    """Return the wall minutes of all training runs and of all evaluations, each summed over jobs."""
    trained = sum(run.cost.seconds for run in runs if run.cost)
    evaluation = sum(evaluated.cost.seconds for evaluated in evaluations if evaluated.cost)
    return trained / MINUTE, evaluation / MINUTE


def _cells(
    model: str, arm: str, runs: Sequence[Run], evaluations: Sequence[Evaluated], first: float | None, words: Words
) -> tuple[str, ...]:
    own = [run.cost for run in runs if (run.model, run.arm) == (model, arm) and run.cost]
    seconds = [cost.seconds for cost in own]
    per_step = _mean_seconds_per_step(runs, model, arm)
    evaluation_seconds = [
        evaluated.cost.seconds
        for evaluated in evaluations
        if (evaluated.source.model, evaluated.source.arm) == (model, arm) and evaluated.cost
    ]
    return (
        arm,
        str(len(own)),
        _mean_and_range(seconds, words),
        f"{per_step:.2f}",
        f"{per_step / first:.2f}" if first else numbers.MISSING,
        _mean([cost.cpu_seconds for cost in own]),
        _largest(own),
        f"{fmean(evaluation_seconds):.1f}" if evaluation_seconds else numbers.MISSING,
    )


def _mean_seconds_per_step(runs: Sequence[Run], model: str, arm: str) -> float:
    own = [run for run in runs if (run.model, run.arm) == (model, arm)]
    return fmean(run.cost.seconds / len(run.metrics) for run in own if run.cost)


def _mean_and_range(values: Sequence[float], words: Words) -> str:
    if len(values) == 1:
        return f"{values[0]:.1f}"
    span = words("span", low=f"{min(values):.1f}", high=f"{max(values):.1f}")
    return f"{fmean(values):.1f} ({span})"


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{fmean(known):.1f}" if known else numbers.MISSING


def _largest(costs: Sequence[Cost]) -> str:
    known = [cost.peak_mb for cost in costs if cost.peak_mb is not None]
    return f"{max(known):,.0f}" if known else numbers.MISSING
