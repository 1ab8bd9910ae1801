"""`aqnpipe init`: a folder for studies; `aqnpipe run`: Snakemake with the workflow of the installed package."""

import contextlib
import io
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from aqnpipe.cli.study import open_study
from aqnpipe.config.validation_messages import did_you_mean
from aqnpipe.errors import ConfigError, StorageError
from aqnpipe.shipped import SHIPPED, SNAKEFILE

_SNAKEFILE = '''"""The workflow of the installed aqnpipe. Studies are in config/, settings of machines in profiles/."""

from aqnpipe.shipped import SNAKEFILE


include: str(SNAKEFILE)


# Snakemake takes no default target from an included file.
workflow.default_target = "all"
'''
_NO_COPIES = shutil.ignore_patterns("README.md", "__pycache__")


def init(folder: Annotated[Path, typer.Argument(help="new or empty folder")] = Path()) -> None:
    """Make a folder for studies: the shipped studies, their arms, and profiles for clusters."""
    make_study_folder(folder)
    enter = "" if folder.resolve() == Path.cwd() else f"cd {folder} && "
    typer.echo(f"{folder}: studies and arms in config/, settings of machines in profiles/")
    typer.echo(f"next: {enter}aqnpipe run (the default study), or snakemake --configfile config/smoke.yaml")


def make_study_folder(folder: Path) -> None:
    """Write what a study needs into `folder`, completely or not at all. Raises StorageError if it is not empty."""
    try:
        is_new = not folder.exists()
        if found := [] if is_new else sorted(path.name for path in folder.iterdir()):
            listed = ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")
            raise StorageError(f"{folder}: found {listed}, expected a new or an empty folder")
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with tempfile.TemporaryDirectory(dir=folder, prefix=".init-") as staged:
                _write(Path(staged))
                for path in sorted(Path(staged).iterdir()):
                    path.rename(folder / path.name)
        finally:
            if is_new and not any(folder.iterdir()):
                folder.rmdir()
    except OSError as error:
        raise StorageError(f"{folder}: cannot be written ({error.strerror})") from error


def _write(folder: Path) -> None:
    for name in ("config", "profiles"):
        shutil.copytree(SHIPPED / name, folder / name, ignore=_NO_COPIES)
    (folder / "Snakefile").write_text(_SNAKEFILE, encoding="utf-8")
    for profile in sorted(path.name for path in (folder / "profiles").iterdir() if path.name != "default"):
        # Snakemake looks for a profile by its name in the working directory.
        (folder / profile).symlink_to(Path("profiles", profile))


# As `python -m snakemake`, without a traceback at Ctrl-C while it starts.
_START = "import runpy\ntry: runpy.run_module('snakemake', None, '__main__', True)\nexcept KeyboardInterrupt: exit(130)"
_DEFAULT_STUDY = Path("config/config.yaml")
_CONFIG_FILES = frozenset({"--configfile", "--configfiles"})
_INFORMATION = frozenset({"--help", "-h", "--version", "-v"})
_NAME_A_STUDY = _CONFIG_FILES | _INFORMATION | {"--profile"}
"""With these a study among the arguments, or at the usual place, is not needed."""

_USUAL_OPTIONS = _INFORMATION | {"-n", "--dry-run", "--profile", "--config", "--configfile", "--cores", "-c", "--until"}
"""With other options Snakemake's own parser is asked, whose import takes a second."""


def run(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[STUDY] [SNAKEMAKE OPTIONS]...", help="default study: config/config.yaml"),
    ] = None,
) -> None:
    """Run a study here: what is missing or has changed. Everything but the study file is passed to Snakemake.

    Examples: `aqnpipe run`, `aqnpipe run config/smoke.yaml -n`, `aqnpipe run --profile a100`.
    """
    given = arguments or []
    study = study_among(given)
    command = [sys.executable, "-c", _START, *snakemake_arguments(given, study)]
    if "SNAKEMAKE_PROFILE" not in os.environ and not _options(given) & {*_NAME_A_STUDY, "--config", "-C"}:
        # A mistake in the study, which Snakemake's workflow would take seconds to find. With these the study may have
        # settings from elsewhere, which the workflow puts together.
        open_study([Path(study) if study is not None else _DEFAULT_STUDY])
    sys.stdout.flush()
    os.execv(sys.executable, command)  # noqa: S606 - Snakemake takes the place of this process, signals included


def snakemake_arguments(arguments: list[str], study: str | None) -> list[str]:
    """Return the arguments for Snakemake; `study` is the study file among those that are given, if there is one.

    Raises ConfigError if there is no study to run, or Snakemake does not know an option.
    """
    workflow = ["--snakefile", str(SNAKEFILE)]
    if study is not None:
        if named := _options(arguments) & _CONFIG_FILES:
            raise ConfigError(f"aqnpipe run: found the study {study} and {min(named)}, expected one of them")
        place = arguments.index(study)
        # With `=`, because Snakemake would take what follows for further files.
        return [*workflow, f"--configfile={study}", *arguments[:place], *arguments[place + 1 :]]
    if not _options(arguments) & _NAME_A_STUDY and not _DEFAULT_STUDY.is_file():
        raise ConfigError(
            f"{_DEFAULT_STUDY}: no such file, expected a study here: name one (`aqnpipe run STUDY`), or make a folder "
            "of studies (`aqnpipe init FOLDER`)"
        )
    return [*workflow, *arguments]


def study_among(arguments: list[str]) -> str | None:
    """Return the study among the arguments: the first of them, or a YAML file behind options and their values."""
    first = arguments[0] if arguments and not arguments[0].startswith("-") else None
    if _options(arguments) <= _USUAL_OPTIONS and (first or not any(map(_is_yaml, arguments))):
        return first
    targets = _targets(arguments)
    return first or next(filter(_is_yaml, targets), None)


def _targets(arguments: list[str]) -> list[str]:
    """Return the arguments that are neither options nor values of options; ConfigError for an unknown option."""
    from snakemake.cli import get_argument_parser

    parser = get_argument_parser()
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            found, unknown = parser.parse_known_args(arguments)
        except SystemExit as ended:
            if not ended.code:
                raise  # behind --help or --version
            raise ConfigError(f"aqnpipe run: {said.getvalue().strip().rpartition('error: ')[2]}") from ended
    if unknown:
        near = did_you_mean(unknown[0], parser._option_string_actions)
        raise ConfigError(f"aqnpipe run: neither it nor Snakemake has the option {unknown[0]}{near}")
    return [str(target) for target in found.targets or ()]


def _is_yaml(argument: str) -> bool:
    return argument.endswith((".yaml", ".yml"))


def _options(arguments: list[str]) -> set[str]:
    return {argument.partition("=")[0] for argument in arguments if argument.startswith("-")}
