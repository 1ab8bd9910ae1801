"""Chooses the tokens of a batch again, from the logits of the model's own forward passes."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from aqnpipe.evaluation.audit.facts import Choice

_DRAWN_STEPS = 8
"""Draws are made again for the first tokens of a batch: other draws, or another temperature, show in these."""
_DRAW_TOLERANCE = 1e-3
"""Two tokens whose perturbed log-probabilities are this close may be exchanged by rounding."""


class Choices:
    """The logits of each place, and whether the tokens read next are those that the study's choice makes of them."""

    def __init__(self, choice: Choice, num_rows: int, *, draws: bool) -> None:
        self._choice, self._num_rows, self._draws_checked = choice, num_rows, draws
        self._generator: torch.Generator | None = None
        self._started: list[Tensor] = []
        self._logits: Tensor | None = None
        self._perturbation: Tensor | None = None
        self._rows: list[int] = []
        self._steps: list[tuple[list[int], Tensor, Tensor, Tensor]] = []
        self._moves: set[int] = set()
        self._last: list[tuple[list[int], Tensor, Tensor]] = []

    def start(self, logits: Tensor) -> None:
        """Note the logits [vocabulary] behind one more prompt."""
        self._started.append(logits.detach())

    def forget(self) -> None:
        """Forget the logits behind a common prefix."""
        self._started.clear()

    def begin(self, rows: Sequence[int]) -> None:
        """All prompts were read; `rows` are their numbers in the batch."""
        self._rows = list(rows)
        if self._started:
            self._set(torch.stack(self._started))

    def move(self, places: Sequence[int]) -> None:
        """Rows changed places, from `places` to 0, 1, ...; rows that are not named have ended."""
        if list(places) == list(range(len(self._rows))) or self._logits is None:
            return
        self._end(sorted(set(range(len(self._rows))).difference(places)))
        self._moves.add(len(self._steps) + 1)
        index = torch.tensor(list(places), device=self._logits.device)
        self._rows = [self._rows[place] for place in places]
        self._logits = self._logits[index]

    def chosen(self) -> list[int] | None:
        """Return the token that each place's logits choose; None if only the draws of the generator know it."""
        is_known = self._choice.temperature is None or self._perturbation is not None
        if self._logits is None or not is_known:
            return None
        tokens: list[int] = self._scores(self._logits, self._rows).argmax(-1).tolist()
        return tokens

    def check(self, tokens: Tensor, logits: Tensor) -> None:
        """Compare the tokens [rows] that a step read with the choice; `logits` [rows, vocabulary] are behind them."""
        if self._logits is not None:
            chosen = self._logits.gather(-1, tokens[:, None])[:, 0]
            is_top = chosen == self._logits.amax(-1)
            self._steps.append((self._rows, chosen, is_top, self._is_wrong(tokens, is_top)))
        self._set(logits.detach())

    def finish(self) -> dict[int, int]:
        """Return the token that each row's last logits choose; none for rows whose draws are not checked."""
        if self._logits is not None:
            self._end(list(range(len(self._rows))))
            self._logits = None
        return {row: token for rows, tokens, _ in self._last for row, token in zip(rows, tokens.tolist(), strict=True)}

    def problems(self) -> Iterator[tuple[int, str]]:
        """Yield the rows with a token that is not the study's choice, and what is wrong with the first such token."""
        found = dict(self._wrong())
        if found and self._moves.issuperset(found.values()):
            # Between these steps every choice was right.
            text = "token {} was read with the cached keys of another row, when rows had left the batch"
            yield from ((row, text.format(step)) for row, step in found.items())
        else:
            yield from ((row, self._describe(step)) for row, step in found.items())

    def _wrong(self) -> Iterator[tuple[int, int]]:
        """Yield the row and the number (from 1) of the first token of each row that is not the study's choice."""
        found: dict[int, int] = {}
        for step, (rows, _, _, is_wrong) in enumerate(self._steps, start=1):
            for row, wrong in zip(rows, is_wrong.tolist(), strict=True):
                if wrong:
                    found.setdefault(row, step)
        yield from sorted(found.items())

    def _describe(self, step: int) -> str:
        if self._choice.temperature is None:
            return f"token {step} is not the most probable one; the study decodes greedily"
        tokens, most_probable = self.counts()
        how = "decoded greedily" if tokens == most_probable else f"token {step} is another draw"
        return f"{how}; the study samples at temperature {self._choice.temperature:g} with draws keyed by this batch"

    def counts(self) -> tuple[int, int]:
        """Return the number of tokens that were read, and how many of them were the most probable ones."""
        tops = [is_top for _, _, is_top, _ in self._steps]
        return sum(map(len, tops)), int(torch.cat(tops).sum()) if tops else 0

    def values(self) -> dict[int, list[float]]:
        """Return the logits of the chosen tokens of each row, in order, as far as the tokens are known."""
        found: dict[int, list[float]] = {}
        last = [(rows, values) for rows, _, values in self._last]
        for rows, values in [*((rows, chosen) for rows, chosen, _, _ in self._steps), *last]:
            for row, value in zip(rows, values.float().tolist(), strict=True):
                found.setdefault(row, []).append(value)
        return found

    def _set(self, logits: Tensor) -> None:
        """Note the logits of the active rows, and make the draws that choose from them."""
        self._logits = logits
        self._perturbation = None
        if self._choice.temperature is None or not self._draws_checked or len(self._steps) >= _DRAWN_STEPS:
            return
        if self._generator is None:
            self._generator = torch.Generator(device=logits.device).manual_seed(self._choice.seed)
        draws = torch.empty(self._num_rows, logits.shape[-1], device=logits.device)
        self._perturbation = draws.exponential_(generator=self._generator).log_()

    def _scores(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        """Return what the choice maximises: logits, or log-probabilities at the temperature minus log of the draws."""
        if self._choice.temperature is None or self._perturbation is None:
            return logits
        index = torch.tensor(list(rows), device=logits.device)
        return torch.log_softmax(logits.float() / self._choice.temperature, -1) - self._perturbation[index]

    def _is_wrong(self, tokens: Tensor, is_top: Tensor) -> Tensor:
        if self._choice.temperature is None:
            return ~is_top
        if self._logits is None or self._perturbation is None:
            return torch.zeros_like(is_top)
        scores = self._scores(self._logits, self._rows)
        best, chosen = scores.amax(-1), scores.gather(-1, tokens[:, None])[:, 0]
        rounding = 8 * torch.finfo(torch.float32).eps * self._logits.float().abs().amax(-1) / self._choice.temperature
        return best - chosen > _DRAW_TOLERANCE + rounding

    def _end(self, places: Sequence[int]) -> None:
        """Note the last choice of the rows at `places`, if it is known."""
        is_known = self._choice.temperature is None or self._perturbation is not None
        if not places or self._logits is None or not is_known:
            return
        logits = self._logits[torch.tensor(list(places), device=self._logits.device)]
        rows = [self._rows[place] for place in places]
        tokens = self._scores(logits, rows).argmax(-1)
        self._last.append((rows, tokens, logits.gather(-1, tokens[:, None])[:, 0]))
