"""Effects of simulated faults: the loss studies, and survival and gradients at the faulty sites of training runs."""

from collections.abc import Iterator, Sequence
from typing import Any

import altair as alt
import polars as pl

from aqnpipe.artifacts.loss_studies import LossStudyCondition, LossStudyFile
from aqnpipe.config.noise import Fault
from aqnpipe.report import charts
from aqnpipe.report.charts import Panel, SeriesKey
from aqnpipe.report.claims import counted_verdicts
from aqnpipe.report.inputs import ReportData, Run
from aqnpipe.report.tables import Figure, PanelGroup, Part, Table, table
from aqnpipe.report.words import Words


def fault_parts(data: ReportData, words: Words) -> tuple[Part, ...]:
    """Return the section on simulated faults: loss studies and the faults of training runs; empty without either."""
    parts = []
    for number, study in enumerate(data.loss_studies, start=1):
        parts += [
            Part("heading", words("losses.heading", name=study.name, model=study.model)),
            Part("text", words.paragraph(list(_sentences(study, words)))),
            Part("figure", _figure(study, words), stem=f"loss-{number}"),
        ]
    if faulty := [run for run in data.runs if run.receipt.faults]:
        survival = training_faults(faulty, words)
        parts.append(Part("folded", (Part("table", survival),), survival.caption))
    return tuple(parts)


def training_faults(runs: Sequence[Run], words: Words) -> Table:
    """Return the survival rate by run, fault and phase, and the share of the gradient that the fault zeroed."""
    return table("training-faults", _training_rows(runs, words), words)


def _training_rows(runs: Sequence[Run], words: Words) -> Iterator[dict[str, Any]]:
    nothing = dict.fromkeys(("survival_rate", "zeroed_share", "zeroed_norm_share"))
    for run in runs:
        name, faults = words("run.name", arm=run.arm, seed=run.seed), run.receipt.faults
        for cell in run.receipt.fault_cells:
            row = {"run": name, "fault": _place(faults[cell.fault]), "phase": cell.phase, "calls": cell.calls}
            yield nothing | row | {"survival_rate": cell.survival_rate}
        for flow in run.receipt.gradient_flows:
            row = {"run": name, "fault": _place(faults[flow.fault]), "phase": "backward", "calls": flow.calls}
            yield nothing | row | {"zeroed_share": flow.zeroed_share, "zeroed_norm_share": flow.zeroed_norm_share}


def _place(fault: Fault) -> str:
    return f"{fault.type} {fault.magnitude:g}, {fault.site} {fault.layer}"


def _figure(study: LossStudyFile, words: Words) -> Figure:
    keys = [
        SeriesKey(name, number)
        for number, name in enumerate(dict.fromkeys(cell.condition for cell in _with_fault(study)), start=1)
    ]
    layers = ", ".join(map(str, study.faulty_layers))
    return Figure(
        caption=words("losses.caption", texts=study.num_texts, gamma=study.gamma, layers=layers),
        groups=(PanelGroup(_panels(study, keys, words), legend=keys),),
        tables=_tables(study, words),
    )


def _with_fault(study: LossStudyFile) -> list[LossStudyCondition]:
    return [cell for cell in study.conditions if cell.magnitude > 0]


def _sentences(study: LossStudyFile, words: Words) -> Iterator[str]:
    """Yield the counts of verdicts, and the conditions worse than guessing."""
    for family in study.families:
        verdicts = [comparison.verdict for comparison in study.comparisons if comparison.family == family.name]
        yield words(f"losses.tested.{family.name}", count=len(verdicts), parts=counted_verdicts(verdicts, words))
    above = sum(cell.above_uniform for cell in study.conditions)
    if above:
        yield words("losses.above", count=above, uniform=study.uniform)
    else:
        yield words("losses.none_above", uniform=study.uniform)


def _panels(study: LossStudyFile, keys: Sequence[SeriesKey], words: Words) -> list[Panel]:
    """Return loss over magnitude, a line per condition, a panel per order; ln|V| and the clean loss as rules."""
    conditions = _with_fault(study)
    orders: list[str | None] = [*dict.fromkeys(cell.order for cell in conditions if cell.order)] or [None]
    clean = [cell.mean_loss for cell in study.conditions if cell.condition == "clean"]
    rules = pl.DataFrame({"loss": [study.uniform, *clean]})
    panels = []
    for order in orders:
        shown = [cell for cell in conditions if cell.order in (order, None)]
        rows = pl.DataFrame([(cell.condition, cell.magnitude, cell.mean_loss) for cell in shown], orient="row")
        rows.columns = ["condition", "magnitude", "loss"]
        x = alt.X("magnitude:Q").title(words("axis.magnitude")).scale(type="log").axis(grid=False)
        y = alt.Y("loss:Q").title(words("axis.loss"))
        told = charts.told(rows, "mark.loss", words, series="")
        chart = alt.layer(
            charts.dashed_rules(rules).encode(y=y), *charts.lines_with_dots(told, x, y, "condition", keys)
        )
        title = words(f"order.{order}") if order else words("losses.panel")
        panels.append(charts.panel(title, chart, words("alt.losses", order=title)))
    return panels


def _tables(study: LossStudyFile, words: Words) -> tuple[Table, ...]:
    """Return the comparisons, the same in words, and the conditions."""
    claims = [vars(one) | {"claim": words.of(one.claim)} for one in study.comparisons]
    compared = (row | {"alert": row["verdict"] == "invalid"} for row in claims)
    sentences = (row | {"in_words": words.all_of(row["statements"])} for row in claims)
    conditions = (
        vars(cell) | {"magnitude": cell.magnitude or None, "alert": cell.above_uniform} for cell in study.conditions
    )
    found = {"loss-comparisons": compared, "loss-sentences": sentences, "loss-conditions": conditions}
    return tuple(table(name, rows, words) for name, rows in found.items())
