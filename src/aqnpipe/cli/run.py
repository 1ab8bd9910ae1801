"""`aqnpipe run`: Snakemake with the workflow of the installed package, in the working directory."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from aqnpipe.errors import ConfigError
from aqnpipe.shipped import SNAKEFILE

_DEFAULT_STUDY = Path("config/config.yaml")


def run(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[STUDY] [SNAKEMAKE OPTIONS]...", help="default study: config/config.yaml"),
    ] = None,
) -> None:
    """Run a study here: what is missing or has changed. Everything behind the study file is passed to Snakemake.

    Examples: `aqnpipe run`, `aqnpipe run config/smoke.yaml -n`, `aqnpipe run --profile a100`.
    """
    command = [sys.executable, "-m", "snakemake", *snakemake_arguments(arguments or [])]
    sys.stdout.flush()
    os.execv(sys.executable, command)  # noqa: S606 - Snakemake takes the place of this process, signals included


def snakemake_arguments(arguments: list[str]) -> list[str]:
    """Return the arguments for Snakemake; ConfigError if there is no study to run."""
    workflow = ["--snakefile", str(SNAKEFILE)]
    if arguments and not arguments[0].startswith("-"):
        return [*workflow, "--configfile", arguments[0], *arguments[1:]]
    if not _names_a_study(arguments) and not _DEFAULT_STUDY.is_file():
        raise ConfigError(
            f"{_DEFAULT_STUDY}: no such file, expected a study here: name one (`aqnpipe run STUDY`), or make a folder "
            "of studies (`aqnpipe init FOLDER`)"
        )
    return [*workflow, *arguments]


def _names_a_study(arguments: list[str]) -> bool:
    options = {argument.partition("=")[0] for argument in arguments}
    return bool(options & {"--configfile", "--configfiles", "--profile", "--help", "-h", "--version", "-v"})
