"""The entry point of the command line: one command per module of this package."""

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from aqnpipe.cli.check import check
from aqnpipe.cli.check_published import check_published
from aqnpipe.cli.diagnose import diagnose
from aqnpipe.cli.doctor.command import doctor
from aqnpipe.cli.measure_noise import measure_noise
from aqnpipe.cli.report import report
from aqnpipe.cli.schema import schema
from aqnpipe.cli.score import score
from aqnpipe.cli.sigmas import sigmas
from aqnpipe.errors import EXIT_USER_ERROR, AqnpipeError

app = typer.Typer(
    help="Noise-robust post-training experiments in which every run proves what it did.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"aqnpipe {version('aqnpipe')}")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool, typer.Option("--version", help="print the version", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Noise-robust post-training experiments in which every run proves what it did."""


for command in (check, check_published, diagnose, doctor, measure_noise, report, schema, score, sigmas):
    app.command()(command)


def main() -> None:
    """Run the command line; a user's mistake ends as one line on standard error and exit code 2."""
    try:
        app()
    except AqnpipeError as error:
        typer.echo(f"ERROR: {error}", err=True)
        sys.exit(EXIT_USER_ERROR)
