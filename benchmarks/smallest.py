"""The option `--smallest` of every benchmark, and how a benchmark ends that cannot run on this machine."""

import argparse
import sys
from typing import Any, NoReturn

NOT_HERE = 2
"""Exit code where a device, a program or a right is missing."""


def parse(parser: argparse.ArgumentParser, **smallest: Any) -> argparse.Namespace:
    """Parse the command line; with `--smallest`, `smallest` are the defaults.

    Options without a default that the command line requires are required all the same.
    """
    parser.add_argument(
        "--smallest", action="store_true", help="sizes that end within seconds: to try the script, not to measure"
    )
    if "--smallest" in sys.argv[1:]:
        parser.set_defaults(**smallest)
    return parser.parse_args()


def not_here(missing: str) -> NoReturn:
    """End with one line that names what this machine lacks."""
    print(f"not on this machine: {missing}", file=sys.stderr)  # noqa: T201 - the message of a script
    sys.exit(NOT_HERE)
