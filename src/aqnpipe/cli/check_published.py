"""`aqnpipe check-published`: what the printed figures of a publication support, as tables or as JSON."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from aqnpipe.artifacts.published import CheckedAccuracy, CheckedClaim, PublishedCheck
from aqnpipe.report.wording import p_text

_STYLES = {"supported": "green", "refuted": "red", "not_shown": "yellow", "invalid": "magenta"}


def check_published(
    published: Annotated[Path, typer.Argument(help="file of published figures, described in config/README.md")],
    json: Annotated[bool, typer.Option("--json", help="print the whole check as JSON")] = False,
) -> None:
    """Test published figures again: which are possible, how precise they are, and which claims they support."""
    from aqnpipe.published.check import check_published_file

    check = check_published_file(published)
    if json:
        typer.echo(check.model_dump_json(indent=2))
        return
    # Colours and borders only where a person looks; a file or pipe gets text of a fixed width.
    console = Console() if Console().is_terminal else Console(width=160)
    console.print(f"{check.title}\n{check.source}\n", highlight=False, markup=False)
    console.print(_accuracies(check))
    if check.losses:
        console.print(_losses(check))
    if check.series:
        console.print(_series(check))
    console.print(_claims(check))
    if check.detectable:
        console.print(_detectable(check))
    for line in _differences(check):
        console.print(line, highlight=False, markup=False)
    console.print(_summary(check), highlight=False, markup=False)


def _table(title: str, text_columns: list[str], number_columns: list[str], last: str | None = None) -> Table:
    table = Table(title=escape(title), title_justify="left", title_style="bold")
    for name in text_columns:
        table.add_column(name)
    for name in number_columns:
        table.add_column(name, justify="right", no_wrap=True)
    if last is not None:
        table.add_column(last)
    return table


def _accuracies(check: PublishedCheck) -> Table:
    columns = ["%", "of", "right answers", f"{100 * (1 - check.alpha):g} % interval"]
    table = _table("Accuracies", ["figure"], columns, "possible?")
    for one in check.accuracies:
        interval = f"{100 * one.ci_low:.1f} to {100 * one.ci_high:.1f}"
        table.add_row(escape(one.label), one.printed, str(one.num_questions), _counts(one), interval, _possibility(one))
    return table


def _counts(one: CheckedAccuracy) -> str:
    if not one.correct:
        return "none"
    return str(one.correct[0]) if len(one.correct) == 1 else f"{one.correct[0]}-{one.correct[-1]}"


def _possibility(one: CheckedAccuracy) -> str:
    if one.possible:
        return "yes"
    sizes = ", ".join(map(str, one.possible_sizes))
    return f"NO: between {one.nearest[0]:.2f} and {one.nearest[1]:.2f}; possible with {sizes} questions"


def _losses(check: PublishedCheck) -> Table:
    table = _table("Losses (nats per token)", ["figure"], ["mean", "SD", "runs", "ln|V|"], "remark")
    for one in check.losses:
        uniform = "" if one.uniform is None else f"{one.uniform:.2f}"
        remark = "above ln|V|: worse than guessing" if one.above_uniform else ""
        table.add_row(escape(one.label), f"{one.mean:.4f}", f"{one.std:.4f}", str(one.num_runs), uniform, remark)
    return table


def _series(check: PublishedCheck) -> Table:
    table = _table("Accuracy over noise levels", ["checkpoint", "%"], ["p (equal)"], "remark")
    for one in check.series:
        remark = "the same at every level: check that the noise was there" if one.identical else ""
        p_value = "" if one.p_value is None else p_text(one.p_value)
        table.add_row(escape(one.label), " / ".join(one.printed), p_value, remark)
    return table


def _claims(check: PublishedCheck) -> Table:
    columns = ["difference", "interval", "p", "p, Holm", "p, run seed_variance"]
    table = _table("Claims", ["claim", "verdict"], columns, "why")
    for one in check.claims:
        style = _STYLES[one.verdict]
        numbers = [_number(one.difference, one), _interval(one), *map(_p, (one.p_value, one.p_holm, one.p_run_to_run))]
        # The sentence starts with the numbers, which stand in their own columns.
        why = one.sentence.partition("). ")[2]
        table.add_row(escape(one.claim), f"[{style}]{one.verdict.replace('_', ' ')}[/{style}]", *numbers, escape(why))
    return table


def _interval(one: CheckedClaim) -> str:
    if one.ci_low is None or one.ci_high is None:
        return "unbounded" if one.unit == "ratio" else ""
    return f"{_number(one.ci_low, one)} to {_number(one.ci_high, one)}"


def _number(value: float, one: CheckedClaim) -> str:
    return f"{value:+.4f}" if one.unit == "nats" else f"{value:+.2f}"


def _p(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0e}" if value < 0.001 else f"{value:.3f}"


def _detectable(check: PublishedCheck) -> Table:
    table = _table(
        f"Smallest paired difference found with {100 * check.power:g} % power",
        [],
        ["questions", "discordant", "asymptotic", "exact McNemar"],
        "remark",
    )
    for one in check.detectable:
        exact = "" if one.exact is None else f"{100 * one.exact:.2f}"
        share = f"{100 * one.discordant_fraction:g} %"
        table.add_row(str(one.num_questions), share, f"{100 * one.asymptotic:.2f}", exact, "; ".join(one.differs))
    return table


def _differences(check: PublishedCheck) -> list[str]:
    lines = [f"{one.id}: {text}" for one in check.claims for text in (*one.differs, *one.notes)]
    return ["Where others state other numbers, and remarks:", *(f"- {line}" for line in lines)] if lines else []


def _summary(check: PublishedCheck) -> str:
    counts = {verdict: sum(one.verdict == verdict for one in check.claims) for verdict in _STYLES}
    parts = [f"{number} {verdict.replace('_', ' ')}" for verdict, number in counts.items() if number]
    impossible = sum(not one.possible for one in check.accuracies)
    verdicts = f"{len(check.claims)} claims: {', '.join(parts)}." if parts else "No claims."
    return (
        f"{verdicts} {impossible} of {len(check.accuracies)} accuracies are impossible for their number of questions."
    )
