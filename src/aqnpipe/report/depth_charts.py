"""Figures of the diagnosis: metrics over the decoder layers as lines, sigmas as bars with the machines side by side."""

from collections.abc import Sequence

import altair as alt
import polars as pl

from aqnpipe.report import charts, numbers
from aqnpipe.report.charts import Panel, SeriesKey
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
            told = _told(layers, column, "machine", title, words)
            if column == "sigma":
                panels.append(_bars(told, "machine", keys, title, words))
            else:
                chart = _lines(told, column, keys, fault_layers, words)
                panels.append(charts.panel(title, chart, words("alt.depth", what=title)))
        elif len(values) == 1:
            constant.append(f"{title}: {values[0]:.4g}")
    return panels, constant


def sigma_bars(table: pl.DataFrame, keys: Sequence[SeriesKey], title: str, words: Words) -> Panel:
    """Return the sigmas of several strategies as bars over the layers; columns strategy, layer and sigma."""
    return _bars(_told(table, "sigma", "strategy", words("depth.sigma"), words), "strategy", keys, title, words)


def _lines(
    layers: pl.DataFrame, column: str, keys: Sequence[SeriesKey], fault_layers: Sequence[int], words: Words
) -> alt.TopLevelMixin:
    x = alt.X("layer:Q").title(words("axis.layer")).axis(grid=False, tickMinStep=1, format="d")
    y = alt.Y(f"{column}:Q").title(words(f"axis.{column}")).scale(zero=False)
    colour = charts.colour_scale("machine", keys)
    base = charts.base_chart(layers)
    lines = base.mark_line(strokeWidth=1.8).encode(x, y, color=colour, strokeDash=charts.dash_scale("machine", keys))
    dots = base.mark_point(filled=True, size=22, opacity=1).encode(x, y, color=colour, description="about:N")
    parts: list[alt.Chart] = [lines, dots]
    if fault_layers:
        rule = alt.Chart(pl.DataFrame({"layer": sorted(set(fault_layers))})).mark_rule(
            color=MUTED, strokeDash=[3, 3], strokeWidth=1.2
        )
        parts.insert(0, rule.encode(x="layer:Q"))
    return alt.layer(*parts)


def _bars(table: pl.DataFrame, by: str, keys: Sequence[SeriesKey], title: str, words: Words) -> Panel:
    wide = len(table) > _BARS_IN_A_SMALL_PANEL
    width = min(_PIXELS_PER_BAR * len(table) + 60, _MAX_WIDTH) if wide else charts.PANEL_WIDTH
    x = alt.X("layer:O").title(words("axis.layer")).axis(grid=False, labelAngle=0, ticks=False)
    chart = (
        alt.Chart(table, width=width, height=charts.PANEL_HEIGHT)
        .mark_bar()
        .encode(
            x,
            alt.Y("sigma:Q").title(words("axis.sigma")).scale(zero=True),
            xOffset=alt.XOffset(f"{by}:N").sort([key.name for key in keys]),
            color=charts.colour_scale(by, keys),
            description="about:N",
        )
    )
    return charts.panel(title, chart, words("alt.depth", what=words("depth.sigma")), wide=wide)


def _told(table: pl.DataFrame, column: str, by: str, title: str, words: Words) -> pl.DataFrame:
    texts = [
        described(
            "",
            words("mark.layer", name=str(name).replace("_", " "), layer=layer, what=title, value=numbers.metric(value)),
        )
        for name, layer, value in table.select(by, "layer", column).iter_rows()
    ]
    return table.with_columns(about=pl.Series(texts, dtype=pl.String))
