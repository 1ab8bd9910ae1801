"""The questions of a study, and the format of its prompts."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from aqnpipe.config.base import FrozenModel, Seed

Split = Literal["train", "test"]
SplitSize = Annotated[int, Field(ge=1, le=10_000_000)]
GeneratedTask = Literal["word_problems", "comparison"]
AnswerFormat = Literal["gsm8k", "number", "boxed", "text", "choice"]


class GeneratedDataset(FrozenModel):
    """Generated questions. The defaults are the task and difficulty for which the tiny models were trained."""

    source: Literal["generated"] = "generated"
    task: GeneratedTask = "word_problems"
    """word_problems: grade-school arithmetic; comparison: count how many have more than a number"""
    seed: Seed = 0
    num_train: SplitSize = 2000
    num_test: SplitSize = 1000
    min_steps: int = Field(default=1, ge=1, le=3)
    max_steps: int = Field(default=3, ge=1, le=3)
    max_number: int = Field(default=20, ge=4, le=9999)
    distractor_probability: float = Field(default=0.3, ge=0.0, le=1.0)

    @property
    def answer_format(self) -> AnswerFormat:
        """The format of generated answers: worked text that ends in `#### number`."""
        return "gsm8k"

    def _problems(self) -> Iterator[str]:
        if self.min_steps > self.max_steps:
            yield f"min_steps is {self.min_steps}, expected at most max_steps, {self.max_steps}"


class StoredDataset(FrozenModel):
    """Settings shared by data sets that are read, not generated. A limit of None takes every row."""

    task: str = Field(default="word_problems", min_length=1)
    """name of the kind of question; an arm may be restricted to a task"""
    question_column: str = Field(default="question", min_length=1)
    """text, or a list of messages with one of the user; a dot leads into a nested column"""
    answer_column: str = Field(default="answer", min_length=1)
    """text, number, or messages that end in the assistant's answer"""
    answer_format: AnswerFormat = "gsm8k"
    """gsm8k: worked text that ends in `#### number`; number: the number alone; boxed: worked text with \\boxed{answer};
    text: the text itself; choice: letter, index or text of one of choices_column"""
    choices_column: str | None = Field(default=None, min_length=1)
    """for answer_format choice: a list of choices, put below the question"""
    cluster_column: str | None = Field(default=None, min_length=1)
    """what the answers to some questions depend on together (kind of problem, document, template): the unit of every
    test and interval; a dot leads into a nested column"""
    system_messages: Literal["refuse", "drop"] = "refuse"
    """what happens with system messages in question_column"""
    num_train: SplitSize | None = None
    num_test: SplitSize | None = None

    def _problems(self) -> Iterator[str]:
        if (self.answer_format == "choice") != (self.choices_column is not None):
            yield "answer_format choice and choices_column need each other"


class LocalDataset(StoredDataset):
    """A folder with the splits train and test as .jsonl, .csv or .parquet files, or one file with test questions."""

    source: Literal["local"]
    path: str = Field(min_length=1)


class HubDataset(StoredDataset):
    """A data set on the Hugging Face hub with the splits train and test."""

    source: Literal["hub"]
    hub_id: str = Field(default="openai/gsm8k", pattern=r"^[\w.-]+/[\w.-]+$")
    subset: str = Field(default="main", min_length=1)
    revision: str = Field(default="main", min_length=1)


class LmEvalDataset(FrozenModel):
    """A task of lm-evaluation-harness, which makes its prompts and grades its answers. For given checkpoints only."""

    source: Literal["lm_eval"]
    task: str = Field(min_length=1)
    """name of one task, multiple-choice or generative; not of a group"""
    include_path: str | None = Field(default=None, min_length=1)
    """folder with custom tasks; null: the tasks of the harness"""
    num_fewshot: int | None = Field(default=None, ge=0, le=64)
    """examples per prompt; null: as in the task"""
    metric: str | None = Field(default=None, min_length=1)
    """metric that is 0 or 1 per question; null: acc or exact_match"""
    filter: str | None = Field(default=None, min_length=1)
    """name of a filter of the task; null: its first"""
    num_test: SplitSize | None = None

    @property
    def num_train(self) -> None:
        """None: a task has no questions to train with."""
        return

    @property
    def answer_format(self) -> Literal["task"]:
        """Answers are graded by the task itself."""
        return "task"


DatasetConfig = Annotated[GeneratedDataset | LocalDataset | HubDataset | LmEvalDataset, Field(discriminator="source")]


class PromptFormat(FrozenModel):
    """The prompt format, the same in training and evaluation.

    - style plain: the instruction (if any) and the question, each followed by a newline.
    - style chat: the tokenizer's chat template around the question, with the instruction after the question.
    - layout question_answer: `Question: ...`, and `Answer:` on the next line, as in the gsm8k task of
      lm-evaluation-harness; the instruction, if any, is on a line before them.
    """

    style: Literal["plain", "chat"] = "plain"
    layout: Literal["bare", "question_answer"] = "bare"
    instruction: str = ""
    num_examples: int = Field(default=0, ge=0, le=64)
    """number of training questions with worked answers before every question (n-shot), separated by blank lines or as
    turns of the chat"""
    example_seed: Seed | None = None
    """seed of a random choice of the examples; null: the first rows of the training split"""

    def _problems(self) -> Iterator[str]:
        if self.num_examples and self.style == "plain" and self.layout == "bare":
            yield "num_examples with style plain needs layout question_answer, in which `Question:` ends a response"

    @property
    def stop_text(self) -> str | None:
        """Text that ends a response, because the model has begun a new question; None if the layout has none."""
        return "Question:" if self.layout == "question_answer" else None
