"""Python with the libraries imported already: a server that forks, and a stand-in for the interpreter that asks it to.

Most of a small study's time is imports. Here Snakemake and its jobs are processes of their own as always, started by
the same commands, with the same files, signals and exit codes; only their imports were made before they were forked.

`python warm_python.py SOCKET STAND_IN` serves until its standard input ends. It writes STAND_IN: a program that, given
a script and arguments, or `-m snakemake` and arguments, runs them in a forked process and ends as that does. Each
process says its pid in the folder that AQNPIPE_WARM_PIDS names.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path

IMPORTED = (
    "snakemake.cli",
    "snakemake.executors.local",
    "aqnpipe.artifacts.provenance",
    "aqnpipe.cli.check",
    "aqnpipe.config.plan",
    "aqnpipe.data.stage",
    "aqnpipe.diagnosis.stage",
    "aqnpipe.evaluation.stage",
    "aqnpipe.loss_study.stage",
    "aqnpipe.runtime.jobs",
    "aqnpipe.models.loading",
    "aqnpipe.report.stage",
    "aqnpipe.comparison.stage",
    "aqnpipe.loss_study.comparison",
    "aqnpipe.published.check",
    "aqnpipe.training.stage",
    "aqnpipe.training.trainer",
    "altair",
    "vl_convert",
    "transformers.models.qwen2.modeling_qwen2",
)
_LARGEST_REQUEST = 1 << 17
_STAND_IN = """#!{python} -IS
import json, os, signal, socket, sys

if not sys.argv[1:] or (sys.argv[1].startswith("-") and sys.argv[1:3] != ["-m", "snakemake"]):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.connect({path!r})
request = {{"arguments": sys.argv[1:], "environment": dict(os.environ), "folder": os.getcwd()}}
socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])
code = int(server.recv(64) or -9)
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""


def main() -> None:
    """Import, write the stand-in, then fork for every request."""
    path, stand_in = sys.argv[1], Path(sys.argv[2])
    for name in IMPORTED:
        importlib.import_module(name)
        if name.startswith("aqnpipe."):
            # What the workflow asks first; the imports of every module are kept.
            sys.modules["aqnpipe.artifacts.provenance"].code_digest(name)  # type: ignore[attr-defined]
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(path)
    listening.listen(64)
    stand_in.write_text(_STAND_IN.format(python=sys.executable, path=path), encoding="utf-8")
    stand_in.chmod(0o755)
    # So that collections of a forked process do not copy what all share.
    gc.collect()
    gc.freeze()
    print("ready", flush=True)  # noqa: T201 - for who started it
    _serve(listening, stand_in)


def _serve(listening: socket.socket, stand_in: Path) -> None:
    children: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(listening, selectors.EVENT_READ)
        selector.register(0, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select(0.01):
                if key.fd == 0:
                    return
                if key.fileobj is listening:
                    _accept(listening, selector, children, stand_in)
                elif not key.fileobj.recv(1):  # type: ignore[union-attr]
                    # Whoever requested is dead, so this is a process that was killed.
                    selector.unregister(key.fileobj)
                    for pid in [pid for pid, requested in children.items() if requested is key.fileobj]:
                        os.kill(pid, signal.SIGKILL)
            _reap(selector, children)


def _accept(
    listening: socket.socket, selector: selectors.BaseSelector, children: dict[int, socket.socket], stand_in: Path
) -> None:
    requested, _ = listening.accept()
    message, descriptors, _, _ = socket.recv_fds(requested, _LARGEST_REQUEST, 3)
    if not message:
        requested.close()
        return
    pid = os.fork()
    if pid == 0:
        for connection in (listening, requested, *children.values()):
            connection.close()
        _become(json.loads(message), descriptors, stand_in)
    for descriptor in descriptors:
        os.close(descriptor)
    children[pid] = requested
    selector.register(requested, selectors.EVENT_READ)


def _reap(selector: selectors.BaseSelector, children: dict[int, socket.socket]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        requested = children.pop(pid)
        if requested in {key.fileobj for key in selector.get_map().values()}:
            selector.unregister(requested)
            with contextlib.suppress(BrokenPipeError):
                requested.send(str(os.waitstatus_to_exitcode(status)).encode())
        requested.close()


def _become(request: dict, descriptors: list[int], stand_in: Path) -> None:
    """Turn this forked process into the one that was requested; does not return."""
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    # So that Snakemake and its shells can be killed as one group.
    os.setsid()
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    if cgroup := os.environ.get("AQNPIPE_WARM_CGROUP"):
        Path(cgroup).write_text(str(os.getpid()))
    arguments = request["arguments"]
    sys.executable = str(stand_in)
    code = 0
    try:
        if arguments[:2] == ["-m", "snakemake"]:
            _note("snakemake")
            sys.argv = ["snakemake", *arguments[2:]]
            sys.modules["snakemake.cli"].main()
        else:
            _note(Path(arguments[0]).name)
            sys.argv = arguments
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
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


def _note(name: str) -> None:
    (Path(os.environ["AQNPIPE_WARM_PIDS"]) / str(os.getpid())).write_text(name)


if __name__ == "__main__":
    main()
