"""`aqnpipe doctor` on the command line."""

from pathlib import Path
from typing import Annotated

import typer

from aqnpipe.artifacts.base import Artifact
from aqnpipe.cli.doctor.checks import Check, machine_checks
from aqnpipe.cli.doctor.profiles import profile_checks, read_profile
from aqnpipe.cli.doctor.slurm import read_partitions
from aqnpipe.errors import EXIT_USER_ERROR

_SIGNS = {"ok": "ok", "untested": "?", "missing": "-", "problem": "!!"}


class Diagnosis(Artifact):
    """What `aqnpipe doctor --json` prints."""

    machine: tuple[Check, ...]
    profile: str | None
    profile_checks: tuple[Check, ...]
    can_run: bool


def examine(profile: str | None) -> Diagnosis:
    """Look at this machine and, if one is named, at what a profile needs. ConfigError if there is no such profile."""
    keys = read_profile(profile) if profile is not None else None
    partitions = read_partitions()
    machine = machine_checks(Path("results"), partitions)
    needs = profile_checks(keys, partitions) if keys is not None else []
    # An unfit version is everybody's problem; what only some need is one where the profile says so.
    problems = [one for one in (*(c for c in machine if c.name != "Slurm"), *needs) if one.status == "problem"]
    return Diagnosis(machine=tuple(machine), profile=profile, profile_checks=tuple(needs), can_run=not problems)


def doctor(
    profile: Annotated[str | None, typer.Option(help="say whether this profile can run from here")] = None,
    json: Annotated[bool, typer.Option("--json", help="print everything as JSON")] = False,
) -> None:
    """Show what this machine has, what fits and what to install. Exit code 2 if the profile cannot run here."""
    found = examine(profile)
    if json:
        typer.echo(found.model_dump_json(indent=2))
    else:
        _print(found)
    if not found.can_run:
        raise typer.Exit(EXIT_USER_ERROR)


def _print(found: Diagnosis) -> None:
    width = max(len(one.name) for one in (*found.machine, *found.profile_checks))
    for title, checks in (("this machine", found.machine), (f"profile {found.profile}", found.profile_checks)):
        if checks:
            typer.echo(title)
        for one in checks:
            advice = f"  -> {one.advice}" if one.advice else ""
            typer.echo(f"  {_SIGNS[one.status]:>2} {one.name:<{width}}  {one.found}{advice}")
    if found.profile is None:
        verdict = "runs here" if found.can_run else "does not run here"
        typer.echo(f"The default study {verdict}; `--profile NAME` asks about a profile.")
    else:
        typer.echo(f"Profile {found.profile} {'can' if found.can_run else 'cannot'} run here.")
