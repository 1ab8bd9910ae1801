"""`aqnpipe check-published`: check the printed figures of a publication; prints tables or JSON."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from aqnpipe.cli.terminal import table_of

if TYPE_CHECKING:
    from aqnpipe.artifacts.published import CheckedAccuracy, PublishedCheck
    from aqnpipe.report import tables
    from aqnpipe.report.words import Words

_STYLES = {"supported": "green", "refuted": "red", "not_shown": "yellow", "invalid": "magenta"}


def check_published(
    published: Annotated[Path, typer.Argument(help="file of published figures, described in config/README.md")],
    json: Annotated[bool, typer.Option("--json", help="print the whole check as JSON")] = False,
) -> None:
    """Test published figures again: which are possible, how precise they are, and which claims they support."""
    from aqnpipe.published.check import check_published_file
    from aqnpipe.report.words import load_words

    check = check_published_file(published)
    if json:
        typer.echo(check.model_dump_json(indent=2))
        return
    words = load_words("en")
    # Colours and borders only in a terminal; a file or pipe gets text of a fixed width.
    console = Console() if Console().is_terminal else Console(width=160)
    console.print(f"{check.title}\n{check.source}\n", highlight=False, markup=False)
    for table in _tables(check, words):
        console.print(table)
    for line in [*_remarks(check, words), _conclusion(check, words)]:
        console.print(line, highlight=False, markup=False)


def _tables(check: "PublishedCheck", words: "Words") -> list[Table]:
    from aqnpipe.report import published

    shown = [_accuracies(check, words)]
    if check.losses:
        shown.append(_as_rich(published.published_losses(check, words)))
    if check.series:
        shown.append(_as_rich(published.published_series(check, words)))
    shown.append(_claims(check, words))
    if check.detectable:
        shown.append(_detectable(check, words))
    return shown


def _as_rich(found: "tables.Table") -> Table:
    """Return a table of the report for the terminal; its last column is text."""
    table = table_of(found.caption, found.headers[:1], found.headers[1:-1], found.headers[-1:])
    for row in found.rows:
        table.add_row(*map(escape, row.cells))
    return table


def _accuracies(check: "PublishedCheck", words: "Words") -> Table:
    from aqnpipe.report import numbers
    from aqnpipe.report.published import possibility

    interval = words("published.interval", level=1 - check.alpha)
    columns = [words("column.published"), words("column.questions"), words("column.correct_answers"), interval]
    table = table_of(words("published.accuracies"), [words("column.figure")], columns, [words("column.possible")])
    for accuracy in check.accuracies:
        table.add_row(
            escape(accuracy.label),
            accuracy.printed,
            numbers.count(accuracy.num_questions),
            _counts(accuracy, words),
            words.span(accuracy.ci_low, accuracy.ci_high, numbers.percent),
            possibility(accuracy, words),
        )
    return table


def _counts(accuracy: "CheckedAccuracy", words: "Words") -> str:
    if not accuracy.correct:
        return words("published.no_count")
    first, last = accuracy.correct[0], accuracy.correct[-1]
    return str(first) if first == last else words("span", low=first, high=last)


def _claims(check: "PublishedCheck", words: "Words") -> Table:
    """Return the claims with the conclusion of each in words; its numbers have columns of their own."""
    from aqnpipe.report.published import published_claims

    found = published_claims(check, words)
    table = table_of(found.caption, found.headers[:2], found.headers[2:], [words("column.why")])
    for claim, row in zip(check.claims, found.rows, strict=True):
        text, verdict, *figures = map(escape, row.cells)
        style = _STYLES[claim.verdict]
        why = escape(words.all_of(claim.statements[1:]))
        table.add_row(text, f"[{style}]{verdict}[/{style}]", *figures, why)
    return table


def _detectable(check: "PublishedCheck", words: "Words") -> Table:
    from aqnpipe.report import numbers

    columns = [words(f"column.{name}") for name in ("questions", "discordant", "asymptotic")]
    table = table_of(words("published.detectable", power=check.power), [], columns, [words("column.remark")])
    for size in check.detectable:
        table.add_row(
            numbers.count(size.num_questions),
            f"{100 * size.discordant_fraction:g}",
            numbers.percent(size.asymptotic, 2),
            words.all_of(size.deviations),
        )
    return table


def _remarks(check: "PublishedCheck", words: "Words") -> list[str]:
    remarks = [
        f"- {claim.id}: {words.of(remark)}" for claim in check.claims for remark in (*claim.deviations, *claim.notes)
    ]
    return [words("published.remarks"), *remarks] if remarks else []


def _conclusion(check: "PublishedCheck", words: "Words") -> str:
    from aqnpipe.report.claims import summary_line

    impossible = words(
        "published.num_impossible",
        impossible=sum(not accuracy.possible for accuracy in check.accuracies),
        accuracies=len(check.accuracies),
    )
    return words.paragraph([summary_line((claim.verdict for claim in check.claims), words), impossible])
