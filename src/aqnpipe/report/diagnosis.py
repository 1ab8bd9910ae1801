"""Faulty machines: their diagnosis against the simulated faults, sigmas over the layers, and what the faults cost.

What faults cost is in the loss studies, and in survival and gradients at the faulty sites of training runs.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import altair as alt
import polars as pl

from aqnpipe.artifacts.diagnoses import LocatedFault, Verdict
from aqnpipe.artifacts.loss_studies import LossStudyCondition, LossStudyFile
from aqnpipe.config.arm import Arm
from aqnpipe.report import charts, numbers
from aqnpipe.report.charts import Panel, SeriesKey
from aqnpipe.report.claims import counted_verdicts
from aqnpipe.report.inputs import Diagnosis, ReportData, Run
from aqnpipe.report.tables import Figure, PanelGroup, Part, Table, table
from aqnpipe.report.words import Words

Outcome = Literal["right", "false_alarm", "missed", "wrong_layer", "wrong_type", "abstained"]

_SHARED_NAMES = {"noise": "noise_or_spike", "spike": "noise_or_spike"}
"""Fault types that the published scans cannot distinguish, and their common name."""


def verdict_tables(diagnoses: Sequence[Diagnosis], words: Words) -> tuple[Table, Table]:
    """Return two tables with a row per machine: fault simulated, fault found, whether that is right; and the reason."""
    rows = [
        {
            "machine": diagnosis.machine,
            "fault": "; ".join(map(_simulated_fault, diagnosis.verdict.simulated_faults)) or words("fault.none"),
            "found": _found_faults(diagnosis.verdict, words),
            "right": outcome(diagnosis.verdict),
            "forwards": diagnosis.verdict.forward_equivalents,
            "reason": diagnosis.verdict.reason,
        }
        for diagnosis in diagnoses
    ]
    return table("diagnosis-verdicts", rows, words), table("diagnosis-reasons", rows, words)


def device_sentences(diagnoses: Sequence[Diagnosis], runs: Sequence[Run], words: Words) -> list[str]:
    """Return which machines were diagnosed on a device of their own, and on what arms were trained; else nothing."""
    named = [each for each in diagnoses if each.device]
    found = [words("diagnosis.on_device", machine=each.machine, device=each.device) for each in named]
    trained = sorted({run.record.device for run in runs})
    return [*found, words("diagnosis.trained_on", device="; ".join(trained))] if found and trained else found


def outcome(verdict: Verdict) -> Outcome:
    """Compare a verdict with the faults that were simulated."""
    if verdict.verdict == "abstain":
        return "abstained"
    if not verdict.simulated_faults:
        return "right" if verdict.verdict == "healthy" else "false_alarm"
    if verdict.verdict == "healthy":
        return "missed"
    in_layer = [fault for fault in verdict.simulated_faults if fault.get("layer") == verdict.layer]
    if not in_layer:
        return "wrong_layer"
    kinds = {str(fault.get("type")) for fault in in_layer}
    return "right" if verdict.type in kinds | {_SHARED_NAMES.get(kind) for kind in kinds} else "wrong_type"


def _simulated_fault(fault: Mapping[str, object]) -> str:
    details = ", ".join(f"{key} {fault[key]}" for key in ("layer", "site", "magnitude", "sparsity") if key in fault)
    return f"{_spaced(str(fault.get('type', '')))} ({details})"


def _found_faults(verdict: Verdict, words: Words) -> str:
    if verdict.faults:
        return "; ".join(_found_fault(fault, words) for fault in verdict.faults)
    if verdict.layer is None:
        return words(f"found.verdict.{verdict.verdict}")
    return words("found.fault_in_layer", layer=verdict.layer, type=_spaced(verdict.type))


def _found_fault(fault: LocatedFault, words: Words) -> str:
    found = _spaced(fault.type)
    if fault.scope == "device":
        found = words("found.fault_of_device", type=found)
    elif fault.layer is not None:
        found = words("found.fault_in_layer", layer=fault.layer, type=found)
    if not fault.num_faulty_channels:
        return found
    return found + words("found.where", site=_spaced(fault.site), channels=fault.num_faulty_channels)


def _spaced(name: str | None) -> str:
    return numbers.formatted(name, "spaced")


DEPTH_COLUMNS = ("instability", "gain", "kurtosis", "sensitivity", "sigma")
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
    rules = [charts.dashed_rules(pl.DataFrame({"layer": sorted(set(fault_layers))})).encode(x="layer:Q")]
    for column in DEPTH_COLUMNS:
        title, values = words(f"depth.{column}"), layers[column].drop_nulls().unique()
        if len(values) > 1:
            told = _told(layers, column, "machine", title, words)
            x = charts.number_axis("layer", words("axis.layer"))
            y = alt.Y(f"{column}:Q").title(words(f"axis.{column}")).scale(zero=False)
            label, marked = words("alt.depth", what=title), rules if fault_layers else ()
            panels.append(
                _bars(told, "machine", keys, title, words)
                if column == "sigma"
                else charts.line_panel(title, label, told, x, y, "machine", keys, marked)
            )
        elif len(values) == 1:
            constant.append(f"{title}: {values[0]:.4g}")
    return panels, constant


def _bars(rows: pl.DataFrame, by: str, keys: Sequence[SeriesKey], title: str, words: Words) -> Panel:
    wide = len(rows) > _BARS_IN_A_SMALL_PANEL
    width = min(_PIXELS_PER_BAR * len(rows) + 60, _MAX_WIDTH) if wide else charts.PANEL_WIDTH
    x = alt.X("layer:O").title(words("axis.layer")).axis(grid=False, labelAngle=0, ticks=False)
    chart = (
        alt.Chart(rows, width=width, height=charts.PANEL_HEIGHT)
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


def _told(rows: pl.DataFrame, column: str, by: str, title: str, words: Words) -> pl.DataFrame:
    named = rows.select("layer", name=by, value=column)
    return rows.with_columns(charts.told(named, "mark.layer", words, series="", what=title)["about"])


def strategies(diagnoses: Sequence[Diagnosis], words: Words) -> tuple[list[PanelGroup], list[Table]]:
    """Return the sigma of every layer by every strategy: a panel per machine, and a table with multiples and reasons.

    Nothing where all arms use the published rule.
    """
    rows = [
        {"machine": one.machine, "strategy": name, "layer": layer, "sigma": sigma}
        | {"multiplier": sigma / file.aqn.base_sigma, "why": file.reasons.get(layer)}
        for one in diagnoses
        for name, file in one.strategies.items()
        for layer, sigma in sorted(file.aqn.layer_sigmas.items())
        if len(one.strategies) > 1
    ]
    if not rows:
        return [], []
    keys, told, panels = charts.keys_of(str(row["strategy"]) for row in rows), words("depth.sigma"), []
    for (machine,), part in pl.DataFrame(rows).group_by("machine", maintain_order=True):
        shown = _told(part.select("strategy", "layer", "sigma"), "sigma", "strategy", told, words)
        panels.append(_bars(shown, "strategy", keys, words("diagnosis.strategies_of", machine=machine), words))
    return [PanelGroup(panels, legend=keys)], [table("sigma-strategies", rows, words)]


def guidance_sentences(arms: Mapping[str, Arm], diagnoses: Sequence[Diagnosis], words: Words) -> list[str]:
    """Return a sentence per arm with sigmas from one of `diagnoses` of a model: what the diagnosis changed.

    Without a diagnosis every layer would have the base sigma. Where the machine has simulated faults and a machine
    without them was diagnosed too, the sigmas of both are compared; otherwise nothing can be said about the faults.
    """
    return [sentence for name, arm in arms.items() for sentence in _sentences(name, arm, diagnoses, words)]


def _sentences(name: str, arm: Arm, diagnoses: Sequence[Diagnosis], words: Words) -> Iterator[str]:
    if arm.aqn is None:
        return
    strategy, machine = arm.aqn.layer_sigmas_strategy, arm.aqn.layer_sigmas_from
    own = next((d for d in diagnoses if (d.model, d.machine) == (arm.model, machine)), None)
    if own is None or strategy not in own.strategies:
        return
    sigmas, rule = own.strategies[strategy].aqn, strategy.replace("_", " ")
    if set(sigmas.layer_sigmas.values()) == {sigmas.base_sigma}:
        yield words("guidance.uniform", arm=name, machine=machine, strategy=rule)
        return
    twin = next((d for d in diagnoses if _is_healthy_twin(d, own) and strategy in d.strategies), None)
    if not own.verdict.simulated_faults or twin is None:
        return
    healthy, without = twin.machine, twin.strategies[strategy].aqn.layer_sigmas
    changed = [str(layer) for layer, sigma in sorted(sigmas.layer_sigmas.items()) if sigma != without.get(layer)]
    layers, number = ", ".join(changed), len(sigmas.layer_sigmas)
    yield (
        words(
            "guidance.changed",
            arm=name,
            machine=machine,
            strategy=rule,
            healthy=healthy,
            layers=layers,
            num_layers=number,
        )
        if changed
        else words("guidance.same_as_healthy", arm=name, machine=machine, strategy=rule, healthy=healthy)
    )


def _is_healthy_twin(diagnosis: Diagnosis, faulty: Diagnosis) -> bool:
    """Return whether a diagnosis is of the same model on the same device, without simulated faults."""
    is_same = (diagnosis.model, diagnosis.device) == (faulty.model, faulty.device)
    return is_same and not diagnosis.verdict.simulated_faults


def fault_parts(data: ReportData, words: Words) -> tuple[Part, ...]:
    """Return the section on simulated faults: loss studies and the faults of training runs; empty without either."""
    parts = []
    for number, study in enumerate(data.loss_studies, start=1):
        parts += [
            Part("heading", words("losses.heading", name=study.name, model=study.model)),
            Part("text", words.paragraph(list(_loss_sentences(study, words)))),
            Part("figure", _loss_figure(study, words), stem=f"loss-{number}"),
        ]
    if faulty := [run for run in data.runs if run.receipt.faults]:
        survival = table("training-faults", _training_rows(faulty, words), words)
        parts.append(Part("folded", (Part("table", survival),), survival.caption))
    return tuple(parts)


def _training_rows(runs: Sequence[Run], words: Words) -> Iterator[dict[str, Any]]:
    """Yield the survival rate by run, fault and phase, and the share of the gradient that the fault zeroed."""
    shares = ("survival_rate", "zeroed_share", "zeroed_norm_share")
    for run in runs:
        name = words("run.name", arm=run.arm, seed=run.seed)
        for seen in (*run.receipt.fault_cells, *run.receipt.gradient_flows):
            is_backward, fault = seen.phase == "backward", run.receipt.faults[seen.fault]
            place = f"{fault.type} {fault.magnitude:g}, {fault.site} {fault.layer}"
            found = {share: getattr(seen, share) for share in (shares[1:] if is_backward else shares[:1])}
            row = {"run": name, "fault": place, "phase": seen.phase, "calls": seen.calls}
            yield row | dict.fromkeys(shares) | found


def _loss_figure(study: LossStudyFile, words: Words) -> Figure:
    keys, layers = charts.keys_of(cell.condition for cell in _with_fault(study)), map(str, study.faulty_layers)
    return Figure(
        caption=words("losses.caption", texts=study.num_texts, gamma=study.gamma, layers=", ".join(layers)),
        groups=(PanelGroup(_loss_panels(study, keys, words), legend=keys),),
        tables=_loss_tables(study, words),
    )


def _with_fault(study: LossStudyFile) -> list[LossStudyCondition]:
    return [cell for cell in study.conditions if cell.magnitude > 0]


def _loss_sentences(study: LossStudyFile, words: Words) -> Iterator[str]:
    """Yield the counts of verdicts, and the conditions worse than guessing."""
    for family in study.families:
        verdicts = [comparison.verdict for comparison in study.comparisons if comparison.family == family.name]
        yield words(f"losses.tested.{family.name}", count=len(verdicts), parts=counted_verdicts(verdicts, words))
    above = sum(cell.above_uniform for cell in study.conditions)
    if above:
        yield words("losses.above", count=above, uniform=study.uniform)
    else:
        yield words("losses.none_above", uniform=study.uniform)


def _loss_panels(study: LossStudyFile, keys: Sequence[SeriesKey], words: Words) -> list[Panel]:
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
        title, above = words(f"order.{order}") if order else words("losses.panel"), charts.dashed_rules(rules)
        label = words("alt.losses", order=title)
        panels.append(charts.line_panel(title, label, told, x, y, "condition", keys, [above.encode(y=y)]))
    return panels


def _loss_tables(study: LossStudyFile, words: Words) -> tuple[Table, ...]:
    """Return the comparisons, the same in words, and the conditions."""
    claims = [vars(one) | {"claim": words.of(one.claim)} for one in study.comparisons]
    compared = (row | {"alert": row["verdict"] == "invalid"} for row in claims)
    sentences = (row | {"in_words": words.all_of(row["statements"])} for row in claims)
    conditions = (
        vars(cell) | {"magnitude": cell.magnitude or None, "alert": cell.above_uniform} for cell in study.conditions
    )
    found = {"loss-comparisons": compared, "loss-sentences": sentences, "loss-conditions": conditions}
    return tuple(table(name, rows, words) for name, rows in found.items())
