"""Where a run works until it is whole: a folder that the workflow does not know of and so does not delete.

<scratch>/lock          held while a process works here
<scratch>/<key>/        one workspace; the key is a digest of all that decides the run's bytes
    run/                what becomes the run's declared folder
    resume/step<N>/     resume points
    finished.json       digests of run/, written when nothing is missing there
    stop                there from when a stop was asked for until the next start
"""

import fcntl
import hashlib
import json
import os
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

from pydantic import ValidationError

from aqnpipe.artifacts.base import Artifact
from aqnpipe.artifacts.durable_files import damage, digests_of, rename, sync, sync_tree, write_durably
from aqnpipe.artifacts.runs import RunRecord
from aqnpipe.errors import RunLockedError

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGURG)
"""What a scheduler sends before its time limit ends a job.

Slurm sends it to every process of the job. SIGURG is the one that all others ignore: Ray's would end on either other,
and several workers could not write a resume point any more.
"""


class FinishedRun(Artifact):
    """finished.json: the files of a finished run by their path in it, with their SHA-256."""

    files: dict[str, str]


@dataclass(frozen=True)
class Workspace:
    """One run in the making; all ranks of a run share it."""

    folder: Path

    @property
    def run(self) -> Path:
        """Folder of what the run hands on."""
        return self.folder / "run"

    @property
    def resume(self) -> Path:
        """Folder of the resume points."""
        return self.folder / "resume"

    @property
    def accounts(self) -> Path:
        """Folder of what each of several workers has for the receipt."""
        return self.folder / "accounts"

    @property
    def stop_file(self) -> Path:
        """File whose presence asks the run to write a resume point and end."""
        return self.folder / "stop"

    def finish(self) -> None:
        """Declare that `run` has everything; from here on only promotion is left."""
        sync_tree(self.run)
        finished = FinishedRun(files=digests_of(self.run))
        write_durably(self.folder / "finished.json", finished.model_dump_json(indent=2) + "\n")

    def is_finished(self) -> bool:
        """Tell whether `run` has everything, every file as it was written."""
        try:
            finished = FinishedRun.model_validate_json((self.folder / "finished.json").read_bytes())
        except (FileNotFoundError, ValidationError):
            return False
        return damage(self.run, finished.files) is None

    def discard(self) -> None:
        """Remove everything, so that the next start is a start from the beginning."""
        # Under another name first: a folder half removed must not look like a workspace.
        doomed = self.folder.with_name(f".{self.folder.name}.removed")
        shutil.rmtree(doomed, ignore_errors=True)
        if self.folder.exists():
            rename(self.folder, doomed)
            shutil.rmtree(doomed)


def open_workspace(scratch: Path, record: RunRecord) -> Workspace:
    """Return the workspace of the run that `record` describes; those of other configurations or code are removed."""
    key = hashlib.sha256(record.model_dump_json().encode()).hexdigest()[:16]
    for other in scratch.iterdir():
        if other.is_dir() and other.name != key:
            shutil.rmtree(other)
    workspace = Workspace(scratch / key)
    workspace.folder.mkdir(exist_ok=True)
    workspace.stop_file.unlink(missing_ok=True)
    return workspace


def promote(workspace: Workspace, output_dir: Path) -> None:
    """Put the finished run at `output_dir` by one rename, in place of what is there; killed anywhere, do it again.

    The files stay in the workspace too, as hard links that take no space: the workflow may delete the declared outputs
    of a job that was killed after this. Everything else in the workspace is removed.
    """
    staged = workspace.folder / "promoted"
    shutil.rmtree(staged, ignore_errors=True)
    shutil.copytree(workspace.run, staged, copy_function=_link)
    sync_tree(staged)
    output_dir.parent.mkdir(parents=True, exist_ok=True)
    if output_dir.exists():
        shutil.rmtree(output_dir)
    rename(staged, output_dir)
    for path in workspace.folder.iterdir():
        if path.is_dir() and path != workspace.run:
            shutil.rmtree(path)


def remove_scratch(scratches: Path) -> None:
    """Remove the scratch folder of every finished run under `scratches` that no process works in.

    For when the workflow has taken note that its runs are done; those that were interrupted keep what they need.
    """
    for finished in scratches.glob("*/*/finished.json"):
        scratch = finished.parents[1]
        with suppress(RunLockedError), locked(scratch):
            shutil.rmtree(scratch)
    with suppress(OSError):
        scratches.rmdir()


@contextmanager
def locked(scratch: Path) -> Iterator[None]:
    """Hold the run's lock for the duration of the body; the system frees it when the process dies, however it dies.

    Raises RunLockedError saying which process has it.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    path = scratch / "lock"
    with ExitStack() as stack:
        file = stack.enter_context(path.open("a+", encoding="utf-8"))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise RunLockedError(f"{scratch}: another process works on this run ({_holder(file.read())})") from None
        if not _is_same_file(path, file.fileno()):
            raise RunLockedError(f"{scratch}: another process has just finished this run; start again")
        since = datetime.now(UTC).isoformat(timespec="seconds")
        file.truncate(0)
        file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since}))
        file.flush()
        yield


@contextmanager
def stopping_on_signals(workspace: Workspace) -> Iterator[None]:
    """Turn the first of `STOP_SIGNALS` into the workspace's stop file; a second one ends the process as usual.

    Only the main thread of a process can do this; elsewhere nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}

    def ask_to_stop(number: int, frame: FrameType | None) -> None:
        workspace.stop_file.touch()
        signal.signal(number, before[signal.Signals(number)])

    try:
        for number in STOP_SIGNALS:
            signal.signal(number, ask_to_stop)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _link(source: str, target: str) -> None:
    """Link `source` to `target`, or copy it where the file system has no hard links; with the time of now.

    Outputs older than inputs that were written anew with the same bytes would make the workflow run the job again.
    """
    try:
        os.link(source, target)
    except PermissionError:
        shutil.copyfile(source, target)
    os.utime(target)
    sync(Path(target))


def _holder(text: str) -> str:
    try:
        holder = json.loads(text)
    except json.JSONDecodeError:
        return "it has not said which"
    return f"process {holder['pid']} on {holder['host']} since {holder['since']}"


def _is_same_file(path: Path, descriptor: int) -> bool:
    """Tell whether `path` still names the open file: the lock may have been removed between opening and locking."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
