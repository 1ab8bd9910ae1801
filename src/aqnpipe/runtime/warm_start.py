"""Jobs on a CPU start in a process that has already imported the libraries of the stages.

Importing torch, transformers and TRL takes several seconds of processor time, much of the time of a small study.
Snakemake starts each job as `python script.py`. `warm_interpreter` starts a server, which imports once, and returns the
command of a stand-in for `python`. The stand-in passes script, environment, folder and streams to the server, which
forks a supervisor of the job, and this one the job. The stand-in forwards signals to the job and ends as that does.
Snakemake decides what runs, as without it.

The stand-in runs the true interpreter instead if the server does not answer, or if the job has other threads:
the libraries read their number of threads when they are imported.

Server: `python -m aqnpipe.runtime.warm_start DESCRIPTOR MODULE ...` with that of a socket on which requests wait, until
its standard input ends and its jobs are done.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

IMPORTED = (
    "aqnpipe.runtime.jobs",
    "aqnpipe.data.stage",
    "aqnpipe.diagnosis.stage",
    "aqnpipe.runtime.training",
    "aqnpipe.training.trainer",
    "aqnpipe.evaluation.stage",
    "aqnpipe.runtime.evaluation_workers",
    "aqnpipe.comparison.stage",
    "aqnpipe.published.check",
    "aqnpipe.report.stage",
    "altair",
    "vl_convert",
    "transformers.models.qwen2.modeling_qwen2",
    "aqnpipe.noise.kernels.gaussian:load_kernels",
)
"""Modules that jobs of the built-in models import, and functions to call, in the order in which jobs need them."""

_LARGEST_REQUEST = 1 << 17
_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGURG)
_STAND_IN = """import json, os, signal, socket, sys

FORWARDED = {forwarded!r}

def cold():
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT, *FORWARDED])
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])

if not sys.argv[1:] or sys.argv[1].startswith("-") or os.environ.get("OMP_NUM_THREADS") != {threads!r}:
    cold()
# Until it is known whom they are for: a signal that ended this process would kill the job.
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, *FORWARDED])
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
request = {{"arguments": sys.argv[1:], "environment": dict(os.environ), "folder": os.getcwd()}}
try:
    server.connect({path!r})
    socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])
    pid = int(server.recv(64) or 0)
except OSError:
    pid = 0
if not pid:
    cold()
# From a terminal the forked process gets an interrupt too.
signal.signal(signal.SIGINT, signal.SIG_IGN)
for number in FORWARDED:
    signal.signal(number, lambda number, frame: os.kill(pid, number))
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT, *FORWARDED])
code = int(server.recv(64) or -9)
if code < 0:
    if code != -9:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


def warm_interpreter(threads: int, modules: tuple[str, ...] = IMPORTED) -> str:
    """Start a server and return the command that Snakemake puts before the scripts of jobs.

    threads: of the jobs that compute, as Snakemake passes them. The server ends with this process, after the jobs.
    """
    folder = Path(tempfile.mkdtemp(prefix="aqnpipe-"))
    path, stand_in = str(folder / "socket"), folder / "python.py"
    stand_in.write_text(stand_in_source(path, str(threads)), encoding="utf-8")
    with listen(path) as listening:
        descriptor = listening.fileno()
        # Without -P it would search the working directory for modules.
        server = subprocess.Popen(  # noqa: S603 - the interpreter itself
            [sys.executable, "-P", "-m", "aqnpipe.runtime.warm_start", str(descriptor), *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            pass_fds=[descriptor],
        )
    atexit.register(_close, server, folder)
    return f"{shlex.quote(sys.executable)} -IS {shlex.quote(str(stand_in))}"


def _close(server: subprocess.Popen[bytes], folder: Path) -> None:
    if server.stdin is not None:
        server.stdin.close()
    # Without its socket it gets no further jobs. It is not waited for: a killed Snakemake leaves its jobs running too.
    shutil.rmtree(folder, ignore_errors=True)


def stand_in_source(path: str, threads: str) -> str:
    """Return the program that stands in for the interpreter, for `python -IS`: it imports nothing of any package."""
    forwarded = [int(number) for number in _FORWARDED]
    return _STAND_IN.format(python=sys.executable, path=path, threads=threads, forwarded=forwarded)


def run_script(arguments: list[str]) -> None:
    """Run a script with arguments in this process as `python` does."""
    sys.argv = arguments
    sys.path.insert(0, str(Path(arguments[0]).parent))
    runpy.run_path(arguments[0], run_name="__main__")


def serve(listening: socket.socket, run: Callable[[list[str]], None] = run_script) -> None:
    """Fork for every request until standard input ends, then wait until all forked processes are done."""
    # Nobody asks how they ended.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with listening, selectors.DefaultSelector() as selector:
        for source in (listening, 0):
            selector.register(source, selectors.EVENT_READ)
        while all(key.fd != 0 for key, _ in selector.select()):
            requested, _ = listening.accept()
            with requested:
                if os.fork() == 0:
                    listening.close()
                    _supervise(requested, run)
    with contextlib.suppress(ChildProcessError):
        os.wait()


def _supervise(requested: socket.socket, run: Callable[[list[str]], None]) -> None:
    """Run what was requested in a process below this one, until it ends or the stand-in does; does not return."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    message, descriptors, _, _ = socket.recv_fds(requested, _LARGEST_REQUEST, 3)
    pid = os.fork() if message else None
    if pid == 0:
        requested.close()
        _become(json.loads(message), descriptors, run)
    if pid:
        for descriptor in descriptors:
            os.close(descriptor)
        threading.Thread(target=_kill_with, args=(requested, pid), daemon=True).start()
        with contextlib.suppress(BrokenPipeError):
            requested.send(str(pid).encode())
        # Its number is free for others only when this process has ended.
        job: Any = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        code = job.si_status if job.si_code == os.CLD_EXITED else -job.si_status
        with contextlib.suppress(BrokenPipeError):
            requested.send(str(code).encode())
    os._exit(0)


def _kill_with(requested: socket.socket, pid: int) -> None:
    """Kill a job whose stand-in has ended, because it was killed."""
    with contextlib.suppress(OSError):
        requested.recv(1)
        os.kill(pid, signal.SIGKILL)


def _become(request: dict, descriptors: list[int], run: Callable[[list[str]], None]) -> None:
    """Turn this forked process into the one that was requested; does not return."""
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    code = 0
    try:
        run(request["arguments"])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except BaseException:  # noqa: BLE001 - as the interpreter ends
        traceback.print_exc()
        code = 1
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                code = code or 120
        os._exit(code)


def listen(path: str) -> socket.socket:
    """Return a socket on which requests wait until `serve` answers them."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(path)
    listening.listen(64)
    return listening


def import_all(names: tuple[str, ...]) -> None:
    """Import modules, call functions (module:function), and keep forked processes from copying what all share.

    Every collection of garbage would touch all objects.
    """
    for name in names:
        module, _, function = name.partition(":")
        imported = importlib.import_module(module)
        if function:
            getattr(imported, function)()
    gc.collect()
    gc.freeze()


def main() -> None:
    """Serve jobs until standard input ends."""
    # An interrupt from a terminal ends the jobs, and then Snakemake ends the server.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    listening = socket.socket(fileno=int(sys.argv[1]))
    folder = Path(listening.getsockname()).parent
    import_all(tuple(sys.argv[2:]))
    serve(listening)
    # A Snakemake that was killed left it.
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
