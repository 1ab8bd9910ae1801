"""The command line as a user types it, in this process."""

from typer.testing import CliRunner, Result

from aqnpipe.cli.main import app


def typed(*arguments: object, catch_exceptions: bool = True) -> Result:
    """Run `aqnpipe` with these arguments; return its exit code, output and exception."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=catch_exceptions)
