"""The summary of a study in Markdown, README.md of its results, and the lines on the terminal when it is finished."""

import re
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
from aqnpipe.report.markup import page_template
from aqnpipe.report.receipts import SHORT_DIGEST
from aqnpipe.report.tables import arm_table, mean_accuracy
from aqnpipe.report.words import Language, Words, load_words, visible

MAX_ROWS = 100
"""Rows of a table; a description of a pull request holds 65,536 characters."""

_SPECIAL = re.compile(r"([\\`*_\[\]<>#|~&$]|^[-+=])")
_NUMBERED = re.compile(r"^(\d+)([.)])")
"""The start of a list. A backslash has to stand before the point, because digits cannot be escaped."""
_MENTION = re.compile(r"@")


def markdown(text: str) -> str:
    """Escape untrusted text for Markdown: no markup, no HTML, no table break, and no mention of a user."""
    flat = " ".join(visible(text).split())
    escaped = _NUMBERED.sub(r"\1\\\2", _SPECIAL.sub(r"\\\1", flat))
    return _MENTION.sub("@<!-- -->", escaped)


def render_summary(
    study: Study,
    data: ReportData,
    overview: ClaimsOverview,
    last: pl.DataFrame,
    scales: Sequence[MachineScale],
    words: Words,
) -> str:
    """Return the answer, the question, the verdicts, the looks, what the study cannot show, and accuracy by arm.

    Behind them are the noises of the study in units of the machines that were measured, its `scales`.
    """
    shown = _shown_claims(overview)
    claims = summary_line((row.verdict for row in overview.rows), words)
    incomplete = [f"> {words('incomplete.title')}", ""] if data.missing else []
    answer = answer_text(data.claims, words)
    parts = [
        *([] if answer is None else [f"**{markdown(answer)}**", ""]),
        f"### {markdown(study.config.report.title)}",
        "",
        markdown(study.config.report.question),
        "",
        *incomplete,
        f"**{claims}**",
        "",
        *_claim_lines(overview, shown, words),
        *_look_lines(data, words),
        *(f"- {markdown(limit)}" for limit in overview.limits),
        "",
        *_accuracy_lines(study, last, _compared_arms(data, shown), words),
        *_scale_lines(scales),
        _provenance(study, data, words),
    ]
    return "\n".join(parts) + "\n"


def _claim_lines(overview: ClaimsOverview, shown: Set[str], words: Words) -> list[str]:
    if not overview.rows:
        return []
    header = [words("column.verdict"), words("column.claim"), words("summary.difference"), words("column.interval")]
    rows = [
        [
            words(f"verdict.{row.verdict}"),
            markdown(row.claim if row.role == "secondary" else words(f"role.{row.role}", claim=row.claim)),
            row.difference,
            row.interval or numbers.MISSING,
        ]
        for row in overview.rows
        if row.comparison_id in shown
    ]
    left_out = left_out_claims([row.verdict for row in overview.rows if row.comparison_id not in shown], words)
    return [*numbers.markdown_table(header, rows), "", *([left_out, ""] if left_out else [])]


def _look_lines(data: ReportData, words: Words) -> list[str]:
    looks = look_table(data.claims, words)
    if looks is None:
        return []
    rows = [[markdown(cell) for cell in row.cells] for row in looks.rows]
    return [looks.caption, "", *numbers.markdown_table(looks.headers, rows), ""]


def _compared_arms(data: ReportData, shown: Set[str]) -> set[tuple[str, str]]:
    """Return (model, arm) of the claims in the table of claims."""
    rows = data.comparisons.filter(pl.col("comparison_id").is_in(shown))
    return {(row["model"], row[side]) for row in rows.iter_rows(named=True) for side in ("treatment", "control")}


def _shown_claims(overview: ClaimsOverview) -> set[str]:
    groups = shown_groups(overview.groups, MAX_ROWS)
    return {row.comparison_id for group in groups for row in group.rows}


def _accuracy_lines(study: Study, last: pl.DataFrame, compared: Set[tuple[str, str]], words: Words) -> list[str]:
    if last.is_empty():
        return []
    table, means = arm_table(study, last, words), mean_accuracy(last)
    header = [table.head, *table.levels]
    # If not all fit: those of the claims that are shown come first.
    first = sorted(
        table.rows, key=lambda row: row["name"] != PRETRAINED and (row["model"], row["name"]) not in compared
    )
    shown = {(row["model"], row["name"]) for row in first[:MAX_ROWS]}
    rows = [
        [markdown(f"{row['model']} {row['name']}" if table.several_models else row["name"]), *row["cells"]]
        for row in table.rows
        if (row["model"], row["name"]) in shown
    ]
    cut = [words("table.left_out", shown=len(rows), all=len(table.rows)), ""] if len(rows) < len(table.rows) else []
    unanswered = words(
        "summary.unanswered" if study.has_training else "summary.unanswered_checkpoints",
        truncated=float(max(means["truncated_fraction"])),
        no_answer=float(max(means["parse_failure_fraction"])),
    )
    return [table.caption, "", *numbers.markdown_table(header, rows), "", *cut, unanswered, ""]


def _scale_lines(scales: Sequence[MachineScale]) -> list[str]:
    lines = []
    for scale in scales:
        lines += [markdown(scale.heading), "", *(f"- {markdown(sentence)}" for sentence in scale.sentences), ""]
        brief = scale.brief
        rows = [[markdown(row.cells[0]), *row.cells[1:]] for row in brief.rows]
        if rows:
            header = [markdown(head) for head in brief.headers]
            lines += [*numbers.markdown_table(header, rows), "", markdown(brief.note), ""]
    return lines


def _provenance(study: Study, data: ReportData, words: Words) -> str:
    # A study of checkpoints has no runs.
    records = [made.record for made in (data.runs or data.evaluations)]
    codes = sorted({record.code_digest[:SHORT_DIGEST] for record in records})
    versions = sorted({f"{name} {version}" for record in records for name, version in record.versions.items()})
    return words(
        "summary.study",
        study=markdown(study.config.study),
        code=", ".join(codes) or numbers.MISSING,
        versions=markdown(", ".join(versions)) or numbers.MISSING,
    )


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
