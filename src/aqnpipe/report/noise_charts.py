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
_INTERVALS_IN_A_SMALL_PANEL = 12


def difference_panel(differences: pl.DataFrame, keys: Sequence[SeriesKey], words: Words) -> Panel:
    """Return every arm minus the reference arm at every level, as a dot with its interval; `differences` in fractions.

    Columns as in `artifacts.comparisons.DifferenceTable`, without rows that have no difference.
    """
    rows = differences.with_columns(pl.col("difference", "ci_low", "ci_high") * 100)
    rows = rows.with_columns(
        level=pl.col("noise_level").map_elements(lambda level: numbers.level(level), return_dtype=pl.String),
        plain=pl.Series([described(arm, "") for arm in rows["arm"]], dtype=pl.String),
        about=pl.Series([_about_difference(row, words) for row in rows.iter_rows(named=True)], dtype=pl.String),
    )
    levels = [numbers.level(level) for level in sorted(rows["noise_level"].unique().to_list())]
    wide = len(rows) > _INTERVALS_IN_A_SMALL_PANEL
    base = alt.Chart(rows, width=_WIDE if wide else charts.PANEL_WIDTH, height=charts.PANEL_HEIGHT + 30 * wide)
    x = alt.X("level:N").sort(levels).title(words("axis.noise")).axis(grid=False, labelAngle=0, ticks=False)
    offset = alt.XOffset("arm:N").sort([key.name for key in keys]).scale(paddingOuter=0.6)
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
    x = alt.X("noise_level:Q").title(words("axis.noise")).axis(grid=False, values=levels)
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
    return charts.about_mean(row, f"{row['arm']}, {numbers.level(row['noise_level'] / 100)}", words)


def _about_seeds(rows: pl.DataFrame, words: Words, many: bool) -> pl.Series:
    if many:
        return pl.Series([small_dot(arm) for arm in rows["arm"]], dtype=pl.String)
    texts = []
    for row in rows.iter_rows(named=True):
        who = f"{words('run.name', arm=row['arm'], seed=row['seed'])}, {numbers.level(row['noise_level'] / 100)}"
        texts.append(charts.about_seed(row, who, words))
    return pl.Series(texts, dtype=pl.String)
