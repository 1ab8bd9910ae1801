"""Tables of the report with cells of plain text; the template only lays them out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from aqnpipe.data.scoring import NUMBER_SCORERS
from aqnpipe.report import numbers
from aqnpipe.report.inputs import Diagnosis, Run
from aqnpipe.report.words import Words
from aqnpipe.statistics.seed_blocks import GUARD_LEVEL, LARGEST_SEED_SD, PRIOR_FREEDOM, PRIOR_FREEDOM_OF_TWO

MAX_CURVE_CELLS = 4000
MAX_CURVE_ROWS = 60
MAX_CURVE_COLUMNS = 120
"""Tables of the curves of more runs than this are in training.csv alone."""
MAX_ROWS_ON_PAGE = 600
"""Longer tables are cut on the page, which has to stay usable with 1,250 runs."""


@dataclass(frozen=True)
class Row:
    """Cells of one row. `alert` marks a problem, `link` is the target of the first cell, `anchor` names the row."""

    cells: tuple[str, ...]
    alert: bool = False
    link: str = ""
    anchor: str = ""


@dataclass(frozen=True)
class Table:
    """A table: the first `num_text_columns` columns are text, the rest numbers. Tests find a table by its `name`."""

    name: str
    caption: str
    headers: tuple[str, ...]
    rows: tuple[Row, ...]
    num_text_columns: int = 1
    note: str = ""
    max_rows: int = MAX_ROWS_ON_PAGE

    @property
    def shown(self) -> tuple[Row, ...]:
        """The rows that the page shows: the first ones, and as many problems among the others."""
        if len(self.rows) <= self.max_rows:
            return self.rows
        problems = [row for row in self.rows[self.max_rows :] if row.alert]
        return (*self.rows[: self.max_rows], *problems[:MAX_ROWS_ON_PAGE])

    @property
    def num_left_out(self) -> int:
        """The number of rows that are in the files of the results alone."""
        return len(self.rows) - len(self.shown)


@dataclass(frozen=True)
class PanelGroup:
    """Panels that share a legend."""

    panels: Sequence[object]
    legend: Sequence[object] = field(default=())


@dataclass(frozen=True)
class Figure:
    """A set of panels with a caption, the tables of its numbers, and what in it needs attention."""

    caption: str
    groups: tuple[PanelGroup, ...]
    tables: tuple[Table, ...]
    alerts: tuple[str, ...] = ()


Column = tuple[str, Callable[[Mapping[str, Any]], str]]
"""Key of the header in the catalogue, and the function from a row of the artifact to the cell."""

RunLink = Callable[[str, str, int], str]
"""(model, arm, seed) -> anchor of the run that a number comes from."""


def table_of(
    name: str,
    caption: str,
    columns: Sequence[Column],
    table: pl.DataFrame,
    words: Words,
    *,
    num_text_columns: int = 1,
    note: str = "",
    alert: Callable[[Mapping[str, Any]], bool] = lambda row: False,
    link: Callable[[Mapping[str, Any]], str] = lambda row: "",
) -> Table:
    """Return `table` with a column per entry of `columns`."""
    rows = tuple(
        Row(tuple(cell(row) for _, cell in columns), alert(row), link(row)) for row in table.iter_rows(named=True)
    )
    return Table(name, caption, tuple(words(f"column.{key}") for key, _ in columns), rows, num_text_columns, note)


def accuracy_table(accuracy: pl.DataFrame, scorer: str, words: Words, run_link: RunLink) -> Table:
    """Return the accuracy of every checkpoint at every level; `scorer` is the study's, named below the table.

    The columns by scorers of numbers are left out where the study's is none of them: it grades answers of another kind.
    """
    by_number: list[Column] = [
        ("strict", lambda row: numbers.percent(row["accuracy_strict"])),
        ("last_number", lambda row: numbers.percent(row["accuracy_last_number"])),
    ]
    columns: list[Column] = [
        ("arm", lambda row: row["arm"]),
        ("seed", lambda row: str(row["seed"])),
        ("step", lambda row: str(row["step"])),
        ("noise", lambda row: words.level(row["noise_level"])),
        ("accuracy", lambda row: numbers.percent(row["accuracy"])),
        ("interval", lambda row: words.span(row["ci_low"], row["ci_high"], numbers.percent)),
        *(by_number if scorer in NUMBER_SCORERS else []),
        ("truncated", lambda row: numbers.percent(row["truncated_fraction"])),
        ("no_answer", lambda row: numbers.percent(row["parse_failure_fraction"])),
        ("questions", lambda row: numbers.count(row["num_questions"])),
        ("noise_seeds", lambda row: str(row["num_noise_seeds"])),
        ("samples", lambda row: str(row["num_samples"])),
    ]
    return table_of(
        "accuracy",
        words("accuracy.table"),
        columns,
        accuracy,
        words,
        note=words("accuracy.graded_by", scorer=scorer),
        link=lambda row: run_link(row["model"], row["arm"], row["seed"]),
    )


def mean_accuracy(last: pl.DataFrame) -> pl.DataFrame:
    """Return mean, lowest and highest accuracy over the seeds of every arm and level, in the order of `last`.

    Further columns: the mean shares of responses that were cut off and of responses without an answer.
    """
    return last.group_by("model", "arm", "noise_level", maintain_order=True).agg(
        pl.col("accuracy").mean().alias("mean"),
        pl.col("accuracy").min().alias("lowest"),
        pl.col("accuracy").max().alias("highest"),
        pl.col("truncated_fraction").mean(),
        pl.col("parse_failure_fraction").mean(),
        pl.len().alias("num_seeds"),
    )


def robustness_means_table(last: pl.DataFrame, words: Words) -> Table:
    """Return the accuracy of every arm at every level, over its seeds."""
    columns: list[Column] = [
        ("arm", lambda row: row["arm"]),
        ("noise", lambda row: words.level(row["noise_level"])),
        ("mean", lambda row: numbers.percent(row["mean"])),
        ("lowest", lambda row: numbers.percent(row["lowest"])),
        ("highest", lambda row: numbers.percent(row["highest"])),
        ("truncated", lambda row: numbers.percent(row["truncated_fraction"])),
        ("no_answer", lambda row: numbers.percent(row["parse_failure_fraction"])),
        ("seeds", lambda row: str(row["num_seeds"])),
    ]
    return table_of("robustness-means", words("robustness.means"), columns, mean_accuracy(last), words)


def robustness_table(robustness: pl.DataFrame, level: float, words: Words) -> Table:
    """Return the slope over noise and the joint test over levels, by arm."""
    columns: list[Column] = [
        ("arm", lambda row: row["arm"]),
        ("slope", lambda row: numbers.points(row["slope"])),
        ("interval", lambda row: words.span(row["slope_ci_low"], row["slope_ci_high"], numbers.points)),
        ("slope_p", lambda row: numbers.p_value(row["slope_p"])),
        ("joint_p", lambda row: numbers.p_value(row["joint_p"])),
        ("levels", lambda row: str(row["num_levels"])),
        ("seeds", lambda row: str(row["num_seeds"])),
        ("problem", lambda row: row["problem"] or numbers.MISSING),
    ]
    return table_of(
        "robustness", words("robustness.table"), columns, robustness, words, note=words("robustness.note", level=level)
    )


def difference_table(differences: pl.DataFrame, level: float, words: Words) -> Table:
    """Return every arm minus the reference arm at every level, with intervals at `level`."""
    columns: list[Column] = [
        ("arm", lambda row: row["arm"]),
        ("reference", lambda row: row["reference"]),
        ("noise", lambda row: words.level(row["noise_level"])),
        ("difference", lambda row: numbers.points(row["difference"])),
        ("interval", lambda row: _interval(row, "ci", words)),
        ("seeds", lambda row: str(row["num_seeds"])),
        ("questions", lambda row: numbers.count(row["num_questions"])),
        ("problem", lambda row: row["problem"] or numbers.MISSING),
    ]
    caption, note = words("robustness.difference_table"), words("robustness.difference_note", level=level)
    return table_of("differences", caption, columns, differences, words, num_text_columns=2, note=note)


def comparison_table(comparisons: pl.DataFrame, words: Words) -> Table:
    """Return all comparisons with the numbers behind their verdicts."""
    columns: list[Column] = [
        ("comparison", lambda row: row["comparison_id"]),
        ("verdict", lambda row: words(f"verdict.{row['verdict']}")),
        ("test", lambda row: _test(row, words)),
        ("treatment", lambda row: numbers.percent(row["treatment_accuracy"])),
        ("control", lambda row: numbers.percent(row["control_accuracy"])),
        ("difference", lambda row: numbers.points(row["difference"])),
        ("interval", lambda row: _interval(row, "ci", words)),
        ("p", lambda row: numbers.p_value(row["p_value"])),
        ("p_holm", lambda row: numbers.p_value(row["p_holm"])),
        ("detectable", lambda row: numbers.percent(row["minimum_detectable_difference"])),
        ("seeds", lambda row: str(row["num_seeds"])),
        ("questions", lambda row: numbers.count(row["num_questions"])),
    ]
    return table_of(
        "comparisons",
        words("comparisons.table"),
        columns,
        comparisons,
        words,
        num_text_columns=3,
        alert=lambda row: row["verdict"] == "invalid",
    )


def comparison_checks(comparisons: pl.DataFrame, words: Words) -> Table:
    """Return other analyses of the comparisons and the sizes needed; a note below the table lists the methods."""
    methods = list(dict.fromkeys(comparisons["method"]))
    columns: list[Column] = [
        ("comparison", lambda row: row["comparison_id"]),
        ("family", lambda row: row["family"] or numbers.MISSING),
        ("p_looks", lambda row: numbers.p_value(row["p_looks"])),
        ("p_equivalence", lambda row: numbers.p_value(row["p_equivalence"])),
        ("p_equivalence_holm", lambda row: numbers.p_value(row["p_equivalence_holm"])),
        ("seeds_needed", lambda row: numbers.count(row["seeds_needed"])),
        ("questions_needed", lambda row: numbers.count(row["questions_needed"])),
        ("interval_level", lambda row: numbers.level(row["interval_level"])),
        ("method", lambda row: str(methods.index(row["method"]) + 1)),
    ]
    note = words("list.separator").join(
        f"{number}: {analysis_text(method, words)}" for number, method in enumerate(methods, start=1)
    )
    return table_of(
        "checks",
        words("comparisons.checks"),
        columns,
        comparisons,
        words,
        num_text_columns=2,
        note=words("comparisons.methods", methods=note) if note else "",
    )


def analysis_text(method: str, words: Words) -> str:
    """Return the text of an analysis from the keys of what was computed and the constants of the code that ran."""
    return words("list.separator").join(_part_of_analysis(key, words) for key in method.split())


def _part_of_analysis(key: str, words: Words) -> str:
    match key:
        case "moderated":
            return words("seed_variance.moderated", prior=PRIOR_FREEDOM)
        case "guarded":
            return words("seed_variance.guarded", guard=GUARD_LEVEL)
        case "larger":
            return words("seed_variance.larger", prior=PRIOR_FREEDOM_OF_TWO)
        case "arm":
            return words("seed_variance.arm", prior=PRIOR_FREEDOM, largest=LARGEST_SEED_SD)
        case "arm_of_two":
            return words("seed_variance.arm_of_two", prior=PRIOR_FREEDOM_OF_TWO, largest=LARGEST_SEED_SD)
        case "arm_alone":
            return words("seed_variance.arm_alone", largest=LARGEST_SEED_SD)
        case _:
            return words(f"analysis.{key}")


def curve_tables(runs: Sequence[Run], words: Words) -> tuple[Table, ...]:
    """Return the training metrics, one table per metric: a row per step, a column per run; none for too many runs."""
    names = ("reward_mean", "kl", "validation_accuracy", "sigma_requested", "sigma_measured")
    if len(runs) > MAX_CURVE_COLUMNS:
        return ()
    return tuple(_curve_table(runs, name, words) for name in names)


def diagnosis_table(diagnoses: Sequence[Diagnosis], words: Words) -> Table:
    """Return layer metrics and sigmas of every machine."""
    columns: list[tuple[str, str]] = [
        ("instability", "instability"),
        ("jump_z", "instability_jump_z"),
        ("gain", "gain"),
        ("gain_z", "gain_z"),
        ("kurtosis", "kurtosis"),
        ("drop_z", "log_kurtosis_drop_z"),
        ("zeros", "zero_share"),
        ("at_maximum", "values_at_maximum"),
        ("pile_up", "pile_up"),
        ("sensitivity", "sensitivity"),
    ]
    rows = tuple(
        Row(
            (
                diagnosis.machine,
                str(row["layer"]),
                *(numbers.metric(row[column]) for _, column in columns),
                numbers.scale(diagnosis.sigmas.aqn.layer_sigmas.get(row["layer"])),
                row["role"].replace("_", " "),
                diagnosis.sigmas.reasons.get(row["layer"], numbers.MISSING),
            )
        )
        for diagnosis in diagnoses
        for row in diagnosis.layers.iter_rows(named=True)
    )
    names = ("machine", "layer", *(name for name, _ in columns), "sigma", "role", "why")
    headers = tuple(words(f"column.{name}") for name in names)
    return Table("layers", words("diagnosis.table"), headers, rows)


def _curve_table(runs: Sequence[Run], column: str, words: Words) -> Table:
    steps = sorted({step for run in runs for step in run.metrics.filter(pl.col(column).is_not_null())["step"]})
    stride = curve_stride(len(steps), len(runs))
    values = [dict(run.metrics.select("step", column).iter_rows()) for run in runs]
    rows = tuple(
        Row((str(step), *(numbers.metric(value_at.get(step)) for value_at in values))) for step in steps[::stride]
    )
    headers = (
        words("column.step"),
        *(words("run.name", arm=run.arm, seed=run.seed) for run in runs),
    )
    note = words("training.stride", stride=stride) if stride > 1 else ""
    return Table(f"curve-{column}", words(f"curve.{column}"), headers, rows, num_text_columns=0, note=note)


def curve_stride(num_steps: int, num_runs: int) -> int:
    """Return the number of steps between rows of a table of curves, which keeps long tables readable."""
    max_rows = min(MAX_CURVE_ROWS, max(MAX_CURVE_CELLS // max(num_runs, 1), 5))
    return max(-(-num_steps // max_rows), 1)


def _interval(row: Mapping[str, Any], name: str, words: Words) -> str:
    return words.span(row[f"{name}_low"], row[f"{name}_high"], numbers.points)


def _test(row: Mapping[str, Any], words: Words) -> str:
    name = words(f"test.{row['test']}")
    return name if row["margin"] is None else f"{name} ({numbers.percent(row['margin'])})"
