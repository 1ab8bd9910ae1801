"""The figures of the report: sets of small panels that wrap on narrow screens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import altair as alt
import polars as pl
from markupsafe import Markup

from aqnpipe.report.svg import CARD, CONTEXT, INK, MUTED, render_svg, series_colour, series_dash
from aqnpipe.report.words import Words

PANEL_WIDTH, PANEL_HEIGHT = 270, 170
ROW_HEIGHT = 34
SMOOTHING_STEPS = 5
MAX_POINTS_PER_LINE = 60
_FAR = 20
MAX_ROWS = 4500
"""Rows of one chart, below Altair's own limit of 5,000."""


@dataclass(frozen=True)
class Panel:
    """One small picture with its title."""

    title: str
    svg: Markup


@dataclass(frozen=True)
class SeriesKey:
    """The name of a series and its position in the palette; 0 is the neutral colour."""

    name: str
    index: int


def accuracy_panels(accuracy: pl.DataFrame, keys: Sequence[SeriesKey], words: Words) -> list[Panel]:
    """Return accuracy by arm, a panel per noise level: every seed with its interval, and the mean as a tick."""
    rows = _in_percent(accuracy)
    bounds = _bounds(rows)
    panels = []
    for level in sorted(rows["noise_level"].unique().to_list()):
        title = words("noise.at", level=level) if level else words("noise.without")
        svg = _dot_rows(rows.filter(pl.col("noise_level") == level), keys, bounds, words("axis.accuracy"))
        panels.append(Panel(title, render_svg(svg, words("alt.accuracy", where=title))))
    return panels


def published_panels(rows: pl.DataFrame, keys: Sequence[SeriesKey], words: Words) -> list[Panel]:
    """Return published and measured accuracies by arm in two panels on one scale; `rows`: `published.side_by_side`."""
    bounds = _bounds(rows)
    panels = []
    for kind in ("published", "measured"):
        title = words(f"published.panel.{kind}")
        chart = _dot_rows(rows.filter(pl.col("kind") == kind), keys, bounds, words("axis.accuracy"))
        panels.append(Panel(title, render_svg(chart, words("alt.accuracy", where=title))))
    return panels


def cost_panels(rows: pl.DataFrame, keys: Sequence[SeriesKey], words: Words) -> list[Panel]:
    """Return the wall time of every training run by arm, from zero; `rows` as `costs_view.cost_rows`."""
    names = [key.name for key in keys if key.name in set(rows["arm"])]
    chart = (
        alt.Chart(rows, width=PANEL_WIDTH - 40, height=ROW_HEIGHT * len(names))
        .mark_point(filled=True, size=36, opacity=1)
        .encode(
            alt.X("minutes:Q").title(words("axis.minutes")).scale(zero=True),
            _arm_axis(names),
            yOffset=alt.YOffset("seed:N").scale(paddingOuter=0.5),
            color=colour_scale("arm", keys),
        )
    )
    title = words("costs.panel")
    return [Panel(title, render_svg(chart, words("alt.costs")))]


def robustness_panels(accuracy: pl.DataFrame, keys: Sequence[SeriesKey], words: Words) -> list[Panel]:
    """Return accuracy over evaluation noise, a panel per arm: its mean and seeds, other arms' means in grey."""
    rows = _in_percent(accuracy).with_columns(pl.col("noise_level") * 100)
    means = rows.group_by("arm", "noise_level").agg(pl.col("accuracy").mean()).sort("arm", "noise_level")
    levels = sorted(rows["noise_level"].unique().to_list())
    bounds = [float(rows["accuracy"].min()), float(rows["accuracy"].max())]  # type: ignore[arg-type]
    x = alt.X("noise_level:Q").title(words("axis.noise")).axis(grid=False, values=levels)
    y = alt.Y("accuracy:Q").title(words("axis.accuracy")).scale(domain=bounds, nice=True, zero=False)
    panels = []
    for key in keys:
        colour = series_colour(key.index)
        others = _base(means.filter(pl.col("arm") != key.name)).mark_line(color=CONTEXT, strokeWidth=1.2)
        own = means.filter(pl.col("arm") == key.name)
        seeds = rows.filter(pl.col("arm") == key.name)
        layers = [
            others.encode(x, y, detail="arm:N"),
            _base(own).mark_line(color=colour, strokeWidth=2.4).encode(x, y),
            _base(seeds).mark_point(color=colour, fill=CARD, size=32, opacity=1).encode(x, y),
        ]
        panels.append(Panel(key.name, render_svg(alt.layer(*layers), words("alt.robustness", arm=key.name))))
    return panels


def training_panels(metrics: pl.DataFrame, keys: Sequence[SeriesKey], words: Words) -> list[Panel]:
    """Return reward, KL, validation accuracy and sigma over optimiser steps; one line per arm and seed.

    `metrics`: the concatenated tables of the runs, with columns arm and seed.
    """
    lines = metrics.select("arm", "seed").n_unique()
    num_steps = int(metrics["step"].max())  # type: ignore[arg-type]
    stride = max(-(-num_steps // max(min(MAX_POINTS_PER_LINE, MAX_ROWS // lines), 1)), 1)
    window = max(SMOOTHING_STEPS, stride)
    smooth = metrics.sort("arm", "seed", "step").with_columns(
        pl.col(name).rolling_mean(window, min_samples=1).over("arm", "seed") for name in ("reward_mean", "kl")
    )
    # Thinned from the end, so that the last step stays.
    thin = smooth.filter((num_steps - pl.col("step")) % stride == 0)
    validated = smooth.filter(pl.col("validation_accuracy").is_not_null()).with_columns(
        pl.col("validation_accuracy") * 100
    )
    panels = [_curves(thin, "reward_mean", words("training.reward_smooth", window=window), keys, words)]
    if thin["kl"].null_count() < len(thin):
        panels.append(_curves(thin, "kl", words("training.kl_smooth", window=window), keys, words))
    if not validated.is_empty():
        panels.append(_curves(validated[-MAX_ROWS:], "validation_accuracy", words("training.validation"), keys, words))
    noisy = thin.filter(pl.col("sigma_requested") > 0)
    if not noisy.is_empty():
        panels.append(_sigma_panel(noisy, keys, words))
    return panels


DEPTH_COLUMNS = (
    *("instability", "gain", "kurtosis", "zero_share", "values_at_maximum", "pile_up"),
    *("sensitivity", "sigma"),
)


def diagnosis_panels(
    layers: pl.DataFrame, keys: Sequence[SeriesKey], fault_layers: Sequence[int], words: Words
) -> tuple[list[Panel], list[str]]:
    """Return layer metrics and sigmas by layer, a line per machine; simulated faults as vertical rules.

    `layers`: the concatenated tables of the machines, with columns machine and sigma. Returns the panels, and the
    metrics that are the same at every layer of every machine, which get no picture, as `name: value`.
    """
    panels, constant = [], []
    for column in DEPTH_COLUMNS:
        title, values = words(f"depth.{column}"), layers[column].drop_nulls().unique()
        if len(values) > 1:
            panels.append(_depth_panel(layers, column, title, keys, fault_layers, words))
        elif len(values) == 1:
            constant.append(f"{title}: {values[0]:.4g}")
    return panels, constant


def _dot_rows(rows: pl.DataFrame, keys: Sequence[SeriesKey], bounds: list[float], title: str) -> alt.TopLevelMixin:
    names = [key.name for key in keys if key.name in set(rows["arm"])]
    y = _arm_axis(names)
    offset = alt.YOffset("seed:N").scale(paddingOuter=0.5)
    x = alt.X("accuracy:Q").title(title).scale(domain=bounds, nice=True, zero=False)
    colour = colour_scale("arm", keys)
    base = alt.Chart(rows, width=PANEL_WIDTH - 40, height=ROW_HEIGHT * len(names))
    means = rows.group_by("arm").agg(pl.col("accuracy").mean()).sort("arm")
    return alt.layer(
        base.mark_rule(strokeWidth=1.4, opacity=0.7).encode(
            alt.X("ci_low:Q").title(title).scale(domain=bounds, nice=True, zero=False),
            alt.X2("ci_high:Q"),
            y,
            yOffset=offset,
            color=colour,
        ),
        base.mark_point(filled=True, size=36, opacity=1).encode(x, y, yOffset=offset, color=colour),
        alt.Chart(means).mark_tick(thickness=2, size=26, color=INK).encode(x, y),
    )


def _arm_axis(names: Sequence[str]) -> alt.Y:
    return alt.Y("arm:N").sort(list(names)).title(None).axis(labelColor=INK, ticks=False, domain=False, labelLimit=110)


def _curves(table: pl.DataFrame, column: str, title: str, keys: Sequence[SeriesKey], words: Words) -> Panel:
    y = alt.Y(f"{column}:Q").title(words(f"axis.{column}")).scale(zero=False)
    if column == "kl" and _needs_decades(table[column]):
        table = table.filter(pl.col(column) > 0)
        y = y.scale(type="log").axis(values=_decades(table[column]))
    chart = (
        _base(table)
        .mark_line(strokeWidth=1.6, opacity=0.9)
        .encode(
            alt.X("step:Q").title(words("axis.step")).axis(grid=False),
            y,
            detail="seed:N",
            color=colour_scale("arm", keys),
            strokeDash=dash_scale("arm", keys),
        )
    )
    return Panel(title, render_svg(chart, words("alt.training", what=title)))


def _sigma_panel(table: pl.DataFrame, keys: Sequence[SeriesKey], words: Words) -> Panel:
    first_seed = table.filter(pl.col("seed") == pl.col("seed").min().over("arm"))
    x = alt.X("step:Q").title(words("axis.step")).axis(grid=False)
    logarithmic = alt.Scale(type="log")
    decades = _decades(table["sigma_requested"])
    requested = _base(first_seed).mark_line(strokeWidth=1.6, interpolate="step-after")
    measured = _base(first_seed.filter(pl.col("sigma_measured") > 0)).mark_point(filled=True, size=14, opacity=1)
    chart = alt.layer(
        requested.encode(
            x,
            alt.Y("sigma_requested:Q").title(words("axis.sigma_requested")).scale(logarithmic).axis(values=decades),
            color=colour_scale("arm", keys),
            strokeDash=dash_scale("arm", keys),
        ),
        measured.encode(x, alt.Y("sigma_measured:Q").scale(logarithmic), color=colour_scale("arm", keys)),
    )
    title = words("training.sigma")
    return Panel(title, render_svg(chart, words("alt.training", what=title)))


def _depth_panel(
    layers: pl.DataFrame,
    column: str,
    title: str,
    keys: Sequence[SeriesKey],
    fault_layers: Sequence[int],
    words: Words,
) -> Panel:
    x = alt.X("layer:Q").title(words("axis.layer")).axis(grid=False, tickMinStep=1, format="d")
    y = alt.Y(f"{column}:Q").title(words(f"axis.{column}")).scale(zero=False)
    encoding = {"x": x, "y": y, "color": colour_scale("machine", keys)}
    lines = _base(layers).mark_line(strokeWidth=1.8).encode(**encoding, strokeDash=dash_scale("machine", keys))
    dots = _base(layers).mark_point(filled=True, size=22, opacity=1).encode(**encoding)
    parts: list[alt.Chart] = [lines, dots]
    if fault_layers:
        rule = alt.Chart(pl.DataFrame({"layer": sorted(set(fault_layers))})).mark_rule(
            color=MUTED, strokeDash=[3, 3], strokeWidth=1.2
        )
        parts.insert(0, rule.encode(x="layer:Q"))
    return Panel(title, render_svg(alt.layer(*parts), words("alt.depth", what=title)))


def _needs_decades(values: pl.Series) -> bool:
    """Whether a few values are so far above the rest that a linear axis would show nothing else."""
    positive = values.filter(values > 0)
    return not positive.is_empty() and float(positive.max()) > _FAR * float(positive.median())  # type: ignore[arg-type]


def _decades(values: pl.Series) -> list[float]:
    """Powers of ten from below the lowest to above the highest of `values`, all above 0."""
    lowest, highest = float(values.min()), float(values.max())  # type: ignore[arg-type]
    return [10.0**power for power in range(math.floor(math.log10(lowest)), math.ceil(math.log10(highest)) + 1)]


def _base(table: pl.DataFrame) -> alt.Chart:
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


def _in_percent(accuracy: pl.DataFrame) -> pl.DataFrame:
    return accuracy.with_columns(pl.col("accuracy", "ci_low", "ci_high") * 100)
