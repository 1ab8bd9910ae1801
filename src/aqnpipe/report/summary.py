"""A short summary of the study in Markdown, for a pull request."""

import re
from collections.abc import Sequence

import polars as pl

from aqnpipe.config.analysis import PRETRAINED
from aqnpipe.config.study import Study
from aqnpipe.report import numbers
from aqnpipe.report.claims_view import ClaimsOverview
from aqnpipe.report.inputs import ReportData
from aqnpipe.report.provenance_view import SHORT_DIGEST
from aqnpipe.report.tables import mean_accuracy
from aqnpipe.report.text import visible
from aqnpipe.report.verdicts import summary_line
from aqnpipe.report.words import Words

_SPECIAL = re.compile(r"([\\`*_\[\]<>#|~&$]|^[-+=]|^\d+(?=[.)]))")
_MENTION = re.compile(r"@")


def markdown(text: str) -> str:
    """Escape untrusted text for Markdown: no markup, no HTML, no table break, and no mention of a user."""
    flat = " ".join(visible(text).split())
    return _MENTION.sub("@<!-- -->", _SPECIAL.sub(r"\\\1", flat))


def render_summary(study: Study, data: ReportData, overview: ClaimsOverview, last: pl.DataFrame, words: Words) -> str:
    """Return the question, the verdicts with their numbers, what the study cannot show, and accuracy by arm."""
    claims = summary_line((row.verdict for row in overview.rows), words)
    incomplete = [f"> {words('incomplete.title')}", ""] if data.missing else []
    parts = [
        f"### {markdown(study.config.report.title)}",
        "",
        markdown(study.config.report.question),
        "",
        *incomplete,
        f"**{claims}**",
        "",
        *_claim_lines(overview, words),
        *(f"- {markdown(limit)}" for limit in overview.limits),
        "",
        *_accuracy_lines(study, last, words),
        _provenance(study, data, words),
    ]
    return "\n".join(parts) + "\n"


def _claim_lines(overview: ClaimsOverview, words: Words) -> list[str]:
    if not overview.rows:
        return []
    header = [words("column.verdict"), words("column.claim"), words("summary.difference"), words("column.interval")]
    return _table(
        header,
        [
            [words(f"verdict.{row.verdict}"), markdown(row.claim), row.difference, row.interval or numbers.MISSING]
            for row in overview.rows
        ],
    )


def _accuracy_lines(study: Study, last: pl.DataFrame, words: Words) -> list[str]:
    if last.is_empty():
        return []
    means = mean_accuracy(last)
    levels = sorted(means["noise_level"].unique().to_list())
    cells = {
        (row["model"], row["arm"], row["noise_level"]): _mean_and_range(row, words)
        for row in means.iter_rows(named=True)
    }
    order = {arm: number for number, arm in enumerate((PRETRAINED, *study.config.arms))}
    arms = sorted({(model, arm) for model, arm, _ in cells}, key=lambda pair: (pair[0], order[pair[1]]))
    header = [words("column.arm"), *(words.level(level) for level in levels)]
    rows = [
        [markdown(arm), *(cells.get((model, arm, level), numbers.MISSING) for level in levels)] for model, arm in arms
    ]
    unanswered = words(
        "summary.unanswered",
        truncated=float(max(means["truncated_fraction"])),
        no_answer=float(max(means["parse_failure_fraction"])),
    )
    return [words("summary.accuracy"), "", *_table(header, rows), unanswered, ""]


def _mean_and_range(row: dict[str, float], words: Words) -> str:
    mean = numbers.percent(row["mean"])
    if row["num_seeds"] == 1:
        return mean
    return f"{mean} ({words.span(row['lowest'], row['highest'], numbers.percent)})"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]
    return [*lines, ""]


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
