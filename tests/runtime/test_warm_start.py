"""Jobs start in a process that has its imports made, and are otherwise as those of the plain interpreter."""

import importlib.util
import os
import shlex
import signal
import socket
import subprocess
import sys

import psutil
import pytest

from aqnpipe.runtime import warm_start

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def command(monkeypatch, tmp_path):
    """The command of a server that has imported only `wave`, which no script imports; ended after the test."""
    ends = []
    monkeypatch.setattr(warm_start.atexit, "register", lambda function, *arguments: ends.append((function, arguments)))
    words = shlex.split(warm_start.warm_interpreter(1, ("wave",)))
    ((function, arguments),) = ends
    yield words
    function(*arguments)
    arguments[0].wait(timeout=30)


def start(command, tmp_path, source, *arguments, **how):
    script = tmp_path / "script.py"
    script.write_text(source)
    settings = {"cwd": tmp_path, "env": ENVIRONMENT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*command, str(script), *arguments], **{**settings, **how})


def ran(command, tmp_path, source, *arguments, **how):
    process = start(command, tmp_path, source, *arguments, **how)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


WARM = "import sys; print('wave' in sys.modules)"


def test_a_script_runs_with_the_imports_made(command, tmp_path):
    source = WARM + "\nimport os\nprint(sys.argv[1:], os.getcwd(), os.environ['MARK'], sys.path[0], __name__)"
    code, out, err = ran(command, tmp_path, source, "a b", env={**ENVIRONMENT, "MARK": "it"})
    assert (code, err) == (0, "")
    assert out.splitlines() == ["True", f"['a b'] {tmp_path} it {tmp_path} __main__"]


def test_two_scripts_share_nothing_that_they_change(command, tmp_path):
    source = "import wave, random, os\nprint(getattr(wave, 'mark', 0))\nwave.mark = 1\nos.environ['MARK'] = '1'"
    assert [ran(command, tmp_path, source)[1] for _ in range(2)] == ["0\n", "0\n"]


@pytest.mark.parametrize(
    ("ending", "code", "message"),
    [
        ("sys.exit(2)", 2, ""),
        ("sys.exit('why')", 1, "why"),
        ("raise ValueError('bug')", 1, "ValueError: bug"),
        ("import os; os.kill(os.getpid(), 11)", -11, ""),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
    ],
)
def test_it_ends_as_the_plain_interpreter_does(command, tmp_path, ending, code, message):
    source = f"import sys\nprint('out', flush=True)\n{ending}"
    for python in (command, [sys.executable]):
        found, out, err = ran(python, tmp_path, source)
        assert (found, out, message in err) == (code, "out\n", True)


def test_a_signal_reaches_the_job(command, tmp_path):
    source = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('stopped', flush=True), sys.exit(3)))\n"
        "print('ready', flush=True)\ntime.sleep(60)"
    )
    process = start(command, tmp_path, source)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=30)[0] == "stopped\n"
    assert process.returncode == 3


def test_a_signal_waits_until_the_job_is_known(tmp_path):
    """It must not end the stand-in: a server whose stand-in has ended kills the job."""
    path, stand_in = str(tmp_path / "socket"), tmp_path / "python.py"
    stand_in.write_text(warm_start.stand_in_source(path, "1"))
    listening = warm_start.listen(path)
    job = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    process = start([sys.executable, "-IS", str(stand_in)], tmp_path, "")
    requested, _ = listening.accept()
    for descriptor in socket.recv_fds(requested, 1 << 17, 3)[1]:
        os.close(descriptor)
    process.send_signal(signal.SIGTERM)
    requested.send(str(job.pid).encode())
    assert job.wait(30) == -signal.SIGTERM
    requested.send(str(-signal.SIGTERM).encode())
    assert process.wait(30) == -signal.SIGTERM


def test_a_killed_stand_in_takes_its_job_with_it(command, tmp_path):
    process = start(command, tmp_path, "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)")
    job = psutil.Process(int(process.stdout.readline()))
    process.kill()
    assert job.wait(timeout=30) is None or not job.is_running()


def test_other_threads_and_options_start_cold(command, tmp_path):
    assert ran(command, tmp_path, WARM)[1] == "True\n"
    assert ran(command, tmp_path, WARM, env={**ENVIRONMENT, "OMP_NUM_THREADS": "2"})[1] == "False\n"
    options = [*command, "-c", WARM]
    assert subprocess.run(options, env=ENVIRONMENT, capture_output=True, text=True, check=True).stdout == "False\n"


def test_without_the_server_a_script_starts_cold(monkeypatch, tmp_path):
    ends = []
    monkeypatch.setattr(warm_start.atexit, "register", lambda function, *arguments: ends.append((function, arguments)))
    words = shlex.split(warm_start.warm_interpreter(1, ("no_such_module",)))
    server = ends[0][1][0]
    # Its import fails, with requests waiting or none.
    assert ran(words, tmp_path, WARM)[:2] == (0, "False\n")
    assert server.wait(timeout=30) == 1
    assert ran(words, tmp_path, WARM)[:2] == (0, "False\n")
    ends[0][0](*ends[0][1])


def test_a_job_outlives_the_end_of_snakemake(monkeypatch, tmp_path):
    ends = []
    monkeypatch.setattr(warm_start.atexit, "register", lambda function, *arguments: ends.append((function, arguments)))
    words = shlex.split(warm_start.warm_interpreter(1, ("wave",)))
    process = start(
        words, tmp_path, "import sys\nprint('ready', flush=True)\nsys.stdin.readline()\nsys.exit(4)", stdin=-1
    )
    assert process.stdout.readline() == "ready\n"
    ends[0][0](*ends[0][1])
    process.communicate("go\n", timeout=30)
    assert process.returncode == 4
    server, folder = ends[0][1]
    assert server.wait(timeout=30) == 0
    assert not folder.exists()


def test_every_module_that_is_imported_before_the_fork_exists():
    for name in warm_start.IMPORTED:
        module, _, function = name.partition(":")
        assert importlib.util.find_spec(module), name
        assert not function or callable(getattr(importlib.import_module(module), function)), name
