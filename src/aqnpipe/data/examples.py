"""Worked examples before a question (few-shot), chosen once per study from its training questions."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from aqnpipe.artifacts.files import read_table
from aqnpipe.artifacts.problems import ProblemTable
from aqnpipe.config.dataset import PromptFormat
from aqnpipe.data.generated import normalise_question
from aqnpipe.errors import DataError
from aqnpipe.seeding import derive_seed


class Example(NamedTuple):
    """A training question with its worked answer."""

    question: str
    answer: str


def choose_examples(prompt_format: PromptFormat, train_problems: Path | None) -> tuple[Example, ...]:
    """Return the examples of a study in order: `num_examples` and a spare one for questions that are examples.

    They are the first distinct questions of the training split or, with `example_seed`, random ones. Raises DataError
    if there are too few, or if examples are needed and `train_problems` is None.
    """
    wanted = prompt_format.num_examples
    if wanted == 0:
        return ()
    if train_problems is None:
        raise DataError(f"prompt.num_examples is {wanted}, but no training questions were given for examples")
    table = read_table(train_problems, ProblemTable)
    order: Sequence[int] = range(table.height)
    seed = prompt_format.example_seed
    if seed is not None:
        order = sorted(order, key=lambda row: derive_seed(seed, "few_shot_examples", row))
    found: dict[str, Example] = {}
    for row in order:
        question, answer = table["question"][row], table["answer"][row]
        found.setdefault(normalise_question(question), Example(question, answer))
        if len(found) > wanted:
            return tuple(found.values())
    raise DataError(
        f"{train_problems}: {len(found)} different questions, expected at least {wanted + 1} for prompt.num_examples "
        f"{wanted}"
    )


def examples_for(question: str, examples: Sequence[Example], number: int) -> list[Example]:
    """Return the first `number` examples other than `question` itself; DataError if there are fewer."""
    if number == 0:
        return []
    asked = normalise_question(question)
    others = [example for example in examples if normalise_question(example.question) != asked]
    if len(others) < number:
        raise DataError(f"prompt.num_examples is {number}, but there are {len(others)} examples for a question")
    return others[:number]


def refuse_leak(train: Iterable[str], test: Iterable[str]) -> None:
    """Raise DataError if a test question is also a training question, ignoring case and repeated spaces."""
    known = {normalise_question(question) for question in train}
    leaked = [question for question in test if normalise_question(question) in known]
    if leaked:
        raise DataError(
            f"{len(leaked)} test question(s) are also training questions, expected none; first {leaked[0][:80]!r}"
        )


def refuse_overlap(examples: Sequence[Example], questions: Iterable[str]) -> None:
    """Raise DataError if a test question is among the examples."""
    known = {normalise_question(example.question) for example in examples}
    for question in questions:
        if normalise_question(question) in known:
            raise DataError(f"test question {question[:80]!r} is an example of the prompt, expected other questions")
