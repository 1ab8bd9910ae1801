"""How a question is put to the model, the same for training, evaluation and diagnosis."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from aqnpipe.config.dataset import PromptFormat
from aqnpipe.errors import DataError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def format_prompt(question: str, prompt_format: PromptFormat, tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return the text that the model continues.

    plain: instruction (if any) and question, a newline after each. chat: the tokenizer's chat template around question
    and instruction, a space between them; raises ModelError if the tokenizer has no template.
    """
    instruction = prompt_format.instruction
    if prompt_format.style == "plain":
        return f"{instruction}\n{question}\n" if instruction else f"{question}\n"
    if not tokenizer.chat_template:
        raise ModelError("prompt style is chat, but the model's tokenizer has no chat template: expected style plain")
    content = f"{question} {instruction}" if instruction else question
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    return str(prompt)


def prompt_token_ids(
    questions: Iterable[str], prompt_format: PromptFormat, tokenizer: "PreTrainedTokenizerBase"
) -> list[list[int]]:
    """Return the token ids of every question's prompt."""
    return tokenize_prompts([format_prompt(q, prompt_format, tokenizer) for q in questions], prompt_format, tokenizer)


def tokenize_prompts(
    prompts: Sequence[str], prompt_format: PromptFormat, tokenizer: "PreTrainedTokenizerBase"
) -> list[list[int]]:
    """Return the token ids of formatted prompts; a chat template has written its special tokens already."""
    add_special_tokens = prompt_format.style == "plain"
    return [list(tokenizer(prompt, add_special_tokens=add_special_tokens)["input_ids"]) for prompt in prompts]


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
