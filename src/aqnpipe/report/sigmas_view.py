"""Sigmas that the arms derive from a diagnosis: bars over the layers, a colour per strategy, and the reasons."""

from collections.abc import Sequence

import polars as pl

from aqnpipe.report import numbers
from aqnpipe.report.charts import Panel, SeriesKey
from aqnpipe.report.depth_charts import sigma_bars
from aqnpipe.report.inputs import Diagnosis
from aqnpipe.report.tables import PanelGroup, Row, Table
from aqnpipe.report.words import Words


def strategy_group(diagnoses: Sequence[Diagnosis], words: Words) -> PanelGroup | None:
    """Return a panel per machine with a bar per strategy and layer; None if all arms use the published rule."""
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
    return sigma_bars(table, keys, words("diagnosis.strategies_of", machine=diagnosis.machine), words)
