"""The summary of a study in Markdown, README.md of its results, and the lines on the terminal when it is finished."""

from collections.abc import Mapping, Sequence, Set
from pathlib import Path

import polars as pl
from rich.cells import cell_len

from aqnpipe.artifacts.comparisons import ClaimsFile, ComparisonTable
from aqnpipe.artifacts.files import read_json, read_table
from aqnpipe.config.analysis import PRETRAINED
from aqnpipe.config.study import Study
from aqnpipe.report import numbers
from aqnpipe.report.claims import (
    VERDICT_SYMBOLS,
    ClaimRow,
    ClaimsOverview,
    answer_text,
    claim_text,
    left_out_claims,
    look_table,
    shown_groups,
    summary_line,
)
from aqnpipe.report.inputs import ReportData
from aqnpipe.report.machines import MachineScale
from aqnpipe.report.markup import markdown, page_template
from aqnpipe.report.receipts import SHORT_DIGEST
from aqnpipe.report.tables import Row, Table, arm_table, mean_accuracy
from aqnpipe.report.words import Language, Words, load_words, visible

MAX_ROWS = 100
"""Rows of a table; a description of a pull request holds 65,536 characters."""


def render_summary(
    study: Study, data: ReportData, overview: ClaimsOverview, scales: Sequence[MachineScale], words: Words
) -> str:
    """Return the answer, the question, the verdicts, the looks, what the study cannot show, and accuracy by arm.

    Behind them are the noises of the study in units of the machines that were measured, its `scales`.
    """
    shown = {row.comparison_id for group in shown_groups(overview.groups, MAX_ROWS) for row in group.rows}
    # A study of checkpoints has no runs.
    records = [made.record for made in (data.runs or data.evaluations)]
    versions = {f"{name} {version}" for record in records for name, version in record.versions.items()}
    return (
        page_template("summary.md.jinja").render(
            w=words,
            study=study,
            data=data,
            answer=answer_text(data.claims, words),
            overview=overview,
            claims=summary_line((row.verdict for row in overview.rows), words),
            rows=[_claim_cells(row, words) for row in overview.rows if row.comparison_id in shown],
            left_out=left_out_claims([row.verdict for row in overview.rows if row.comparison_id not in shown], words),
            looks=look_table(data.claims, words),
            accuracy=accuracy(study, data.last, _compared_arms(data, shown), words),
            scales=scales,
            codes=sorted({record.code_digest[:SHORT_DIGEST] for record in records}),
            versions=sorted(versions),
            missing=numbers.MISSING,
        )
        + "\n"
    )


def _claim_cells(row: ClaimRow, words: Words) -> tuple[str, ...]:
    claim = row.claim if row.role == "secondary" else words(f"role.{row.role}", claim=row.claim)
    return words(f"verdict.{row.verdict}"), markdown(claim), row.difference, row.interval or numbers.MISSING


def _compared_arms(data: ReportData, shown: Set[str]) -> set[tuple[str, str]]:
    """Return (model, arm) of the claims in the table of claims."""
    rows = data.comparisons.filter(pl.col("comparison_id").is_in(shown))
    return {(row["model"], row[side]) for row in rows.iter_rows(named=True) for side in ("treatment", "control")}


def accuracy(study: Study, last: pl.DataFrame, compared: Set[tuple[str, str]], words: Words) -> Table | None:
    """Return the accuracies after the last step; of too many arms, those of the claims that are shown come first."""
    if last.is_empty():
        return None
    arms, means = arm_table(study, last, words), mean_accuracy(last)
    first = sorted(arms.rows, key=lambda row: row["name"] != PRETRAINED and (row["model"], row["name"]) not in compared)
    shown = {(row["model"], row["name"]) for row in first[:MAX_ROWS]}
    rows = tuple(
        Row((markdown(f"{row['model']} {row['name']}" if arms.several_models else row["name"]), *row["cells"]))
        for row in arms.rows
        if (row["model"], row["name"]) in shown
    )
    cut = [words("table.left_out", shown=len(rows), all=len(arms.rows))] if len(rows) < len(arms.rows) else []
    unanswered = words(
        "summary.unanswered" if study.has_training else "summary.unanswered_checkpoints",
        truncated=float(max(means["truncated_fraction"])),
        no_answer=float(max(means["parse_failure_fraction"])),
    )
    return Table("arms", arms.caption, (arms.head, *arms.levels), rows, note="\n\n".join([*cut, unanswered]))


def readme(study: Study, words: Words) -> str:
    """Return the text of the README; the same for the same study."""
    return page_template("readme.md.jinja").render(w=words, study=study) + "\n"


MAX_CLAIMS = 20
"""Verdicts shown; the decided ones come first, and the others are counted."""


def closing_lines(results: Path, language: Language, noises: Mapping[float, str]) -> list[str]:
    """Return the lines for the terminal; none without claims. Raises DataError if the claims are damaged.

    `noises`: names of the study's named noises by level.
    """
    path = results / "claims.json"
    if not path.is_file():
        return []
    claims, words = read_json(path, ClaimsFile), load_words(language, noises)
    answer = answer_text(claims, words)
    return [
        summary_line((claim.verdict for claim in claims.claims), words),
        *_verdict_lines(claims, results, words),
        *([] if answer is None else [visible(answer)]),
    ]


def _verdict_lines(claims: ClaimsFile, results: Path, words: Words) -> list[str]:
    table = read_table(results / "comparisons.parquet", ComparisonTable)
    rows = {row["comparison_id"]: row for row in table.iter_rows(named=True)}
    ordered = sorted(claims.claims, key=lambda claim: claim.verdict == "not_shown")
    width = max((cell_len(words(f"verdict.{verdict}")) for verdict in VERDICT_SYMBOLS), default=0)
    lines = []
    for claim in ordered[:MAX_CLAIMS]:
        row, verdict = rows.get(claim.comparison_id, {}), words(f"verdict.{claim.verdict}")
        interval = words.span(row.get("ci_low"), row.get("ci_high"), numbers.points)
        padding = " " * (width - cell_len(verdict))
        amount = f"{numbers.points(row.get('difference')):>6} ({interval})"
        lines.append(f"  {verdict}{padding}  {amount:<24}  {visible(claim_text(claim, words))}")
    left = len(ordered) - MAX_CLAIMS
    return lines + ([f"  {words('more', count=left)}"] if left > 0 else [])
