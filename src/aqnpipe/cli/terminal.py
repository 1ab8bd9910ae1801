"""Output of commands: consoles and tables; options: which were given, as opposed to defaults, and noise levels."""

from collections.abc import Sequence

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from aqnpipe.errors import ConfigError


def console_of(*, stderr: bool) -> Console:
    """Return a console on standard output, or on standard error for progress."""
    return Console(stderr=stderr, soft_wrap=False, highlight=False)


def table_of(title: str, left: Sequence[str], right: Sequence[str], remarks: Sequence[str] = ()) -> Table:
    """Return an empty table with columns of text, of numbers, and of remarks, which break into lines."""
    table = Table(title=escape(title) or None, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in left:
        table.add_column(column, overflow="fold")
    for column in right:
        table.add_column(column, justify="right", overflow="fold")
    for column in remarks:
        table.add_column(column)
    return table


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return one line per row, with the cells of a column in the same place; rows have equally many cells."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def given_options(context: typer.Context) -> list[str]:
    """Return the names of the arguments and options that are on the command line, in the order of the command's own."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]


def refuse_level(option: str, level: float, *, may_be_zero: bool = False) -> None:
    """Raise ConfigError for a relative noise outside its range, with the share that a percentage probably means."""
    if not (0 < level < 1 or (may_be_zero and level == 0)):
        meant = f"; did you mean {level / 100:g}?" if 1 <= level < 100 else ""
        least = "" if level >= 1 else "at least 0 and " if may_be_zero else "above 0 and "
        raise ConfigError(f"{option}: found {level:g}, expected {least}below 1{meant}")
