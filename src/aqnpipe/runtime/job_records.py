"""Which jobs of a study run again: decided by the content of files, never by their times.

Snakemake asks its persistence object whether a job has changed. The one here answers from a record that it writes when
a job ends, `jobs/OUTPUT.json` in the results: digests of the job's parameters (settings and `code_digest`), of its
script, and of every file that it read and wrote. A job runs again if one of these digests differs now, or if it has no
record. Records are part of the results, so they are valid in every copy of them. Snakemake's own are in `.snakemake`,
and where these are missing it accepts every file that exists.
"""

import atexit
import hashlib
import json
import os
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from snakemake.persistence import NO_PARAMS_CHANGE, ParamsChange
from snakemake.persistence.file import FilePersistence
from snakemake.settings.enums import RerunTrigger

from aqnpipe.artifacts.base import Artifact
from aqnpipe.artifacts.files import read_json, write_json, write_text
from aqnpipe.artifacts.provenance import code_of, sha256_of_file
from aqnpipe.errors import EXIT_USER_ERROR, DataError

_NS_UNTIL_SETTLED = 2_000_000_000
"""A file that changed more recently may change again within one tick of its file system's clock, with equal times."""


class JobRecord(Artifact):
    """jobs/OUTPUT.json: what a job was made from, as digests. Paths in the results are relative to them."""

    parameters: str
    script: str | None
    inputs: dict[str, str | None]
    outputs: dict[str, str | None]

    def differences(self, now: "JobRecord") -> list[str]:
        """Return what differs in `now`, in words: parameters, script, or files."""
        found = [name for name in ("parameters", "script") if getattr(self, name) != getattr(now, name)]
        for kind, before, after in (("input", self.inputs, now.inputs), ("output", self.outputs, now.outputs)):
            found += [f"{kind} {name}" for name in sorted({*before, *after}) if before.get(name) != after.get(name)]
        return found


class FileDigests:
    """SHA-256 of files. One is read again if its inode, size or times have changed, also by a later process."""

    def __init__(self, cache: Path) -> None:
        self._cache = cache
        try:
            self._known: dict[str, list[Any]] = json.loads(cache.read_text(encoding="utf-8"))
        except (FileNotFoundError, json.JSONDecodeError):
            self._known = {}
        self._is_new = False

    def __call__(self, path: str) -> str | None:
        """Return the digest of a file; None if there is none, or something else in its place."""
        try:
            at = os.stat(path)
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(at.st_mode):
            return None
        # Programs can set a file's other times, but not that of its last change (ctime).
        stamp = [at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns]
        if (known := self._known.get(path)) and known[:-1] == stamp:
            return str(known[-1])
        digest = sha256_of_file(Path(path))
        if time.time_ns() - at.st_ctime_ns > _NS_UNTIL_SETTLED:
            self._known[path], self._is_new = [*stamp, digest], True
        return digest

    def save(self) -> None:
        """Write what is new for the next process, which without it reads every file again."""
        if self._is_new:
            with suppress(OSError):
                write_text(self._cache, json.dumps(self._known))


class JobRecords(FilePersistence):
    """Snakemake's persistence, in which the records in the results decide what has changed."""

    def __init__(self, *, results: str, **settings: Any) -> None:
        super().__init__(**settings)
        self._results = results
        self._digests = FileDigests(self.path / "aqnpipe" / f"{results.replace('/', '_')}.digests.json")
        self._inputs: dict[Path, dict[str, str | None]] = {}
        # Snakemake compares times first, and then the checksums of newer inputs up to a size: here of any size, and
        # by `input_checksums`. Its own are not needed.
        self.max_checksum_file_size = 0
        self.dag.max_checksum_file_size = sys.maxsize
        # Not what the command line says: without this one nothing here is asked, and others compare times.
        self.dag.workflow.dag_settings.rerun_triggers = frozenset({RerunTrigger.PARAMS})
        atexit.register(self._digests.save)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold Snakemake's lock. Where another has it, end with one line, not with the advice to unlock at once."""
        if self.locked:
            problem = f"{self._results}: another Snakemake works on this study"
            sys.stderr.write(f"ERROR: {problem}; if it was killed on another machine: snakemake --unlock\n")
            sys.exit(EXIT_USER_ERROR)
        with super().lock():
            yield

    def started(self, job: Any, external_jobid: str | None = None) -> None:
        """Note the digests of a job's inputs: an edit while it runs must not be taken for what it read."""
        if job.output:
            record = self._record(job)
            record.unlink(missing_ok=True)
            self._inputs[record] = self._of(job.input)
        super().started(job, external_jobid)

    async def finished(self, job: Any) -> None:
        """Write the record of a job before Snakemake considers its outputs complete."""
        if job.output:
            record = self._record(job)
            now = self._now(job)
            write_json(record, now.model_copy(update={"inputs": self._inputs.pop(record, now.inputs)}))
        await super().finished(job)

    def has_metadata(self, job: Any) -> bool:
        """Return True, so that Snakemake asks for changes."""
        return True

    def has_outdated_metadata(self, job: Any) -> bool:
        """Return False, as `has_metadata`."""
        return False

    def params_changed(self, job: Any, file: Any = None) -> ParamsChange:
        """Return what has changed since a job ended: anything in its record, not its parameters alone."""
        if not job.output:
            return NO_PARAMS_CHANGE
        try:
            changes = read_json(self._record(job), JobRecord).differences(self._now(job))
        except DataError:
            changes = ["no record of this job"]
        return ParamsChange(only_new=set(changes), files=set(job.output)) if changes else NO_PARAMS_CHANGE

    def input_checksums(self, job: Any, input_path: Any) -> set[str]:
        """Return the present checksum of an input, so that none counts as changed because its time has."""
        checksum = f"sha256:{self._digests(input_path)}"
        self.dag.workflow.iocache.checksum[input_path] = checksum
        return {checksum}

    def _now(self, job: Any) -> JobRecord:
        script = job.rule.script and code_of(Path(job.rule.basedir.join(job.rule.script).get_path_or_uri(True)))
        return JobRecord(
            parameters=hashlib.sha256("\n".join(self._params(job)).encode()).hexdigest(),
            script=hashlib.sha256(script).hexdigest() if script else None,
            inputs=self._of(job.input),
            outputs=self._of(job.output),
        )

    def _of(self, paths: Any) -> dict[str, str | None]:
        return {path.removeprefix(f"{self._results}/"): self._digests(path) for path in paths}

    def _record(self, job: Any) -> Path:
        """Return the file of a job's record, named after its first output, which no other job has."""
        return Path(self._results, "jobs", f"{job.output[0].removeprefix(f'{self._results}/')}.json")
