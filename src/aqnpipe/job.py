"""The edge between Snakemake and the stages: log files, progress on the terminal, and errors as one line."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from aqnpipe.errors import EXIT_USER_ERROR, AqnpipeError

Say = Callable[[str], None]


@contextmanager
def logged_job(log: Path) -> Iterator[Say]:
    """Send everything that the body prints (C libraries too) to `log`; yield a function for lines on the terminal too.

    An AqnpipeError ends the process with its one line and exit code 2. Any other exception is a bug: its traceback goes
    to the log, which Snakemake names and shows.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    terminal = os.dup(sys.stderr.fileno())
    with log.open("w", encoding="utf-8", buffering=1) as file:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())

        def say(line: str) -> None:
            print(line, flush=True)  # noqa: T201 - goes to the log file
            os.write(terminal, f"{line}\n".encode())

        try:
            yield say
        except AqnpipeError as error:
            say(f"ERROR: {error}")
            say(f"log: {log}")
            sys.exit(EXIT_USER_ERROR)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
