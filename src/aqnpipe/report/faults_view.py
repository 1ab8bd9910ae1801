"""What simulated faults did: the loss studies, and survival and gradients at the faulty sites of every training run."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import altair as alt
import polars as pl

from aqnpipe.artifacts.loss_studies import LossStudyComparison, LossStudyCondition, LossStudyFile
from aqnpipe.report import charts, numbers
from aqnpipe.report.charts import Panel, SeriesKey
from aqnpipe.report.inputs import ReportData, Run
from aqnpipe.report.svg import MUTED, render_svg
from aqnpipe.report.tables import Figure, PanelGroup, Row, Table
from aqnpipe.report.words import Words


@dataclass(frozen=True)
class LossSection:
    """One loss study: what it shows in a sentence, and its figure with the tables behind it."""

    heading: str
    sentence: str
    figure: Figure


@dataclass(frozen=True)
class FaultSection:
    """All that the report says about simulated faults outside the diagnosis."""

    losses: tuple[LossSection, ...]
    training: Table | None


def fault_section(data: ReportData, words: Words) -> FaultSection | None:
    """Return loss studies and the faults of training runs; None where the study has neither."""
    struck = [run for run in data.runs if run.receipt.faults]
    if not data.loss_studies and not struck:
        return None
    return FaultSection(
        losses=tuple(_loss_section(one, words) for one in data.loss_studies),
        training=training_faults(struck, words) if struck else None,
    )


def training_faults(runs: Sequence[Run], words: Words) -> Table:
    """Survival rate by run, fault and phase, and what of the gradient the fault zeroed."""
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
        for number, name in enumerate(dict.fromkeys(one.condition for one in _with_fault(study)), start=1)
    ]
    return LossSection(
        heading=words("losses.heading", name=study.name, model=study.model),
        sentence=" ".join(_sentences(study, words)),
        figure=Figure(
            caption=words(
                "losses.caption",
                texts=study.num_texts,
                gamma=f"{study.gamma:g}",
                layers=", ".join(map(str, study.faulty_layers)),
            ),
            groups=(PanelGroup(_panels(study, keys, words), legend=keys),),
            tables=(_comparison_table(study, words), _condition_table(study, words)),
        ),
    )


def _with_fault(study: LossStudyFile) -> list[LossStudyCondition]:
    return [one for one in study.conditions if one.magnitude > 0]


def _sentences(study: LossStudyFile, words: Words) -> Iterator[str]:
    """How many claims came out how, what a weaker test would have said, and what is worse than guessing."""
    for family in study.families:
        found = [one.verdict for one in study.comparisons if one.family == family.name]
        counts = {verdict: found.count(verdict) for verdict in ("supported", "refuted", "not_shown", "invalid")}
        parts = words("summary.separator").join(
            words("summary.part", count=count, verdict=words(f"verdict.{verdict}"))
            for verdict, count in counts.items()
            if count
        )
        yield words(f"losses.{family.name}", count=len(found), parts=parts)
    naive = [one for one in study.comparisons if one.p_seed_t is not None and one.p_seed_t < study.alpha]
    unshown = sum(one.verdict == "not_shown" for one in naive)
    if unshown:
        yield words("losses.naive", count=unshown, alpha=f"{study.alpha:g}")
    above = [one for one in study.conditions if one.above_uniform]
    yield words("losses.above" if above else "losses.none_above", count=len(above), uniform=f"{study.uniform:.2f}")


def _panels(study: LossStudyFile, keys: Sequence[SeriesKey], words: Words) -> list[Panel]:
    """Loss over magnitude, a line per condition, a panel per order; ln|V| and the clean loss as rules."""
    conditions = _with_fault(study)
    orders: list[str | None] = [*dict.fromkeys(one.order for one in conditions if one.order)] or [None]
    clean = [one.mean_loss for one in study.conditions if one.condition == "clean"]
    rules = pl.DataFrame({"loss": [study.uniform, *clean]})
    panels = []
    for order in orders:
        rows = pl.DataFrame(
            [
                {"condition": one.condition, "magnitude": one.magnitude, "loss": one.mean_loss}
                for one in conditions
                if one.order in (order, None)
            ]
        )
        x = alt.X("magnitude:Q").title(words("axis.magnitude")).scale(type="log").axis(grid=False)
        y = alt.Y("loss:Q").title(words("axis.loss"))
        base = alt.Chart(rows, width=charts.PANEL_WIDTH, height=charts.PANEL_HEIGHT)
        colour = charts.colour_scale("condition", keys)
        chart = alt.layer(
            alt.Chart(rules).mark_rule(color=MUTED, strokeDash=[3, 3], strokeWidth=1.2).encode(y=y),
            base.mark_line(strokeWidth=1.8).encode(x, y, color=colour, strokeDash=charts.dash_scale("condition", keys)),
            base.mark_point(filled=True, size=22, opacity=1).encode(x, y, color=colour),
        )
        title = words(f"order.{order}") if order else words("losses.panel")
        panels.append(Panel(title, render_svg(chart, words("alt.losses", order=title))))
    return panels


def _comparison_table(study: LossStudyFile, words: Words) -> Table:
    names = ("claim", "verdict", "difference_in_nats", "interval", "p", "p_holm", "p_seed_t")
    return Table(
        "loss-comparisons",
        words("losses.comparisons"),
        tuple(words(f"column.{name}") for name in names),
        tuple(_comparison_row(one, words) for one in study.comparisons),
        2,
        words("losses.note"),
    )


def _comparison_row(one: LossStudyComparison, words: Words) -> Row:
    return Row(
        (
            one.claim_zh if words.language == "zh" else one.claim,
            words(f"verdict.{one.verdict}"),
            _nats(one.difference, sign=True),
            words("span", low=_nats(one.ci_low, sign=True), high=_nats(one.ci_high, sign=True)),
            numbers.p_value(one.p_value),
            numbers.p_value(one.p_holm),
            numbers.p_value(one.p_seed_t),
        ),
        alert=one.verdict == "invalid",
    )


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
                    one.condition,
                    f"{one.magnitude:g}" if one.magnitude else numbers.MISSING,
                    words(f"order.{one.order}") if one.order else numbers.MISSING,
                    ", ".join(map(str, one.noised_layers)) or numbers.MISSING,
                    _nats(one.mean_loss),
                    numbers.MISSING if one.seed_sd is None else _nats(one.seed_sd),
                    numbers.percent(one.survival_rate),
                    numbers.percent(one.gradient_zeroed_share),
                    numbers.percent(one.gradient_zeroed_norm_share),
                    words("published.worse" if one.above_uniform else "published.better"),
                ),
                alert=one.above_uniform,
            )
            for one in study.conditions
        ),
        4,
    )


def _nats(value: float, sign: bool = False) -> str:
    return f"{round(value, 4) + 0.0:{'+' if sign else ''}.4f}".replace("-", "−")
