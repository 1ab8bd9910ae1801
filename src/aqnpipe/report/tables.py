"""Tables of the report with cells of plain text; the template only lays them out."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from itertools import product
from typing import Any, Literal

import polars as pl
import yaml

from aqnpipe.config.analysis import PRETRAINED
from aqnpipe.config.study import Study
from aqnpipe.report import numbers
from aqnpipe.report.charts import SeriesKey
from aqnpipe.report.inputs import Run
from aqnpipe.report.words import Text, Words
from aqnpipe.statistics.seed_blocks import GUARD_LEVEL, LARGEST_SEED_SD, PRIOR_FREEDOM, PRIOR_FREEDOM_OF_TWO

Rows = pl.DataFrame | Iterable[object]
"""A frame, mappings, or records whose fields are the columns."""

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
    """A table: the first `num_text_columns` columns are text, the rest numbers. Tests find a table by its `name`.

    foot: rows below the others, such as means, which stay there when a page sorts the table.
    """

    name: str
    caption: str
    headers: tuple[str, ...]
    rows: tuple[Row, ...]
    num_text_columns: int = 1
    note: str = ""
    max_rows: int = MAX_ROWS_ON_PAGE
    foot: tuple[Row, ...] = ()

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
    legend: Sequence[SeriesKey] = field(default=())


@dataclass(frozen=True)
class Figure:
    """A set of panels with a caption, the tables of its numbers, and what in it needs attention."""

    caption: str
    groups: tuple[PanelGroup, ...]
    tables: tuple[Table, ...]
    alerts: tuple[str, ...] = ()
    is_open: bool = False


@dataclass(frozen=True)
class Part:
    """A part of a section of the page: a text, texts, a table, a figure, or further parts that are folded.

    `title`: of what is folded, of problems, or of a table that has no caption of its own. `stem`: the beginning of the
    names of its files in an export; by default the name of the section.
    """

    kind: Literal[
        "heading", "name", "caption", "text", "code", "items", "problems", "table", "captioned", "figure", "folded"
    ]
    content: Any
    title: str = ""
    stem: str = ""


@dataclass(frozen=True)
class Section:
    """A section of the page; its heading is in the catalogue."""

    name: str
    parts: tuple[Part, ...]

    def exported(self) -> Iterator[tuple[str, Figure | Table]]:
        """Yield every figure and table, folded ones too, with the beginning of its name.

        Tables with a title, the receipts of single runs, have captions that repeat: whoever exports them names them.
        """
        waiting = list(self.parts)
        while waiting:
            part = waiting.pop(0)
            if part.kind == "folded":
                waiting[:0] = part.content
            elif part.kind in ("figure", "table", "captioned") and not part.title:
                yield part.stem or self.name, part.content


RunLink = Callable[[str, str, int], str]
"""(model, arm, seed) -> anchor of the run that a number comes from."""


def table(
    name: str,
    rows: Rows,
    words: Words,
    *,
    of: str = "",
    without: Collection[str] = (),
    max_rows: int = MAX_ROWS_ON_PAGE,
    **values: object,
) -> Table:
    """Return the table `name` of `templates/tables.yaml`, where its columns, caption and note are.

    of: what single one it is of several such tables, the end of its name. without: keys of columns to leave out.
    values: of the placeholders of caption and note.
    """
    found = specifications()[name]
    columns = found["columns"].split()
    kept = [column for column in columns if _parts(column)[0] not in without]
    return table_of(
        f"{name}-{of}" if of else name,
        words(found["caption"], **values),
        rows,
        " ".join(kept),
        words,
        num_text_columns=sum(column in kept for column in columns[: found.get("text", 1)]),
        note=words(found["note"], **values) if "note" in found else "",
        max_rows=max_rows,
    )


@cache
def specifications() -> dict[str, dict[str, Any]]:
    """Return the columns, the keys of caption and note, and the number of columns of text of every table."""
    text = (resources.files("aqnpipe.report") / "templates" / "tables.yaml").read_text(encoding="utf-8")
    content: dict[str, dict[str, Any]] = yaml.safe_load(text)
    return content


def table_of(name: str, caption: str, rows: Rows, columns: str, words: Words, **fields: Any) -> Table:
    """Return a table of `rows` with the given columns; `fields`: further ones of `Table`.

    A column is `key=field:form`: its header in the catalogue, the field of a row, and how its values are shown, see
    `_cell`. Without a field it is the key, without a form the text of the value. The fields alert, link and anchor
    of a row, if there are any, are those of `Row`.
    """
    parts = [_parts(column) for column in columns.split()]
    mappings = (
        row if isinstance(row, Mapping) else vars(row)
        for row in (rows.iter_rows(named=True) if isinstance(rows, pl.DataFrame) else rows)
    )
    shown = tuple(
        Row(
            tuple(_cell(row, name_of_field, form, words) for _, name_of_field, form in parts),
            bool(row.get("alert")),
            row.get("link") or "",
            row.get("anchor") or "",
        )
        for row in mappings
    )
    headers = tuple(words(f"column.{key}") for key, _, _ in parts)
    return Table(name, caption, headers, shown, **fields)


def _parts(column: str) -> tuple[str, str, str]:
    """Return the key of the header, the field and the form of a column."""
    named, _, form = column.partition(":")
    key, _, name_of_field = named.partition("=")
    return key, name_of_field or key, form


def _cell(row: Mapping[str, Any], field: str, form: str, words: Words) -> str:
    """Return a value as text, in a form of `numbers.formatted`; a missing value is a dash.

    Besides: `level`, which may have a name; the beginning of a key of the catalogue, such as `verdict.`, whose end is
    the value, or yes or no; `list` and `slashes` for several values; and, with another form, `spans_` for the interval
    of the fields `{field}_low` and `{field}_high`, or `ranges_` for the value with them as its range.
    """
    kind, _, end = form.partition("_")
    if kind == "spans":
        return words.span(row[f"{field}_low"], row[f"{field}_high"], lambda value: numbers.formatted(value, end))
    value = row[field]
    if kind == "ranges":
        return ranged(value, row[f"{field}_low"], row[f"{field}_high"], end, words)
    if value in (None, "", ()):
        return numbers.MISSING
    if form.endswith("."):
        key = form + (("yes" if value else "no") if isinstance(value, bool) else value)
        return words(key)
    match form:
        case "":
            return str(value)
        case "level":
            return words.level(value)
        case "list":
            return ", ".join(map(str, value))
        case "slashes":
            return " / ".join(map(str, value))
        case _:
            return numbers.formatted(value, form)


def ranged(value: float | None, low: float | None, high: float | None, form: str, words: Words) -> str:
    """Return a value with its range: 70.5 (69.8 to 71.2); alone where it has no range, a dash where it is missing."""
    if value is None:
        return numbers.MISSING
    middle = numbers.formatted(value, form)
    if low is None or high is None:
        return middle
    return f"{middle} ({words.span(low, high, lambda end: numbers.formatted(end, form))})"


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


def comparison_tables(comparisons: pl.DataFrame, words: Words) -> tuple[Table, Table]:
    """Return all comparisons with the numbers behind their verdicts, and other analyses with the sizes needed."""
    methods = list(dict.fromkeys(comparisons["method"]))
    rows = [
        row | {"test": _test(row, words), "method": methods.index(row["method"]) + 1}
        for row in comparisons.iter_rows(named=True)
    ]
    texts = [f"{number}: {analysis_text(method, words)}" for number, method in enumerate(methods, start=1)]
    marked = (row | {"alert": row["verdict"] == "invalid"} for row in rows)
    checks = table("checks", rows, words, methods=words("list.separator").join(texts))
    return table("comparisons", marked, words), checks


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


def _test(row: Mapping[str, Any], words: Words) -> str:
    name = words(f"test.{row['test']}")
    return name if row["margin"] is None else f"{name} ({numbers.percent(row['margin'])})"


@dataclass(frozen=True)
class ArmTable:
    """Accuracy in percent, a column per level: of arms after the last step, mean over seeds (lowest to highest).

    `title` heads the page's table, `caption` that of the summary, and `head` the column of names. A row has what an arm
    is and its `cells`; its `anchor` is "" beyond the first model.
    """

    title: str
    caption: str
    head: str
    levels: tuple[str, ...]
    rows: tuple[Mapping[str, Any], ...]
    several_models: bool


def what_it_is(study: Study, arm: str, words: Words) -> Text:
    """Return the description of an arm, or that of the model before training."""
    if arm not in study.arms:
        return Text(words("arm.pretrained"), untranslated=False)
    return words.own(study.arms[arm].description, study.arms[arm].description_zh)


def arm_table(study: Study, last: pl.DataFrame, words: Words) -> ArmTable:
    """Return every arm of the study, the pretrained models first; `last`: the accuracies of the last steps."""
    means = mean_accuracy(last)
    levels = sorted(means["noise_level"].unique().to_list())
    cells: dict[tuple[str, str], dict[float, str]] = {}
    for row in means.iter_rows(named=True):
        low, high = (row["lowest"], row["highest"]) if row["num_seeds"] > 1 else (None, None)
        of_arm = cells.setdefault((row["model"], row["arm"]), {})
        of_arm[row["noise_level"]] = ranged(row["mean"], low, high, "points", words)
    models = list(dict.fromkeys([arm.model for arm in study.arms.values()] + means["model"].to_list()))
    rows, named = [], set[str]()
    for model, name in product(models, (PRETRAINED, *study.config.arms)):
        arm = study.arms.get(name)
        if (model, name) not in cells and (arm is None or arm.model != model):
            continue
        text, found = what_it_is(study, name, words), cells.get((model, name), {})
        rows.append(
            {
                "name": name,
                "model": model,
                "anchor": "" if name in named else f"arm-{name}",
                "description": text.text,
                "untranslated": text.untranslated,
                "control_of": (arm.aa_control_of or "") if arm else "",
                "cells": tuple(found.get(level, numbers.MISSING) for level in levels),
            }
        )
        named.add(name)
    if study.has_training:
        title, caption, head = words("arms.table"), words("summary.accuracy"), words("column.arm")
    else:  # Given checkpoints have neither steps nor seeds.
        title, caption, head = words("arms.checkpoints"), words("summary.checkpoints"), words("column.checkpoint")
    return ArmTable(title, caption, head, tuple(words.level(level) for level in levels), tuple(rows), len(models) > 1)
