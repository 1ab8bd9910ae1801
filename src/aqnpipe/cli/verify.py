"""`aqnpipe verify`: compare every file of a study's results with the record of what was written."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from aqnpipe.errors import ConfigError, DataError, ModelError

_DAMAGED = 1


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
    records = sorted((results / "jobs").rglob("*.json"))
    if not records:
        raise ConfigError(f"{results}: no records in jobs/, expected the results folder of a study")
    files, damages = _damages_of_jobs(records, results)
    models = _models(results)
    damages += [damage for model in models for damage in _damage_of_model(model, results)]
    for damage in damages:
        typer.echo(f"{damage.path}: {damage.what}")
    if not damages:
        typer.echo(f"verify: {files} files of {len(records)} jobs and {len(models)} models are as they were written")
        return
    if repair:
        for damage in damages:
            damage.path.unlink(missing_ok=True)
            damage.record.unlink(missing_ok=True)
    done = "removed; start" if repair else "start"
    typer.echo(f"verify: {len(damages)} damaged or missing files; {done} the workflow again to make them")
    raise typer.Exit(_DAMAGED)


def _models(results: Path) -> list[Path]:
    """Return the folders of the models that a study made; not what a killed job left half written."""
    from aqnpipe.artifacts.files import RESULT_FOLDERS, STAGED
    from aqnpipe.models.prepared import PREPARED_MODEL_FILE

    return [
        path.parent
        for folder in RESULT_FOLDERS
        for path in sorted((results / folder).rglob(PREPARED_MODEL_FILE))
        if not any(part.endswith(STAGED) for part in path.parts)
    ]


def _damages_of_jobs(records: Sequence[Path], results: Path) -> tuple[int, list[Damage]]:
    """Return the number of files that jobs wrote, and those that are damaged, by the records of the jobs."""
    from aqnpipe.artifacts.files import RESULT_FOLDERS, read_json
    from aqnpipe.artifacts.provenance import sha256_of_file
    from aqnpipe.runtime.job_records import JobRecord

    damages: list[Damage] = []
    outputs: dict[str, tuple[str | None, Path]] = {}
    inputs: set[str] = set()
    for path in records:
        try:
            record = read_json(path, JobRecord)
        except DataError:
            damages.append(Damage(path, "no valid record of a job", path))
            continue
        outputs |= {name: (digest, path) for name, digest in record.outputs.items()}
        inputs |= {name for name in record.inputs if Path(name).parts[0] in RESULT_FOLDERS}
    for name, (digest, path) in outputs.items():
        file = results / name
        if not file.is_file():
            damages.append(Damage(file, "missing", path))
        elif sha256_of_file(file) != digest:
            damages.append(Damage(file, "changed after it was written (SHA-256 differs)", path))
    # Jobs read it, so a job wrote it.
    unknown = sorted(inputs - outputs.keys())
    damages += [
        Damage(results / name, "the record of the job that wrote it is gone", results / name) for name in unknown
    ]
    return len(outputs), damages


def _damage_of_model(folder: Path, results: Path) -> Iterator[Damage]:
    from aqnpipe.artifacts.retention import why_weights_are_gone
    from aqnpipe.models.loading import refuse_damaged
    from aqnpipe.models.prepared import PREPARED_MODEL_FILE

    if why_weights_are_gone(folder):
        return
    try:
        refuse_damaged(folder)
    except ModelError as error:
        # The record of the job that made the model: of the model itself, or of the run that a checkpoint belongs to.
        inside = folder.relative_to(results)
        places = [results / "jobs" / parent for parent in (inside, *inside.parents)]
        records = (record for place in places for record in sorted(place.glob("*.json")))
        file = folder / PREPARED_MODEL_FILE
        yield Damage(file, str(error).partition(": ")[2], next(records, file))
