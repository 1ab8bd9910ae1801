"""Generation as the stages see it: prompts in, completions out, the same for rollouts and evaluation."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. `temperature` None is greedy; otherwise `seed` keys the draws.

    `log_probabilities`: completions say how probable each drawn token was, at this temperature; greedy ones cannot.
    The prompts are rows `first_row` and on of a batch of `num_rows` (None: they are the batch). Every row has draws of
    its own in it, so that however a batch is shared out over processes, each prompt has the same seed_variance.
    A response also ends with the token that completes `stop_text`.
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
            raise ValueError("log-probabilities are of drawn tokens, found temperature None; this is a bug")


@dataclass(frozen=True)
class Completion:
    """Response tokens up to and including the end token or the end of a stop text, and why generation ended.

    `log_probabilities` of the tokens, where they were requested; not compared, as backends round differently.
    """

    token_ids: list[int]
    finish_reason: Literal["stop", "length"]
    log_probabilities: list[float] | None = field(default=None, compare=False)


class GenerationBackend(Protocol):
    """Generates with the weights (and the noise) that its model has at the time of the call."""

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Completion]:
        """Return one completion per prompt (token ids), in order."""
        ...
