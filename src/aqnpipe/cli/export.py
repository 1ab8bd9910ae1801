"""`aqnpipe export`: the figures and tables of the report as files for a paper, or evaluations as logs of Inspect."""

from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from aqnpipe.cli.study import open_study
from aqnpipe.cli.terminal import given_options
from aqnpipe.errors import ConfigError

PAPER = "paper"
INSPECT = "inspect"
"""Folders in the results for the files."""


def export(
    context: typer.Context,
    study: Annotated[Path, typer.Argument(help="study file, described in config/README.md")],
    figures: Annotated[str, typer.Option(help="formats of the figures, with commas between: pdf, svg")] = "pdf,svg",
    tables: Annotated[str, typer.Option(help="formats of the tables, with commas between: latex, csv")] = "latex,csv",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="folder to write to; default: paper/, or inspect/, in the results"),
    ] = None,
    inspect: Annotated[
        bool, typer.Option("--inspect", help="write every response as logs for the viewer of inspect_ai instead")
    ] = False,
) -> None:
    """Write every figure and table of a study's report as files for a paper.

    Figures are 89 or 183 mm wide, with captions in captions.md. LaTeX tables need the packages booktabs and longtable.

    With --inspect, write the responses of the last checkpoint of every run as logs, one per noise level; show them
    with: inspect view --log-dir FOLDER.
    """
    from aqnpipe.report.inputs import inputs_of, read_inputs
    from aqnpipe.report.inspect_logs import write_inspect_logs
    from aqnpipe.report.paper import FigureFormat, TableFormat, export_paper
    from aqnpipe.report.responses import Responses
    from aqnpipe.report.words import load_words

    for option in ("figures", "tables"):
        if inspect and option in given_options(context):
            raise ConfigError(f"--{option}: found with --inspect, which writes no {option}; leave one out")
    wanted = _formats("--figures", figures, get_args(FigureFormat)), _formats("--tables", tables, get_args(TableFormat))
    plan = open_study([study], look_outside=False, trust_code=True)  # runs none of it
    folder = output or Path(plan.results) / (INSPECT if inspect else PAPER)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--output {folder}: found a file, expected a folder")
    if inspect:
        number = write_inspect_logs(Responses(Path(plan.results)), plan.study.config.study, folder)
        typer.echo(f"export: {number} logs in {folder}; show them with: inspect view --log-dir {folder}")
        return
    inputs = inputs_of(plan)
    if not inputs.claims.is_file():
        raise ConfigError(f"{inputs.claims}: no such file, expected a study that was run to its report")
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
