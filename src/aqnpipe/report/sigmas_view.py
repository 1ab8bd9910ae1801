"""Sigmas that the arms derive from a diagnosis: a line per strategy over the layers, and the reasons."""

from collections.abc import Sequence

import altair as alt
import polars as pl

from aqnpipe.report import numbers
from aqnpipe.report.charts import PANEL_HEIGHT, PANEL_WIDTH, Panel, SeriesKey, colour_scale, dash_scale
from aqnpipe.report.inputs import Diagnosis
from aqnpipe.report.svg import render_svg
from aqnpipe.report.tables import PanelGroup, Row, Table
from aqnpipe.report.words import Words


def strategy_group(diagnoses: Sequence[Diagnosis], words: Words) -> PanelGroup | None:
    """Return a panel per machine with a line per strategy over layers; None if all arms use the published rule."""
    compared = [diagnosis for diagnosis in diagnoses if len(diagnosis.strategies) > 1]
    if not compared:
        return None
    names = list(dict.fromkeys(name for diagnosis in compared for name in diagnosis.strategies))
    keys = [SeriesKey(name, number) for number, name in enumerate(names, start=1)]
    return PanelGroup([_panel(diagnosis, keys, words) for diagnosis in compared], legend=keys)


def strategy_table(diagnoses: Sequence[Diagnosis], words: Words) -> Table | None:
    """Return sigma, its multiple of the base and the reason by strategy and layer; None as in `strategy_group`."""
    rows = tuple(
        Row(
            (
                diagnosis.machine,
                strategy.replace("_", " "),
                str(layer),
                numbers.scale(sigma),
                f"{sigma / file.aqn.base_sigma:.3g}",
                file.reasons.get(layer, numbers.MISSING),
            )
        )
        for diagnosis in diagnoses
        if len(diagnosis.strategies) > 1
        for strategy, file in diagnosis.strategies.items()
        for layer, sigma in sorted(file.aqn.layer_sigmas.items())
    )
    names = ("machine", "strategy", "layer", "sigma", "multiplier", "why")
    headers = tuple(words(f"column.{name}") for name in names)
    return Table("sigma-strategies", words("diagnosis.strategies"), headers, rows, 2) if rows else None


def _panel(diagnosis: Diagnosis, keys: Sequence[SeriesKey], words: Words) -> Panel:
    table = pl.DataFrame(
        [
            {"strategy": strategy, "layer": layer, "sigma": sigma}
            for strategy, file in diagnosis.strategies.items()
            for layer, sigma in sorted(file.aqn.layer_sigmas.items())
        ]
    )
    base = alt.Chart(table, width=PANEL_WIDTH, height=PANEL_HEIGHT)
    x = alt.X("layer:Q").title(words("axis.layer")).axis(grid=False, tickMinStep=1, format="d")
    y = alt.Y("sigma:Q").title(words("axis.sigma"))
    colour = colour_scale("strategy", keys)
    chart = alt.layer(
        base.mark_line(strokeWidth=1.8).encode(x, y, color=colour, strokeDash=dash_scale("strategy", keys)),
        base.mark_point(filled=True, size=22, opacity=1).encode(x, y, color=colour),
    )
    title = words("diagnosis.strategies_of", machine=diagnosis.machine)
    return Panel(title, render_svg(chart, words("alt.depth", what=words("depth.sigma"))))
