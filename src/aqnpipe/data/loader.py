"""The problems of a study as a table, read from the generator, a local folder or the hub, and checked."""

import codecs
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import polars as pl

from aqnpipe.config.base import is_pipe_or_device
from aqnpipe.config.dataset import DatasetConfig, GeneratedDataset, HubDataset, LmEvalDataset, LocalDataset, Split
from aqnpipe.data.columns import questions_and_answers, shown
from aqnpipe.data.generated import generate_problems, normalise_question
from aqnpipe.data.harness_task import HarnessTask
from aqnpipe.data.scoring import extract_answer
from aqnpipe.errors import DataError, first_line

SPLITS: tuple[Split, Split] = ("train", "test")
_FORMATS = (".jsonl", ".csv", ".parquet")


def load_problems(config: DatasetConfig, split: Split) -> pl.DataFrame:
    """Return the problems of `split`: question_id ("test-00017"), question, answer (worked), gold_answer (canonical).

    Where the data set has clusters of questions, the column cluster too.

    A limit selects the first rows. A file in place of a folder has the test questions alone.

    Raises DataError if a file, column or gold answer is missing, a limit exceeds the
    number of rows, a question has two answers, or train and test share a question (compared over whole splits, ignoring
    case and repeated spaces).
    """
    if isinstance(config, LmEvalDataset):
        return _limit(HarnessTask.load(config).problems(), config, split)
    splits = {name: _read_split(config, name) for name in splits_of(config)}
    if split not in splits:
        raise DataError(f"{_name_of(config)}: a file has test questions alone, expected a folder with a file train.*")
    if len(splits) > 1:
        _refuse_shared_questions(splits, _name_of(config))
    table = splits[split]
    _refuse_two_answers(table, f"{_name_of(config)}, split {split}")
    table = _limit(table, config, split)
    question_ids = [f"{split}-{index:05d}" for index in range(table.height)]
    return table.select(pl.Series("question_id", question_ids, dtype=pl.String), *table.columns)


def splits_of(config: DatasetConfig) -> tuple[Split, ...]:
    """Return the splits that a data set has: both, or only test questions if it is a single file."""
    is_file = isinstance(config, LocalDataset) and Path(config.path).is_file()
    return ("test",) if is_file else SPLITS


def _name_of(config: DatasetConfig) -> str:
    """Return the name of a data set in messages."""
    if isinstance(config, GeneratedDataset):
        return f"generated data set (seed {config.seed})"
    if isinstance(config, LocalDataset):
        return f"data set {config.path}"
    if isinstance(config, LmEvalDataset):
        return f"task {config.task}"
    return f"data set {config.hub_id} ({config.subset})"


def _read_split(config: GeneratedDataset | LocalDataset | HubDataset, split: Split) -> pl.DataFrame:
    """Return the columns question, answer, gold_answer and, where there are clusters, cluster of a whole split."""
    if isinstance(config, GeneratedDataset):
        problems = generate_problems(config, split)
        return pl.DataFrame(
            {
                "question": [problem.question for problem in problems],
                "answer": [problem.answer for problem in problems],
                "gold_answer": [extract_answer(problem.answer, "strict") for problem in problems],
                "cluster": [problem.kind for problem in problems],
            },
            schema_overrides={"gold_answer": pl.String},
        )
    if isinstance(config, LocalDataset):
        return _read_local(config, split)
    return _read_hub(config, split)


def _read_local(config: LocalDataset, split: Split) -> pl.DataFrame:
    """Read `split` from its file."""
    folder = Path(config.path)
    if folder.is_file():
        return _read_file(folder, config)
    if not folder.is_dir():
        raise DataError(
            f"data set {folder}: no such folder, expected a folder with train and test as .jsonl, .csv or .parquet"
        )
    found = [folder / f"{split}{suffix}" for suffix in _FORMATS if (folder / f"{split}{suffix}").is_file()]
    if len(found) != 1:
        state = " and ".join(path.name for path in found) or "none"
        names = ", ".join(f"{split}{suffix}" for suffix in _FORMATS)
        raise DataError(f"data set {folder}: found {state} of {names}, expected one of them")
    return _read_file(found[0], config)


def _read_file(path: Path, config: LocalDataset) -> pl.DataFrame:
    """Read the questions of a file."""
    if path.suffix not in _FORMATS:
        raise DataError(
            f"data set {path}: found a file {path.suffix or 'without a suffix'}, expected {', '.join(_FORMATS)}"
        )
    if is_pipe_or_device(path):
        raise DataError(f"{path}: found a pipe, socket or device, expected a file")
    try:
        table = _READERS[path.suffix](path)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise DataError(f"{path}: cannot be read as {path.suffix[1:]} ({first_line(error)})") from error
    return questions_and_answers(table, config, str(path))


def _read_jsonl(path: Path) -> pl.DataFrame:
    """Read JSON lines, also behind the byte order mark that Windows programs write, which polars refuses."""
    return pl.read_ndjson(path.read_bytes().removeprefix(codecs.BOM_UTF8), infer_schema_length=None)


def _read_csv(path: Path) -> pl.DataFrame:
    """Read cells as text: inferred types would turn 007 into 7. DataError if two columns share a name."""
    # A header is a row like others; as such, its names are not made different.
    names = pl.read_csv(path, has_header=False, n_rows=1, infer_schema=False).rows()
    repeated = [name for name, count in Counter(names[0] if names else ()).items() if count > 1 and name is not None]
    if repeated:
        raise DataError(f"{path}: found the column {repeated[0]} twice, expected different names")
    return pl.read_csv(path, infer_schema=False)


_READERS: Mapping[str, Callable[[Path], pl.DataFrame]] = {
    ".jsonl": _read_jsonl,
    ".csv": _read_csv,
    ".parquet": pl.read_parquet,
}


def _read_hub(config: HubDataset, split: Split) -> pl.DataFrame:
    """Read `split` of a data set on the hub with the `datasets` library, which caches it."""
    import datasets
    from huggingface_hub.errors import HfHubHTTPError

    try:
        rows = datasets.load_dataset(config.hub_id, config.subset, revision=config.revision, split=split)
    except (datasets.exceptions.DatasetsError, HfHubHTTPError, OSError, ValueError) as error:
        reason = first_line(error)
        raise DataError(
            f"{_name_of(config)} at revision {config.revision}: could not be fetched from the hub ({reason})"
        ) from error
    return questions_and_answers(pl.DataFrame(rows.to_dict()), config, f"{_name_of(config)}, split {split}")


def _refuse_two_answers(table: pl.DataFrame, name: str) -> None:
    """Raise DataError if a question occurs with two gold answers."""
    first_gold: dict[str, str] = {}
    for question, gold in zip(table["question"], table["gold_answer"], strict=True):
        if first_gold.setdefault(normalise_question(question), gold) != gold:
            known = first_gold[normalise_question(question)]
            raise DataError(f"{name}: question {shown(question)} has two answers, {known} and {gold}")


def _refuse_shared_questions(splits: dict[Split, pl.DataFrame], name: str) -> None:
    """Raise DataError if train and test share questions."""
    train = {normalise_question(question) for question in splits["train"]["question"]}
    shared = [question for question in splits["test"]["question"] if normalise_question(question) in train]
    if shared:
        raise DataError(
            f"{name}: {len(shared)} test question(s) are also in train, expected none; first {shown(shared[0])}"
        )


def _limit(table: pl.DataFrame, config: DatasetConfig, split: Split) -> pl.DataFrame:
    """Return the configured number of first rows; DataError if there are fewer."""
    limit = config.num_train if split == "train" else config.num_test
    if limit is None:
        return table
    if limit > table.height:
        raise DataError(f"{_name_of(config)}: num_{split} is {limit}, but the split has {table.height} rows")
    return table.head(limit)
