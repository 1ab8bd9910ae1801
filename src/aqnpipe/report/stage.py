"""The report stage: one self-contained HTML page, a summary and a README in Markdown, and tables, from artifacts."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from aqnpipe.artifacts.files import write_text
from aqnpipe.config.study import Study
from aqnpipe.report import (
    claims_view,
    explorer,
    export,
    faults_view,
    looks_view,
    machine_scale_view,
    machines_view,
    numbers,
    page,
    provenance_view,
    receipts,
    svg,
    tables,
    translation,
)
from aqnpipe.report import overview as overview_view
from aqnpipe.report.html import inline, page_template
from aqnpipe.report.inputs import ReportData, ReportInputs, read_inputs
from aqnpipe.report.readme import readme
from aqnpipe.report.summary import render_summary
from aqnpipe.report.verdicts import summary_line
from aqnpipe.report.words import Words, load_words

__all__ = ["ReportOutputs", "build_report"]


@dataclass(frozen=True)
class ReportOutputs:
    """Files that the stage writes. `tables` is the folder of training, layers and flips, each as .parquet and .csv."""

    html: Path
    summary: Path
    tables: Path

    @property
    def readme(self) -> Path:
        """The description of the results folder."""
        return self.tables / "README.md"

    @classmethod
    def in_folder(cls, results: Path) -> Self:
        """Return the paths that the pipeline uses."""
        return cls(results / "report.html", results / "summary.md", results)


def build_report(study: Study, inputs: ReportInputs, outputs: ReportOutputs) -> None:
    """Write page, summary and tables from those files of `inputs` that exist; the same files give the same bytes.

    The page names the files that do not exist. Raises DataError for malformed artifacts; then nothing is written.
    """
    data = read_inputs(inputs)
    words = load_words(study.config.report.language, study.config.evaluation.noise_names())
    pair = explorer.explored_pair(study, data.comparisons)
    flipped, num_questions, num_seeds = explorer.flips(pair, study, data) if pair else explorer.no_flips()
    explored = explorer.explorer(pair, flipped, num_questions, num_seeds) if pair and num_seeds else None
    overview = claims_view.claims_overview(study, data, words)
    scales = machine_scale_view.machine_scales(study, data, words)
    html = _render(study, data, words, overview, explored, scales)
    write_text(outputs.readme, readme(study, words))
    write_text(outputs.html, html)
    last = page.last_steps(data.accuracy)
    write_text(outputs.summary, render_summary(study, data, overview, last, scales, words))
    export.write_pair(outputs.tables, "training", page.training_table(data.runs))
    export.write_pair(outputs.tables, "layers", page.layer_table(data.diagnoses))
    export.write_pair(outputs.tables, "flips", flipped, left_out=explorer.TEXT_COLUMNS)


def _render(
    study: Study,
    data: ReportData,
    words: Words,
    overview: claims_view.ClaimsOverview,
    explored: explorer.Explorer | None,
    scales: tuple[machine_scale_view.MachineScale, ...],
) -> str:
    """Return the page as HTML. All text is made visible and escaped; only the SVGs of `svg.py` stay markup."""
    run_link = provenance_view.run_links(data.runs)
    css, script = inline("report.css"), inline("report.js")
    return page_template("report.html.jinja").render(
        w=words,
        css=css.code,
        css_hash=css.sha256,
        script=script.code,
        script_hash=script.sha256,
        study=study.config,
        title=translation.title(study, words),
        question=translation.question(study, words),
        arm_table=overview_view.arm_table(study, page.last_steps(data.accuracy), words),
        facts=_facts(study, data, words),
        power=study.config.statistics.power,
        missing=_missing(data),
        overview=overview,
        left_out=lambda verdicts: claims_view.left_out_claims(verdicts, words),
        answer=claims_view.answer_text(data.claims, words),
        looks=looks_view.look_table(data.claims, words),
        summary=summary_line((row.verdict for row in overview.rows), words),
        sections=[page.model_section(study, data, model, words, run_link) for model in page.model_roles(data)],
        published=page.published_section(study, data.published, data.accuracy, words) if data.published else None,
        scales=scales,
        machines=machines_view.machines_section(study, data.machines, words),
        faults=faults_view.fault_section(data, words),
        costs=page.cost_figure(study, data, words),
        explored=explored,
        explored_where=_where(explored, words) if explored else "",
        explored_limit=explorer.MAX_QUESTIONS_PER_GROUP,
        receipt_overview=receipts.run_overview(data.runs, words, run_link),
        run_receipts=receipts.run_receipts(data.runs, words),
        evaluation_receipts=receipts.evaluation_overview(data.evaluations, words, run_link),
        evaluation_problems=receipts.evaluation_problems(data.evaluations, words),
        comparison_table=tables.comparison_table(data.comparisons, words),
        comparison_checks=tables.comparison_checks(data.comparisons, words),
        run_table=provenance_view.run_table(data.runs, words, run_link),
        evaluation_table=provenance_view.evaluation_table(data.evaluations, words, run_link),
        versions=provenance_view.version_table(data, words),
        study_text=provenance_view.study_text(study),
        study_arms=(min(provenance_view.MAX_ARMS_IN_STUDY, len(study.arms)), len(study.arms)),
        max_rows=tables.MAX_ROWS_ON_PAGE,
        colour_of=svg.palette_position,
        dash_of=lambda index: " ".join(map(str, svg.series_dash(index))),
    )


def _facts(study: Study, data: ReportData, words: Words) -> str:
    config = study.config
    if not study.has_training:
        return words(
            "page.facts.checkpoints",
            checkpoints=len(config.arms),
            questions=numbers.count(data.accuracy["num_questions"].max()),  # type: ignore[arg-type]
            levels=len(config.evaluation.all_levels()),
        )
    return words(
        "page.facts",
        arms=len(config.arms),
        seeds=claims_view.seeds_per_arm(study, words),
        steps=study.num_steps,
        questions=numbers.count(data.accuracy["num_questions"].max()),  # type: ignore[arg-type]
        levels=len(config.evaluation.all_levels()),
    )


def _where(explored: explorer.Explorer, words: Words) -> str:
    level = explored.pair.noise_level
    return words("noise.at", level=level) if level else words("noise.without")


def _missing(data: ReportData) -> dict[str, Any] | None:
    """Return the values of the note on missing files; None if there are none."""
    if not data.missing:
        return None
    return {
        "runs": len(data.missing_runs),
        "all_runs": len(data.missing_runs) + len(data.runs),
        "evaluations": len(data.missing_evaluations),
        "all_evaluations": len(data.missing_evaluations) + len(data.evaluations),
        "diagnoses": len(data.missing_diagnoses),
        "all_diagnoses": len(data.missing_diagnoses) + len(data.diagnoses),
        "files": [str(path) for path in data.missing],
    }
