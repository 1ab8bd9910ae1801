"""Which questions a study trains on and evaluates on, and how they are put to the model."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from aqnpipe.config.base import FrozenModel

SplitSize = Annotated[int, Field(ge=1)]
GeneratedTask = Literal["word_problems", "comparison"]
AnswerFormat = Literal["gsm8k", "number"]


class GeneratedDataset(FrozenModel):
    """Generated questions; the defaults are the task and the difficulty that the tiny models were made for."""

    source: Literal["generated"] = "generated"
    task: GeneratedTask = Field(
        default="word_problems",
        description="word_problems: grade-school arithmetic; comparison: count who has more than a number",
    )
    seed: int = 0
    num_train: SplitSize = 2000
    num_test: SplitSize = 1000
    min_steps: int = Field(default=1, ge=1, le=3)
    max_steps: int = Field(default=3, ge=1, le=3)
    max_number: int = Field(default=20, ge=4, le=9999)
    distractor_probability: float = Field(default=0.3, ge=0.0, le=1.0)

    @model_validator(mode="after")
    def _steps_are_ordered(self) -> Self:
        if self.min_steps > self.max_steps:
            raise ValueError(f"min_steps is {self.min_steps}, above max_steps {self.max_steps}: expected at most that")
        return self


class _StoredDataset(FrozenModel):
    """What data sets that exist already have in common; a limit of None takes every row."""

    task: str = Field(
        default="word_problems", min_length=1, description="name of the kind of question; arms may be meant for one"
    )
    question_column: str = Field(default="question", min_length=1)
    answer_column: str = Field(default="answer", min_length=1)
    answer_format: AnswerFormat = Field(
        default="gsm8k", description="gsm8k: worked text that ends in `#### number`; number: the number alone"
    )
    num_train: SplitSize | None = None
    num_test: SplitSize | None = None


class LocalDataset(_StoredDataset):
    """A folder with train and test as .jsonl or .parquet."""

    source: Literal["local"]
    path: str = Field(min_length=1)


class HubDataset(_StoredDataset):
    """A data set of the Hugging Face hub with splits train and test."""

    source: Literal["hub"]
    hub_id: str = Field(default="openai/gsm8k", pattern=r"^[\w.-]+/[\w.-]+$")
    subset: str = Field(default="main", min_length=1)
    revision: str = Field(default="main", min_length=1)


DatasetConfig = Annotated[GeneratedDataset | LocalDataset | HubDataset, Field(discriminator="source")]


class PromptFormat(FrozenModel):
    """How a question becomes a prompt, for reward and evaluation alike.

    style plain: instruction (if any) and question, each ended by a newline. chat: the tokenizer's chat template around
    the question, the instruction after it. layout question_answer: `Question: ...` and, on the next line, `Answer:`, as
    in lm-evaluation-harness's gsm8k; the instruction, if any, on a line before everything.
    """

    style: Literal["plain", "chat"] = "plain"
    layout: Literal["bare", "question_answer"] = "bare"
    instruction: str = ""
    num_examples: int = Field(
        default=0,
        ge=0,
        le=64,
        description="training questions with their worked answers that stand before every question (n-shot), with "
        "blank lines between them or as turns of the chat",
    )
    example_seed: int | None = Field(
        default=None, ge=0, description="draws the examples; null: the first rows of the training split"
    )

    @model_validator(mode="after")
    def _a_response_has_an_end(self) -> Self:
        if self.num_examples and self.style == "plain" and self.layout == "bare":
            raise ValueError(
                "num_examples in style plain needs layout question_answer: a model that goes on after its answer is "
                "cut off at the next question"
            )
        return self

    @property
    def stop_text(self) -> str | None:
        """Text at which a response ends if the model goes on with a question of its own; None: no such text."""
        return "Question:" if self.layout == "question_answer" else None
