"""Commands on the results of a study: `report` on what exists, `export` for papers and viewers, `verify` of files."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_args

import typer

from aqnpipe.cli.options import StudyArgument, TrustCode, given_options
from aqnpipe.cli.study import open_study
from aqnpipe.config.base import RESULT_FOLDERS
from aqnpipe.config.plan import StudyPlan
from aqnpipe.errors import ConfigError, DataError, ModelError, printable

if TYPE_CHECKING:
    from aqnpipe.runtime.job_records import JobRecord

PARTIAL = "partial"
"""Folder in the results for reports on what exists; in place of the final report they would stop the study."""


def report(study: StudyArgument, trust_code: TrustCode = False) -> None:
    """Compare and report on the existing results of a study, for example while it runs or after a failed job.

    Writes a separate folder in the results, which the study ignores.
    """
    for line in report_on_existing_results(open_study([study], look_outside=False, trust_code=trust_code)):
        typer.echo(line)


def report_on_existing_results(plan: StudyPlan) -> Iterator[str]:
    """Write the outputs of the rules compare, check_published and report from existing evaluations; yield a log.

    Comparisons without one of their evaluations are invalid. All files appear together, or none if an artifact is
    malformed (DataError).
    """
    from aqnpipe.artifacts.files import atomic_path, write_json
    from aqnpipe.comparison.look_states import plan_after, read_looks
    from aqnpipe.comparison.stage import compare, existing_evaluations
    from aqnpipe.loss_study.comparison import compare_losses, existing_losses
    from aqnpipe.published.check import check_published_file
    from aqnpipe.report.inputs import read_study
    from aqnpipe.report.stage import build_report

    looks = read_looks(plan.results) if plan.study.adaptive_seeds else []
    plan = plan_after(plan.study, looks)
    target = Path(plan.results) / PARTIAL
    evaluations = existing_evaluations(plan)
    published = plan.study.config.statistics.published
    problems = Path(plan.results) / "data" / "test.parquet"
    with atomic_path(target) as folder:
        folder.mkdir()
        compare(plan.study, evaluations, folder, looks, problems)
        if published is not None:
            write_json(folder / "published.json", check_published_file(Path(published)))
        for loss_inputs, claims in existing_losses(plan):
            made = folder / claims.relative_to(plan.results)
            compare_losses(loss_inputs, plan.study.config.statistics, made)
        build_report(plan.study, read_study(plan, compared=folder), folder)
        # The folder is replaced as a whole.
        if target.exists() and not target.is_dir():
            raise ConfigError(f"{target}: found a file, expected nothing or an earlier report on what exists")
        known = {path.name for path in folder.iterdir()} | {"published.json", "loss_study"}
        for name in sorted({path.name for path in target.glob("*")} - known):
            raise ConfigError(f"{target / name}: is of no report, and {target} is replaced; move it elsewhere")
    yield f"compare: {len(evaluations)} of {plan.num_evaluations} evaluations exist"
    yield f"report: {target / 'report.html'}"


PAPER = "paper"
INSPECT = "inspect"
"""Folders in the results for the files."""


def export(
    context: typer.Context,
    study: StudyArgument,
    figures: Annotated[str, typer.Option(help="formats of the figures, with commas between: pdf, svg")] = "pdf,svg",
    tables: Annotated[str, typer.Option(help="formats of the tables, with commas between: latex, csv")] = "latex,csv",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="folder to write to; default: paper/, or inspect/, in the results"),
    ] = None,
    inspect: Annotated[
        bool, typer.Option("--inspect", help="write every response as logs for the viewer of inspect_ai instead")
    ] = False,
) -> None:
    """Write every figure and table of a study's report as files for a paper.

    Figures are 89 or 183 mm wide, with captions in captions.md. LaTeX tables need the packages booktabs and longtable.

    With --inspect, write the responses of the last checkpoint of every run as logs, one per noise level; show them
    with: inspect view --log-dir FOLDER.
    """
    from aqnpipe.report.export import FigureFormat, TableFormat, export_paper, write_inspect_logs
    from aqnpipe.report.inputs import read_study
    from aqnpipe.report.words import load_words

    for option in ("figures", "tables"):
        if inspect and option in given_options(context):
            raise ConfigError(f"--{option}: found with --inspect, which writes no {option}; leave one out")
    wanted = _formats("--figures", figures, get_args(FigureFormat)), _formats("--tables", tables, get_args(TableFormat))
    plan = open_study([study], look_outside=False, trust_code=True)  # runs none of it
    folder = output or Path(plan.results) / (INSPECT if inspect else PAPER)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--output {folder}: found a file, expected a folder")
    if inspect:
        config = plan.study.config
        number = write_inspect_logs(Path(plan.results), config.study, config.evaluation, folder)
        typer.echo(f"export: {number} logs in {folder}; show them with: inspect view --log-dir {folder}")
        return
    claims = Path(plan.results) / "claims.json"
    if not claims.is_file():
        raise ConfigError(f"{claims}: no such file, expected a study that was run to its report")
    words = load_words(plan.study.config.report.language, plan.study.config.evaluation.noise_names())
    written = export_paper(plan.study, read_study(plan), words, folder, *wanted)
    typer.echo(f"export: {len(written)} files in {folder}")


def _formats(option: str, text: str, known: tuple[str, ...]) -> list[Any]:
    """Return the formats in a list with commas; none for an empty one. Raises ConfigError for an unknown one."""
    found = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in found:
        if name not in known:
            raise ConfigError(f"{option}: found {name!r}, expected {', '.join(known)}")
    return found


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
        from aqnpipe.runtime.locks import hold_results

        hold_results(str(results))
    records, damages = _records(paths, results)
    damages += [*_damages_of_files(records, results), *_damages_of_runs(records, results)]
    models = _prepared_models(results)
    of_models = [damage for model in models for damage in _damage_of_model(model, results)]
    damages += of_models
    for line in dict.fromkeys(f"{damage.path}: {damage.what}" for damage in damages):
        typer.echo(printable(line))
    if not damages:
        files = sum(len(record.outputs) for record in records.values())
        typer.echo(f"verify: {files} files of {len(paths)} jobs and {len(models)} models are as they were written")
        return
    wrong = {path for damage in damages for path in (damage.path, damage.record)} if repair else set()
    kept = sorted(path for path in wrong if not _removed(path, results))
    for path in kept:
        typer.echo(printable(f"{path}: not removed: a folder, or a link leads to it; remove it yourself"))
    done = "start" if kept or not repair else "removed; start"
    if of_models and not repair:
        # The workflow reads a damaged model, and ends, before it would make it again.
        done = "remove them by --repair, then start"
    number = len({damage.path for damage in damages})
    typer.echo(f"verify: {number} damaged or missing files; {done} the workflow again to make them")
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

    def leaves(name: Path) -> bool:
        too_long = any(len(part.encode()) > _LONGEST_PART for part in name.parts)
        return name.is_absolute() or ".." in name.parts or too_long

    return [name for name in names if not 0 < len(name) <= _LONGEST_NAME or "\0" in name or leaves(Path(name))]


def _damages_of_files(records: Mapping[Path, "JobRecord"], results: Path) -> Iterator[Damage]:
    """Yield files that are not as a job wrote them, or as the jobs that read them found them."""
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
    from aqnpipe.artifacts.runs import RunRecord, has_digest, read_removed

    of_jobs = {
        results / name: (digest, path) for path, record in records.items() for name, digest in record.outputs.items()
    }
    for run, (of_run, path) in of_jobs.items():
        if run.name != "run.json" or not has_digest(run, of_run):
            continue
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
            if below not in of_jobs and below not in gone:
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
