"""Tables of the report with cells of plain text; the template only lays them out."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import polars as pl

from aqnpipe.config.analysis import PRETRAINED
from aqnpipe.config.study import Study
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
    legend: Sequence[object] = field(default=())


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


def table_of(
    name: str,
    caption: str,
    rows: pl.DataFrame | Iterable[Mapping[str, Any]],
    columns: str,
    words: Words,
    *,
    num_text_columns: int = 1,
    note: str = "",
    max_rows: int = MAX_ROWS_ON_PAGE,
) -> Table:
    """Return a table of `rows` with the given columns.

    A column is `key=field:form`: its header in the catalogue, the field of a row, and how its values are shown, see
    `_cell`. Without a field it is the key, without a form the text of the value. The fields alert, link and anchor
    of a row, if there are any, are those of `Row`.
    """
    parts = []
    for column in columns.split():
        named, _, form = column.partition(":")
        key, _, name_of_field = named.partition("=")
        parts.append((key, name_of_field or key, form))
    shown = tuple(
        Row(
            tuple(_cell(row, name_of_field, form, words) for _, name_of_field, form in parts),
            bool(row.get("alert")),
            row.get("link") or "",
            row.get("anchor") or "",
        )
        for row in (rows.iter_rows(named=True) if isinstance(rows, pl.DataFrame) else rows)
    )
    headers = tuple(words(f"column.{key}") for key, _, _ in parts)
    return Table(name, caption, headers, shown, num_text_columns, note, max_rows)


def _cell(row: Mapping[str, Any], field: str, form: str, words: Words) -> str:
    """Return a value as text, in a form of `numbers.formatted`; a missing value is a dash.

    Besides: `level`, which may have a name; the beginning of a key of the catalogue, such as `verdict.`; and `spans_`
    with another form, for the interval of the fields `{field}_low` and `{field}_high`.
    """
    if form.startswith("spans_"):
        end = form.removeprefix("spans_")
        return words.span(row[f"{field}_low"], row[f"{field}_high"], lambda value: numbers.formatted(value, end))
    value = row[field]
    if value is None or value == "":
        return numbers.MISSING
    if form == "level":
        return words.level(value)
    key = f"{form}{value}"
    return words(key) if form.endswith(".") else numbers.formatted(value, form) if form else str(value)


def accuracy_table(accuracy: pl.DataFrame, scorer: str, words: Words, run_link: RunLink) -> Table:
    """Return the accuracy of every checkpoint at every level; `scorer` is the study's, named below the table.

    The columns by scorers of numbers are left out where the study's is none of them: it grades answers of another kind.
    """
    by_number = "strict=accuracy_strict:points last_number=accuracy_last_number:points"
    return table_of(
        "accuracy",
        words("accuracy.table"),
        (row | {"link": run_link(row["model"], row["arm"], row["seed"])} for row in accuracy.iter_rows(named=True)),
        "arm seed step noise=noise_level:level accuracy:points interval=ci:spans_points "
        f"{by_number if scorer in NUMBER_SCORERS else ''} truncated=truncated_fraction:points "
        "no_answer=parse_failure_fraction:points questions=num_questions:count noise_seeds=num_noise_seeds "
        "samples=num_samples",
        words,
        note=words("accuracy.graded_by", scorer=scorer),
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
    columns = (
        "arm noise=noise_level:level mean:points lowest:points highest:points truncated=truncated_fraction:points "
        "no_answer=parse_failure_fraction:points seeds=num_seeds"
    )
    return table_of("robustness-means", words("robustness.means"), mean_accuracy(last), columns, words)


def robustness_table(robustness: pl.DataFrame, level: float, words: Words) -> Table:
    """Return the slope over noise, by arm."""
    columns = (
        "arm slope:signed_points interval=slope_ci:spans_signed_points slope_p:p_value "
        "levels=num_levels seeds=num_seeds problem"
    )
    note = words("robustness.note", level=level)
    return table_of("robustness", words("robustness.table"), robustness, columns, words, note=note)


def difference_table(differences: pl.DataFrame, level: float, words: Words) -> Table:
    """Return every arm minus the reference arm at every level, with intervals at `level`."""
    columns = (
        "arm reference noise=noise_level:level difference:signed_points interval=ci:spans_signed_points "
        "seeds=num_seeds questions=num_questions:count problem"
    )
    caption, note = words("robustness.difference_table"), words("robustness.difference_note", level=level)
    return table_of("differences", caption, differences, columns, words, num_text_columns=2, note=note)


def comparison_table(comparisons: pl.DataFrame, words: Words) -> Table:
    """Return all comparisons with the numbers behind their verdicts."""
    rows = (
        row | {"test": _test(row, words), "alert": row["verdict"] == "invalid"}
        for row in comparisons.iter_rows(named=True)
    )
    columns = (
        "comparison=comparison_id verdict:verdict. test treatment=treatment_accuracy:points "
        "control=control_accuracy:points difference:signed_points interval=ci:spans_signed_points p=p_value:p_value "
        "p_holm:p_value detectable=minimum_detectable_difference:points seeds=num_seeds questions=num_questions:count"
    )
    return table_of("comparisons", words("comparisons.table"), rows, columns, words, num_text_columns=3)


def comparison_checks(comparisons: pl.DataFrame, words: Words) -> Table:
    """Return other analyses of the comparisons and the sizes needed; a note below the table lists the methods."""
    methods = list(dict.fromkeys(comparisons["method"]))
    rows = (row | {"method": methods.index(row["method"]) + 1} for row in comparisons.iter_rows(named=True))
    columns = (
        "comparison=comparison_id family p_looks:p_value p_equivalence:p_value p_equivalence_holm:p_value "
        "seeds_needed:count questions_needed:count interval_level:level method"
    )
    texts = [f"{number}: {analysis_text(method, words)}" for number, method in enumerate(methods, start=1)]
    note = words("comparisons.methods", methods=words("list.separator").join(texts)) if texts else ""
    return table_of("checks", words("comparisons.checks"), rows, columns, words, num_text_columns=2, note=note)


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
    rows = (
        row
        | {
            "machine": diagnosis.machine,
            "sigma": diagnosis.sigmas.aqn.layer_sigmas.get(row["layer"]),
            "role": row["role"].replace("_", " "),
            "why": diagnosis.sigmas.reasons.get(row["layer"]),
        }
        for diagnosis in diagnoses
        for row in diagnosis.layers.iter_rows(named=True)
    )
    columns = (
        "machine layer instability:metric jump_z=instability_jump_z:metric gain:metric gain_z:metric kurtosis:metric "
        "drop_z=log_kurtosis_drop_z:metric zeros=zero_share:metric at_maximum=values_at_maximum:metric pile_up:metric "
        "sensitivity:metric sigma:scale role why"
    )
    return table_of("layers", words("diagnosis.table"), rows, columns, words)


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


def arm_table(study: Study, last: pl.DataFrame, words: Words) -> ArmTable:
    """Return every arm of the study, the pretrained models first; `last`: the accuracies of the last steps."""
    means = mean_accuracy(last)
    levels = sorted(means["noise_level"].unique().to_list())
    found = {(row["model"], row["arm"], row["noise_level"]): row for row in means.iter_rows(named=True)}
    models = list(dict.fromkeys([arm.model for arm in study.arms.values()] + means["model"].to_list()))
    present = {key[:2] for key in found}
    pairs = [
        (model, name)
        for model in models
        for name in (PRETRAINED, *study.config.arms)
        if (model, name) in present or (name in study.arms and study.arms[name].model == model)
    ]
    first_model = {name: model for model, name in reversed(pairs)}
    rows = []
    for model, name in pairs:
        is_arm = name in study.arms
        text = words.own(study.arms[name].description, study.arms[name].description_zh) if is_arm else None
        rows.append(
            {
                "name": name,
                "model": model,
                "anchor": "" if model != first_model[name] else f"arm-{name}",
                "description": text.text if text else words("arm.pretrained"),
                "untranslated": text is not None and text.untranslated,
                "control_of": (study.arms[name].aa_control_of or "") if is_arm else "",
                "cells": tuple(_accuracy_cell(found.get((model, name, level)), words) for level in levels),
            }
        )
    if study.has_training:
        title, caption, head = words("arms.table"), words("summary.accuracy"), words("column.arm")
    else:  # Given checkpoints have neither steps nor seeds.
        title, caption, head = words("arms.checkpoints"), words("summary.checkpoints"), words("column.checkpoint")
    return ArmTable(title, caption, head, tuple(words.level(level) for level in levels), tuple(rows), len(models) > 1)


def _accuracy_cell(row: Mapping[str, float] | None, words: Words) -> str:
    """Return a mean with its range: 70.5 (69.8 to 71.2)."""
    if row is None:
        return numbers.MISSING
    mean = numbers.percent(row["mean"])
    if row["num_seeds"] == 1:
        return mean
    return f"{mean} ({words.span(row['lowest'], row['highest'], numbers.percent)})"
