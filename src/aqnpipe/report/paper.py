"""Figures and tables of the report as files for a paper: PDF or SVG in the colours of the light page, LaTeX or CSV."""

import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import vl_convert
from tabulate import tabulate

from aqnpipe.artifacts.files import atomic_path, write_text
from aqnpipe.config.study import Study
from aqnpipe.report import claims_view, faults_view, looks_view, page, provenance_view, receipts, tables
from aqnpipe.report.charts import Panel
from aqnpipe.report.claims_chart import claims_panel
from aqnpipe.report.inputs import ReportData
from aqnpipe.report.overview import arm_table
from aqnpipe.report.svg import light_spec
from aqnpipe.report.tables import Figure, PanelGroup, Row, RunLink, Table
from aqnpipe.report.text import visible
from aqnpipe.report.words import Words

FigureFormat = Literal["pdf", "svg"]
TableFormat = Literal["latex", "csv"]

_LATEX_COMMANDS = {"−": "$-$", "⟨": "$\\langle$", "⟩": "$\\rangle$", "≈": "$\\approx$", "σ": "$\\sigma$", "²": "$^2$"}
"""What pdfLaTeX cannot typeset of the catalogue's characters; Chinese needs XeLaTeX or LuaLaTeX."""
_LONGEST_IN_A_LINE = 60
_PARAGRAPH = "p{7cm}"
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9]+")
_NOT_IN_STEMS = re.compile(r"[^A-Za-z0-9_.]+")
_FORMULA = re.compile(r"^[=+\-@\t\r]")
_NUMBER = re.compile(r"^[+\-−]?[\d.,]+( to [+\-−]?[\d.,]+)?$")


@dataclass(frozen=True)
class Drawn:
    """A picture of the report, under the name of its section and model."""

    name: str
    panel: Panel
    has_legend: bool


def export_paper(
    study: Study,
    data: ReportData,
    words: Words,
    folder: Path,
    figures: Sequence[FigureFormat],
    formats: Sequence[TableFormat],
) -> list[Path]:
    """Write every figure and table of the report below `folder`; return the paths."""
    written = []
    contents = list(_sections(study, data, words))
    for name, figure, own in contents:
        if figures and figure is not None:
            for drawn in _pictures(name, figure):
                written += [_write_figure(folder, drawn, suffix) for suffix in figures]
        for table in own if formats else ():
            # Names of paired tables hold ids of comparisons, which a path cannot hold as they are.
            stem = f"{name}-{_NOT_IN_STEMS.sub('-', table.name)}"
            written += [_write_table(folder, stem, table, form) for form in formats]
    return written


def _sections(study: Study, data: ReportData, words: Words) -> Iterator[tuple[str, Figure | None, list[Table]]]:
    run_link = provenance_view.run_links(data.runs)
    overview = claims_view.claims_overview(study, data, words)
    looks = looks_view.look_table(data.claims, words)
    forest = claims_panel(overview, data.comparisons, words)
    drawn = None if forest is None else Figure(caption="", groups=(PanelGroup([forest]),), tables=())
    paired = [row.paired for row in overview.rows if row.paired is not None]
    own = [_claim_table(overview, words), _arm_table(study, data, words), *([looks] if looks else []), *paired]
    yield "claims", drawn, own
    models = page.model_roles(data)
    for model in models:
        section = page.model_section(study, data, model, words, run_link)
        suffix = f"-{model}" if len(models) > 1 else ""
        for name in ("accuracy", "robustness", "training", "diagnosis"):
            figure: Figure | None = getattr(section, name)
            if figure is not None:
                yield f"{name}{suffix}", figure, list(figure.tables)
        if section.diagnosis_verdicts is not None:
            yield f"diagnosis{suffix}", None, [section.diagnosis_verdicts]
    checks = tables.comparison_checks(data.comparisons, words)
    yield "comparisons", None, [tables.comparison_table(data.comparisons, words), checks]
    faults = faults_view.fault_section(data, words)
    if faults is not None and faults.training is not None:
        yield "faults", None, [faults.training]
    for number, losses in enumerate(faults.losses if faults else (), start=1):
        yield f"loss-{number}", losses.figure, list(losses.figure.tables)
    costs = page.cost_figure(study, data, words)
    if costs is not None:
        yield "costs", costs, list(costs.tables)
    yield "receipts", None, list(_receipt_tables(data, words, run_link))
    yield (
        "provenance",
        None,
        [
            provenance_view.run_table(data.runs, words, run_link),
            provenance_view.evaluation_table(data.evaluations, words, run_link),
            provenance_view.version_table(data, words),
        ],
    )
    if data.published is not None:
        published = page.published_section(study, data.published, data.accuracy, words)
        yield "published", published.figure, [published.claims, published.sentences, *published.figure.tables]


def _receipt_tables(data: ReportData, words: Words, run_link: RunLink) -> Iterator[Table]:
    yield receipts.run_overview(data.runs, words, run_link)
    yield receipts.evaluation_overview(data.evaluations, words, run_link)
    for found in receipts.run_receipts(data.runs, words):
        yield replace(found.phases, name=f"phases-{_slug(found.name)}")


def _claim_table(overview: claims_view.ClaimsOverview, words: Words) -> Table:
    """Return every claim with verdict, difference, interval and the reason or finding in words."""
    names = ("family", "claim", "verdict", "difference", "interval", "in_words")
    rows = tuple(
        Row((row.family, row.claim, words(f"verdict.{row.verdict}"), row.difference, row.interval, row.sentence))
        for row in overview.rows
    )
    return Table("verdicts", words("claims.label"), tuple(words(f"column.{name}") for name in names), rows, 3)


def _arm_table(study: Study, data: ReportData, words: Words) -> Table:
    arms = arm_table(study, page.last_steps(data.accuracy), words)
    headers = (words("column.model"), arms.head, words("column.what"), *arms.levels)
    rows = tuple(Row((row.model, row.name, row.description, *row.cells)) for row in arms.rows)
    return Table("arms", arms.title, headers, rows, 3)


def _pictures(name: str, figure: Figure) -> Iterator[Drawn]:
    for number, group in enumerate(figure.groups, start=1):
        for place, panel in enumerate(group.panels, start=1):
            if isinstance(panel, Panel):
                # Numbered, because a Chinese title leaves no letters for a name.
                part = f"{number}-{place}" if len(figure.groups) > 1 else f"{place}"
                yield Drawn(f"{name}-{part}-{_slug(panel.title)}", panel, bool(group.legend))


def _write_figure(folder: Path, drawn: Drawn, suffix: FigureFormat) -> Path:
    spec = light_spec(drawn.panel.chart, legend=drawn.has_legend)
    path = folder / "figures" / f"{drawn.name}.{suffix}"
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as temporary:
        if suffix == "svg":
            temporary.write_text(vl_convert.vegalite_to_svg(spec), encoding="utf-8")
        else:
            temporary.write_bytes(vl_convert.vegalite_to_pdf(spec))
    return path


def _write_table(folder: Path, name: str, table: Table, form: TableFormat) -> Path:
    path = folder / "tables" / f"{name}.{'tex' if form == 'latex' else 'csv'}"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, _latex(table) if form == "latex" else _csv(table))
    return path


def _latex(table: Table) -> str:
    """Return a table of the packages booktabs and longtable, with all cells escaped; its caption is a comment."""
    aligned = ["left"] * table.num_text_columns + ["right"] * (len(table.headers) - table.num_text_columns)
    rows = [[_one_line(visible(cell)) for cell in row.cells] for row in table.rows]
    environment = "longtable" if len(rows) > 40 else "tabular"
    body = tabulate(
        rows,
        headers=[_one_line(visible(head)) for head in table.headers],
        tablefmt="latex_longtable" if environment == "longtable" else "latex_booktabs",
        disable_numparse=True,
        colalign=aligned,
    )
    for character, command in _LATEX_COMMANDS.items():
        body = body.replace(character, command)
    letters = "".join(side[0] for side in aligned)
    columns = "".join(
        _PARAGRAPH if any(len(row[number]) > _LONGEST_IN_A_LINE for row in rows) else letter
        for number, letter in enumerate(letters)
    )
    body = body.replace(f"\\begin{{{environment}}}{{{letters}}}", f"\\begin{{{environment}}}{{{columns}}}", 1)
    caption = " ".join(visible(f"{table.caption}. {table.note}").split()).removesuffix(".")
    return f"% {caption}\n{body}\n"


def _one_line(cell: str) -> str:
    """Return a cell without line feeds: an empty line in a cell of LaTeX is an error."""
    return re.sub(r"[\n\t]+", " ", cell)


def _csv(table: Table) -> str:
    """Return the rows as CSV; a cell that a spreadsheet could run as a formula begins with an apostrophe."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(table.headers)
    writer.writerows([[_inert(visible(cell)) for cell in row.cells] for row in table.rows])
    return buffer.getvalue()


def _inert(cell: str) -> str:
    return f"'{cell}" if _FORMULA.match(cell) and not _NUMBER.match(cell) else cell


def _slug(text: str) -> str:
    return _NOT_IN_NAMES.sub("-", text).strip("-").lower() or "picture"
