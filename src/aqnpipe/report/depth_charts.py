"""Figures of the diagnosis: metrics over the decoder layers as lines, sigmas as bars with the machines side by side."""

from collections.abc import Sequence

import altair as alt
import polars as pl

from aqnpipe.report import numbers
from aqnpipe.report.charts import (
    PANEL_HEIGHT,
    PANEL_WIDTH,
    Panel,
    SeriesKey,
    base_chart,
    colour_scale,
    dash_scale,
    panel,
)
from aqnpipe.report.svg import MUTED, described
from aqnpipe.report.words import Words

DEPTH_COLUMNS = (
    *("instability", "gain", "kurtosis", "zero_share", "values_at_maximum", "pile_up"),
    *("sensitivity", "sigma"),
)
_BARS_IN_A_SMALL_PANEL = 32
_PIXELS_PER_BAR = 8
_MAX_WIDTH = 900


def diagnosis_panels(
    layers: pl.DataFrame, keys: Sequence[SeriesKey], fault_layers: Sequence[int], words: Words
) -> tuple[list[Panel], list[str]]:
    """Return layer metrics and sigmas by layer for every machine; simulated faults as vertical rules.

    `layers`: the concatenated tables of the machines, with columns machine and sigma. Returns the panels, and the
    metrics that are the same at every layer of every machine, which get no picture, as `name: value`.
    """
    panels, constant = [], []
    for column in DEPTH_COLUMNS:
        title, values = words(f"depth.{column}"), layers[column].drop_nulls().unique()
        if len(values) > 1:
            draw = _line_chart if column != "sigma" else _bar_chart
            told = _told(layers, column, "machine", title, words)
            chart, wide = draw(told, column, keys, fault_layers, words)
            panels.append(panel(title, chart, words("alt.depth", what=title), wide=wide))
        elif len(values) == 1:
            constant.append(f"{title}: {values[0]:.4g}")
    return panels, constant


def sigma_bars(table: pl.DataFrame, keys: Sequence[SeriesKey], title: str, words: Words) -> Panel:
    """Return the sigmas of several strategies as bars over the layers; columns strategy, layer and sigma."""
    told = _told(table, "sigma", "strategy", words("depth.sigma"), words)
    chart, wide = _bars(told, "strategy", keys, words)
    return panel(title, chart, words("alt.depth", what=words("depth.sigma")), wide=wide)


def _line_chart(
    layers: pl.DataFrame, column: str, keys: Sequence[SeriesKey], fault_layers: Sequence[int], words: Words
) -> tuple[alt.TopLevelMixin, bool]:
    x = alt.X("layer:Q").title(words("axis.layer")).axis(grid=False, tickMinStep=1, format="d")
    y = alt.Y(f"{column}:Q").title(words(f"axis.{column}")).scale(zero=False)
    colour = colour_scale("machine", keys)
    base = base_chart(layers)
    lines = base.mark_line(strokeWidth=1.8).encode(x, y, color=colour, strokeDash=dash_scale("machine", keys))
    dots = base.mark_point(filled=True, size=22, opacity=1).encode(x, y, color=colour, description="about:N")
    parts: list[alt.Chart] = [lines, dots]
    if fault_layers:
        rule = alt.Chart(pl.DataFrame({"layer": sorted(set(fault_layers))})).mark_rule(
            color=MUTED, strokeDash=[3, 3], strokeWidth=1.2
        )
        parts.insert(0, rule.encode(x="layer:Q"))
    return alt.layer(*parts), False


def _bar_chart(
    layers: pl.DataFrame, column: str, keys: Sequence[SeriesKey], fault_layers: Sequence[int], words: Words
) -> tuple[alt.TopLevelMixin, bool]:
    return _bars(layers, "machine", keys, words)


def _bars(table: pl.DataFrame, by: str, keys: Sequence[SeriesKey], words: Words) -> tuple[alt.TopLevelMixin, bool]:
    wide = len(table) > _BARS_IN_A_SMALL_PANEL
    width = min(_PIXELS_PER_BAR * len(table) + 60, _MAX_WIDTH) if wide else PANEL_WIDTH
    x = alt.X("layer:O").title(words("axis.layer")).axis(grid=False, labelAngle=0, ticks=False)
    chart = (
        alt.Chart(table, width=width, height=PANEL_HEIGHT)
        .mark_bar()
        .encode(
            x,
            alt.Y("sigma:Q").title(words("axis.sigma")).scale(zero=True),
            xOffset=alt.XOffset(f"{by}:N").sort([key.name for key in keys]),
            color=colour_scale(by, keys),
            description="about:N",
        )
    )
    return chart, wide


def _told(table: pl.DataFrame, column: str, by: str, title: str, words: Words) -> pl.DataFrame:
    texts = [
        described(
            "",
            words("mark.layer", name=str(name).replace("_", " "), layer=layer, what=title, value=numbers.metric(value)),
        )
        for name, layer, value in table.select(by, "layer", column).iter_rows()
    ]
    return table.with_columns(about=pl.Series(texts, dtype=pl.String))
