"""What one sabotage is, how it is tried on a study, and what came of it."""

import contextlib
import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import worker_processes
from hold import effects, took_effect
from micro_study import MicroStudy

from aqnpipe.artifacts.files import read_json, write_json
from aqnpipe.artifacts.provenance import sha256_of_file
from aqnpipe.artifacts.runs import RunRecord
from aqnpipe.errors import AqnpipeError

Apply = Callable[[MicroStudy], AbstractContextManager[Any]]
Job = tuple[Any, ...]
"""Name of a method of MicroStudy, and its arguments."""

END: tuple[Job, ...] = (("compare",), ("report",))
EVALUATE: tuple[Job, ...] = (("evaluate", "guided", 0),)
TRAIN: tuple[Job, ...] = (("train", "guided", 0),)
AFTER_TRAINING: tuple[Job, ...] = (("evaluate", "guided", 0, 1), *EVALUATE, *END)
COMPARE: tuple[Job, ...] = (("compare",),)


@dataclass(frozen=True)
class Sabotage:
    """One named sabotage of the study `variant`.

    `apply` does it for the duration of its body, in which the jobs `during` run; the jobs `after` run without it.
    `cause`: what the message must name to count as caught, a regular expression. `facts`: the number of the way to be
    fooled that it repeats, where it is one of the ten. `reason`: why it cannot be caught; empty if it must be.
    """

    name: str
    what: str
    apply: Apply
    during: tuple[Job, ...] = ()
    after: tuple[Job, ...] = END
    facts: int | None = None
    group: str = ""
    cause: str = ""
    variant: str = "attacked"
    reason: str = ""

    @property
    def jobs(self) -> tuple[Job, ...]:
        """What is run again, without the sabotage the control of this case."""
        return self.during + self.after


@dataclass(frozen=True)
class Outcome:
    """What came of a sabotage: the check that saw it, and its words; no check if nothing did.

    `has_effect`: the sabotaged code ran. `names_cause`: the words name what was done. `changed`: results differ from
    those of the study without sabotage; None if a check stopped the study before that was known.
    """

    check: str | None
    words: str
    has_effect: bool = True
    names_cause: bool = True
    changed: bool | None = None

    @property
    def is_caught(self) -> bool:
        """Whether the pipeline stopped, or marked a claim of the study invalid, and said why."""
        return self.check is not None and self.has_effect and self.names_cause


def attempt(study: MicroStudy, sabotage: Sabotage) -> Outcome:
    """Try a sabotage on a study of its own; an exception that is no AqnpipeError is raised: a crash is no check."""
    before, seen = study.digests(), effects()
    worker_processes.sabotage_name[:] = [sabotage.name]
    try:
        outcome = _outcome(study, sabotage)
    finally:
        worker_processes.sabotage_name.clear()
    caught = outcome.check is not None
    return replace(
        outcome,
        has_effect=effects() > seen,
        names_cause=names_cause(sabotage, outcome.words),
        changed=None if caught else study.digests() != before,
    )


def names_cause(sabotage: Sabotage, words: str) -> bool:
    """Whether a message names what was done."""
    return bool(re.search(sabotage.cause, words, re.IGNORECASE))


def untouched(study: MicroStudy, jobs: tuple[Job, ...]) -> Outcome:
    """Do the same jobs without any sabotage; nothing may be caught."""
    return _outcome(study, Sabotage("none", "", lambda _: contextlib.nullcontext(), jobs, ()))


def of_group(group: str, cause: str, sabotages: Iterable[Sabotage]) -> tuple[Sabotage, ...]:
    """Return sabotages with their group, and with `cause` where they do not name one of their own."""
    return tuple(replace(sabotage, group=group, cause=sabotage.cause or cause) for sabotage in sabotages)


def patched(*targets_and_values: Any) -> Apply:
    """A sabotage that puts values in the place of functions of the product: (target, value, target, value, ...)."""
    from hold import replaced

    pairs = list(zip(targets_and_values[::2], targets_and_values[1::2], strict=True))
    return replaced(*((target, _constant(value)) for target, value in pairs))


def edited(edit: Callable[[MicroStudy], None]) -> Apply:
    """A sabotage that changes files between the stages."""

    @contextmanager
    def apply(study: MicroStudy) -> Any:
        before = study.digests()
        edit(study)
        if study.digests() != before:
            took_effect()
        yield

    return apply


def replace_file(path: Path, content: bytes) -> None:
    """Put `content` at `path`, and leave other names of the old file alone."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def update_digests(study: MicroStudy, arm: str, seed: int, step: int | None = None) -> None:
    """Update the record of an evaluation with the digests of table and receipt: what a forger would do next."""
    step = study.last_step if step is None else step
    path = study.evaluation_file(arm, seed, "run.json", step)
    record = read_json(path, RunRecord)
    digests = {
        name: sha256_of_file(study.evaluation_file(arm, seed, suffix, step))
        for name, suffix in (("table", "parquet"), ("receipt", "receipt.json"))
    }
    write_json(path, record.model_copy(update={"outputs_sha256": digests}))


def _outcome(study: MicroStudy, sabotage: Sabotage) -> Outcome:
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


def _constant(value: Any) -> Callable[[Any], Any]:
    """Return what makes `value`, which notes that it is used, of the original."""

    def make(original: Any) -> Any:
        if isinstance(value, type | property) or not callable(value):
            took_effect()
            return value

        def noted(*args: Any, **kwargs: Any) -> Any:
            took_effect()
            return value(*args, **kwargs)

        return noted

    return make


def _do(study: MicroStudy, job: Job) -> None:
    name, *arguments = job
    getattr(study, name)(*arguments)
