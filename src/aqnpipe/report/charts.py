"""The figures of the report, each a set of small panels that wrap on narrow screens."""

from collections.abc import Sequence
from dataclasses import dataclass

import altair as alt
import polars as pl
from markupsafe import Markup

from aqnpipe.report.numbers import noise_level
from aqnpipe.report.svg import CARD, CONTEXT, INK, MUTED, render_svg, series_colour, series_dash

PANEL_WIDTH, PANEL_HEIGHT = 270, 170
SMOOTHING_STEPS = 5


@dataclass(frozen=True)
class Panel:
    """One small picture with its title."""

    title: str
    svg: Markup


@dataclass(frozen=True)
class SeriesKey:
    """How a series is told apart: position in the palette, 0 for the neutral one."""

    name: str
    index: int


def accuracy_panels(accuracy: pl.DataFrame, keys: Sequence[SeriesKey]) -> list[Panel]:
    """Accuracy by arm, a panel per noise level: every seed with its interval, and the mean as a tick."""
    rows = _in_percent(accuracy)
    bounds = [float(rows["ci_low"].min()), float(rows["ci_high"].max())]  # type: ignore[arg-type]
    panels = []
    for level in sorted(rows["noise_level"].unique().to_list()):
        chart = _accuracy_panel(rows.filter(pl.col("noise_level") == level), keys, bounds)
        title = f"at {noise_level(level)} noise" if level else "without noise"
        panels.append(Panel(title, render_svg(chart, f"Accuracy of every arm and seed {title}")))
    return panels


def robustness_panels(accuracy: pl.DataFrame, keys: Sequence[SeriesKey]) -> list[Panel]:
    """Accuracy over evaluation noise, a panel per arm: its mean and seeds, the other arms' means behind it."""
    rows = _in_percent(accuracy).with_columns(pl.col("noise_level") * 100)
    means = rows.group_by("arm", "noise_level").agg(pl.col("accuracy").mean()).sort("arm", "noise_level")
    levels = sorted(rows["noise_level"].unique().to_list())
    bounds = [float(rows["accuracy"].min()), float(rows["accuracy"].max())]  # type: ignore[arg-type]
    x = alt.X("noise_level:Q").title("noise at evaluation (%)").axis(grid=False, values=levels)
    y = alt.Y("accuracy:Q").title("accuracy (%)").scale(domain=bounds, nice=True, zero=False)
    panels = []
    for key in keys:
        colour = series_colour(key.index)
        others = _base(means.filter(pl.col("arm") != key.name)).mark_line(color=CONTEXT, strokeWidth=1.2)
        own = means.filter(pl.col("arm") == key.name)
        seeds = rows.filter(pl.col("arm") == key.name)
        if own.is_empty():
            continue
        layers = [
            others.encode(x, y, detail="arm:N"),
            _base(own).mark_line(color=colour, strokeWidth=2.4).encode(x, y),
            _base(seeds).mark_point(color=colour, fill=CARD, size=32, opacity=1).encode(x, y),
        ]
        panels.append(Panel(key.name, render_svg(alt.layer(*layers), f"Accuracy of {key.name} over noise")))
    return panels


def training_panels(metrics: pl.DataFrame, keys: Sequence[SeriesKey]) -> list[Panel]:
    """Reward, KL, validation accuracy and sigma over optimiser steps; one line per arm and seed.

    `metrics`: the runs' tables one below the other, with columns arm and seed.
    """
    smooth = metrics.sort("arm", "seed", "step").with_columns(
        pl.col(name).rolling_mean(SMOOTHING_STEPS, min_samples=1).over("arm", "seed") for name in ("reward_mean", "kl")
    )
    percent = smooth.with_columns(pl.col("validation_accuracy") * 100)
    validated = percent.filter(pl.col("validation_accuracy").is_not_null())
    panels = [_curves(smooth, "reward_mean", f"Reward, mean of {SMOOTHING_STEPS} steps", "reward", keys)]
    if smooth["kl"].null_count() < len(smooth):
        panels.append(_curves(smooth, "kl", f"KL to the start, mean of {SMOOTHING_STEPS} steps", "KL (nats)", keys))
    if not validated.is_empty():
        panels.append(_curves(validated, "validation_accuracy", "Validation accuracy", "accuracy (%)", keys))
    noisy = metrics.filter(pl.col("sigma_asked").max().over("arm") > 0)
    if not noisy.is_empty():
        panels.append(_sigma_panel(noisy, keys))
    return panels


def diagnosis_panels(layers: pl.DataFrame, keys: Sequence[SeriesKey], fault_layers: Sequence[int]) -> list[Panel]:
    """Layer metrics and sigmas over depth, a line per machine; simulated faults as vertical rules.

    `layers`: the machines' tables one below the other, with columns machine and sigma.
    """
    wanted = [
        ("instability", "Instability", "std of repeats"),
        ("gain", "Gain", "output / input noise"),
        ("kurtosis", "Kurtosis", "Fisher kurtosis"),
        ("zero_share", "Exact zeros", "share of values"),
        ("values_at_maximum", "Values at the maximum", "values per call"),
        ("sigma", "Sigma for AQN", "sigma"),
    ]
    return [_depth_panel(layers, column, title, unit, keys, fault_layers) for column, title, unit in wanted]


def _accuracy_panel(rows: pl.DataFrame, keys: Sequence[SeriesKey], bounds: list[float]) -> alt.TopLevelMixin:
    names = [key.name for key in keys if key.name in set(rows["arm"])]
    y = alt.Y("arm:N").sort(names).title(None).axis(labelColor=INK, ticks=False, domain=False, labelLimit=110)
    offset = alt.YOffset("seed:N").scale(paddingOuter=0.5)
    x = alt.X("accuracy:Q").title("accuracy (%)").scale(domain=bounds, nice=True, zero=False)
    colour = _colour("arm", keys)
    base = alt.Chart(rows, width=PANEL_WIDTH - 40, height=34 * len(names))
    means = rows.group_by("arm").agg(pl.col("accuracy").mean()).sort("arm")
    return alt.layer(
        base.mark_rule(strokeWidth=1.4, opacity=0.7).encode(
            alt.X("ci_low:Q").title("accuracy (%)").scale(domain=bounds, nice=True, zero=False),
            alt.X2("ci_high:Q"),
            y,
            yOffset=offset,
            color=colour,
        ),
        base.mark_point(filled=True, size=36, opacity=1).encode(x, y, yOffset=offset, color=colour),
        alt.Chart(means).mark_tick(thickness=2, size=26, color=INK).encode(x, y),
    )


def _curves(table: pl.DataFrame, column: str, title: str, unit: str, keys: Sequence[SeriesKey]) -> Panel:
    chart = (
        _base(table)
        .mark_line(strokeWidth=1.6, opacity=0.9)
        .encode(
            alt.X("step:Q").title("optimiser step").axis(grid=False),
            alt.Y(f"{column}:Q").title(unit).scale(zero=False),
            detail="seed:N",
            color=_colour("arm", keys),
            strokeDash=_dash("arm", keys),
        )
    )
    return Panel(title, render_svg(chart, f"{title} over optimiser steps for every run"))


def _sigma_panel(table: pl.DataFrame, keys: Sequence[SeriesKey]) -> Panel:
    first_seed = table.filter(pl.col("seed") == pl.col("seed").min().over("arm"))
    x = alt.X("step:Q").title("optimiser step").axis(grid=False)
    asked = _base(first_seed).mark_line(strokeWidth=1.6, interpolate="step-after")
    measured = _base(first_seed).mark_point(filled=True, size=10, opacity=1)
    chart = alt.layer(
        asked.encode(
            x,
            alt.Y("sigma_asked:Q").title("sigma (line asked, dots measured)"),
            color=_colour("arm", keys),
            strokeDash=_dash("arm", keys),
        ),
        measured.encode(x, alt.Y("sigma_measured:Q"), color=_colour("arm", keys)),
    )
    return Panel(
        "AQN sigma, asked and measured", render_svg(chart, "AQN sigma asked and measured over optimiser steps")
    )


def _depth_panel(
    layers: pl.DataFrame, column: str, title: str, unit: str, keys: Sequence[SeriesKey], fault_layers: Sequence[int]
) -> Panel:
    x = alt.X("layer:Q").title("decoder layer").axis(grid=False, tickMinStep=1, format="d")
    encoding = {"x": x, "y": alt.Y(f"{column}:Q").title(unit).scale(zero=False), "color": _colour("machine", keys)}
    lines = _base(layers).mark_line(strokeWidth=1.8).encode(**encoding, strokeDash=_dash("machine", keys))
    dots = _base(layers).mark_point(filled=True, size=22, opacity=1).encode(**encoding)
    parts: list[alt.Chart] = [lines, dots]
    if fault_layers:
        rule = alt.Chart(pl.DataFrame({"layer": sorted(set(fault_layers))})).mark_rule(
            color=MUTED, strokeDash=[3, 3], strokeWidth=1.2
        )
        parts.insert(0, rule.encode(x="layer:Q"))
    return Panel(title, render_svg(alt.layer(*parts), f"{title} over decoder layers on every machine"))


def _base(table: pl.DataFrame) -> alt.Chart:
    return alt.Chart(table, width=PANEL_WIDTH, height=PANEL_HEIGHT)


def _colour(field: str, keys: Sequence[SeriesKey]) -> alt.Color:
    scale = alt.Scale(domain=[key.name for key in keys], range=[series_colour(key.index) for key in keys])
    return alt.Color(f"{field}:N", legend=None).scale(scale)


def _dash(field: str, keys: Sequence[SeriesKey]) -> alt.StrokeDash:
    scale = alt.Scale(domain=[key.name for key in keys], range=[series_dash(key.index) for key in keys])
    return alt.StrokeDash(f"{field}:N", legend=None).scale(scale)


def _in_percent(accuracy: pl.DataFrame) -> pl.DataFrame:
    return accuracy.with_columns(pl.col("accuracy", "ci_low", "ci_high") * 100)
