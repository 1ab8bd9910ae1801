"""Cost of each arm, from the measurements of its jobs."""

from collections.abc import Sequence
from statistics import fmean
from typing import TypeVar

import polars as pl

from aqnpipe.report import numbers
from aqnpipe.report.costs import Cost
from aqnpipe.report.inputs import Evaluated, Run
from aqnpipe.report.tables import Row, Table
from aqnpipe.report.words import Words

Made = TypeVar("Made", Run, Evaluated)
MINUTE = 60.0


def cost_table(runs: Sequence[Run], evaluations: Sequence[Evaluated], words: Words) -> Table:
    """Return one row per arm with means over its runs, relative to the first arm that has measurements."""
    trained, evaluated = _measured(runs), _measured(evaluations)
    first = _mean_seconds_per_step(next(iter(trained.values()))) if trained else None
    rows = tuple(
        Row(_cells(key[1], own, [cost for _, cost in evaluated.get(key, [])], first, words))
        for key, own in trained.items()
    )
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


def _measured(made: Sequence[Made]) -> dict[tuple[str, str], list[tuple[Made, Cost]]]:
    """Return what has a measured cost, with it, by model and arm."""
    found: dict[tuple[str, str], list[tuple[Made, Cost]]] = {}
    for one in made:
        if one.cost:
            found.setdefault((one.source.model, one.source.arm), []).append((one, one.cost))
    return found


def _cells(
    arm: str, own: Sequence[tuple[Run, Cost]], evaluations: Sequence[Cost], first: float | None, words: Words
) -> tuple[str, ...]:
    costs = [cost for _, cost in own]
    per_step = _mean_seconds_per_step(own)
    return (
        arm,
        str(len(own)),
        _mean_and_range([cost.seconds for cost in costs], words),
        f"{per_step:.2f}",
        f"{per_step / first:.2f}" if first else numbers.MISSING,
        f"{fmean(cost.cpu_seconds for cost in costs):.1f}",
        f"{max(cost.peak_mb for cost in costs):,.0f}",
        f"{fmean(cost.seconds for cost in evaluations):.1f}" if evaluations else numbers.MISSING,
    )


def _mean_seconds_per_step(own: Sequence[tuple[Run, Cost]]) -> float:
    return fmean(cost.seconds / len(run.metrics) for run, cost in own)


def _mean_and_range(values: Sequence[float], words: Words) -> str:
    if len(values) == 1:
        return f"{values[0]:.1f}"
    span = words("span", low=f"{min(values):.1f}", high=f"{max(values):.1f}")
    return f"{fmean(values):.1f} ({span})"
