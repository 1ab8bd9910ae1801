"""The figures of the report: sets of small panels that wrap on narrow screens; accuracy by arm, and cost."""

import math
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
import polars as pl
from markupsafe import Markup

from aqnpipe.report.svg import INK, described, render_svg, series_colour, series_dash, small_dot
from aqnpipe.report.words import Words

PANEL_WIDTH, PANEL_HEIGHT = 270, 170
ROW_HEIGHT = 34
MANY_ARMS = 40
"""With more arms than this a picture has lower rows, and values at the means alone: a page has to stay usable."""
MANY_RUNS = 1000
"""With more runs than this in one picture, too, dots have no values of their own."""
MAX_ARMS_IN_PICTURES = 256
"""Pictures show the first arms up to this number; the page says so, and the tables beside it have all."""
_LOW_ROW_HEIGHT = 13
_ARM_LABEL_WIDTH = 110


@dataclass(frozen=True)
class Panel:
    """One picture with its title; `chart` is what it was drawn from, and a `wide` one takes the whole width."""

    title: str
    svg: Markup
    chart: alt.TopLevelMixin
    wide: bool = False


@dataclass(frozen=True)
class SeriesKey:
    """The name of a series and its position in the palette; 0 is the neutral colour."""

    name: str
    index: int


def panel(title: str, chart: alt.TopLevelMixin, label: str, *, wide: bool = False) -> Panel:
    """Return `chart` as a panel of the page; `label` names it for readers who cannot see it."""
    return Panel(title, render_svg(chart, label), chart, wide)


def accuracy_panels(accuracy: pl.DataFrame, keys: Sequence[SeriesKey], words: Words) -> list[Panel]:
    """Return accuracy by arm, a panel per noise level: every seed with its interval, and the mean as a tick."""
    rows = in_percent(accuracy)
    bounds = _bounds(rows)
    panels = []
    for level in sorted(rows["noise_level"].unique().to_list()):
        title = words("noise.at", level=level) if level else words("noise.without")
        chart = _dot_rows(rows.filter(pl.col("noise_level") == level), keys, bounds, words)
        panels.append(panel(title, chart, words("alt.accuracy", where=title)))
    return panels


def published_panels(rows: pl.DataFrame, keys: Sequence[SeriesKey], words: Words) -> list[Panel]:
    """Return published and measured accuracies by arm in two panels on one scale; `rows`: `published.side_by_side`."""
    bounds = _bounds(rows)
    panels = []
    for kind in ("published", "measured"):
        title = words(f"published.panel.{kind}")
        chart = _dot_rows(rows.filter(pl.col("kind") == kind), keys, bounds, words)
        panels.append(panel(title, chart, words("alt.accuracy", where=title)))
    return panels


def cost_panels(rows: pl.DataFrame, keys: Sequence[SeriesKey], words: Words) -> list[Panel]:
    """Return the wall time of every training run by arm, from zero; `rows` as `costs_view.cost_rows`."""
    names = _present(keys, rows)
    about = pl.Series(
        [
            small_dot(arm)
            if is_crowded(len(names), len(rows))
            else described(arm, words("mark.minutes", arm=arm, seed=seed, minutes=f"{minutes:.2f}"))
            for arm, seed, minutes in rows.select("arm", "seed", "minutes").iter_rows()
        ],
        dtype=pl.String,
    )
    chart = (
        alt.Chart(rows.with_columns(about=about), width=PANEL_WIDTH - 40, height=row_height(names) * len(names))
        .mark_point(filled=True, size=36, opacity=1)
        .encode(
            alt.X("minutes:Q").title(words("axis.minutes")).scale(zero=True),
            _arm_axis(names),
            yOffset=alt.YOffset("seed:N").scale(paddingOuter=0.5),
            color=colour_scale("arm", keys),
            description="about:N",
        )
    )
    return [panel(words("costs.panel"), chart, words("alt.costs"))]


def _dot_rows(rows: pl.DataFrame, keys: Sequence[SeriesKey], bounds: list[float], words: Words) -> alt.TopLevelMixin:
    names = _present(keys, rows)
    many = is_crowded(len(names), len(rows))
    y = _arm_axis(names)
    offset = alt.YOffset("seed:N").scale(paddingOuter=0.5)
    title = words("axis.accuracy")
    x = alt.X("accuracy:Q").title(title).scale(domain=bounds, nice=True, zero=False)
    colour = colour_scale("arm", keys)
    about = [small_dot(row["arm"]) if many else _about_seed(row, words) for row in rows.iter_rows(named=True)]
    told = rows.with_columns(about=pl.Series(about, dtype=pl.String))
    base = alt.Chart(told, width=PANEL_WIDTH - 40, height=row_height(names) * len(names))
    means = mean_and_range(rows, "arm")
    means = means.with_columns(
        about=pl.Series([about_mean(row, row["arm"], words) for row in means.iter_rows(named=True)], dtype=pl.String)
    )
    intervals = base.mark_rule(strokeWidth=1.4, opacity=0.7).encode(
        alt.X("ci_low:Q").title(title).scale(domain=bounds, nice=True, zero=False),
        alt.X2("ci_high:Q"),
        y,
        yOffset=offset,
        color=colour,
        description="about:N",
    )
    dots = base.mark_point(filled=True, size=12 if many else 36, opacity=1)
    layers = [
        dots.encode(x, y, yOffset=offset, color=colour, description="about:N"),
        alt.Chart(means).mark_tick(thickness=2, size=9 if many else 26, color=INK).encode(x, y, description="about:N"),
    ]
    return alt.layer(*([] if many else [intervals]), *layers)


def is_crowded(num_arms: int, num_runs: int) -> bool:
    """Whether a picture of so many arms and runs shows values at the means alone."""
    return num_arms > MANY_ARMS or num_runs > MANY_RUNS


def _about_seed(row: Mapping[str, Any], words: Words) -> str:
    who = row["arm"] if row["seed"] < 0 else words("run.name", arm=row["arm"], seed=row["seed"])
    return about_seed(row, who, words)


def about_seed(row: Mapping[str, Any], who: str, words: Words) -> str:
    """Return the description of the accuracy of one seed with its interval, in percent."""
    interval = words("span", low=f"{row['ci_low']:.1f}", high=f"{row['ci_high']:.1f}")
    accuracy = f"{row['accuracy']:.1f}"
    return described(row["arm"], words("mark.accuracy", who=who, accuracy=accuracy, interval=interval))


def mean_and_range(rows: pl.DataFrame, *by: str) -> pl.DataFrame:
    """Return the mean accuracy over the seeds, with the lowest and the highest; columns `by`, accuracy, low, high."""
    accuracy = pl.col("accuracy")
    return rows.group_by(*by).agg(accuracy.mean(), accuracy.min().alias("low"), accuracy.max().alias("high")).sort(*by)


def about_mean(row: Mapping[str, Any], name: str, words: Words) -> str:
    """Return the description of a row of `mean_and_range`."""
    interval = words("span", low=f"{row['low']:.1f}", high=f"{row['high']:.1f}")
    accuracy = f"{row['accuracy']:.1f}"
    return described(row["arm"], words("mark.mean_accuracy", arm=name, accuracy=accuracy, interval=interval))


def _present(keys: Sequence[SeriesKey], rows: pl.DataFrame) -> list[str]:
    arms = set(rows["arm"].unique())
    return [key.name for key in keys if key.name in arms]


def row_height(names: Sequence[str]) -> int:
    """Return the height of the row of an arm in pixels."""
    return _LOW_ROW_HEIGHT if len(names) > MANY_ARMS else ROW_HEIGHT


def _arm_axis(names: Sequence[str]) -> alt.Y:
    size = 9 if len(names) > MANY_ARMS else 11
    return (
        alt.Y("arm:N")
        .sort(list(names))
        .title(None)
        .axis(
            labelColor=INK,
            ticks=False,
            domain=False,
            labelLimit=_ARM_LABEL_WIDTH,
            labelFontSize=size,
            minExtent=room_for_labels(names, size, _ARM_LABEL_WIDTH),
        )
    )


def room_for_labels(labels: Iterable[str], font_size: float, limit: float = math.inf) -> float:
    """Return the width for labels in pixels, where they are cut off at a measured width of `limit`.

    A page shows labels in its own font, which may be wider than the one that they were measured with; what is then
    beyond the edge of a picture would be lost. The width is that of DejaVu Sans: Latin letters 0.6 of the font's size.
    """
    ems = (sum(1.0 if unicodedata.east_asian_width(letter) in "WF" else 0.6 for letter in text) for text in labels)
    return min(font_size * max(ems, default=0.0), 1.25 * limit)


def base_chart(table: pl.DataFrame) -> alt.Chart:
    """Return an empty chart of the usual size."""
    return alt.Chart(table, width=PANEL_WIDTH, height=PANEL_HEIGHT)


def colour_scale(field: str, keys: Sequence[SeriesKey]) -> alt.Color:
    """Return the colour of `field` by the positions of `keys` in the palette."""
    scale = alt.Scale(domain=[key.name for key in keys], range=[series_colour(key.index) for key in keys])
    return alt.Color(f"{field}:N", legend=None).scale(scale)


def dash_scale(field: str, keys: Sequence[SeriesKey]) -> alt.StrokeDash:
    """Return the dash pattern of `field`, so that colour is never the only difference."""
    scale = alt.Scale(domain=[key.name for key in keys], range=[series_dash(key.index) for key in keys])
    return alt.StrokeDash(f"{field}:N", legend=None).scale(scale)


def _bounds(rows: pl.DataFrame) -> list[float]:
    return [float(rows["ci_low"].min()), float(rows["ci_high"].max())]  # type: ignore[arg-type]


def in_percent(accuracy: pl.DataFrame) -> pl.DataFrame:
    """Return the table with accuracy and its interval in percent."""
    return accuracy.with_columns(pl.col("accuracy", "ci_low", "ci_high") * 100)
