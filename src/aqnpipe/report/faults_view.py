"""Effects of simulated faults: the loss studies, and survival and gradients at the faulty sites of training runs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import altair as alt
import polars as pl

from aqnpipe.artifacts.loss_studies import LossStudyComparison, LossStudyCondition, LossStudyFile
from aqnpipe.report import charts, numbers
from aqnpipe.report.charts import Panel, SeriesKey
from aqnpipe.report.inputs import ReportData, Run
from aqnpipe.report.svg import MUTED, described
from aqnpipe.report.tables import Figure, PanelGroup, Row, Table
from aqnpipe.report.verdicts import counted_verdicts
from aqnpipe.report.words import Words


@dataclass(frozen=True)
class LossSection:
    """One loss study: a summary of its claims, and its figure with the tables of its numbers."""

    heading: str
    sentence: str
    figure: Figure


@dataclass(frozen=True)
class FaultSection:
    """The section on simulated faults, apart from the diagnosis."""

    losses: tuple[LossSection, ...]
    training: Table | None


def fault_section(data: ReportData, words: Words) -> FaultSection | None:
    """Return loss studies and the faults of training runs; None if the study has neither."""
    faulty = [run for run in data.runs if run.receipt.faults]
    if not data.loss_studies and not faulty:
        return None
    return FaultSection(
        losses=tuple(_loss_section(study, words) for study in data.loss_studies),
        training=training_faults(faulty, words) if faulty else None,
    )


def training_faults(runs: Sequence[Run], words: Words) -> Table:
    """Return the survival rate by run, fault and phase, and the share of the gradient that the fault zeroed."""
    names = ("run", "fault", "phase", "calls", "survival", "gradient_share", "gradient_norm")
    return Table(
        "training-faults",
        words("faults.training"),
        tuple(words(f"column.{name}") for name in names),
        tuple(_training_rows(runs, words)),
        3,
    )


def _training_rows(runs: Sequence[Run], words: Words) -> Iterator[Row]:
    for run in runs:
        name = words("run.name", arm=run.arm, seed=run.seed)
        faults = run.receipt.faults
        for cell in run.receipt.fault_cells:
            fault = faults[cell.fault]
            place = f"{fault.type} {fault.magnitude:g}, {fault.site} {fault.layer}"
            cells = (name, place, cell.phase, numbers.count(cell.calls), numbers.percent(cell.survival_rate))
            yield Row((*cells, numbers.MISSING, numbers.MISSING))
        for flow in run.receipt.gradient_flows:
            fault = faults[flow.fault]
            place = f"{fault.type} {fault.magnitude:g}, {fault.site} {fault.layer}"
            shares = (numbers.percent(flow.zeroed_share), numbers.percent(flow.zeroed_norm_share))
            yield Row((name, place, "backward", numbers.count(flow.calls), numbers.MISSING, *shares))


def _loss_section(study: LossStudyFile, words: Words) -> LossSection:
    keys = [
        SeriesKey(name, number)
        for number, name in enumerate(dict.fromkeys(cell.condition for cell in _with_fault(study)), start=1)
    ]
    return LossSection(
        heading=words("losses.heading", name=study.name, model=study.model),
        sentence=words.paragraph(list(_sentences(study, words))),
        figure=Figure(
            caption=words(
                "losses.caption",
                texts=study.num_texts,
                gamma=study.gamma,
                layers=", ".join(map(str, study.faulty_layers)),
            ),
            groups=(PanelGroup(_panels(study, keys, words), legend=keys),),
            tables=(_comparison_table(study, words), _sentence_table(study, words), _condition_table(study, words)),
        ),
    )


def _with_fault(study: LossStudyFile) -> list[LossStudyCondition]:
    return [cell for cell in study.conditions if cell.magnitude > 0]


def _sentences(study: LossStudyFile, words: Words) -> Iterator[str]:
    """Yield the counts of verdicts, the findings of a weaker test, and the conditions worse than guessing."""
    for family in study.families:
        verdicts = [comparison.verdict for comparison in study.comparisons if comparison.family == family.name]
        yield words(f"losses.tested.{family.name}", count=len(verdicts), parts=counted_verdicts(verdicts, words))
    significant = [
        comparison
        for comparison in study.comparisons
        if comparison.p_seed_t is not None and comparison.p_seed_t < study.alpha
    ]
    not_shown = sum(comparison.verdict == "not_shown" for comparison in significant)
    if not_shown:
        yield words("losses.naive", count=not_shown, alpha=study.alpha)
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
        rows = pl.DataFrame(
            [
                {"condition": cell.condition, "magnitude": cell.magnitude, "loss": cell.mean_loss}
                for cell in conditions
                if cell.order in (order, None)
            ]
        )
        x = alt.X("magnitude:Q").title(words("axis.magnitude")).scale(type="log").axis(grid=False)
        y = alt.Y("loss:Q").title(words("axis.loss"))
        colour = charts.colour_scale("condition", keys)
        told = rows.with_columns(about=_told(rows, words))
        base = alt.Chart(told, width=charts.PANEL_WIDTH, height=charts.PANEL_HEIGHT)
        chart = alt.layer(
            alt.Chart(rules).mark_rule(color=MUTED, strokeDash=[3, 3], strokeWidth=1.2).encode(y=y),
            base.mark_line(strokeWidth=1.8).encode(x, y, color=colour, strokeDash=charts.dash_scale("condition", keys)),
            base.mark_point(filled=True, size=22, opacity=1).encode(x, y, color=colour, description="about:N"),
        )
        title = words(f"order.{order}") if order else words("losses.panel")
        panels.append(charts.panel(title, chart, words("alt.losses", order=title)))
    return panels


def _told(rows: pl.DataFrame, words: Words) -> pl.Series:
    texts = [
        described("", words("mark.loss", condition=condition, magnitude=f"{magnitude:g}", loss=f"{loss:.4f}"))
        for condition, magnitude, loss in rows.select("condition", "magnitude", "loss").iter_rows()
    ]
    return pl.Series(texts, dtype=pl.String)


def _comparison_table(study: LossStudyFile, words: Words) -> Table:
    names = ("claim", "verdict", "difference_in_nats", "interval", "p", "p_holm", "p_seed_t")
    return Table(
        "loss-comparisons",
        words("losses.comparisons"),
        tuple(words(f"column.{name}") for name in names),
        tuple(_comparison_row(comparison, words) for comparison in study.comparisons),
        2,
        words("losses.note"),
    )


def _comparison_row(comparison: LossStudyComparison, words: Words) -> Row:
    return Row(
        (
            words.of(comparison.claim),
            words(f"verdict.{comparison.verdict}"),
            numbers.signed(comparison.difference, 4),
            words("span", low=numbers.signed(comparison.ci_low, 4), high=numbers.signed(comparison.ci_high, 4)),
            numbers.p_value(comparison.p_value),
            numbers.p_value(comparison.p_holm),
            numbers.p_value(comparison.p_seed_t),
        ),
        alert=comparison.verdict == "invalid",
    )


def _sentence_table(study: LossStudyFile, words: Words) -> Table:
    rows = tuple(
        Row((words.of(comparison.claim), words.all_of(comparison.statements))) for comparison in study.comparisons
    )
    headers = (words("column.claim"), words("column.in_words"))
    return Table("loss-sentences", words("losses.sentences"), headers, rows, 2)


def _condition_table(study: LossStudyFile, words: Words) -> Table:
    names = (
        "condition", "magnitude", "order", "layers", "loss", "loss_std", "survival", "gradient_share", "gradient_norm",
        "against_uniform",
    )  # fmt: skip
    return Table(
        "loss-conditions",
        words("losses.conditions"),
        tuple(words(f"column.{name}") for name in names),
        tuple(
            Row(
                (
                    cell.condition,
                    f"{cell.magnitude:g}" if cell.magnitude else numbers.MISSING,
                    words(f"order.{cell.order}") if cell.order else numbers.MISSING,
                    ", ".join(map(str, cell.noised_layers)) or numbers.MISSING,
                    f"{cell.mean_loss:.4f}",
                    numbers.MISSING if cell.seed_sd is None else f"{cell.seed_sd:.4f}",
                    numbers.percent(cell.survival_rate),
                    numbers.percent(cell.gradient_zeroed_share),
                    numbers.percent(cell.gradient_zeroed_norm_share),
                    words("published.worse" if cell.above_uniform else "published.better"),
                ),
                alert=cell.above_uniform,
            )
            for cell in study.conditions
        ),
        4,
    )
