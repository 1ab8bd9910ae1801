"""The figures of the report: small panels that wrap on narrow screens; accuracy by arm and over the noise, and cost.

The picture of `aqnpipe sensitivity --figure` is in the same style.
"""

import math
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import altair as alt
import polars as pl
import vl_convert
from markupsafe import Markup

from aqnpipe.artifacts.comparisons import ClaimAtLook, SegmentBy, SegmentEffect
from aqnpipe.artifacts.diagnoses import SensitivityFile
from aqnpipe.artifacts.files import atomic_path
from aqnpipe.errors import ConfigError
from aqnpipe.report.markup import INK, MUTED, described, light_spec, render_svg, series_colour, series_dash, small_dot
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


def keys_of(names: Iterable[str]) -> list[SeriesKey]:
    """Return the keys of series in the order in which their names occur first."""
    return [SeriesKey(name, number) for number, name in enumerate(dict.fromkeys(names), start=1)]


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


def line_panel(
    title: str,
    label: str,
    rows: pl.DataFrame,
    x: alt.X,
    y: alt.Y,
    by: str,
    keys: Sequence[SeriesKey],
    rules: Sequence[alt.Chart] = (),
) -> Panel:
    """Return a line per series of `by` with a dot at every value, above `rules`; `rows` as from `told`."""
    base, colour = base_chart(rows), colour_scale(by, keys)
    lines = base.mark_line(strokeWidth=1.8).encode(x, y, color=colour, strokeDash=dash_scale(by, keys))
    dots = base.mark_point(filled=True, size=22, opacity=1).encode(x, y, color=colour, description="about:N")
    return panel(title, alt.layer(*rules, lines, dots), label)


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
    rows, means, y = _seeds_and_means(accuracy, words, many=many)
    rows, means = (table.with_columns(pl.col("noise_level") * 100) for table in (rows, means))
    levels = sorted(rows["noise_level"].unique().to_list())
    x = alt.X("noise_level:Q").title(words("axis.noise_scale")).axis(grid=False, values=levels)
    of_seeds, of_means = (
        base_chart(table).encode(x, y, color=colour_scale("arm", keys), description="about:N")
        for table in (rows, switched(means, "plain"))
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
    rows, means, y = _seeds_and_means(accuracy, words, many=many)
    levels = [words.level(level) for level in sorted(rows["noise_level"].unique().to_list())]
    wide = _needs_width(len(means), levels)
    of_seeds, of_means = (
        _over_levels(_with_levels(table, words), levels, keys, words, wide=wide).encode(y, description="about:N")
        for table in (rows, means)
    )
    chart = alt.layer(
        of_seeds.mark_point(size=18, opacity=0.55, filled=many),
        of_means.mark_point(filled=True, size=44, opacity=1),
    )
    return panel(words("robustness.named"), chart, words("alt.named"), wide=wide)


def _seeds_and_means(accuracy: pl.DataFrame, words: Words, *, many: bool) -> tuple[pl.DataFrame, pl.DataFrame, alt.Y]:
    """Return the accuracies of seeds and of arms in percent, with what their marks tell, and their axis."""
    rows = told(in_percent(accuracy), "mark.accuracy_at", words, small=many)
    means = told(mean_and_range(rows, "arm", "noise_level"), "mark.mean_at", words)
    return rows, means, alt.Y("accuracy:Q").title(words("axis.accuracy")).scale(nice=True, zero=False)


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


_FIGURE_FORMATS = (".svg", ".png")
_FIGURE_WIDTH, _FIGURE_HEIGHT, _PNG_SCALE = 460, 240, 2
_SENSITIVITIES = keys_of(["measured, ± 2 standard errors", "estimate from one backward pass"])


def check_format(path: Path) -> None:
    """Raise ConfigError unless the suffix of `path` is that of a format that can be written."""
    if path.suffix not in _FIGURE_FORMATS:
        raise ConfigError(f"--figure {path}: found suffix {path.suffix!r}, expected {' or '.join(_FIGURE_FORMATS)}")


def write_sensitivity_chart(path: Path, file: SensitivityFile) -> None:
    """Write the increase of the loss by layer, measured and estimated, and the change of the accuracy if measured.

    As SVG or PNG, by the suffix of `path`, in the colours of the report; the same result gives the same bytes. The axis
    of the loss is linear near 0 and logarithmic beyond, because one fragile layer would hide all others.
    """
    check_format(path)
    measured, estimate = (key.name for key in _SENSITIVITIES)
    layers = pl.DataFrame([vars(layer) for layer in file.layers], infer_schema_length=None)

    def rows(kind: str, value: str, reach: pl.Expr) -> pl.DataFrame:
        part, middle = pl.col("layer").cast(pl.String).fill_null("head"), pl.col(value).fill_null(0.0)
        return layers.select(part=part, kind=pl.lit(kind), value=middle, low=middle - reach, high=middle + reach)

    error = 2 * pl.col("loss_standard_error").fill_null(0.0)
    losses = pl.concat([rows(measured, "loss_increase", error), rows(estimate, "estimate", pl.lit(0.0))])
    # Where the axis turns logarithmic: at a twentieth of the mean size of the values.
    linear = max(float(losses["value"].abs().to_numpy().mean()) / 20, 1e-9)
    scale = alt.Scale(type="symlog", constant=linear)
    panels = [_sensitivities(losses, "increase of the loss, nats per token", scale)]
    if file.accuracy is not None:
        changes = rows(measured, "accuracy_change", 2 * pl.col("accuracy_standard_error").fill_null(0.0))
        points = changes.with_columns(pl.col("value", "low", "high") * 100)
        panels.append(_sensitivities(points, "change of the accuracy, points", alt.Scale()))
    title = f"{file.model}: {100 * file.scale:g} % noise on the matrix products of one layer at a time"
    chart = alt.vconcat(*panels, title=alt.TitleParams(title, anchor="start", fontSize=13))
    spec = light_spec(chart, legend=True)
    with atomic_path(path) as temporary:
        if path.suffix == ".svg":
            temporary.write_text(vl_convert.vegalite_to_svg(spec), encoding="utf-8")
        else:
            temporary.write_bytes(vl_convert.vegalite_to_png(spec, scale=_PNG_SCALE))


def _sensitivities(rows: pl.DataFrame, title: str, scale: alt.Scale) -> alt.LayerChart | alt.FacetChart:
    y = alt.Y("value:Q").title(title).scale(scale).axis(format="~f", tickCount=6, labelOverlap="greedy")
    offset = alt.XOffset("kind:N").scale(domain=[key.name for key in _SENSITIVITIES], paddingOuter=0.8)
    base = alt.Chart(rows, width=_FIGURE_WIDTH, height=_FIGURE_HEIGHT).encode(
        alt.X("part:N")
        .sort(rows["part"].unique(maintain_order=True).to_list())
        .title("layer")
        .axis(labelAngle=0, labelOverlap=True, grid=False),
        xOffset=offset,
        color=colour_scale("kind", _SENSITIVITIES),
    )
    points = base.mark_point(filled=True, size=45, opacity=1).encode(y)
    bars = base.mark_rule(strokeWidth=1.4).encode(y=alt.Y("low:Q").scale(scale), y2="high:Q")
    return alt.layer(points, bars, dashed_rules(pl.DataFrame({"zero": [0.0]})).encode(y="zero:Q"))
