"""The figures of the report: small panels that wrap on narrow screens; accuracy by arm and over the noise, and cost."""

import math
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
import polars as pl
from markupsafe import Markup

from aqnpipe.artifacts.comparisons import ClaimAtLook, SegmentBy, SegmentEffect
from aqnpipe.report.markup import INK, MUTED, described, render_svg, series_colour, series_dash, small_dot
from aqnpipe.report.words import Words, at_noise

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
    """The name of a series, its position in the palette (0 is the neutral colour), and what it is, for legends."""

    name: str
    index: int
    what: str = ""


def panel(title: str, chart: alt.TopLevelMixin, label: str, *, wide: bool = False) -> Panel:
    """Return `chart` as a panel of the page; `label` names it for readers who cannot see it."""
    return Panel(title, render_svg(chart, label), chart, wide)


def accuracy_panels(accuracy: pl.DataFrame, keys: Sequence[SeriesKey], words: Words) -> list[Panel]:
    """Return accuracy by arm, a panel per noise level: every seed with its interval, and the mean as a tick."""
    rows = in_percent(accuracy)
    levels = sorted(rows["noise_level"].unique().to_list())
    return _accuracies(rows, "noise_level", {level: at_noise(level, words) for level in levels}, keys, words)


def published_panels(rows: pl.DataFrame, keys: Sequence[SeriesKey], words: Words) -> list[Panel]:
    """Return published and measured accuracies by arm in two panels on one scale; `rows`: `published.side_by_side`."""
    titles = {kind: words(f"published.panel.{kind}") for kind in ("published", "measured")}
    return _accuracies(rows, "kind", titles, keys, words)


def _accuracies(
    rows: pl.DataFrame, by: str, titles: Mapping[Any, str], keys: Sequence[SeriesKey], words: Words
) -> list[Panel]:
    bounds = [float(rows["ci_low"].min()), float(rows["ci_high"].max())]  # type: ignore[arg-type]
    charts = {
        title: _dot_rows(rows.filter(pl.col(by) == value), keys, bounds, words) for value, title in titles.items()
    }
    return [panel(title, chart, words("alt.accuracy", where=title)) for title, chart in charts.items()]


def cost_panels(rows: pl.DataFrame, keys: Sequence[SeriesKey], words: Words) -> list[Panel]:
    """Return the wall time of every training run by arm, from zero; `rows` as `page.cost_rows`."""
    names = _present(keys, rows)
    about = told(rows, "mark.minutes", words, small=is_crowded(len(names), len(rows)))
    x = alt.X("minutes:Q").title(words("axis.minutes")).scale(zero=True)
    chart = _rows_of_arms(about, names, keys).mark_point(filled=True, size=36, opacity=1).encode(x)
    return [panel(words("costs.panel"), chart, words("alt.costs"))]


def _rows_of_arms(rows: pl.DataFrame, names: Sequence[str], keys: Sequence[SeriesKey]) -> alt.Chart:
    """Return an empty chart with a row per arm and its seeds below each other; `rows` as from `told`."""
    return alt.Chart(rows, width=PANEL_WIDTH - 40, height=row_height(names) * len(names)).encode(
        _arm_axis(names),
        yOffset=alt.YOffset("seed:N").scale(paddingOuter=0.5),
        color=colour_scale("arm", keys),
        description="about:N",
    )


def _dot_rows(rows: pl.DataFrame, keys: Sequence[SeriesKey], bounds: list[float], words: Words) -> alt.TopLevelMixin:
    names = _present(keys, rows)
    many = is_crowded(len(names), len(rows))
    title = words("axis.accuracy")
    x, low = (
        alt.X(f"{end}:Q").title(title).scale(domain=bounds, nice=True, zero=False) for end in ("accuracy", "ci_low")
    )
    seeds = told(rows, "mark.printed" if (rows["seed"] < 0).all() else "mark.accuracy", words, small=many)
    base = _rows_of_arms(seeds, names, keys)
    means = alt.Chart(told(mean_and_range(rows, "arm"), "mark.mean", words))
    layers = [
        base.mark_point(filled=True, size=12 if many else 36, opacity=1).encode(x),
        means.mark_tick(thickness=2, size=9 if many else 26, color=INK).encode(
            x, _arm_axis(names), description="about:N"
        ),
    ]
    intervals = base.mark_rule(strokeWidth=1.4, opacity=0.7).encode(low, alt.X2("ci_high:Q"))
    return alt.layer(*([] if many else [intervals]), *layers)


def told(
    rows: pl.DataFrame, key: str, words: Words, *, series: str = "arm", small: bool = False, **values: object
) -> pl.DataFrame:
    """Return the rows with descriptions of their marks in `about`: the text of `key` with the fields of each row.

    series: the field by which a mark is switched on and off; none if it is empty. small: marks are dots without texts
    of their own. values: of placeholders that are no fields.
    """
    texts = [
        small_dot(row[series]) if small else described(row[series] if series else "", words(key, **row, **values))
        for row in rows.iter_rows(named=True)
    ]
    return rows.with_columns(pl.Series("about", texts, dtype=pl.String))


def switched(rows: pl.DataFrame, column: str = "about") -> pl.DataFrame:
    """Return the rows with descriptions without a text: marks are switched on and off with their arm."""
    return rows.with_columns(pl.Series(column, [described(arm, "") for arm in rows["arm"]], dtype=pl.String))


def dashed_rules(rows: pl.DataFrame) -> alt.Chart:
    """Return rules that mark a value for comparison."""
    return alt.Chart(rows).mark_rule(color=MUTED, strokeDash=[3, 3], strokeWidth=1.2)


def number_axis(field: str, title: str) -> alt.X:
    """Return the axis of whole numbers such as steps and layers."""
    return alt.X(f"{field}:Q").title(title).axis(grid=False, tickMinStep=1, format="d")


def lines_with_dots(rows: pl.DataFrame, x: alt.X, y: alt.Y, by: str, keys: Sequence["SeriesKey"]) -> list[alt.Chart]:
    """Return a line per series of `by` with a dot at every value; `rows` as from `told`."""
    base, colour = base_chart(rows), colour_scale(by, keys)
    return [
        base.mark_line(strokeWidth=1.8).encode(x, y, color=colour, strokeDash=dash_scale(by, keys)),
        base.mark_point(filled=True, size=22, opacity=1).encode(x, y, color=colour, description="about:N"),
    ]


def is_crowded(num_arms: int, num_runs: int) -> bool:
    """Return whether a picture of so many arms and runs shows values at the means alone."""
    return num_arms > MANY_ARMS or num_runs > MANY_RUNS


def mean_and_range(rows: pl.DataFrame, *by: str) -> pl.DataFrame:
    """Return the mean accuracy over the seeds, with the lowest and the highest; columns `by`, accuracy, low, high."""
    accuracy = pl.col("accuracy")
    return rows.group_by(*by).agg(accuracy.mean(), accuracy.min().alias("low"), accuracy.max().alias("high")).sort(*by)


def _present(keys: Sequence[SeriesKey], rows: pl.DataFrame) -> list[str]:
    arms = set(rows["arm"].unique())
    return [key.name for key in keys if key.name in arms]


def row_height(names: Sequence[str]) -> int:
    """Return the height of the row of an arm in pixels."""
    return _LOW_ROW_HEIGHT if len(names) > MANY_ARMS else ROW_HEIGHT


def _arm_axis(names: Sequence[str]) -> alt.Y:
    return row_axis("arm", names, names, 9 if len(names) > MANY_ARMS else 11, _ARM_LABEL_WIDTH)


def row_axis(
    field: str, names: Sequence[str], lines: Iterable[str], font_size: int, limit: float = 0, **axis: Any
) -> alt.Y:
    """Return the axis of rows in the order of `names`; `lines`: all lines of their labels. limit: of width, 0 for none.

    axis: further properties of the axis.
    """
    return (
        alt.Y(f"{field}:N")
        .sort(list(names))
        .title(None)
        .axis(
            labelColor=INK,
            ticks=False,
            domain=False,
            labelLimit=limit,
            labelFontSize=font_size,
            minExtent=room_for_labels(lines, font_size, limit or math.inf),
            **axis,
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


_WIDE = 620
_MARKS_IN_A_SMALL_PANEL = 12
_LETTERS_IN_A_SMALL_PANEL = 36


def difference_panel(differences: pl.DataFrame, keys: Sequence[SeriesKey], words: Words) -> Panel:
    """Return every arm minus the reference arm at every level, as a dot with its interval; `differences` in fractions.

    Columns as in `artifacts.comparisons.DifferenceTable`, without rows that have no difference.
    """
    rows = in_percent(_with_levels(switched(told(differences, "mark.difference", words), "plain"), words))
    levels = [words.level(level) for level in sorted(rows["noise_level"].unique().to_list())]
    wide = _needs_width(len(rows), levels)
    base = _over_levels(rows, levels, keys, words, wide=wide)
    chart = effects(base, words("axis.difference"), upright=True, opacity=0.8, rule_text="plain:N")
    reference = rows["reference"][0]
    return panel(
        words("robustness.differences", reference=reference),
        chart,
        words("alt.differences", reference=reference),
        wide=wide,
    )


def segment_panel(segments: Sequence[SegmentEffect], by: SegmentBy, words: Words) -> Panel:
    """Return the difference of one claim in every segment, as a dot with its interval."""
    fields, names = {"segment", "num_questions", "difference", "ci_low", "ci_high"}, [one.segment for one in segments]
    rows = told(pl.DataFrame([one.model_dump(include=fields) for one in segments]), "mark.segment", words, series="")
    rows = rows.with_columns(pl.col("segment").alias("arm"))
    base = alt.Chart(in_percent(rows), width=PANEL_WIDTH - 40, height=ROW_HEIGHT * len(names))
    chart = effects(base.encode(_arm_axis(names)), words("axis.difference"))
    heading = words(f"segment.{by}")
    return panel(heading, chart, words("alt.segments", by=heading))


def effects(
    base: alt.Chart,
    title: str,
    *,
    upright: bool = False,
    opacity: Any = alt.Undefined,
    rule_text: str | None = None,
    dot_text: str | None = "about:N",
) -> alt.TopLevelMixin:
    """Return a dot per difference with its interval, and a rule at 0; columns difference, ci_low and ci_high.

    base: has the data and the other axis. upright: differences are on the vertical axis. opacity: of the intervals.
    rule_text, dot_text: columns with the descriptions of intervals and dots, if any.
    """
    value, end = (alt.Y, alt.Y2) if upright else (alt.X, alt.X2)
    zero = alt.Chart(pl.DataFrame({"zero": [0.0]})).mark_rule(color=INK, strokeWidth=1)
    rules = base.mark_rule(strokeWidth=2, color=INK, opacity=opacity)
    dots = base.mark_point(filled=True, size=44, opacity=1, color=INK)
    about_rules, about_dots = ({} if text is None else {"description": text} for text in (rule_text, dot_text))
    return alt.layer(
        zero.encode(value("zero:Q").title(title)),
        rules.encode(value("ci_low:Q").title(title), end("ci_high:Q"), **about_rules),
        dots.encode(value("difference:Q").title(title), **about_dots),
    )


def in_percent(rows: pl.DataFrame) -> pl.DataFrame:
    """Return the table with accuracies or differences and their intervals in percent or percentage points."""
    names = [name for name in ("accuracy", "difference", "ci_low", "ci_high") if name in rows.columns]
    return rows.with_columns(pl.col(*names) * 100)


def look_panel(looks: Sequence[ClaimAtLook], claim: str, words: Words) -> Panel:
    """Return the difference of one claim with its repeated interval at every look, over the seeds."""
    rows = pl.DataFrame([look.model_dump(include={"seeds", "difference", "ci_low", "ci_high"}) for look in looks])
    x = alt.X("seeds:Q").title(words("column.seeds_at_look")).scale(zero=False, padding=20)
    base = base_chart(in_percent(told(rows, "mark.look", words, series="")))
    base = base.encode(x.axis(grid=False, format="d", values=rows["seeds"].to_list()))
    chart = effects(base, words("axis.difference"), upright=True)
    return panel(claim, chart, words("alt.looks", claim=claim))


def accuracy_over_noise(
    accuracy: pl.DataFrame, keys: Sequence[SeriesKey], words: Words, *, many: bool = False
) -> Panel:
    """Return the mean accuracy of every arm over the levels as a line, and its seeds as dots.

    many: the page has so many arms that the dots of seeds have no values of their own.
    """
    rows = told(in_percent(accuracy), "mark.accuracy_at", words, small=many)
    means = told(switched(mean_and_range(rows, "arm", "noise_level"), "plain"), "mark.mean_at", words)
    rows, means = (table.with_columns(pl.col("noise_level") * 100) for table in (rows, means))
    levels = sorted(rows["noise_level"].unique().to_list())
    x = alt.X("noise_level:Q").title(words("axis.noise_scale")).axis(grid=False, values=levels)
    y = alt.Y("accuracy:Q").title(words("axis.accuracy")).scale(nice=True, zero=False)
    of_seeds, of_means = (
        base_chart(table).encode(x, y, color=colour_scale("arm", keys), description="about:N")
        for table in (rows, means)
    )
    lines = of_means.mark_line(strokeWidth=2)
    chart = alt.layer(
        of_seeds.mark_point(size=18, opacity=0.55, filled=many),
        lines.encode(strokeDash=dash_scale("arm", keys), description="plain:N"),
        of_means.mark_point(filled=True, size=30, opacity=1),
    )
    return panel(words("robustness.accuracy"), chart, words("alt.robustness"))


def accuracy_by_name(accuracy: pl.DataFrame, keys: Sequence[SeriesKey], words: Words, *, many: bool = False) -> Panel:
    """Return the accuracy of every arm under each named noise, beside that without noise, as dots over categories.

    Named noises have no scale in common, so no line joins them. Columns and `many` as in `accuracy_over_noise`.
    """
    rows = told(_with_levels(in_percent(accuracy), words), "mark.accuracy_at", words, small=many)
    means = told(mean_and_range(rows, "arm", "noise_level", "level"), "mark.mean_at", words)
    levels = [words.level(level) for level in sorted(rows["noise_level"].unique().to_list())]
    wide = _needs_width(len(means), levels)
    y = alt.Y("accuracy:Q").title(words("axis.accuracy")).scale(nice=True, zero=False)
    of_seeds, of_means = (
        _over_levels(table, levels, keys, words, wide=wide).encode(y, description="about:N") for table in (rows, means)
    )
    chart = alt.layer(
        of_seeds.mark_point(size=18, opacity=0.55, filled=many),
        of_means.mark_point(filled=True, size=44, opacity=1),
    )
    return panel(words("robustness.named"), chart, words("alt.named"), wide=wide)


def _needs_width(num_marks: int, levels: Sequence[str]) -> bool:
    return num_marks > _MARKS_IN_A_SMALL_PANEL or sum(map(len, levels)) > _LETTERS_IN_A_SMALL_PANEL


def _over_levels(
    rows: pl.DataFrame, levels: Sequence[str], keys: Sequence[SeriesKey], words: Words, *, wide: bool
) -> alt.Chart:
    """Return an empty chart with the names of noise levels as categories, and the arms side by side at each."""
    x = alt.X("level:N").sort(list(levels)).title(words("axis.noise")).axis(grid=False, labelAngle=0, ticks=False)
    offset = alt.XOffset("arm:N").sort([key.name for key in keys]).scale(paddingOuter=0.6)
    base = alt.Chart(rows, width=_WIDE if wide else PANEL_WIDTH, height=PANEL_HEIGHT + 30 * wide)
    return base.encode(x, xOffset=offset, color=colour_scale("arm", keys))


def _with_levels(rows: pl.DataFrame, words: Words) -> pl.DataFrame:
    """Return the rows with a column `level`, the names of their noise levels."""
    return rows.with_columns(level=pl.Series([words.level(level) for level in rows["noise_level"]], dtype=pl.String))
