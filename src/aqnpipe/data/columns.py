"""Questions and answers from the columns of a data set: nested columns, messages, choices, and formats of answers.

A column may be inside another one (`reward_model.ground_truth`, as in the parquet files of verl). A value may be a
list of messages (`{"role": ..., "content": ...}`): then the question is the user's message, and the answer the
assistant's last one. The answers of a table come out in two forms: `answer`, worked as far as the data set has it,
which examples in a prompt show, and `gold_answer`, which scorers compare with.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import polars as pl

from aqnpipe.config.dataset import AnswerFormat, StoredDataset
from aqnpipe.data.scoring import LETTERS, boxed_answer, extract_answer, normalise_number
from aqnpipe.errors import DataError

_SHOWN = 80


def questions_and_answers(table: pl.DataFrame, config: StoredDataset, name: str) -> pl.DataFrame:
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
            rows.append((_with_choices(question, choices), letter, letter))
        else:
            text = _answer_text(answer, where, config)
            rows.append((question, *_GOLD[config.answer_format](text, where)))
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
            raise DataError(f"{where}: column {column}: found {shown(message)}, expected role and content, both text")
        found.append((str(pair[0]), str(pair[1])))
    return found


def _choices(value: Any, where: str, column: str) -> tuple[list[str], list[str]]:
    """Return the texts of choices and their labels; no labels unless they are stored, as in ARC: `text` and `label`."""
    labels: list[str] = []
    if isinstance(value, Mapping) and "text" in value:
        labels, value = [str(label) for label in value.get("label") or ()], value["text"]
    if not isinstance(value, list) or not 2 <= len(value) <= len(LETTERS):
        raise DataError(
            f"{where}: column {column}: found {shown(value)}, expected a list of 2 to {len(LETTERS)} choices"
        )
    if labels and (len(labels) != len(value) or len(set(labels)) != len(labels)):
        raise DataError(f"{where}: column {column}: found labels {shown(labels)}, expected one of its own per choice")
    return [str(choice) for choice in value], labels


def _letter(answer: Any, choices: Sequence[str], labels: list[str], where: str, column: str) -> str:
    """Return the letter of the right choice, given as its label, its letter, its index from 0, or its text."""
    letters = list(LETTERS[: len(choices)])
    if str(answer) in labels:
        return letters[labels.index(str(answer))]
    if labels and labels != letters:
        # Labels may be numbers from 1, as in some questions of ARC; these are not indices.
        raise DataError(f"{where}: column {column}: found {shown(answer)}, expected a label, {' or '.join(labels)}")
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
        f"{where}: column {column}: found {shown(answer)}, expected the letter (A to {letters[-1]}), the index (0 to "
        f"{len(choices) - 1}) or the text of one choice"
    )


def _with_choices(question: str, choices: Sequence[str]) -> str:
    return "\n".join([question, *(f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=False))])


def _gsm8k(text: str, where: str) -> tuple[str, str]:
    gold = extract_answer(text, "strict")
    if gold is None:
        raise DataError(f"{where}: answer {shown(text)} has no `#### number`")
    return text, gold


def _number(text: str, where: str) -> tuple[str, str]:
    number = normalise_number(text)
    if number is None:
        raise DataError(f"{where}: answer {shown(text)} is not a number (answer_format: number)")
    return f"#### {number}", number


def _boxed(text: str, where: str) -> tuple[str, str]:
    gold = boxed_answer(text)
    if not gold:
        raise DataError(f"{where}: answer {shown(text)} has no \\boxed{{...}}")
    return text, gold


def _text(text: str, where: str) -> tuple[str, str]:
    if not text.strip():
        raise DataError(f"{where}: the answer is empty, expected text")
    return text, text.strip()


_GOLD: Mapping[AnswerFormat, Callable[[str, str], tuple[str, str]]] = {
    "gsm8k": _gsm8k,
    "number": _number,
    "boxed": _boxed,
    "text": _text,
}
"""For each format of answers, worked answer and gold answer of a text."""


def shown(value: Any) -> str:
    """Return a value as messages show it: in quotes if it is text, and cut if it is long."""
    text = "a missing number" if isinstance(value, float) and math.isnan(value) else repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
