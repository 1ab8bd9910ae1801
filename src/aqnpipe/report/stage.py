"""The report stage: one self-contained HTML page, a summary and a README in Markdown, and tables, from artifacts."""

from pathlib import Path

import polars as pl

from aqnpipe.artifacts.files import atomic_path, write_csv, write_text
from aqnpipe.config.study import Study
from aqnpipe.report import claims, explorer, machines, markup, numbers, page, tables
from aqnpipe.report.claims import summary_line
from aqnpipe.report.inputs import ReportData
from aqnpipe.report.markup import inline, page_template
from aqnpipe.report.summary import readme, render_summary
from aqnpipe.report.words import Words, at_noise, load_words


def write_pair(folder: Path, name: str, table: pl.DataFrame, left_out: tuple[str, ...] = ()) -> None:
    """Write `table` as <name>.parquet and, without the columns `left_out`, as <name>.csv; both atomically."""
    with atomic_path(folder / f"{name}.parquet") as temporary:
        table.write_parquet(temporary, compression="zstd")
    write_csv(folder / f"{name}.csv", table.drop(left_out, strict=False))


def build_report(study: Study, data: ReportData, folder: Path) -> None:
    """Write page, summary and tables from what exists of the study; the same files give the same bytes.

    Into `folder`: report.html, summary.md and README.md, and training, layers and flips, each as .parquet and .csv.
    The page names the files that do not exist.
    """
    words = load_words(study.config.report.language, study.config.evaluation.noise_names())
    pair = explorer.explored_pair(study, data.comparisons)
    flipped, num_questions, num_seeds = explorer.flips(pair, study, data)
    explored = explorer.explorer(pair, flipped, num_questions, num_seeds) if pair and num_seeds else None
    overview = claims.claims_overview(study, data, words)
    scales = machines.machine_scales(study, data, words)
    html = _render(study, data, words, overview, explored, scales)
    write_text(folder / "README.md", readme(study, words))
    write_text(folder / "report.html", html)
    last = page.last_steps(data.accuracy)
    write_text(folder / "summary.md", render_summary(study, data, overview, last, scales, words))
    write_pair(folder, "training", page.training_table(data.runs))
    write_pair(folder, "layers", page.layer_table(data.diagnoses))
    write_pair(folder, "flips", flipped, left_out=explorer.TEXT_COLUMNS)


def _render(
    study: Study,
    data: ReportData,
    words: Words,
    overview: claims.ClaimsOverview,
    explored: explorer.Explorer | None,
    scales: tuple[machines.MachineScale, ...],
) -> str:
    """Return the page as HTML. All text is made visible and escaped; only the SVGs of `markup.py` stay markup."""
    return page_template("report.html.jinja").render(
        w=words,
        css=inline("report.css"),
        script=inline("report.js"),
        study=study.config,
        title=words.own(study.config.report.title, study.config.report.title_zh),
        question=words.own(study.config.report.question, study.config.report.question_zh),
        arm_table=tables.arm_table(study, page.last_steps(data.accuracy), words),
        facts=facts(study, data, words),
        power=study.config.statistics.power,
        data=data,
        overview=overview,
        left_out=lambda verdicts: claims.left_out_claims(verdicts, words),
        answer=claims.answer_text(data.claims, words),
        looks=page.look_figure(data.claims, words),
        summary=summary_line((row.verdict for row in overview.rows), words),
        sections=page.sections(study, data, scales, words),
        explored=explored,
        explored_where=at_noise(explored.pair.noise_level, words) if explored else "",
        explored_limit=explorer.MAX_QUESTIONS_PER_GROUP,
        max_rows=tables.MAX_ROWS_ON_PAGE,
        colour_of=markup.palette_position,
        dash_of=lambda index: " ".join(map(str, markup.series_dash(index))),
    )


def facts(study: Study, data: ReportData, words: Words) -> str:
    """Return the sizes of the study: arms, seeds, steps, questions and noise levels."""
    questions = numbers.count(data.accuracy["num_questions"].max())  # type: ignore[arg-type]
    arms, levels = len(study.config.arms), len(study.config.evaluation.all_levels())
    if not study.has_training:
        return words("page.facts.checkpoints", checkpoints=arms, questions=questions, levels=levels)
    seeds = claims.seeds_per_arm(study, words)
    return words("page.facts", arms=arms, seeds=seeds, steps=study.num_steps, questions=questions, levels=levels)
