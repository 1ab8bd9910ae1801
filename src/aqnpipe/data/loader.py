"""The problems of a study as a table, read from the generator, a local folder or the hub, and checked."""

from pathlib import Path

import polars as pl

from aqnpipe.config.dataset import DatasetConfig, GeneratedDataset, HubDataset, LocalDataset, Split
from aqnpipe.data.generated import generate_problems, normalise_question
from aqnpipe.data.scoring import extract_answer, normalise_number
from aqnpipe.errors import DataError, first_line

SPLITS: tuple[Split, Split] = ("train", "test")
_FORMATS = (".jsonl", ".parquet")


def load_problems(config: DatasetConfig, split: Split) -> pl.DataFrame:
    """Return the problems of `split`: question_id ("test-00017"), question, answer (worked), gold_answer (canonical).

    A limit selects the first rows. Raises DataError if a file, column or gold answer is missing, a limit exceeds the
    number of rows, a question has two answers, or train and test share a question (compared over whole splits, ignoring
    case and repeated spaces).
    """
    splits = {name: _read_split(config, name) for name in SPLITS}
    _refuse_shared_questions(splits, _name_of(config))
    table = _with_gold_answers(splits[split], f"{_name_of(config)}, split {split}")
    table = _limit(table, config, split)
    question_ids = [f"{split}-{index:05d}" for index in range(table.height)]
    return table.select(pl.Series("question_id", question_ids, dtype=pl.String), "question", "answer", "gold_answer")


def _name_of(config: DatasetConfig) -> str:
    """Return the name of a data set in messages."""
    if isinstance(config, GeneratedDataset):
        return f"generated data set (seed {config.seed})"
    if isinstance(config, LocalDataset):
        return f"data set {config.path}"
    return f"data set {config.hub_id} ({config.subset})"


def _read_split(config: DatasetConfig, split: Split) -> pl.DataFrame:
    """Return the columns question and answer of a whole split."""
    if isinstance(config, GeneratedDataset):
        problems = generate_problems(config, split)
        return pl.DataFrame(
            {"question": [problem.question for problem in problems], "answer": [problem.answer for problem in problems]}
        )
    if isinstance(config, LocalDataset):
        return _read_local(config, split)
    return _read_hub(config, split)


def _read_local(config: LocalDataset, split: Split) -> pl.DataFrame:
    """Read `split` from its file."""
    folder = Path(config.path)
    if not folder.is_dir():
        raise DataError(
            f"data set {folder}: no such folder, expected a folder with train and test as .jsonl or .parquet"
        )
    found = [folder / f"{split}{suffix}" for suffix in _FORMATS if (folder / f"{split}{suffix}").is_file()]
    if len(found) != 1:
        state = "neither" if not found else "both"
        raise DataError(f"data set {folder}: found {state} of {split}.jsonl and {split}.parquet, expected one of them")
    path = found[0]
    try:
        table = pl.read_ndjson(path, infer_schema_length=None) if path.suffix == ".jsonl" else pl.read_parquet(path)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise DataError(f"{path}: cannot be read as {path.suffix[1:]} ({first_line(error)})") from error
    return _question_and_answer(table, config, str(path))


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
    return _question_and_answer(pl.DataFrame(rows.to_dict()), config, f"{_name_of(config)}, split {split}")


def _question_and_answer(table: pl.DataFrame, config: LocalDataset | HubDataset, name: str) -> pl.DataFrame:
    """Return the columns question and answer; answers are texts that end in `#### number`.

    Raises DataError if a column is missing, has empty cells, or does not have the configured format.
    """
    columns = (config.question_column, config.answer_column)
    for column in columns:
        if column not in table.columns:
            raise DataError(
                f"{name}: found columns {', '.join(table.columns) or 'none'}, expected {' and '.join(columns)}"
            )
        if table[column].null_count():
            raise DataError(f"{name}: column {column} is empty in {table[column].null_count()} rows, expected text")
    if table.is_empty():
        raise DataError(f"{name}: no rows")
    question, answer = (table[column] for column in columns)
    if config.answer_format == "number":
        answer = _marked_numbers(answer, name)
    for column, values in zip(columns, (question, answer), strict=True):
        if values.dtype != pl.String:
            hint = " (for numbers set answer_format: number)" if values.dtype.is_numeric() else ""
            raise DataError(f"{name}: column {column} is {values.dtype}, expected text{hint}")
    return pl.DataFrame({"question": question, "answer": answer})


def _marked_numbers(answers: pl.Series, name: str) -> pl.Series:
    """Return numbers (or texts of numbers) as texts `#### number`; DataError for anything else."""
    numbers = [normalise_number(str(answer)) for answer in answers]
    if None in numbers:
        row = numbers.index(None)
        raise DataError(
            f"{name}, row {row}: answer {_shorten(str(answers[row]))!r} is not a number (answer_format: number)"
        )
    return pl.Series([f"#### {number}" for number in numbers], dtype=pl.String)


def _with_gold_answers(table: pl.DataFrame, name: str) -> pl.DataFrame:
    """Add the column gold_answer; DataError if an answer has no `#### number` or a question has two gold answers."""
    golds = [extract_answer(answer, "strict") for answer in table["answer"]]
    if None in golds:
        row = golds.index(None)
        raise DataError(f"{name}, row {row}: answer {_shorten(table['answer'][row])!r} has no `#### number`")
    first_gold: dict[str, str | None] = {}
    for question, gold in zip(table["question"], golds, strict=True):
        if first_gold.setdefault(normalise_question(question), gold) != gold:
            known = first_gold[normalise_question(question)]
            raise DataError(f"{name}: question {_shorten(question)!r} has two answers, {known} and {gold}")
    return table.with_columns(pl.Series("gold_answer", golds, dtype=pl.String))


def _refuse_shared_questions(splits: dict[Split, pl.DataFrame], name: str) -> None:
    """Raise DataError if train and test share questions."""
    train = {normalise_question(question) for question in splits["train"]["question"]}
    shared = [question for question in splits["test"]["question"] if normalise_question(question) in train]
    if shared:
        raise DataError(
            f"{name}: {len(shared)} test question(s) are also in train, expected none; first {_shorten(shared[0])!r}"
        )


def _limit(table: pl.DataFrame, config: DatasetConfig, split: Split) -> pl.DataFrame:
    """Return the configured number of first rows; DataError if there are fewer."""
    limit = config.num_train if split == "train" else config.num_test
    if limit is None:
        return table
    if limit > table.height:
        raise DataError(f"{_name_of(config)}: num_{split} is {limit}, but the split has {table.height} rows")
    return table.head(limit)


def _shorten(text: str, length: int = 80) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."
