"""Accuracy over the noise at evaluation: differences to one arm with their intervals, and the accuracies themselves."""

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import polars as pl

from aqnpipe.report import charts, numbers
from aqnpipe.report.charts import Panel, SeriesKey
from aqnpipe.report.svg import INK, described, small_dot
from aqnpipe.report.words import Words

_WIDE = 620
_MARKS_IN_A_SMALL_PANEL = 12
_LETTERS_IN_A_SMALL_PANEL = 36


def difference_panel(differences: pl.DataFrame, keys: Sequence[SeriesKey], words: Words) -> Panel:
    """Return every arm minus the reference arm at every level, as a dot with its interval; `differences` in fractions.

    Columns as in `artifacts.comparisons.DifferenceTable`, without rows that have no difference.
    """
    rows = differences.with_columns(pl.col("difference", "ci_low", "ci_high") * 100)
    rows = rows.with_columns(
        level=pl.Series([words.level(level) for level in rows["noise_level"]], dtype=pl.String),
        plain=pl.Series([described(arm, "") for arm in rows["arm"]], dtype=pl.String),
        about=pl.Series([_about_difference(row, words) for row in rows.iter_rows(named=True)], dtype=pl.String),
    )
    levels = [words.level(level) for level in sorted(rows["noise_level"].unique().to_list())]
    wide = _needs_width(len(rows), levels)
    base = alt.Chart(rows, width=_WIDE if wide else charts.PANEL_WIDTH, height=charts.PANEL_HEIGHT + 30 * wide)
    x, offset = _level_axis(levels, words), _arm_offset(keys)
    title = words("axis.difference")
    colour = charts.colour_scale("arm", keys)
    common = {"xOffset": offset, "color": colour, "description": "about:N"}
    zero = alt.Chart(pl.DataFrame({"zero": [0.0]})).mark_rule(color=INK, strokeWidth=1)
    chart = alt.layer(
        zero.encode(alt.Y("zero:Q").title(title)),
        base.mark_rule(strokeWidth=2, opacity=0.8).encode(
            x, alt.Y("ci_low:Q").title(title), alt.Y2("ci_high:Q"), **common | {"description": "plain:N"}
        ),
        base.mark_point(filled=True, size=44, opacity=1).encode(x, alt.Y("difference:Q").title(title), **common),
    )
    reference = rows["reference"][0]
    return charts.panel(
        words("robustness.differences", reference=reference),
        chart,
        words("alt.differences", reference=reference),
        wide=wide,
    )


def accuracy_over_noise(
    accuracy: pl.DataFrame, keys: Sequence[SeriesKey], words: Words, *, many: bool = False
) -> Panel:
    """Return the mean accuracy of every arm over the levels as a line, and its seeds as dots.

    many: the page has so many arms that the dots of seeds have no values of their own.
    """
    rows = charts.in_percent(accuracy).with_columns(pl.col("noise_level") * 100)
    means = charts.mean_and_range(rows, "arm", "noise_level")
    means = means.with_columns(
        plain=pl.Series([described(arm, "") for arm in means["arm"]], dtype=pl.String),
        about=pl.Series([_about_mean(row, words) for row in means.iter_rows(named=True)], dtype=pl.String),
    )
    levels = sorted(rows["noise_level"].unique().to_list())
    x = alt.X("noise_level:Q").title(words("axis.noise_scale")).axis(grid=False, values=levels)
    y = alt.Y("accuracy:Q").title(words("axis.accuracy")).scale(nice=True, zero=False)
    colour = charts.colour_scale("arm", keys)
    lines = charts.base_chart(means).mark_line(strokeWidth=2)
    points = charts.base_chart(means).mark_point(filled=True, size=30, opacity=1)
    seeds = charts.base_chart(rows.with_columns(about=_about_seeds(rows, words, many)))
    chart = alt.layer(
        seeds.mark_point(size=18, opacity=0.55, filled=many).encode(x, y, color=colour, description="about:N"),
        lines.encode(x, y, color=colour, strokeDash=charts.dash_scale("arm", keys), description="plain:N"),
        points.encode(x, y, color=colour, description="about:N"),
    )
    return charts.panel(words("robustness.accuracy"), chart, words("alt.robustness"))


def accuracy_by_name(accuracy: pl.DataFrame, keys: Sequence[SeriesKey], words: Words, *, many: bool = False) -> Panel:
    """Return the accuracy of every arm under each named noise, beside that without noise, as dots over categories.

    Named noises have no scale in common, so no line joins them. Columns and `many` as in `accuracy_over_noise`.
    """
    rows = charts.in_percent(accuracy).with_columns(
        level=pl.Series([words.level(level) for level in accuracy["noise_level"]], dtype=pl.String)
    )
    # `_about_mean` expects levels in percent.
    scaled = rows.with_columns(pl.col("noise_level") * 100)
    means = charts.mean_and_range(scaled, "arm", "noise_level", "level")
    means = means.with_columns(
        about=pl.Series([_about_mean(row, words) for row in means.iter_rows(named=True)], dtype=pl.String)
    )
    levels = [words.level(level) for level in sorted(rows["noise_level"].unique().to_list())]
    wide = _needs_width(len(means), levels)
    width, height = _WIDE if wide else charts.PANEL_WIDTH, charts.PANEL_HEIGHT + 30 * wide
    x = _level_axis(levels, words)
    y = alt.Y("accuracy:Q").title(words("axis.accuracy")).scale(nice=True, zero=False)
    common = {"xOffset": _arm_offset(keys), "color": charts.colour_scale("arm", keys), "description": "about:N"}
    seeds = alt.Chart(scaled.with_columns(about=_about_seeds(scaled, words, many)), width=width, height=height)
    chart = alt.layer(
        seeds.mark_point(size=18, opacity=0.55, filled=many).encode(x, y, **common),
        alt.Chart(means, width=width, height=height).mark_point(filled=True, size=44, opacity=1).encode(x, y, **common),
    )
    return charts.panel(words("robustness.named"), chart, words("alt.named"), wide=wide)


def _needs_width(num_marks: int, levels: Sequence[str]) -> bool:
    return num_marks > _MARKS_IN_A_SMALL_PANEL or sum(map(len, levels)) > _LETTERS_IN_A_SMALL_PANEL


def _level_axis(levels: Sequence[str], words: Words) -> alt.X:
    return alt.X("level:N").sort(list(levels)).title(words("axis.noise")).axis(grid=False, labelAngle=0, ticks=False)


def _arm_offset(keys: Sequence[SeriesKey]) -> alt.XOffset:
    return alt.XOffset("arm:N").sort([key.name for key in keys]).scale(paddingOuter=0.6)


def _about_difference(row: Mapping[str, Any], words: Words) -> str:
    return described(
        row["arm"],
        words(
            "mark.difference",
            arm=row["arm"],
            reference=row["reference"],
            level=row["noise_level"],
            difference=row["difference"] / 100,
            interval=words.span(row["ci_low"] / 100, row["ci_high"] / 100, numbers.points),
        ),
    )


def _about_mean(row: Mapping[str, Any], words: Words) -> str:
    return charts.about_mean(row, f"{row['arm']}, {words.level(row['noise_level'] / 100)}", words)


def _about_seeds(rows: pl.DataFrame, words: Words, many: bool) -> pl.Series:
    if many:
        return pl.Series([small_dot(arm) for arm in rows["arm"]], dtype=pl.String)
    texts = []
    for row in rows.iter_rows(named=True):
        who = f"{words('run.name', arm=row['arm'], seed=row['seed'])}, {words.level(row['noise_level'] / 100)}"
        texts.append(charts.about_seed(row, who, words))
    return pl.Series(texts, dtype=pl.String)
