"""The folder of an unfinished run. It is not the output of a rule, so Snakemake does not delete it.

<scratch>/lock          locked while a process works here (runtime.run_lock)
<scratch>/<key>/        one workspace; the key is a digest of everything that decides the run's bytes
    run/                the future contents of the run's declared folder
    resume/step<N>/     resume points
    facts.json          facts of the training, which become part of run.json
    finished.json       digests of run/, written when it is complete
    stop                exists from a stop request until the next start
"""

import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from aqnpipe.artifacts.base import Artifact
from aqnpipe.artifacts.files import damage, digests_of, rename, sync, sync_tree, write_durably
from aqnpipe.artifacts.runs import RunRecord


class FinishedRun(Artifact):
    """finished.json: the SHA-256 of every file of a finished run, by its path in the run's folder."""

    files: dict[str, str]


@dataclass(frozen=True)
class Workspace:
    """The workspace of one unfinished run; all its ranks share it."""

    folder: Path

    @property
    def run(self) -> Path:
        """Folder of the run's results."""
        return self.folder / "run"

    @property
    def resume(self) -> Path:
        """Folder of the resume points."""
        return self.folder / "resume"

    @property
    def facts(self) -> Path:
        """File with the facts of the training until they are part of the run's record."""
        return self.folder / "facts.json"

    @property
    def stop_file(self) -> Path:
        """File that requests a stop: if it exists, the run writes a resume point and ends."""
        return self.folder / "stop"

    def finish(self) -> None:
        """Mark the run as complete: its files are on the disk, and only promotion remains."""
        sync_tree(self.run)
        finished = FinishedRun(files=digests_of(self.run))
        write_durably(self.folder / "finished.json", finished.model_dump_json(indent=2) + "\n")

    def is_finished(self) -> bool:
        """Return True if the run is complete and no file has changed since."""
        try:
            finished = FinishedRun.model_validate_json((self.folder / "finished.json").read_bytes())
        except (FileNotFoundError, ValidationError):
            return False
        return damage(self.run, finished.files) is None

    def discard(self) -> None:
        """Remove the workspace, so that the next start begins at step 0."""
        # Renamed first: a half-removed folder must not look like a workspace.
        doomed = self.folder.with_name(f".{self.folder.name}.removed")
        shutil.rmtree(doomed, ignore_errors=True)
        if self.folder.exists():
            rename(self.folder, doomed)
            shutil.rmtree(doomed)


def open_workspace(scratch: Path, record: RunRecord) -> Workspace:
    """Return the workspace of the run that `record` describes; remove those of other configurations or code."""
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
    """Publish the finished run at `output_dir` by one rename, replacing an earlier output. After a kill, call it again.

    The files also stay in the workspace, as hard links that take no space, because Snakemake may delete the outputs of
    a job that was killed after this call. Everything else in the workspace is removed.
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
    """Link `source` to `target`, or copy it if the file system has no hard links; give it the current time.

    Inputs that were rewritten with the same bytes may be newer than `source`; Snakemake would run the job again.
    """
    try:
        os.link(source, target)
    except PermissionError:
        shutil.copyfile(source, target)
    os.utime(target)
    sync(Path(target))
