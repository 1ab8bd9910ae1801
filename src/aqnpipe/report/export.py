"""The report for other tools: figures and tables as files for a paper, and every response as logs of Inspect.

PDF or SVG in the colours of the light page, LaTeX or CSV. A log of Inspect is one checkpoint at one noise level: a
sample per question, an epoch per noise seed and sampled response, and a score by every scorer. It is the JSON form of
Inspect's logs, version 2, written without its library, which needs other versions of fsspec and urllib3 than those that
this package is tested with.
"""

import csv
import io
import json
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from string import ascii_lowercase
from typing import Any, Literal

import altair as alt
import polars as pl
import vl_convert
from tabulate import tabulate

from aqnpipe.artifacts.evaluations import EvaluationTable, last_evaluations
from aqnpipe.artifacts.files import atomic_path, read_table, write_text
from aqnpipe.artifacts.problems import ProblemTable
from aqnpipe.artifacts.provenance import short_digest
from aqnpipe.config.evaluation import EvaluationConfig, scorer_column
from aqnpipe.config.study import Study
from aqnpipe.errors import DataError
from aqnpipe.report import charts, claims, receipts, stage
from aqnpipe.report.charts import Panel
from aqnpipe.report.claims import ClaimsOverview
from aqnpipe.report.inputs import ReportData
from aqnpipe.report.machines import machine_scales
from aqnpipe.report.markup import light_spec, markdown
from aqnpipe.report.tables import Figure, PanelGroup, Row, Table, arm_table, table
from aqnpipe.report.words import Words, visible

_WIDTH, _LINE_HEIGHT, _FONT_SIZE = 380, 14, 11
_COLUMNS = {False: 89, True: 183}
"""Width in millimetres of one column of a journal, and of two, for pictures that are wide."""


def claims_panel(overview: ClaimsOverview, comparisons: pl.DataFrame, words: Words) -> Panel | None:
    """Return the difference of every claim with its interval, in percentage points; None if none was compared.

    Claims are in the study's order. `comparisons`: as in `artifacts.comparisons.ComparisonTable`.
    """
    found = {row["comparison_id"]: row for row in comparisons.iter_rows(named=True)}
    texts, letters = Counter(row.claim for row in overview.rows), 58 if words.language == "en" else 30
    drawn = [
        {
            # A label beyond the edge of a picture is cut off.
            "claim": "\n".join(
                textwrap.wrap(row.claim if texts[row.claim] == 1 else f"{row.claim} ({row.comparison_id})", letters)
            ),
            **{column: found[row.comparison_id][column] for column in ("difference", "ci_low", "ci_high")},
        }
        for row in overview.rows
        if row.strip is not None
    ]
    if not drawn:
        return None
    names = [row["claim"] for row in drawn]
    lines = [name.split("\n") for name in names]
    row_height = _LINE_HEIGHT * (1 + max(map(len, lines)))
    base = alt.Chart(charts.in_percent(pl.DataFrame(drawn)), width=_WIDTH, height=row_height * len(drawn))
    split = "split(datum.label, '\\n')"
    all_lines = [line for claim in lines for line in claim]
    y = charts.row_axis("claim", names, all_lines, _FONT_SIZE, labelLineHeight=_LINE_HEIGHT, labelExpr=split)
    title = words("claims.axis")
    return charts.panel(words("claims.label"), charts.effects(base.encode(y), title, dot_text=None), title, wide=True)


FigureFormat = Literal["pdf", "svg"]
TableFormat = Literal["latex", "csv"]

_LATEX_COMMANDS = {"−": "$-$", "⟨": "$\\langle$", "⟩": "$\\rangle$", "≈": "$\\approx$", "σ": "$\\sigma$", "²": "$^2$"}
"""Characters of the catalogue that pdfLaTeX cannot typeset; Chinese needs XeLaTeX or LuaLaTeX."""
_LONGEST_IN_A_LINE = 60
_PARAGRAPH = "p{7cm}"
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9]+")
_NOT_IN_STEMS = re.compile(r"[^A-Za-z0-9_.]+")
_FORMULA = re.compile(r"^[=+\-@\t\r]")
_NUMBER = re.compile(r"^[+\-−]?[\d.,]+( to [+\-−]?[\d.,]+)?$")


def export_paper(
    study: Study,
    data: ReportData,
    words: Words,
    folder: Path,
    figures: Sequence[FigureFormat],
    formats: Sequence[TableFormat],
) -> list[Path]:
    """Write every figure and table of the report below `folder`, and figures/captions.md; return the paths."""
    written, captions, size = [], [], stage.facts(study, data, words)
    contents = list(_sections(study, data, words))
    for name, figure, own in contents:
        if figures and figure is not None:
            pictures = list(_pictures(name, figure))
            for stem, panel, svg in pictures:
                paths = (folder / "figures" / f"{stem}.{suffix}" for suffix in figures)
                written += [_write_figure(path, svg, _COLUMNS[panel.wide]) for path in paths]
            titles = "; ".join(markdown(f"{stem}: {panel.title}") for stem, panel, _ in pictures)
            keys = {key.name: key.what for group in figure.groups for key in group.legend if key.what}
            arms = [f"{'; '.join(f'{arm}: {what}' for arm, what in keys.items())}."] if keys else []
            captions.append(f"**{titles}.** {markdown(words.paragraph([figure.caption, *arms]))} ({size})")
        for each in own if formats else ():
            # Names of paired tables hold ids of comparisons, which a path cannot hold as they are.
            stem = f"{name}-{_NOT_IN_STEMS.sub('-', each.name)}"
            written += [_write_table(folder, stem, each, form) for form in formats]
    if captions:
        write_text(folder / "figures" / "captions.md", "\n\n".join(captions) + "\n")
        written.append(folder / "figures" / "captions.md")
    if twice := [str(path) for path, number in Counter(written).items() if number > 1]:
        raise RuntimeError(f"{', '.join(twice)}: written twice, so one is lost; this is a bug")
    return written


def _sections(study: Study, data: ReportData, words: Words) -> Iterator[tuple[str, Figure | None, list[Table]]]:
    overview = claims.claims_overview(study, data, words)
    forest = claims_panel(overview, data.comparisons, words)
    caption = words.paragraph([words.of(claim.statements[0]) for claim in data.claims.claims if claim.statements])
    drawn = None if forest is None else Figure(caption=caption, groups=(PanelGroup([forest]),), tables=())
    paired = [row.paired for row in overview.rows if row.paired is not None]
    yield "claims", drawn, [table("verdicts", overview.rows, words), _arm_table(study, data, words), *paired]
    if looks := stage.look_figure(data.claims, words):
        yield "looks", looks, list(looks.tables)
    for section in stage.sections(study, data, machine_scales(study, data, words), words):
        for stem, found in section.exported():
            if isinstance(found, Figure):
                yield stem, found, list(found.tables)
            else:
                yield stem, None, [found]
    for run in data.runs:
        phases, run_name = receipts.phase_table(run.receipt, words), words("run.name", arm=run.arm, seed=run.seed)
        yield "receipts", None, [replace(phases, name=f"phases-{_slug(run_name)}")]


def _arm_table(study: Study, data: ReportData, words: Words) -> Table:
    arms = arm_table(study, data.last, words)
    headers = (words("column.model"), arms.head, words("column.what"), *arms.levels)
    rows = tuple(Row((row["model"], row["name"], row["description"], *row["cells"])) for row in arms.rows)
    return Table("arms", arms.title, headers, rows, 3)


def _pictures(name: str, figure: Figure) -> Iterator[tuple[str, Panel, str]]:
    """Yield the name and the SVG of every picture; those of a group have letters."""
    for number, group in enumerate(figure.groups, start=1):
        for place, panel in enumerate(group.panels, start=1):
            if isinstance(panel, Panel):
                # Numbered, because a Chinese title leaves no letters for a name.
                part = f"{number}-{place}" if len(figure.groups) > 1 else f"{place}"
                letter = ascii_lowercase[(place - 1) % 26] if len(group.panels) > 1 else ""
                spec = light_spec(panel.chart, legend=bool(group.legend))
                spec["title"] = {"text": letter, "anchor": "start"}
                yield f"{name}-{part}-{_slug(panel.title)[:60]}", panel, vl_convert.vegalite_to_svg(spec)


def _write_figure(path: Path, svg: str, width: float) -> Path:
    """Write a picture of a width in millimetres, to which its height follows; the renderer of PDF counts in points."""
    unit, width = ("mm", width) if path.suffix == ".svg" else ("", width * 72 / 25.4)

    def sizes(found: re.Match[str]) -> str:
        return f'width="{width:.2f}{unit}" height="{width * float(found[2]) / float(found[1]):.2f}{unit}"'

    sized = re.sub(r'width="([\d.]+)" height="([\d.]+)"', sizes, svg, count=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as temporary:
        temporary.write_bytes(vl_convert.svg_to_pdf(sized) if path.suffix == ".pdf" else sized.encode())
    return path


def _write_table(folder: Path, name: str, table: Table, form: TableFormat) -> Path:
    path = folder / "tables" / f"{name}.{'tex' if form == 'latex' else 'csv'}"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, _latex(table) if form == "latex" else _csv(table))
    return path


def _latex(table: Table) -> str:
    """Return a table of the packages booktabs and longtable, with all cells escaped; its caption is a comment."""
    aligned = ["left"] * table.num_text_columns + ["right"] * (len(table.headers) - table.num_text_columns)
    rows = [[_one_line(visible(cell)) for cell in row.cells] for row in (*table.rows, *table.foot)]
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
    writer.writerows([[_inert(visible(cell)) for cell in row.cells] for row in (*table.rows, *table.foot)])
    return buffer.getvalue()


def _inert(cell: str) -> str:
    return f"'{cell}" if _FORMULA.match(cell) and not _NUMBER.match(cell) else cell


def _slug(text: str) -> str:
    return _NOT_IN_NAMES.sub("-", text).strip("-").lower() or "picture"


_CORRECT = "correct_"
_STOPS = {"stop": "stop", "length": "max_tokens"}


def write_inspect_logs(results: Path, study: str, settings: EvaluationConfig, folder: Path) -> int:
    """Write a log per noise level of the last checkpoint of every run into `folder`; return their number.

    results, study, settings: those of the study, and its name. Raises DataError for a damaged evaluation, or none.
    """
    checkpoints, path = last_evaluations(results), results / "data" / "test.parquet"
    if not checkpoints:
        raise DataError(f"{results}: found no evaluations in eval/, expected the results folder of a study")
    asked = read_table(path, ProblemTable).iter_rows(named=True) if path.exists() else ()
    questions = {row["question_id"]: row for row in asked}
    names, primary, number = settings.noise_names(), scorer_column(settings.primary_scorer), 0
    for one in checkpoints:
        model, made = f"{one.model}/{one.arm}/seed{one.seed}/step{one.step}", one.table.stat().st_mtime
        table = read_table(one.table, EvaluationTable).sort("noise_level", "noise_seed", "sample", "question_id")
        for (level,), at_level in table.group_by("noise_level", maintain_order=True):
            rows = _beside_no_noise(at_level, table, primary) if level else at_level
            # The viewer shows the first score in its list: that of the study.
            graded = [name.removeprefix(_CORRECT) for name in rows.columns if name.startswith(_CORRECT)]
            columns = sorted(graded, key=lambda scorer: scorer != primary)
            scorers = {scorer: settings.primary_scorer if scorer == primary else scorer for scorer in columns}
            task = f"{study}, {names.get(level) or f'noise {level:g}'}"
            identity, time = short_digest((task, model), 8), datetime.fromtimestamp(made, UTC)
            log: dict[str, Any] = {"version": 2, "status": "success", **_log(rows, questions, scorers)}
            log["eval"] |= {"created": time.isoformat(timespec="seconds"), "task": task, "model": model}
            log["eval"] |= dict.fromkeys(("eval_id", "run_id", "task_id"), identity)
            # The viewer lists files whose names begin with a time.
            write_text(folder / f"{time:%Y-%m-%dT%H-%M-%S+00-00}_{study}_{identity}.json", json.dumps(log))
            number += 1
    return number


def _beside_no_noise(rows: pl.DataFrame, table: pl.DataFrame, primary: str) -> pl.DataFrame:
    """Return the rows with one more score, `without_noise`: that of the same question and sample without noise.

    It lets the viewer show the answers that noise changed. The rows are unchanged if nothing was evaluated without.
    """
    keys, names = ["question_id", "sample"], ("correct", "answer")
    plain = table.filter(pl.col("noise_level") == 0).unique(keys, keep="first", maintain_order=True)
    scores = plain.select(*keys, *(pl.col(f"{name}_{primary}").alias(f"{name}_without_noise") for name in names))
    return rows if plain.is_empty() else rows.join(scores, on=keys, how="left", maintain_order="left")


def _log(rows: pl.DataFrame, questions: dict[str, dict[str, str]], scorers: dict[str, str]) -> dict[str, Any]:
    """Return what a log says of responses at one noise level, and not of their model."""
    accuracies = {shown: rows[f"correct_{scorer}"].mean() for scorer, shown in scorers.items()}
    scores = [
        {"name": name, "scorer": name, "metrics": {"accuracy": {"name": "accuracy", "value": accuracy}}}
        for name, accuracy in accuracies.items()
    ]
    num_questions = rows["question_id"].n_unique()
    return {
        "eval": {
            "dataset": {"name": "test", "samples": num_questions},
            "config": {"epochs": len(rows) // num_questions},
            "packages": {"aqnpipe": version("aqnpipe")},
            "metadata": {"noise_level": rows["noise_level"][0]},
        },
        "results": {"total_samples": len(rows), "completed_samples": len(rows), "scores": scores},
        "samples": list(_samples(rows, questions, scorers)),
    }


def _samples(
    rows: pl.DataFrame, questions: dict[str, dict[str, str]], scorers: dict[str, str]
) -> Iterator[dict[str, Any]]:
    """Yield the samples; the input is the question as it is in the data, without the prompt around it."""
    epochs: dict[str, int] = {}
    for row in rows.iter_rows(named=True):
        name, response = row["question_id"], {"role": "assistant", "content": row["response"]}
        epochs[name] = epochs.get(name, 0) + 1
        asked = questions.get(name, {"question": name, "gold_answer": ""})
        yield {
            "id": name,
            "epoch": epochs[name],
            "input": asked["question"],
            "target": asked["gold_answer"],
            "messages": [{"role": "user", "content": asked["question"]}, response],
            "output": {
                "choices": [{"message": response, "stop_reason": _STOPS[row["finish_reason"]]}],
                "completion": row["response"],
                "usage": {"output_tokens": row["response_tokens"], "total_tokens": row["response_tokens"]},
            },
            "scores": {
                shown: {"value": "C" if row[f"correct_{scorer}"] else "I", "answer": row[f"answer_{scorer}"]}
                for scorer, shown in scorers.items()
            },
            "metadata": {key: row[key] for key in ("noise_seed", "sample")},
        }
