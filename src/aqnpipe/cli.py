"""The command line for use without the pipeline."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from aqnpipe import check_command, score_command
from aqnpipe.config.plan import StudyPlan
from aqnpipe.config.schema import study_schema
from aqnpipe.config.study import load_study_file
from aqnpipe.diagnosis import command as diagnosis_command
from aqnpipe.doctor import command as doctor_command
from aqnpipe.errors import EXIT_USER_ERROR, AqnpipeError
from aqnpipe.noise import command as noise_command

app = typer.Typer(
    help="Experiments on noise-robust post-training that prove what they did.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def schema() -> None:
    """Print the JSON schema of study files (the content of config/schema.json)."""
    typer.echo(study_schema(), nl=False)


@app.command()
def audit(
    published: Annotated[Path, typer.Argument(help="file of published figures, described in config/README.md")],
    json: Annotated[bool, typer.Option("--json", help="print the whole audit as JSON")] = False,
) -> None:
    """Re-test published figures: what is possible, how sure it is, and which claims stand."""
    from aqnpipe.statistics.audit_command import print_audit  # slow to import, so only here

    print_audit(published, json)


@app.command()
def report(study: Path) -> None:
    """Compare and report on whatever results of a study exist, as after `snakemake --keep-going`."""
    from aqnpipe.partial_report import report_on_what_exists  # slow to import, so only here

    for line in report_on_what_exists(StudyPlan(load_study_file(study))):
        typer.echo(line)


app.command()(check_command.check)
app.command()(diagnosis_command.diagnose)
app.command()(diagnosis_command.sigmas)
app.command()(noise_command.noise_audit)
app.command()(doctor_command.doctor)
app.command()(score_command.score)


def main() -> None:
    """Run the command line; a user's mistake ends as one line on standard error and exit code 2."""
    try:
        app()
    except AqnpipeError as error:
        typer.echo(f"ERROR: {error}", err=True)
        sys.exit(EXIT_USER_ERROR)
