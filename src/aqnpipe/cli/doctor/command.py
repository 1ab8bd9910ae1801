"""`aqnpipe doctor`: check this machine and the requirements of a profile."""

from pathlib import Path
from typing import Annotated

import typer

from aqnpipe.artifacts.base import Artifact
from aqnpipe.cli.doctor.checks import Item, machine_checks
from aqnpipe.cli.doctor.profiles import profile_checks, read_profile
from aqnpipe.cli.doctor.slurm import read_partitions
from aqnpipe.errors import EXIT_USER_ERROR, ConfigError

TRIED = Path("results/first-hour")
_SIGNS = {"ok": "ok", "untested": "?", "missing": "-", "problem": "!!"}


class DoctorReport(Artifact):
    """Output of `aqnpipe doctor --json`."""

    machine: tuple[Item, ...]
    profile: str | None
    profile_checks: tuple[Item, ...]
    can_run: bool


def examine(profile: str | None) -> DoctorReport:
    """Check this machine and the requirements of `profile`, if given; ConfigError if there is no such profile."""
    keys = read_profile(profile) if profile is not None else None
    partitions = read_partitions()
    machine = machine_checks(Path("results"), partitions)
    needs = profile_checks(keys, partitions) if keys is not None else []
    # Slurm is a problem only for a profile that uses it, and then among `needs`.
    checks = [*(check for check in machine if check.name != "Slurm"), *needs]
    problems = [check for check in checks if check.status == "problem"]
    return DoctorReport(machine=tuple(machine), profile=profile, profile_checks=tuple(needs), can_run=not problems)


def doctor(
    profile: Annotated[
        str | None, typer.Option(help="also check whether jobs of this profile can run from here")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print everything as JSON")] = False,
    try_everything: Annotated[
        bool, typer.Option("--try", help=f"also try kernels, noise cost and a study; the page is {TRIED}/first-hour.md")
    ] = False,
    workers: Annotated[
        int | None, typer.Option(min=1, help="of the study of --try (default: one per device, 2 on a CPU)")
    ] = None,
    minutes: Annotated[float, typer.Option(min=0, help="after which --try stops")] = 20,
) -> None:
    """Check devices, libraries, Slurm and disk of this machine. Exit code 2 if the study or profile cannot run here."""
    if json and try_everything:
        raise ConfigError("--json: found --try too, whose result is a page, expected one of them")
    found = examine(profile)
    if json:
        typer.echo(found.model_dump_json(indent=2))
    else:
        _print(found)
    from aqnpipe.cli.doctor.first_hour import try_out

    passed = not try_everything or try_out(TRIED, found.machine, workers, minutes, typer.echo)
    if not (found.can_run and passed):
        raise typer.Exit(EXIT_USER_ERROR)


def _print(found: DoctorReport) -> None:
    width = max(len(check.name) for check in (*found.machine, *found.profile_checks))
    for title, checks in (("this machine", found.machine), (f"profile {found.profile}", found.profile_checks)):
        if checks:
            typer.echo(title)
        for check in checks:
            advice = f"  -> {check.advice}" if check.advice else ""
            typer.echo(f"  {_SIGNS[check.status]:>2} {check.name:<{width}}  {check.found}{advice}")
    if found.profile is None:
        result = "can" if found.can_run else "cannot"
        typer.echo(f"The default study {result} run here; `--profile NAME` checks a profile.")
    else:
        typer.echo(f"Profile {found.profile} {'can' if found.can_run else 'cannot'} run here.")
