"""Entry point of the command line."""

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from aqnpipe.cli.check import check
from aqnpipe.cli.check_published import check_published
from aqnpipe.cli.diagnose.command import diagnose
from aqnpipe.cli.doctor.command import doctor
from aqnpipe.cli.measure_noise import measure_noise
from aqnpipe.cli.report import report
from aqnpipe.cli.robustness.command import robustness
from aqnpipe.cli.schema import schema
from aqnpipe.cli.score import score
from aqnpipe.cli.sensitivity import sensitivity
from aqnpipe.cli.sigmas import sigmas
from aqnpipe.errors import EXIT_USER_ERROR, AqnpipeError

app = typer.Typer(
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
        bool, typer.Option("--version", help="print the version and exit", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Experiments on noise-robust post-training of language models, with measured noise in every run."""


for command in (
    *(check, check_published, diagnose, doctor, measure_noise, report),
    *(robustness, schema, score, sensitivity, sigmas),
):
    app.command()(command)


def main() -> None:
    """Run the command line. A user-correctable error prints one line on standard error and exits with code 2."""
    try:
        app()
    except AqnpipeError as error:
        typer.echo(f"ERROR: {error}", err=True)
        sys.exit(EXIT_USER_ERROR)
