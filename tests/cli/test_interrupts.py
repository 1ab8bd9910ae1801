"""Ctrl-C at the start of a command."""

import signal
import subprocess
import sys
import threading

import pytest

from aqnpipe.cli.interrupts import ends_at_once

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


TERMINATED = """
import os, signal, sys
from aqnpipe.cli import robustness

robustness.evaluate_and_report = lambda *_: os.kill(os.getpid(), signal.SIGTERM)
from aqnpipe.cli.main import main
main()
"""


def test_sigterm_says_that_the_same_command_continues(tmp_path):
    arguments = ["robustness", "tiny", "--output", str(tmp_path / "out")]
    command = [sys.executable, "-c", TERMINATED, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, "")
    assert done.stderr == "stopped by SIGTERM before it was done\nnext: run the same command, which continues\n"


def test_a_handler_of_another_program_stays():
    before = signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with ends_at_once():
            assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with ends_at_once():
            assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_thread_may_import_the_commands():
    failed = []

    def enter():
        try:
            with ends_at_once():
                pass
        except ValueError as error:
            failed.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert not failed
