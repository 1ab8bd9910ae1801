"""`aqnpipe check-published`: check the printed figures of a publication; prints tables or JSON."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from aqnpipe.cli.options import as_printed, console_of

if TYPE_CHECKING:
    from aqnpipe.artifacts.published import PublishedCheck
    from aqnpipe.report.words import Words


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
    console = console_of(stderr=False, width=160)
    console.print(f"{check.title}\n{check.source}\n", markup=False)
    for table in _tables(check, words):
        console.print(table)
    for line in [*_remarks(check, words), _conclusion(check, words)]:
        console.print(line, markup=False)


def _tables(check: "PublishedCheck", words: "Words") -> list[Table]:
    from aqnpipe.report import published

    claims, sentences, accuracies, series, losses = published.published_tables(check, words, {})
    detectable = published.published_detectable(check, words)
    found = (accuracies, losses, series, claims, sentences, detectable)
    return [as_printed(table) for table in found if table.rows]


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
