"""The command line for use without the pipeline."""

import sys
from pathlib import Path

import typer

from aqnpipe.config.plan import StudyPlan
from aqnpipe.config.schema import study_schema
from aqnpipe.config.study import load_study_file
from aqnpipe.errors import EXIT_USER_ERROR, AqnpipeError

app = typer.Typer(
    help="Experiments on noise-robust post-training that prove what they did.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def check(study: Path) -> None:
    """Validate a study file and the arms it names, and say what it would run."""
    plan = StudyPlan(load_study_file(study))
    config = plan.study.config
    seeds = ", ".join(map(str, config.seeds))
    typer.echo(
        f"{study}: valid. {len(plan.runs())} runs ({', '.join(config.arms)}; seeds {seeds}) of {plan.num_steps} steps, "
        f"{plan.num_evaluations} evaluations, {len(plan.diagnoses())} diagnoses, "
        f"{len(config.comparisons)} comparisons; report in {plan.results}/report.html"
    )


@app.command()
def schema() -> None:
    """Print the JSON schema of study files (the content of config/schema.json)."""
    typer.echo(study_schema(), nl=False)


def main() -> None:
    """Run the command line; a user's mistake ends as one line on standard error and exit code 2."""
    try:
        app()
    except AqnpipeError as error:
        typer.echo(f"ERROR: {error}", err=True)
        sys.exit(EXIT_USER_ERROR)
