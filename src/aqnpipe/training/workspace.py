"""The folder in which a run works until it is complete; Snakemake does not know it and so does not delete it.

<scratch>/lock          held while a process works here (runtime.run_lock)
<scratch>/<key>/        one workspace; the key is a digest of all that decides the run's bytes
    run/                what becomes the run's declared folder
    resume/step<N>/     resume points
    finished.json       digests of run/, written when nothing is missing there
    stop                there from when a stop was requested until the next start
"""

import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from aqnpipe.artifacts.base import Artifact
from aqnpipe.artifacts.durable_files import damage, digests_of, rename, sync, sync_tree, write_durably
from aqnpipe.artifacts.runs import RunRecord


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
    def measurements(self) -> Path:
        """Folder of the workers' measurements, one file per worker; only runs with several workers have it."""
        return self.folder / "measurements"

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
    scratch.mkdir(parents=True, exist_ok=True)
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
