"""`aqnpipe export`: the figures and tables of the report as files for a paper."""

from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from aqnpipe.cli.study import open_study
from aqnpipe.errors import ConfigError

PAPER = "paper"
"""Folder in the results for the files."""


def export(
    study: Annotated[Path, typer.Argument(help="study file, described in config/README.md")],
    figures: Annotated[str, typer.Option(help="formats of the figures, with commas between: pdf, svg")] = "pdf,svg",
    tables: Annotated[str, typer.Option(help="formats of the tables, with commas between: latex, csv")] = "latex,csv",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="folder to write to; default: paper/ in the results")
    ] = None,
) -> None:
    """Write every figure and table of a study's report as files for a paper.

    Figures are 89 or 183 mm wide, with captions in captions.md. LaTeX tables need the packages booktabs and longtable.
    """
    from aqnpipe.report.inputs import inputs_of, read_inputs
    from aqnpipe.report.paper import FigureFormat, TableFormat, export_paper
    from aqnpipe.report.words import load_words

    wanted = _formats("--figures", figures, get_args(FigureFormat)), _formats("--tables", tables, get_args(TableFormat))
    plan = open_study([study], look_outside=False)
    inputs = inputs_of(plan)
    if not inputs.claims.is_file():
        raise ConfigError(f"{inputs.claims}: no such file, expected a study that was run to its report")
    folder = output or Path(plan.results) / PAPER
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--output {folder}: found a file, expected a folder")
    words = load_words(plan.study.config.report.language, plan.study.config.evaluation.noise_names())
    written = export_paper(plan.study, read_inputs(inputs), words, folder, *wanted)
    typer.echo(f"export: {len(written)} files in {folder}")


def _formats(option: str, text: str, known: tuple[str, ...]) -> list[Any]:
    """Return the formats in a list with commas; none for an empty one. Raises ConfigError for an unknown one."""
    found = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in found:
        if name not in known:
            raise ConfigError(f"{option}: found {name!r}, expected {', '.join(known)}")
    return found
