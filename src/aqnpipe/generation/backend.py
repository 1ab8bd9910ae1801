"""Input and output of a generation backend, and how a stop text ends a response. Rollouts and evaluation share them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

STOP_TEXTS, END_TOKEN = "aqnpipe_stop_texts", "aqnpipe_end_token"
"""Keys of the extra arguments of a vLLM request: the stop texts, and the token to force behind any of them."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen: greedily if `temperature` is None, else by draws that `seed` keys.

    `log_probabilities`: completions contain the log-probability of each drawn token at this temperature; not available
    for greedy decoding. The prompts are the rows from `first_row` on of a batch of `num_rows` rows (None: they are the
    whole batch). Each row of the batch has its own draws, so a prompt gets the same draws however the batch is split
    over processes. A response also ends with the token that completes `stop_text`.
    """

    max_response_tokens: int
    temperature: float | None = None
    seed: int = 0
    first_row: int = 0
    num_rows: int | None = None
    log_probabilities: bool = False
    stop_text: str | None = None

    def __post_init__(self) -> None:
        if self.log_probabilities and self.temperature is None:
            raise ValueError("log-probabilities need sampled tokens, found temperature None; this is a bug")


@dataclass(frozen=True)
class Completion:
    """Response tokens, including the end token or the end of a stop text, and why generation ended.

    `log_probabilities`: one per token, if requested. Equality ignores them, because backends round differently.
    """

    token_ids: list[int]
    finish_reason: Literal["stop", "length"]
    log_probabilities: list[float] | None = field(default=None, compare=False)


@dataclass(frozen=True, kw_only=True)
class RoutedCompletion(Completion):
    """A completion of a mixture of experts whose routers were observed.

    `experts` [tokens, slots]: those that computed each token that was read: of the prompt, and of the response but its
    last token.
    """

    experts: Tensor = field(compare=False, repr=False)


class StopText:
    """Detects `text` in a response; decodes the response only if its last token may complete the text."""

    def __init__(self, tokenizer: Any, text: str) -> None:
        if not text:
            raise ValueError("found an empty stop text, expected at least one character; this is a bug")
        self._tokenizer, self._text = tokenizer, text
        self._may_complete: dict[int, bool] = {}

    def is_complete(self, token_ids: Sequence[int]) -> bool:
        """Return whether the last token completes the text."""
        if not token_ids:
            return False
        last = token_ids[-1]
        if last not in self._may_complete:
            self._may_complete[last] = self._text[-1] in self._tokenizer.decode([last])
        # Each token has at least one character, so tokens before the last len(text) cannot be part of the text.
        return self._may_complete[last] and self._text in self._tokenizer.decode(
            list(token_ids[-len(self._text) :]), skip_special_tokens=True
        )
