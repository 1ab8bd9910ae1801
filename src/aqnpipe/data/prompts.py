"""Prompts: the format of questions, the same in training, evaluation and diagnosis, and the examples before them.

Worked examples (few-shot) are chosen once per study from its training questions.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import TemplateError

from aqnpipe.artifacts.files import read_table
from aqnpipe.artifacts.problems import ProblemTable
from aqnpipe.config.dataset import PromptFormat
from aqnpipe.data.generated import normalise_question
from aqnpipe.errors import DataError, ModelError, first_line
from aqnpipe.seeding import derive_seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)
"""Errors that a chat template, which is a program, can raise."""


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


def format_prompt(
    question: str,
    prompt_format: PromptFormat,
    tokenizer: "PreTrainedTokenizerBase",
    examples: Sequence[Example] = (),
) -> str:
    """Return the text that the model continues; `examples` come from `choose_examples`.

    - plain: the instruction (if any) and a newline, the examples with a blank line after each, and the question; a
      question of layout bare ends with a newline.
    - chat: the tokenizer's chat template around turns of questions and worked answers; with layout bare, each question
      is followed by a space and the instruction.

    Raises ModelError if the tokenizer has no chat template or one that leaves a turn out, DataError if there are too
    few examples.
    """
    shown = examples_for(question, examples, prompt_format.num_examples)
    if prompt_format.style == "plain":
        before = "".join(f"{_laid_out(example.question, prompt_format)} {example.answer}\n\n" for example in shown)
        return _instructed(before + _laid_out(question, prompt_format), prompt_format)
    if not tokenizer.chat_template:
        raise ModelError("prompt.style is chat, but the model's tokenizer has no chat template: expected style plain")
    bare, instruction = prompt_format.layout == "bare", prompt_format.instruction
    turns = []
    for number, asked in enumerate([*(example.question for example in shown), question]):
        if bare:
            content = f"{asked} {instruction}" if instruction else asked
        else:
            content = _laid_out(asked, prompt_format)
            if number == 0:
                content = _instructed(content, prompt_format)
        turns.append({"role": "user", "content": content})
        if number < len(shown):
            turns.append({"role": "assistant", "content": shown[number].answer})
    try:
        text = str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
    except TEMPLATE_ERRORS as error:
        raise ModelError(f"chat template of {tokenizer.name_or_path!r} cannot be used: {first_line(error)}") from error
    _refuse_left_out(turns, text, tokenizer)
    return text


def refuse_unusable_template(prompt_format: PromptFormat, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Raise ModelError if no question could be asked through the tokenizer's chat template. Style plain needs none."""
    examples = [Example(f"What is {number} plus 1?", f"#### {number + 1}") for number in range(64)]
    format_prompt("What is 77 plus 8?", prompt_format, tokenizer, examples[: prompt_format.num_examples])


def prompt_token_ids(
    questions: Iterable[str],
    prompt_format: PromptFormat,
    tokenizer: "PreTrainedTokenizerBase",
    examples: Sequence[Example] = (),
) -> list[list[int]]:
    """Return the token ids of the prompt of every question."""
    prompts = [format_prompt(question, prompt_format, tokenizer, examples) for question in questions]
    return tokenize_prompts(prompts, prompt_format, tokenizer)


class Questions(NamedTuple):
    """Questions in the order of their table: ids, prompts (token ids) and gold answers."""

    ids: list[str]
    prompts: list[list[int]]
    golds: list[str]


def read_questions(
    table: Path, prompt_format: PromptFormat, tokenizer: Any, train_problems: Path | None, limit: int | None = None
) -> Questions:
    """Return the first `limit` questions (None: all) of a file; examples are from `train_problems`."""
    problems = read_table(table, ProblemTable)[:limit]
    examples = choose_examples(prompt_format, train_problems)
    prompts = prompt_token_ids(problems["question"], prompt_format, tokenizer, examples)
    return Questions(problems["question_id"].to_list(), prompts, problems["gold_answer"].to_list())


def end_of_response(text: str, stop_text: str | None) -> str:
    """Return `text` up to `PromptFormat.stop_text`, at which the model has begun a new question."""
    return text if stop_text is None else text.split(stop_text, 1)[0]


def _refuse_left_out(turns: Sequence[Mapping[str, str]], text: str, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Raise ModelError unless `text` has the content of every turn, in order.

    Jinja renders a key that a message lacks as nothing, so a template for other messages drops every question without
    an error. Templates may trim contents, and leave out the reasoning of earlier answers.
    """
    end = 0
    for turn in turns:
        content = turn["content"].strip()
        if turn["role"] == "assistant":
            content = content.rpartition("</think>")[2].strip()
        start = text.find(content, end)
        if start < 0:
            raise ModelError(
                f"chat template of {tokenizer.name_or_path!r} leaves out the content of a turn with `role` "
                f"{turn['role']}, {content[:80]!r}, expected every turn in the prompt"
            )
        end = start + len(content)


def _laid_out(question: str, prompt_format: PromptFormat) -> str:
    return f"{question}\n" if prompt_format.layout == "bare" else f"Question: {question}\nAnswer:"


def _instructed(text: str, prompt_format: PromptFormat) -> str:
    return f"{prompt_format.instruction}\n{text}" if prompt_format.instruction else text


def tokenize_prompts(
    prompts: Sequence[str], prompt_format: PromptFormat, tokenizer: "PreTrainedTokenizerBase"
) -> list[list[int]]:
    """Return the token ids of formatted prompts. Chat prompts already contain their special tokens."""
    add_special_tokens = prompt_format.style == "plain"
    if not prompts:
        return []
    return [list(ids) for ids in tokenizer(list(prompts), add_special_tokens=add_special_tokens)["input_ids"]]


def check_prompt_lengths(question_ids: Iterable[str], token_ids: Sequence[Sequence[int]], max_tokens: int) -> None:
    """Raise DataError, naming the longest prompt, if any prompt has more than `max_tokens` tokens."""
    lengths = {question_id: len(ids) for question_id, ids in zip(question_ids, token_ids, strict=True)}
    too_long = [question_id for question_id, length in lengths.items() if length > max_tokens]
    if too_long:
        longest = max(too_long, key=lambda question_id: lengths[question_id])
        raise DataError(
            f"training.max_prompt_tokens is {max_tokens}: {len(too_long)} of {len(lengths)} prompts are longer; the "
            f"longest, of question {longest}, has {lengths[longest]} tokens"
        )


def check_context(
    token_ids: Sequence[Sequence[int]], max_response_tokens: int, model_config: Mapping[str, Any], padding: int
) -> None:
    """Raise DataError if the longest prompt and response exceed a model's context, or a token its vocabulary.

    `model_config`: content of config.json; what it does not say has no limit. `padding`: token id of the padding.
    """
    longest, context = max(map(len, token_ids), default=0), model_config.get("max_position_embeddings")
    if context is not None and longest + max_response_tokens > context:
        raise DataError(
            f"the longest prompt has {longest} tokens and a response may have {max_response_tokens}, together more "
            f"than the {context} positions of the model: expected fewer examples (prompt.num_examples) or shorter "
            "responses"
        )
    largest, vocabulary = max(padding, *(max(ids, default=0) for ids in token_ids)), model_config.get("vocab_size")
    if isinstance(vocabulary, int) and largest >= vocabulary:
        raise DataError(
            f"the tokenizer has a token {largest}, which is used in prompts or as padding, and the model has "
            f"{vocabulary}, from 0: expected the tokenizer of this model"
        )
