"""The report stage: one self-contained HTML page from the artifacts of a study."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl
from jinja2 import Environment, PackageLoader, StrictUndefined

from aqnpipe.artifacts import write_text
from aqnpipe.config.analysis import PRETRAINED
from aqnpipe.config.study import Study
from aqnpipe.report import charts, numbers, provenance_view, receipts, svg, tables, verdicts
from aqnpipe.report.charts import SeriesKey
from aqnpipe.report.inputs import (
    Diagnosis,
    DiagnosisInput,
    EvaluationReceiptInput,
    ReportData,
    ReportInputs,
    RunInput,
    read_inputs,
)
from aqnpipe.report.tables import Figure, Table

__all__ = ["DiagnosisInput", "EvaluationReceiptInput", "ReportInputs", "RunInput", "build_report", "render_report"]


@dataclass(frozen=True)
class ModelSection:
    """The figures of one model role."""

    model: str
    source: str
    accuracy: Figure
    robustness: Figure
    training: Figure | None
    diagnosis: Figure | None
    diagnosis_verdicts: Table | None


def build_report(study: Study, inputs: ReportInputs, output: Path) -> None:
    """Read all artifacts and write the report; the same artifacts give the same bytes. DataError for bad artifacts."""
    write_text(output, render_report(study, read_inputs(inputs)))


def render_report(study: Study, data: ReportData) -> str:
    """Return the page as HTML. All text is escaped by the template; only the SVGs of `svg.py` are markup."""
    environment = Environment(
        loader=PackageLoader("aqnpipe.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    level = 1 - study.config.statistics.alpha
    return environment.get_template("report.html.jinja").render(
        study=study.config,
        arms=study.arms,
        level=f"{100 * level:.3g}\u00a0%",
        summary=verdicts.summary(data.claims),
        limits=verdicts.limits(study, data.claims, data.comparisons),
        cards=verdicts.cards(data.claims, data.comparisons),
        sections=[_section(study, data, model) for model in sorted(data.accuracy["model"].unique())],
        receipt_overview=receipts.run_overview(data.runs),
        run_receipts=receipts.run_receipts(data.runs),
        evaluation_receipts=receipts.evaluation_overview(data.evaluations),
        evaluation_problems=receipts.evaluation_problems(data.evaluations),
        comparison_table=tables.comparison_table(data.comparisons, verdicts.VERDICT_LABELS),
        seed_tables=[verdicts.seed_table(claim, level) for claim in data.claims.claims if claim.seeds],
        provenance=provenance_view.provenance_table(data.runs),
        versions=provenance_view.version_table(data.runs),
        study_text=provenance_view.study_text(study),
        colour_of=svg.palette_position,
        dash_of=lambda index: " ".join(map(str, svg.series_dash(index))),
    )


def _section(study: Study, data: ReportData, model: str) -> ModelSection:
    accuracy = data.accuracy.filter(pl.col("model") == model)
    last = accuracy.filter(pl.col("step") == pl.col("step").max().over("arm", "seed"))
    keys = _arm_keys(study, set(accuracy["arm"]))
    diagnoses = [one for one in data.diagnoses if one.model == model]
    diagnosis = _diagnosis_figure(diagnoses) if diagnoses else None
    return ModelSection(
        model=model,
        source=study.config.models[model].source if model in study.config.models else "",
        accuracy=_accuracy_figure(last, accuracy, keys, 1 - study.config.statistics.alpha),
        robustness=Figure(
            caption="Each panel: one arm after its last step, the mean of its seeds as a line, seeds as circles; "
            "the other arms in grey.",
            panels=charts.robustness_panels(last, keys),
            tables=(),
        ),
        training=_training_figure(data, model, keys),
        diagnosis=diagnosis,
        diagnosis_verdicts=verdicts.diagnosis_verdicts(diagnoses) if diagnoses else None,
    )


def _accuracy_figure(last: pl.DataFrame, accuracy: pl.DataFrame, keys: Sequence[SeriesKey], level: float) -> Figure:
    questions = numbers.count(int(last["num_questions"].max()))  # type: ignore[arg-type]
    return Figure(
        caption=f"After the last step. Dots: seeds, with {100 * level:.3g}\u00a0% Wilson intervals over {questions} "
        "questions (the luck of training is not in them). Ticks: means.",
        panels=charts.accuracy_panels(last, keys),
        tables=(tables.accuracy_table(accuracy),),
    )


def _training_figure(data: ReportData, model: str, keys: Sequence[SeriesKey]) -> Figure | None:
    runs = [run for run in data.runs if run.model == model]
    if not runs:
        return None
    metrics = pl.concat(
        run.metrics.with_columns(arm=pl.lit(run.arm), seed=pl.lit(run.seed, dtype=pl.Int64)) for run in runs
    )
    return Figure(
        caption="One line per run; the seeds of an arm share its colour and dashes.",
        panels=charts.training_panels(metrics, keys),
        tables=tables.curve_tables(runs),
        legend=[key for key in keys if key.name in {run.arm for run in runs}],
    )


def _diagnosis_figure(diagnoses: Sequence[Diagnosis]) -> Figure:
    keys = [SeriesKey(one.machine, number) for number, one in enumerate(diagnoses, start=1)]
    layers = pl.concat(
        one.layers.with_columns(
            machine=pl.lit(one.machine),
            sigma=pl.col("layer").replace_strict(one.sigmas.aqn.layer_sigmas, default=None, return_dtype=pl.Float64),
        )
        for one in diagnoses
    )
    faults = [one.verdict.simulated_fault for one in diagnoses if one.verdict.simulated_fault is not None]
    fault_layers = [layer for fault in faults if isinstance(layer := fault.get("layer"), int)]
    rule = " The dotted rule marks the simulated fault." if fault_layers else ""
    return Figure(
        caption=f"Scans over depth, and the sigmas that follow from them.{rule}",
        panels=charts.diagnosis_panels(layers, keys, fault_layers),
        tables=(tables.diagnosis_table(diagnoses),),
        legend=keys,
    )


def _arm_keys(study: Study, present: set[str]) -> list[SeriesKey]:
    """Pretrained first and neutral, then the arms in the study's order: the same colour for an arm everywhere."""
    neutral = [SeriesKey(PRETRAINED, 0)] if PRETRAINED in present else []
    return neutral + [SeriesKey(arm, n) for n, arm in enumerate(study.config.arms, start=1) if arm in present]
