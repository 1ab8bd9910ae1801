"""Entry point of the command line, and two commands that only pass on what others do: `schema` and `lm-eval`."""

from aqnpipe.cli.interrupts import EXIT_INTERRUPTED, ends_at_once

with ends_at_once():
    import errno
    import sys
    from collections.abc import Callable
    from importlib.metadata import version
    from typing import Annotated, Any

    import typer
    from pydantic import ValidationError

    from aqnpipe.cli.check import check, plan
    from aqnpipe.cli.diagnose.command import diagnose
    from aqnpipe.cli.doctor.command import doctor
    from aqnpipe.cli.exec import execute
    from aqnpipe.cli.results import export, report, verify
    from aqnpipe.cli.robustness import robustness
    from aqnpipe.cli.run import init, run
    from aqnpipe.cli.score import check_published, score
    from aqnpipe.cli.sensitivity import measure_noise, sensitivity, sigmas
    from aqnpipe.cli.two_machines import capture, compare_runs, parity
    from aqnpipe.config.base import describe_validation_error
    from aqnpipe.config.schema import study_schema
    from aqnpipe.errors import EXIT_USER_ERROR, AqnpipeError, ConfigError, printable

app = typer.Typer(pretty_exceptions_enable=False)


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


def schema() -> None:
    """Print the JSON schema of study files, the content of config/schema.json."""
    typer.echo(study_schema(), nl=False)


def lm_eval(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENTS...", help="as of `lm_eval`, with --model aqnpipe")
    ] = None,
) -> None:
    """Evaluate a model under noise on tasks of lm-evaluation-harness.

    Example: `aqnpipe lm-eval --model aqnpipe --model_args pretrained=./model,noise=0.05,noise_seed=0 --tasks gsm8k`.
    """
    # The harness finds no models of other packages by itself.
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError as error:
        raise ConfigError("lm-evaluation-harness is not installed: pip install 'aqnpipe[lm-eval]'") from error
    import aqnpipe.integrations.lm_harness  # noqa: F401 - registers the model

    # The harness reads its arguments from there.
    sys.argv = ["lm-eval", *(arguments or ["--help"])]
    cli_evaluate()


_GROUPS: dict[str, tuple[Callable[..., None], ...]] = {
    "Studies": (init, check, plan, run, report, verify, export, sigmas, schema),
    "Models and programs under noise": (execute, robustness, sensitivity, measure_noise, lm_eval),
    "Machines": (doctor, diagnose, capture, parity, compare_runs),
    "Answers and published figures": (score, check_published),
}
_PANELS = {
    "Data and responses": "data questions texts prompts style layout instruction shots max_tokens scorer "
    "sequences tokens decode padding replay",
    "Noise and faults": "levels noise noises noise_seeds scale fault operators",
    "Computation": "dtype attention backend tensor_parallel batch_size batch_invariant device threads random_weights",
    "Several devices": "devices duration history logs compare",
    "Results": "output json figure alpha rows max_megabytes",
}
_PANEL_OF = {name: panel for panel, names in _PANELS.items() for name in names.split()}
"""The group of an option in the help of commands with more than `_MOST_IN_ONE_LIST`."""
_MOST_IN_ONE_LIST = 12


class _Grouped(typer.core.TyperCommand):
    """A command whose help has many options in groups."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        for option in self.params if len(self.params) > _MOST_IN_ONE_LIST else ():
            option.rich_help_panel = _PANEL_OF.get(option.name)  # type: ignore[attr-defined]


# Options behind the study are Snakemake's, and all of `lm-eval` are those of the harness.
_PASSED_ON = {"ignore_unknown_options": True, "allow_interspersed_args": False}
_SETTINGS: dict[Callable[..., None], dict[str, Any]] = {
    execute: {"name": "exec", "context_settings": {"allow_interspersed_args": False}},
    run: {"context_settings": _PASSED_ON},
    lm_eval: {"name": "lm-eval", "context_settings": _PASSED_ON | {"help_option_names": ["--about"]}},
}
for group, commands in _GROUPS.items():
    for command in commands:
        # Lines of a docstring are longer than those of most terminals.
        text = "\n\n".join(" ".join(part.split()) for part in (command.__doc__ or "").split("\n\n"))
        app.command(cls=_Grouped, help=text, rich_help_panel=group, **_SETTINGS.get(command, {}))(command)


_OF_THE_DISK = (errno.EACCES, errno.EDQUOT, errno.ENOSPC, errno.EROFS)
"""Errors of files that a user can correct, in whatever command; any other is a bug."""


def main() -> None:
    """Run the command line. A user's mistake prints one line on standard error and exits with code 2."""
    try:
        sys.exit(app(args=sys.argv[1:] or ["--help"], prog_name="aqnpipe", standalone_mode=False) or 0)
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(EXIT_INTERRUPTED)
    except typer.TyperException as error:
        # typer itself would draw a box under the usage of the command.
        context = getattr(error, "ctx", None)
        hint = f" (`{context.command_path} --help` lists what there is)" if context else ""
        typer.echo(f"ERROR: {printable(_usage_message(error))}{hint}", err=True)
        sys.exit(EXIT_USER_ERROR)
    except AqnpipeError as error:
        typer.echo(f"ERROR: {error}", err=True)
        sys.exit(EXIT_USER_ERROR)
    except OSError as error:
        if error.errno not in _OF_THE_DISK or not error.filename:
            raise
        typer.echo(f"ERROR: {printable(str(error.filename))}: {error.strerror}", err=True)
        sys.exit(EXIT_USER_ERROR)


def _usage_message(error: typer.TyperException) -> str:
    """Return a usage error on one line; values are judged by pydantic, whose words are not shown."""
    message = " ".join(error.format_message().split()).removesuffix(".").replace("Value error, ", "")
    cause = error.__cause__ or error.__context__
    if not isinstance(cause, ValidationError) or cause.errors()[0]["type"] == "value_error":
        return message
    option = message.partition(": ")[0].removeprefix("Invalid value for ").strip("'")
    return f"{option}: {describe_validation_error(cause).partition(': ')[2]}"
