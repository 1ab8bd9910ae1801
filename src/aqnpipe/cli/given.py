"""Input of a user on the command line, as opposed to defaults."""

import typer


def given_options(context: typer.Context) -> list[str]:
    """Return the names of the arguments and options that are on the command line, in the order of the command's own."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
