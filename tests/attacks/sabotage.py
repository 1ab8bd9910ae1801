"""What one sabotage is, how it is tried on a study, and what came of it."""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from micro_study import LAST_STEP, MicroStudy

from aqnpipe.artifacts.files import read_json, write_json
from aqnpipe.artifacts.provenance import sha256_of_file
from aqnpipe.artifacts.runs import RunRecord
from aqnpipe.errors import AqnpipeError

Job = tuple[Any, ...]
"""Name of a method of MicroStudy, and its arguments."""

END: tuple[Job, ...] = (("compare",), ("report",))
EVALUATE: tuple[Job, ...] = (("evaluate", "guided", 0),)
TRAIN: tuple[Job, ...] = (("train", "guided", 0),)
AFTER_TRAINING: tuple[Job, ...] = (("evaluate", "guided", 0, 1), *EVALUATE, *END)


@dataclass(frozen=True)
class Sabotage:
    """One named sabotage. `facts` is the number of the way to be fooled that it repeats, where it is one of the ten.

    `apply` does it for the duration of its body, in which the jobs `during` run; the jobs `after` run without it.
    """

    name: str
    what: str
    apply: Callable[[MicroStudy], AbstractContextManager[Any]]
    during: tuple[Job, ...] = ()
    after: tuple[Job, ...] = END
    facts: int | None = None

    @property
    def jobs(self) -> tuple[Job, ...]:
        """What is run again, without the sabotage the control of this case."""
        return self.during + self.after


@dataclass(frozen=True)
class Outcome:
    """What came of a sabotage: the check that saw it, and its words; None if nothing did."""

    check: str | None
    words: str

    @property
    def is_caught(self) -> bool:
        """Whether the pipeline stopped, or marked a claim of the study invalid."""
        return self.check is not None


def attempt(study: MicroStudy, sabotage: Sabotage) -> Outcome:
    """Try a sabotage on a study of its own; an exception that is no AqnpipeError is raised: a crash is no check."""
    with contextlib.chdir(study.folder):
        job: Job = ("prepare",)
        try:
            with sabotage.apply(study):
                for job in sabotage.during:
                    _do(study, job)
            for job in sabotage.after:
                _do(study, job)
                if job == ("compare",) and (invalid := study.invalid()):
                    return Outcome("compare: verdict invalid", invalid[0])
        except AqnpipeError as error:
            text = str(error).replace(f"{study.folder}/", "")
            return Outcome(f"{job[0]}: {type(error).__name__}", text)
    return Outcome(None, "every job ended well and no claim is invalid")


def untouched(study: MicroStudy, jobs: tuple[Job, ...]) -> Outcome:
    """Do the same jobs without any sabotage; nothing may be caught."""
    return attempt(study, Sabotage("none", "", lambda _: contextlib.nullcontext(), jobs, ()))


def patched(target: str, value: Any) -> Callable[[MicroStudy], AbstractContextManager[Any]]:
    """A sabotage that puts `value` in the place of one function of the product."""
    return lambda _: mock.patch(target, value)


def edited(edit: Callable[[MicroStudy], None]) -> Callable[[MicroStudy], AbstractContextManager[Any]]:
    """A sabotage that changes files between the stages."""

    @contextmanager
    def apply(study: MicroStudy) -> Any:
        edit(study)
        yield

    return apply


def replace_file(path: Path, content: bytes) -> None:
    """Put `content` at `path`, and leave other names of the old file alone."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def update_digests(study: MicroStudy, arm: str, seed: int, step: int = LAST_STEP) -> None:
    """Update the record of an evaluation with the digests of table and receipt: what a forger would do next."""
    path = study.evaluation_file(arm, seed, "run.json", step)
    record = read_json(path, RunRecord)
    digests = {
        name: sha256_of_file(study.evaluation_file(arm, seed, suffix, step))
        for name, suffix in (("table", "parquet"), ("receipt", "receipt.json"))
    }
    write_json(path, record.model_copy(update={"outputs_sha256": digests}))


def _do(study: MicroStudy, job: Job) -> None:
    name, *arguments = job
    getattr(study, name)(*arguments)
