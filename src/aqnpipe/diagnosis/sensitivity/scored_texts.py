"""Texts whose loss is measured: token ids, the part that is scored, and the loss of a batch of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import polars as pl
import torch
import torch.nn.functional as F
from torch import Tensor

from aqnpipe.config.dataset import PromptFormat
from aqnpipe.data.prompts import Example, prompt_token_ids
from aqnpipe.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MAX_TOKENS = 4096
_MAX_LOGITS = 2**26
"""Limits of one batch: tokens with padding, and logits (256 MiB in float32)."""


@dataclass(frozen=True)
class ScoredText:
    """A text as token ids. The loss is that of the tokens after the first `prompt_tokens`.

    `gold_answer`: the answer to the prompt, if it is a question; accuracy is measured on such texts.
    """

    token_ids: tuple[int, ...]
    prompt_tokens: int = 1
    gold_answer: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.prompt_tokens < len(self.token_ids):
            raise DataError(
                f"a text has {len(self.token_ids)} tokens, {self.prompt_tokens} of them in its prompt: expected a "
                "prompt of at least one token, and at least one token after it"
            )

    @property
    def num_scored(self) -> int:
        """Number of tokens that the loss is of."""
        return len(self.token_ids) - self.prompt_tokens


def texts_of_problems(
    problems: pl.DataFrame,
    prompt: PromptFormat,
    tokenizer: "PreTrainedTokenizerBase",
    examples: Sequence[Example] = (),
) -> list[ScoredText]:
    """Return prompt, gold solution and end token of every row of a ProblemTable; the solution is scored."""
    prompts = prompt_token_ids(problems["question"], prompt, tokenizer, examples)
    end = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    return [
        ScoredText(
            (*ids, *tokenizer(answer, add_special_tokens=False)["input_ids"], *end), len(ids), gold_answer=gold_answer
        )
        for ids, answer, gold_answer in zip(prompts, problems["answer"], problems["gold_answer"], strict=True)
    ]


@dataclass(frozen=True)
class TextBatch:
    """Texts of similar length: `positions` in the list of all texts, `token_ids` [rows, tokens] and the scored mask.

    Rows are padded on the right, where a causal model cannot see the padding; it is not scored.
    """

    positions: tuple[int, ...]
    token_ids: Tensor
    is_scored: Tensor


def text_batches(texts: Sequence[ScoredText], vocabulary_size: int, device: torch.device) -> list[TextBatch]:
    """Return all texts in batches, longest last; the limits bound the memory of the logits."""
    order = sorted(range(len(texts)), key=lambda position: len(texts[position].token_ids))
    max_tokens = max(1, min(_MAX_TOKENS, _MAX_LOGITS // vocabulary_size))
    groups: list[list[int]] = []
    for position in order:
        length = len(texts[position].token_ids)
        if groups and (len(groups[-1]) + 1) * length <= max_tokens:
            groups[-1].append(position)
        else:
            groups.append([position])
    return [_batch(texts, group, device) for group in groups]


def _batch(texts: Sequence[ScoredText], positions: Sequence[int], device: torch.device) -> TextBatch:
    length = max(len(texts[position].token_ids) for position in positions)
    ids = torch.zeros(len(positions), length, dtype=torch.long)
    scored = torch.zeros(len(positions), length, dtype=torch.bool)
    for row, position in enumerate(positions):
        text = texts[position]
        ids[row, : len(text.token_ids)] = torch.tensor(text.token_ids)
        scored[row, text.prompt_tokens : len(text.token_ids)] = True
    return TextBatch(tuple(positions), ids.to(device), scored.to(device))


def summed_losses(model: Any, batch: TextBatch) -> Tensor:
    """Return the sum of the cross entropy in nats over the scored tokens of every row, float32 [rows]."""
    logits = model(input_ids=batch.token_ids, use_cache=False).logits
    losses = F.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), batch.token_ids[:, 1:].flatten(), reduction="none"
    ).view(batch.token_ids.shape[0], -1)
    return (losses * batch.is_scored[:, 1:]).sum(1)
