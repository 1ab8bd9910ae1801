"""Input and output of a generation backend. Rollouts and evaluation share them."""

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor


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
