"""`aqnpipe verify`: compare every file of a study's results with the record of what was written."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from aqnpipe.errors import ConfigError, DataError, ModelError, printable

if TYPE_CHECKING:
    from aqnpipe.runtime.job_records import JobRecord

_DAMAGED = 1
_LONGEST_NAME, _LONGEST_PART = 3000, 255
"""Of a path in characters, and of the name of a file in bytes: no job could have written a longer one."""


class Damage(NamedTuple):
    """A file that is not as it was written, and the record that says so."""

    path: Path
    what: str
    record: Path


def verify(
    results: Annotated[Path, typer.Argument(help="results folder of a study")] = Path("results"),
    repair: Annotated[
        bool, typer.Option("--repair", help="remove what is damaged, so that the workflow makes it again")
    ] = False,
) -> None:
    """Compare every file of a study's results, and the weights of its models, with the records of what was written.

    Prints a line per damaged or missing file, and ends with exit code 1 if there is one. The workflow makes such files
    again; a model whose weights are damaged, and what must not be read until then, after --repair.
    """
    try:
        found = "no records in jobs/" if results.exists() else "no such folder"
        paths = sorted((results / "jobs").rglob("*.json"))
    except OSError as error:
        raise ConfigError(f"{results}: cannot be read ({error.strerror})") from error
    if not paths:
        raise ConfigError(f"{results}: {found}, expected the results folder of a study")
    if repair:
        from aqnpipe.runtime.study_lock import hold_results

        hold_results(str(results))
    records, damages = _records(paths, results)
    damages += [*_damages_of_files(records, results), *_damages_of_runs(records, results)]
    models = _prepared_models(results)
    damages += [damage for model in models for damage in _damage_of_model(model, results)]
    files = sum(len(record.outputs) for record in records.values())
    for damage in damages:
        typer.echo(printable(f"{damage.path}: {damage.what}"))
    if not damages:
        typer.echo(f"verify: {files} files of {len(paths)} jobs and {len(models)} models are as they were written")
        return
    wrong = {path for damage in damages for path in (damage.path, damage.record)} if repair else set()
    kept = sorted(path for path in wrong if not _removed(path, results))
    for path in kept:
        typer.echo(printable(f"{path}: not removed: a folder, or a link leads to it; remove it yourself"))
    done = "start" if kept or not repair else "removed; start"
    typer.echo(f"verify: {len(damages)} damaged or missing files; {done} the workflow again to make them")
    raise typer.Exit(_DAMAGED)


def _removed(path: Path, results: Path) -> bool:
    """Remove a file or a link; return False for a folder, and for a file that only a link puts into the results."""
    if not os.path.lexists(path):
        return True
    is_inside = Path(os.path.realpath(path.parent)).is_relative_to(os.path.realpath(results))
    if not is_inside or (path.is_dir() and not path.is_symlink()):
        return False
    path.unlink()
    return True


def _records(paths: Sequence[Path], results: Path) -> tuple[dict[Path, "JobRecord"], list[Damage]]:
    """Return the records of jobs by their files, and those that are none: edited, or of files elsewhere."""
    from aqnpipe.artifacts.files import read_json
    from aqnpipe.runtime.job_records import JobRecord

    records, damages = dict[Path, JobRecord](), list[Damage]()
    for path in paths:
        try:
            record = read_json(path, JobRecord)
        except DataError:
            damages.append(Damage(path, "no valid record of a job", path))
            continue
        # It is named after an output of its job.
        own = str(path.relative_to(results / "jobs")).removesuffix(".json")
        outside = _outside(record.outputs)
        if outside or own not in record.outputs:
            what = f"names {outside[0]}, which is not in the results" if outside else f"does not name {own}"
            damages.append(Damage(path, f"no valid record of a job: it {what}", path))
        else:
            records[path] = record
    return records, damages


def _outside(names: Iterable[str]) -> list[str]:
    """Return the names that are of no file below a folder: a record that names them may not have anything removed."""
    return [name for name in names if not 0 < len(name) <= _LONGEST_NAME or "\0" in name or _leaves(Path(name))]


def _leaves(name: Path) -> bool:
    return name.is_absolute() or ".." in name.parts or any(len(part.encode()) > _LONGEST_PART for part in name.parts)


def _damages_of_files(records: Mapping[Path, "JobRecord"], results: Path) -> Iterator[Damage]:
    """Yield files that are not as a job wrote them, or as the jobs that read them found them."""
    from aqnpipe.artifacts.files import RESULT_FOLDERS

    outputs = {name: (digest, path) for path, record in records.items() for name, digest in record.outputs.items()}
    for name, (digest, path) in outputs.items():
        yield from _damage(results / name, digest, path)
    for path, record in records.items():
        first = next(iter(record.outputs))
        for name, digest in record.inputs.items():
            if name in outputs and outputs[name][0] != digest:
                yield Damage(results / first, f"made from another {name} than the one that is there", path)
            elif name not in outputs and not _outside([name]) and Path(name).parts[0] in RESULT_FOLDERS:
                # Jobs read it, so a job wrote it.
                yield Damage(results / name, "the record of the job that wrote it is gone", results / name)


def _damages_of_runs(records: Mapping[Path, "JobRecord"], results: Path) -> Iterator[Damage]:
    """Yield files of training runs, such as those of checkpoints, that are not as the record of the run says."""
    from aqnpipe.artifacts.files import read_json
    from aqnpipe.artifacts.retention import read_removed
    from aqnpipe.artifacts.runs import RunRecord, has_digest

    of_jobs = {str(results / name) for record in records.values() for name in record.outputs}
    runs = [
        (results / name, path)
        for path, record in records.items()
        for name, digest in record.outputs.items()
        if Path(name).name == "run.json" and has_digest(results / name, digest)
    ]
    for run, path in runs:
        try:
            written = read_json(run, RunRecord).outputs_sha256
            folders = {(run.parent / name).parent for name in written}
            gone = {folder / name for folder in folders if (one := read_removed(folder)) for name in one.files_sha256}
        except DataError:
            yield Damage(run, "no valid record of a run", path)
            continue
        if outside := _outside(written):
            yield Damage(run, f"no valid record of a run: it names {outside[0]}, which is not in the run", path)
            continue
        for below, digest in ((run.parent / name, digest) for name, digest in written.items()):
            if str(below) not in of_jobs and below not in gone:
                yield from _damage(below, digest, path)


def _damage(file: Path, digest: str | None, record: Path) -> Iterator[Damage]:
    from aqnpipe.artifacts.provenance import sha256_of_file

    if not file.is_file():
        yield Damage(file, "found no regular file" if file.exists() else "missing", record)
        return
    try:
        found = sha256_of_file(file)
    except OSError as error:
        # That is no damage, and nothing to repair.
        raise DataError(f"{file}: cannot be read ({error.strerror})") from error
    if found != digest:
        yield Damage(file, "changed after it was written (SHA-256 differs)", record)


def _prepared_models(results: Path) -> list[Path]:
    """Return the folders of the models that a study prepared; not what a killed job left half written."""
    from aqnpipe.artifacts.files import STAGED
    from aqnpipe.models.prepared import PREPARED_MODEL_FILE

    found = (path.parent for path in sorted((results / "models").rglob(PREPARED_MODEL_FILE)))
    return [folder for folder in found if not any(part.endswith(STAGED) for part in folder.parts)]


def _damage_of_model(folder: Path, results: Path) -> Iterator[Damage]:
    """Yield the damage of a prepared model, whose record has one digest of all its weights."""
    from aqnpipe.models.loading import refuse_damaged
    from aqnpipe.models.prepared import PREPARED_MODEL_FILE

    try:
        refuse_damaged(folder)
    except ModelError as error:
        places = results / "jobs" / folder.relative_to(results)
        file = folder / PREPARED_MODEL_FILE
        yield Damage(file, str(error).partition(": ")[2], next(iter(sorted(places.glob("*.json"))), file))
