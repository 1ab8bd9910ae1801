"""The same training on two machines, or by two library versions: its metrics step by step, from files of either."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from aqnpipe.config.base import FrozenModel
from aqnpipe.errors import DataError
from aqnpipe.statistics.arrays import FloatArray
from aqnpipe.statistics.curves import compare_curves

METRICS: Mapping[str, tuple[str, ...]] = {
    "reward": ("reward_mean", "reward", "critic/rewards/mean", "critic/score/mean"),
    "loss": ("loss", "train/loss", "actor/pg_loss", "train_loss"),
    "kl": ("kl", "actor/kl_loss", "actor/ppo_kl", "objective/kl"),
    "entropy": ("entropy", "actor/entropy", "actor/entropy_loss"),
    "grad_norm": ("grad_norm", "train/grad_norm", "actor/grad_norm"),
    "response_tokens": ("response_tokens_mean", "completions/mean_length", "response_length/mean", "completion_length"),
}
"""Names of each metric in the files of this package, of TRL and of verl; the first that both sides have counts."""

_STEPS = ("step", "training/global_step", "global_step", "train/global_step")
_SUFFIXES = (".parquet", ".csv", ".jsonl", ".json")


class MetricDifference(FrozenModel):
    """A metric over the steps that both sides have; second minus first. Intervals and p-values need two runs a side.

    `relative`: difference of the means over the mean magnitude of the first. `p_adjusted`: for the steps, the mean over
    them, and all metrics (Bonferroni), as are interval and band: it is below alpha where one of them is left.
    `first_unequal`: first step at which runs with the same seed have other numbers. `first_beyond`: first step whose
    difference is beyond the band that seeds explain.
    """

    metric: str
    columns: tuple[str, str]
    mean_first: float
    mean_second: float
    difference: float
    relative: float | None
    ci_low: float | None = None
    ci_high: float | None = None
    p_adjusted: float | None = None
    first_unequal: int | None
    first_beyond: int | None = None
    difference_beyond: float | None = None
    band_beyond: float | None = None


class RunComparison(FrozenModel):
    """Output of `aqnpipe compare-runs --json`. `paired`: both sides have the same seeds, at least two."""

    first: str
    second: str
    runs: tuple[int, int]
    paired: bool
    steps: tuple[int, int]
    num_steps: int
    only_one_side: int
    alpha: float
    metrics: tuple[MetricDifference, ...]

    @property
    def has_band(self) -> bool:
        """Return whether the scatter between seeds is known."""
        return any(row.p_adjusted is not None for row in self.metrics)

    @property
    def differing(self) -> tuple[MetricDifference, ...]:
        """Return the metrics that differ by more than seeds explain."""
        return tuple(row for row in self.metrics if row.p_adjusted is not None and row.p_adjusted < self.alpha)


def read_runs(source: Path) -> dict[str, pl.DataFrame]:
    """Return the metrics of every run of `source` by name, each with a column `step`.

    source: a run of a study, the folder of an arm (a folder per seed), a file of metrics, or a folder of such files:
    the metrics.parquet of a run, a table (.parquet, .csv), JSON Lines, or trainer_state.json of transformers' Trainer.
    Raises DataError for a file that is none of these.
    """
    if source.is_file():
        return {"run": _read(source)}
    if not source.is_dir():
        raise DataError(f"{source}: no such file or folder")
    if (source / "metrics.parquet").is_file():
        return {"run": _read(source / "metrics.parquet")}
    runs = {path.parent.name: path for path in sorted(source.glob("seed*/metrics.parquet"))}
    runs = runs or {path.stem: path for path in sorted(source.iterdir()) if path.suffix in _SUFFIXES and path.is_file()}
    if not runs:
        raise DataError(
            f"{source}: holds no metrics, expected metrics.parquet, folders seed*/ with one, or files of metrics "
            f"({', '.join(_SUFFIXES)})"
        )
    return {name: _read(path) for name, path in runs.items()}


def _read(path: Path) -> pl.DataFrame:
    try:
        match path.suffix:
            case ".parquet":
                table = pl.read_parquet(path)
            case ".csv":
                table = pl.read_csv(path, infer_schema_length=None)
            case ".jsonl":
                table = _of_rows(json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line)
            case ".json":
                content = json.loads(path.read_text(encoding="utf-8"))
                table = _of_rows(content["log_history"] if isinstance(content, dict) else content)
            case _:
                raise DataError(f"{path}: found {path.suffix or 'no ending'}, expected {', '.join(_SUFFIXES)}")
    except (pl.exceptions.PolarsError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: no table of metrics, expected a row per step") from error
    step = next((name for name in _STEPS if name in table.columns), None)
    if step is None:
        raise DataError(f"{path}: found no column of steps, expected one of {', '.join(_STEPS)}")
    try:
        table = table.rename({step: "step"}).drop_nulls("step").with_columns(pl.col("step").cast(pl.Int64))
    except pl.exceptions.PolarsError as error:
        raise DataError(f"{path}: column {step} has other values than whole numbers") from error
    if not len(table):
        raise DataError(f"{path}: found no steps")
    return table


def _of_rows(rows: Iterable[Mapping[str, Any]]) -> pl.DataFrame:
    """Return a table of the numbers of all rows; logs have rows of several kinds for one step, with other columns."""
    numbers = [
        {name: float(value) for name, value in row.items() if isinstance(value, int | float)}
        for row in rows
        if any(name in row for name in _STEPS)
    ]
    names = dict.fromkeys(name for row in numbers for name in row)
    return pl.DataFrame(numbers, schema=dict.fromkeys(names, pl.Float64))


def compare_runs(
    first: Mapping[str, pl.DataFrame],
    second: Mapping[str, pl.DataFrame],
    names: tuple[str, str],
    metrics: Sequence[str] = (),
    alpha: float = 0.05,
) -> RunComparison:
    """Compare two groups of runs; DataError if they have no step or no metric in common.

    metrics: columns, or keys of `METRICS`; none: those of `METRICS` that both sides have.
    """
    is_paired = len(first) > 1 and set(first) == set(second)
    groups = [[group[key] for key in sorted(group)] for group in (first, second)]
    found = [(name, *_columns(name, groups, names)) for name in metrics or METRICS]
    lacking = [
        (side, name) for name, *columns in found for side, one in zip(names, columns, strict=True) if one is None
    ]
    if metrics and lacking:
        raise DataError(f"{lacking[0][0]}: has no metric {lacking[0][1]}")
    present = [(name, one, other) for name, one, other in found if one is not None and other is not None]
    if not present:
        raise DataError(f"{names[0]} and {names[1]}: no metric in common, expected one of {', '.join(METRICS)}")
    rows, steps = [], set[int]()
    for name, *columns in present:
        shared, curves = _curves(groups, (columns[0], columns[1]))
        if not shared:
            raise DataError(f"{names[0]} and {names[1]}: no step in common with a value of {name}")
        steps.update(shared)
        row = _row(name, curves, shared, (alpha, len(present)), is_paired=is_paired)
        rows.append(MetricDifference(metric=name, columns=(columns[0], columns[1]), **row))
    every = [set().union(*(run["step"].to_list() for run in group)) for group in groups]
    return RunComparison(
        first=names[0],
        second=names[1],
        runs=(len(first), len(second)),
        paired=is_paired,
        steps=(min(steps), max(steps)),
        num_steps=len(steps),
        only_one_side=len(every[0] ^ every[1]),
        alpha=alpha,
        metrics=tuple(rows),
    )


def _columns(
    name: str, groups: Sequence[Sequence[pl.DataFrame]], names: tuple[str, str]
) -> tuple[str | None, str | None]:
    """Return the column of a metric on each side; None where a side has none."""
    aliases = METRICS.get(name, (name,))
    sides = [next((alias for alias in aliases if all(alias in run.columns for run in group)), None) for group in groups]
    for side, group, source in zip(sides, groups, names, strict=True):
        if side is not None and not all(run[side].dtype.is_numeric() or run[side].is_null().all() for run in group):
            raise DataError(f"{source}: column {side} has other values than numbers")
    return sides[0], sides[1]


def _curves(
    groups: Sequence[Sequence[pl.DataFrame]], columns: tuple[str, str]
) -> tuple[list[int], tuple[FloatArray, FloatArray]]:
    """Return the steps at which every run of both sides has a value, and the values [run, step] of each side.

    The last value of a step counts: a run that was resumed may have logged a step twice.
    """
    runs = [
        run.select("step", pl.col(column).cast(pl.Float64).alias("value")).drop_nulls().group_by("step").last()
        for group, column in zip(groups, columns, strict=True)
        for run in group
    ]
    aligned = pl.align_frames(*runs, on="step", how="inner")
    values, first = np.stack([run["value"].to_numpy() for run in aligned]), len(groups[0])
    return aligned[0]["step"].to_list(), (values[:first], values[first:])


def _row(
    name: str,
    curves: tuple[FloatArray, FloatArray],
    steps: Sequence[int],
    level: tuple[float, int],
    *,
    is_paired: bool,
) -> dict[str, Any]:
    """Return the fields of the difference of a metric; `level`: alpha, and the number of metrics that share it."""
    (alpha, num_metrics), (first, second), every_step = level, curves, np.array(steps)
    is_finite = [np.isfinite(values).all(0) for values in curves]
    finite = is_finite[0] & is_finite[1]
    if not finite.any():
        raise DataError(f"{name}: has no finite numbers at the steps that both sides have")
    ours, theirs = first[:, finite], second[:, finite]
    difference, size = float(theirs.mean()) - float(ours.mean()), float(np.abs(ours).mean())
    row: dict[str, Any] = {
        "mean_first": float(ours.mean()),
        "mean_second": float(theirs.mean()),
        "difference": difference,
        "relative": difference / size if size > 0 else None,
        "first_unequal": None,
    }
    if is_paired or len(first) == len(second) == 1:
        same = (first == second) | (np.isnan(first) & np.isnan(second))
        row["first_unequal"] = _first(every_step, ~same.all(0))
    found = compare_curves(ours, theirs, alpha / num_metrics, paired=is_paired)
    if found is not None:
        index = found.first_beyond
        row |= {"ci_low": found.ci_low, "ci_high": found.ci_high, "p_adjusted": min(1.0, num_metrics * found.p_value)}
        if index is not None:
            row |= {"first_beyond": int(every_step[finite][index]), "difference_beyond": float(found.at_step[index])}
            row |= {"band_beyond": float(found.band[index])}
    # A number on one side and none on the other differ whatever the seeds.
    lost = _first(every_step, is_finite[0] != is_finite[1])
    if lost is not None:
        row["p_adjusted"] = 0.0
        if lost < row.get("first_beyond", math.inf):
            row |= {"first_beyond": lost, "difference_beyond": None, "band_beyond": None}
    return row


def _first(steps: npt.NDArray[np.int64], is_found: npt.NDArray[np.bool_]) -> int | None:
    return int(steps[is_found][0]) if is_found.any() else None
