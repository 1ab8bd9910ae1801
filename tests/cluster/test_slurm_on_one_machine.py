"""Tests of the script that starts a Slurm on one machine; what it starts is used by tests/workflow/test_slurm.py."""

import importlib.util
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("slurm_on_one_machine.py")


@pytest.fixture(scope="module")
def script():
    """The script as a module."""
    specification = importlib.util.spec_from_file_location("slurm_on_one_machine", SCRIPT)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_a_stale_process_number_harms_nobody(script, tmp_path):
    """After a reboot the number in a pid file may be another program's: it is left alone, and the file goes."""
    with subprocess.Popen(["sleep", "60"]) as another:
        pid_file = tmp_path / "munged.pid"
        pid_file.write_text(f"{another.pid}\n", encoding="utf-8")
        script.end(pid_file, "munged")
        assert another.poll() is None
        assert not pid_file.exists()
        another.kill()


def test_the_named_program_is_ended(script, tmp_path):
    """What was started is ended, and waited for."""
    started = subprocess.run(["sh", "-c", "sleep 60 >&- 2>&- & echo $!"], capture_output=True, text=True, check=True)
    pid_file = tmp_path / "sleep.pid"
    pid_file.write_text(started.stdout, encoding="utf-8")
    script.end(pid_file, "sleep")
    assert not Path(f"/proc/{started.stdout.strip()}").exists()
    assert not pid_file.exists()


def test_a_process_that_is_gone_is_no_error(script, tmp_path):
    """A machine that went down leaves pid files of nobody."""
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    pid_file = tmp_path / "munged.pid"
    pid_file.write_text(f"{ended.pid}\n", encoding="utf-8")
    script.end(pid_file, "munged")
    script.end(tmp_path / "never-written.pid", "munged")
    assert not pid_file.exists()
