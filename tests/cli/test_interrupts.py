"""Ctrl-C at the start of a command."""

import signal
import subprocess
import sys
import threading

import pytest

from aqnpipe.cli.interrupts import interrupts_end_at_once

INTERRUPTED_AT = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, *_):
        if name == {name!r}:
            os.kill(os.getpid(), signal.SIGINT)

# Background shells ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupting())
from aqnpipe.cli.main import main
main()
"""


@pytest.mark.parametrize("name", ["importlib.metadata", "pydantic", "aqnpipe.errors", "polars"])
def test_an_interrupt_while_libraries_are_imported_is_no_traceback(name, tmp_path):
    """`polars` is imported by the command itself, the others before it starts."""
    arguments = ["robustness", "tiny", "--output", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_AT.format(name=name), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 130
    assert "Traceback" not in done.stderr
    assert len(f"{done.stdout}{done.stderr}".splitlines()) <= 2


def test_a_handler_of_another_program_stays():
    before = signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with interrupts_end_at_once():
            assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with interrupts_end_at_once():
            assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_thread_may_import_the_commands():
    failed = []

    def enter():
        try:
            with interrupts_end_at_once():
                pass
        except ValueError as error:
            failed.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert not failed
