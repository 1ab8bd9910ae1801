"""The problems of a study as a table, read from the generator, a local folder or the hub, and checked.

A column may be inside another one (`reward_model.ground_truth`, as in the parquet files of verl). A value may be a
list of messages (`{"role": ..., "content": ...}`): then the question is the user's message, and the answer the
assistant's last one. The answers of a table come out in two forms: `answer`, worked as far as the data set has it,
which examples in a prompt show, and `gold_answer`, which scorers compare with.
"""

import codecs
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import polars as pl

from aqnpipe.config.base import refuse_pipe_or_device
from aqnpipe.config.dataset import (
    AnswerFormat,
    DatasetConfig,
    GeneratedDataset,
    HubDataset,
    LmEvalDataset,
    LocalDataset,
    Split,
    StoredDataset,
)
from aqnpipe.data.generated import generate_problems, normalise_question
from aqnpipe.data.harness_task import HarnessTask
from aqnpipe.data.scoring import LETTERS, boxed_answer, extract_answer, normalise_number
from aqnpipe.errors import DataError, first_line

SPLITS: tuple[Split, Split] = ("train", "test")
_FORMATS = (".jsonl", ".csv", ".parquet")

_SHOWN = 80


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
    refuse_pipe_or_device(path, DataError)
    try:
        table = _READERS[path.suffix](path)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise DataError(f"{path}: cannot be read as {path.suffix[1:]} ({first_line(error)})") from error
    return _questions_and_answers(table, config, str(path))


def _read_jsonl(path: Path) -> pl.DataFrame:
    """Read JSON lines, also behind the byte order mark that Windows programs write, which polars refuses.

    Raises DataError for a key that stands twice in an object, of which polars takes one.
    """
    content = path.read_bytes().removeprefix(codecs.BOM_UTF8)

    def refuse_repeats(pairs: list[tuple[str, Any]]) -> None:
        repeated = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
        if repeated:
            raise DataError(f"{path}: found the key {repeated[0]} twice in an object, expected different names")

    for line in content.splitlines():
        with suppress(ValueError, RecursionError):  # polars says what is wrong with a line that is no JSON
            json.loads(line, object_pairs_hook=refuse_repeats)
    return pl.read_ndjson(content, infer_schema_length=None)


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
    return _questions_and_answers(pl.DataFrame(rows.to_dict()), config, f"{_name_of(config)}, split {split}")


def _refuse_two_answers(table: pl.DataFrame, name: str) -> None:
    """Raise DataError if a question occurs with two gold answers."""
    first_gold: dict[str, str] = {}
    for question, gold in zip(table["question"], table["gold_answer"], strict=True):
        if first_gold.setdefault(normalise_question(question), gold) != gold:
            known = first_gold[normalise_question(question)]
            raise DataError(f"{name}: question {_shown(question)} has two answers, {known} and {gold}")


def _refuse_shared_questions(splits: dict[Split, pl.DataFrame], name: str) -> None:
    """Raise DataError if train and test share questions."""
    train = {normalise_question(question) for question in splits["train"]["question"]}
    shared = [question for question in splits["test"]["question"] if normalise_question(question) in train]
    if shared:
        raise DataError(
            f"{name}: {len(shared)} test question(s) are also in train, expected none; first {_shown(shared[0])}"
        )


def _limit(table: pl.DataFrame, config: DatasetConfig, split: Split) -> pl.DataFrame:
    """Return the configured number of first rows; DataError if there are fewer."""
    limit = config.num_train if split == "train" else config.num_test
    if limit is None:
        return table
    if limit > table.height:
        raise DataError(f"{_name_of(config)}: num_{split} is {limit}, but the split has {table.height} rows")
    return table.head(limit)


def _questions_and_answers(table: pl.DataFrame, config: StoredDataset, name: str) -> pl.DataFrame:
    """Return the columns question, answer, gold_answer and, if one is named, cluster of a data set's table.

    Raises DataError, naming `name`, the row and the column, if a column is missing or empty, or a value is not what the
    configuration says.
    """
    if table.is_empty():
        raise DataError(f"{name}: no rows")
    columns = [config.question_column, config.answer_column]
    columns += [config.choices_column] if config.choices_column is not None else []
    columns += [config.cluster_column] if config.cluster_column is not None else []
    values = {column: _values(table, column, columns, name) for column in columns}
    rows = []
    for row in range(table.height):
        where = f"{name}, row {row}"
        question = _question(values[config.question_column][row], where, config)
        if not question.strip():
            raise DataError(f"{where}: column {config.question_column} is empty, expected a question")
        answer = values[config.answer_column][row]
        if config.choices_column is not None:
            choices, labels = _choices(values[config.choices_column][row], where, config.choices_column)
            letter = _letter(answer, choices, labels, where, config.answer_column)
            listed = [f"{each}. {choice}" for each, choice in zip(LETTERS, choices, strict=False)]
            rows.append(("\n".join([question, *listed]), letter, letter))
        else:
            text = _answer_text(answer, where, config)
            rows.append((question, *_worked_and_gold(text, config.answer_format, where)))
    found = pl.DataFrame(rows, schema=dict.fromkeys(("question", "answer", "gold_answer"), pl.String), orient="row")
    if config.cluster_column is None:
        return found
    return found.with_columns(pl.Series("cluster", [str(value) for value in values[config.cluster_column]]))


def _values(table: pl.DataFrame, column: str, wanted: Sequence[str], name: str) -> list[Any]:
    """Return the values of a column, which may be inside others; a column whose name has dots goes first."""
    if column in table.columns:
        values = table[column].to_list()
    else:
        first, *inner = column.split(".")
        if first not in table.columns:
            raise DataError(
                f"{name}: found columns {', '.join(table.columns) or 'none'}, expected {' and '.join(wanted)}"
            )
        values = table[first].to_list()
        for depth, part in enumerate(inner, start=1):
            values = [_part(value, part, f"{name}, row {row}", column, depth) for row, value in enumerate(values)]
    empty = sum(value is None for value in values)
    if empty:
        raise DataError(f"{name}: column {column} is empty in {empty} rows, expected text")
    return values


def _part(value: Any, part: str, where: str, column: str, depth: int) -> Any:
    if isinstance(value, Mapping) and part in value:
        return value[part]
    outer = ".".join(column.split(".")[:depth])
    found = f"keys {', '.join(map(str, value))}" if isinstance(value, Mapping) else type(value).__name__
    raise DataError(f"{where}: column {outer} has {found}, expected {part} in it (column {column})")


def _question(value: Any, where: str, config: StoredDataset) -> str:
    column = config.question_column
    if isinstance(value, str):
        return value
    messages = _messages(value, where, column)
    if config.system_messages == "drop":
        messages = [(role, content) for role, content in messages if role != "system"]
    if messages and messages[-1][0] == "assistant":
        messages = messages[:-1]
    roles = [role for role, _ in messages]
    if roles != ["user"]:
        hint = ""
        if "system" in roles:
            hint = "; prompt.instruction can hold what the system message says, system_messages: drop leaves it out"
        raise DataError(f"{where}: column {column} has messages of {', '.join(roles)}, expected one of user{hint}")
    return messages[0][1]


def _answer_text(value: Any, where: str, config: StoredDataset) -> str:
    column = config.answer_column
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        messages = _messages(value, where, column)
        if not messages or messages[-1][0] != "assistant":
            raise DataError(f"{where}: column {column} has no last message of the assistant, expected the answer there")
        return messages[-1][1]
    if isinstance(value, int | float) and not isinstance(value, bool) and config.answer_format in ("number", "text"):
        return str(value)
    hint = " (for numbers set answer_format: number)" if isinstance(value, int | float) else ""
    raise DataError(f"{where}: column {column} is {type(value).__name__}, expected text{hint}")


def _messages(value: Any, where: str, column: str) -> list[tuple[str, str]]:
    """Return the roles and texts of messages."""
    if not isinstance(value, list):
        raise DataError(f"{where}: column {column} is {type(value).__name__}, expected text or messages")
    found = []
    for message in value:
        pair = (message.get("role"), message.get("content")) if isinstance(message, Mapping) else (None, None)
        if not (isinstance(pair[0], str) and isinstance(pair[1], str)):
            raise DataError(f"{where}: column {column}: found {_shown(message)}, expected `role` and `content` as text")
        found.append((str(pair[0]), str(pair[1])))
    return found


def _choices(value: Any, where: str, column: str) -> tuple[list[str], list[str]]:
    """Return the texts of choices and their labels; no labels unless they are stored, as in ARC: `text` and `label`."""
    labels: list[str] = []
    if isinstance(value, Mapping) and "text" in value:
        labels, value = [str(label) for label in value.get("label") or ()], value["text"]
    if not isinstance(value, list) or not 2 <= len(value) <= len(LETTERS):
        raise DataError(
            f"{where}: column {column}: found {_shown(value)}, expected a list of 2 to {len(LETTERS)} choices"
        )
    if labels and (len(labels) != len(value) or len(set(labels)) != len(labels)):
        raise DataError(f"{where}: column {column}: found labels {_shown(labels)}, expected a different one per choice")
    return [str(choice) for choice in value], labels


def _letter(answer: Any, choices: Sequence[str], labels: list[str], where: str, column: str) -> str:
    """Return the letter of the right choice, given as its label, its letter, its index from 0, or its text."""
    letters = list(LETTERS[: len(choices)])
    if str(answer) in labels:
        return letters[labels.index(str(answer))]
    if labels and labels != letters:
        # Labels may be numbers from 1, as in some questions of ARC; these are not indices.
        raise DataError(f"{where}: column {column}: found {_shown(answer)}, expected a label, {' or '.join(labels)}")
    if (
        isinstance(answer, str)
        and answer in choices
        and (answer not in letters or choices[letters.index(answer)] == answer)
    ):
        if choices.count(answer) == 1:
            return letters[choices.index(answer)]
    elif isinstance(answer, str) and len(answer.strip()) == 1 and answer.strip().upper() in letters:
        return answer.strip().upper()
    elif isinstance(answer, str) and answer.strip().isdecimal() and int(answer) < len(choices):
        return letters[int(answer)]  # an index stored as text, as in HellaSwag
    elif isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(choices):
        return letters[answer]
    raise DataError(
        f"{where}: column {column}: found {_shown(answer)}, expected the letter (A to {letters[-1]}), the index (0 to "
        f"{len(choices) - 1}) or the text of one choice"
    )


def _worked_and_gold(text: str, answers: AnswerFormat, where: str) -> tuple[str, str]:
    """Return the worked answer and the gold answer in a text of a format."""
    match answers:
        case "gsm8k":
            worked, gold, problem = text, extract_answer(text, "strict"), "has no `#### number`"
        case "number":
            gold, problem = normalise_number(text), "is not a number (answer_format: number)"
            worked = f"#### {gold}"
        case "boxed":
            worked, gold, problem = text, boxed_answer(text) or None, "has no \\boxed{...}"
        case _:
            worked, gold, problem = text, text.strip() or None, "is empty, expected text"
    if gold is None:
        raise DataError(f"{where}: answer {_shown(text)} {problem}")
    return worked, gold


def _shown(value: Any) -> str:
    """Return a value as messages show it: in quotes if it is text, and cut if it is long."""
    text = "a missing number" if isinstance(value, float) and math.isnan(value) else repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
