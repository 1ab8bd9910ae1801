"""How a question is put to the model, the same for training, evaluation and diagnosis."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from jinja2 import TemplateError

from aqnpipe.config.dataset import PromptFormat
from aqnpipe.data.examples import Example, examples_for
from aqnpipe.errors import DataError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def format_prompt(
    question: str,
    prompt_format: PromptFormat,
    tokenizer: "PreTrainedTokenizerBase",
    examples: Sequence[Example] = (),
) -> str:
    """Return the text that the model continues; `examples` are those of `choose_examples`.

    plain: the instruction (if any), a newline, examples with a blank line after each, the question; a bare question
    ends in a newline. chat: the tokenizer's chat template around turns of questions and worked answers; a bare question
    is followed by the instruction, a space between them. Raises ModelError if the tokenizer has no template, DataError
    if there are too few examples.
    """
    shown = examples_for(question, examples, prompt_format.num_examples)
    if prompt_format.style == "plain":
        before = "".join(f"{_put(one.question, prompt_format)} {one.answer}\n\n" for one in shown)
        return _instructed(before + _put(question, prompt_format), prompt_format)
    if not tokenizer.chat_template:
        raise ModelError("prompt style is chat, but the model's tokenizer has no chat template: expected style plain")
    bare, instruction = prompt_format.layout == "bare", prompt_format.instruction
    turns = []
    for number, requested in enumerate([*(one.question for one in shown), question]):
        if bare:
            content = f"{requested} {instruction}" if instruction else requested
        else:
            content = (
                _put(requested, prompt_format) if number else _instructed(_put(requested, prompt_format), prompt_format)
            )
        turns.append({"role": "user", "content": content})
        if number < len(shown):
            turns.append({"role": "assistant", "content": shown[number].answer})
    try:
        return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
    except (TemplateError, TypeError) as error:
        raise ModelError(f"chat template of {tokenizer.name_or_path!r} cannot be used: {error}") from error


def prompt_token_ids(
    questions: Iterable[str],
    prompt_format: PromptFormat,
    tokenizer: "PreTrainedTokenizerBase",
    examples: Sequence[Example] = (),
) -> list[list[int]]:
    """Return the token ids of every question's prompt."""
    prompts = [format_prompt(question, prompt_format, tokenizer, examples) for question in questions]
    return tokenize_prompts(prompts, prompt_format, tokenizer)


def end_of_response(text: str, stop_text: str | None) -> str:
    """Return `text` up to `stop_text` (of `PromptFormat`), where the model went on with a question of its own."""
    return text if stop_text is None else text.split(stop_text, 1)[0]


def _put(question: str, prompt_format: PromptFormat) -> str:
    return f"{question}\n" if prompt_format.layout == "bare" else f"Question: {question}\nAnswer:"


def _instructed(text: str, prompt_format: PromptFormat) -> str:
    return f"{prompt_format.instruction}\n{text}" if prompt_format.instruction else text


def tokenize_prompts(
    prompts: Sequence[str], prompt_format: PromptFormat, tokenizer: "PreTrainedTokenizerBase"
) -> list[list[int]]:
    """Return the token ids of formatted prompts; a chat template has written its special tokens already."""
    add_special_tokens = prompt_format.style == "plain"
    if not prompts:
        return []
    return [list(ids) for ids in tokenizer(list(prompts), add_special_tokens=add_special_tokens)["input_ids"]]


def check_prompt_lengths(question_ids: Iterable[str], token_ids: Sequence[Sequence[int]], max_tokens: int) -> None:
    """Raise DataError, naming the longest, if any prompt has more than `max_tokens` tokens."""
    lengths = {question_id: len(ids) for question_id, ids in zip(question_ids, token_ids, strict=True)}
    too_long = [question_id for question_id, length in lengths.items() if length > max_tokens]
    if too_long:
        longest = max(too_long, key=lambda question_id: lengths[question_id])
        raise DataError(
            f"training.max_prompt_tokens is {max_tokens}: {len(too_long)} of {len(lengths)} prompts are longer, the "
            f"longest is that of question {longest} with {lengths[longest]} tokens"
        )


def check_context(token_ids: Sequence[Sequence[int]], max_response_tokens: int, context: int | None) -> None:
    """Raise DataError if a prompt and its longest response have more tokens than a model's context (None: no limit)."""
    longest = max(map(len, token_ids), default=0)
    if context is not None and longest + max_response_tokens > context:
        raise DataError(
            f"the longest prompt has {longest} tokens and a response may have {max_response_tokens}, together more "
            f"than the {context} positions of the model: expected fewer examples (prompt.num_examples) or shorter "
            "responses"
        )
