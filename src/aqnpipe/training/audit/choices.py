"""Audit of decoding: the tokens of a batch are those that the study's temperature and seed choose from the logits.

The logits are observed at the network, under the noise of the phase. The draws are made again: row r of the batch of
all workers takes, for its n-th token, the r-th row of the n-th matrix of exponential variates of the keyed generator.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aqnpipe.seeding import derive_seed
from aqnpipe.training.audit.measure import Errors

_WATCHED = 12
"""Tokens of each response, from the first on, whose choice is always audited; more while their logits fit."""
_PLACES = 16
"""Rows of a forward whose logits are kept, if those of all rows are too large."""
_SMALL = 2**22
"""Bytes of the logits of a forward that are kept for all rows."""
_MEMORY = 2**27
"""Bytes of kept logits from which on no more tokens are watched."""
_ALLOWED_GAP = 2e-5
"""Logarithmic distance of a chosen token to the best one that rounding in float32 explains."""
_NOTED_ERROR = 2e-4
"""Absolute error of a log-probability that the sampler computes in float32."""

Draws = dict[tuple[int, int], Tensor]


@dataclass(frozen=True)
class Decoding:
    """A request to decode `prompts`: the rows from `first_row` on of a batch of `num_rows`; greedy without draws."""

    prompts: Sequence[Sequence[int]]
    temperature: float | None
    seed: int
    first_row: int
    num_rows: int


@dataclass(frozen=True)
class _Observed:
    """One forward: the tokens that it read by place, and the logits of some places."""

    tokens: list[int]
    logits: dict[int, Tensor]


class ChoiceAudit:
    """Observes the forwards of one batch, and compares the responses with the tokens that had to be chosen."""

    def __init__(self, decoding: Decoding) -> None:
        self._decoding = decoding
        prompts = decoding.prompts
        self._order = sorted(range(len(prompts)), key=lambda row: (len(prompts[row]), row))
        self._first: dict[int, Tensor] = {}
        self._read = 0
        self._steps: list[_Observed] = []
        self._wrong_prompts = 0
        self._kept = 0

    def observe(self, kwargs: Mapping[str, Any], logits: Tensor) -> None:
        """Note a forward of the network with a cache; `logits` have the shape [rows, places, vocabulary]."""
        ids = kwargs["input_ids"]
        if self._read < len(self._order):
            self._observe_prompts(ids, kwargs.get("logits_to_keep"), logits)
        elif len(self._steps) < _WATCHED or self._kept < _MEMORY:
            places = self._places(logits[:, -1], 1 + len(self._steps))
            self._steps.append(_Observed(ids[:, -1].tolist(), {place: logits[place, -1].clone() for place in places}))

    def _observe_prompts(self, ids: Tensor, kept: Any, logits: Tensor) -> None:
        rows = self._order[self._read : self._read + len(ids)]
        ends = kept.tolist() if isinstance(kept, Tensor) else None
        for place, row in enumerate(rows):
            prompt = list(self._decoding.prompts[row])
            tokens = ids[place].tolist()
            read = tokens[: len(prompt)] if ends is not None else tokens[-len(prompt) :]
            self._wrong_prompts += read != prompt
        for place in self._places(logits[:, -1], 0):
            end = len(self._decoding.prompts[rows[place]]) - 1
            self._first[rows[place]] = logits[place, -1 if ends is None else ends.index(end)].clone()
        self._read += len(rows)

    def _places(self, logits: Tensor, step: int) -> list[int]:
        """Return the rows of a forward that are kept; `logits` have the shape [rows, vocabulary]."""
        rows, of_row = len(logits), logits[0].numel() * logits.element_size()
        ranked = sorted(range(rows), key=lambda place: derive_seed(self._decoding.seed, "audited rows", step, place))
        places = sorted(ranked if rows * of_row <= _SMALL else ranked[:_PLACES])
        self._kept += len(places) * of_row
        return places

    def finish(
        self, name: str, responses: Sequence[Sequence[int]], errors: Errors, report: Callable[[str], None]
    ) -> None:
        """Compare the responses, row by row, with what the observed logits and the study's draws choose."""
        if not self._first:
            return
        if self._wrong_prompts:
            report(f"{name}: the network read {self._wrong_prompts} prompts that were not requested")
        chosen = self._chosen(name, responses, report)
        draws = self._draws(chosen)
        gaps = [self._gap(logits, row, step, token, draws) for row, step, token, logits in chosen]
        if errors.add(name, torch.tensor(gaps, dtype=torch.float64), _ALLOWED_GAP):
            return
        wrong = sum(gap > _ALLOWED_GAP for gap in gaps)
        report(f"{name}: {wrong} of {len(gaps)} are not those of the study's draws{self._cause(chosen, draws)}")

    def _chosen(
        self, name: str, responses: Sequence[Sequence[int]], report: Callable[[str], None]
    ) -> list[tuple[int, int, int, Tensor]]:
        """Return (row, number of the token, token, logits) for every kept place.

        When rows end, the last rows take their places.
        """
        chosen = [(row, 0, responses[row][0], logits) for row, logits in self._first.items()]
        rows = list(self._order)
        for step, observed in enumerate(self._steps, start=1):
            rows = _without_gaps(rows, [len(responses[row]) > step for row in rows])
            if [responses[row][step - 1] for row in rows] != observed.tokens:
                report(f"{name}: the network read other tokens after step {step} than those in the responses")
                return chosen
            chosen += [
                (rows[place], step, responses[rows[place]][step], kept) for place, kept in observed.logits.items()
            ]
        return chosen

    def check_noted(
        self,
        name: str,
        noted: Sequence[Sequence[float]],
        responses: Sequence[Sequence[int]],
        report: Callable[[str], None],
    ) -> None:
        """Compare the log-probabilities that the sampler noted with those of the observed logits."""
        temperature = self._decoding.temperature or 1.0
        for row, number, token, logits in self._chosen(name, responses, lambda problem: None):
            if not noted[row] or not logits.isfinite().all():
                continue
            expected = float((logits.double() / temperature).log_softmax(-1)[token])
            if abs(noted[row][number] - expected) > _NOTED_ERROR:
                report(
                    f"{name}: the sampler noted a log-probability of {noted[row][number]:.6g}, the network's logits "
                    f"give {expected:.6g}: it drew from other (rounded?) logits"
                )
                return

    def _draws(self, chosen: Sequence[tuple[int, int, int, Tensor]]) -> Draws:
        """Return the exponential variates of every chosen token, by its row and number; none for greedy decoding."""
        decoding = self._decoding
        if decoding.temperature is None:
            return {}
        sample = chosen[0][3]
        generator = torch.Generator(device=sample.device).manual_seed(decoding.seed)
        draws: Draws = {}
        for step in range(1 + max(number for _, number, _, _ in chosen)):
            whole = torch.empty((decoding.num_rows, sample.shape[-1]), device=sample.device)
            whole.exponential_(generator=generator)
            rows = [row for row, number, _, _ in chosen if number == step]
            kept = whole[[decoding.first_row + row for row in rows]]
            draws.update(((row, step), values) for row, values in zip(rows, kept, strict=True))
        return draws

    def _scores(self, logits: Tensor, row: int, step: int, draws: Draws, temperature: float) -> Tensor:
        # argmax p/e is argmax (log p - log e), and the normaliser of p does not matter.
        return logits.double() / temperature - draws[row, step].double().log()

    def _gap(self, logits: Tensor, row: int, step: int, token: int, draws: Draws) -> float:
        temperature = self._decoding.temperature
        if not logits.isfinite().all():
            return 0.0  # The guard of the run ends it at the loss.
        scores = logits.double() if temperature is None else self._scores(logits, row, step, draws, temperature)
        return float(scores.max() - scores[token])

    def _cause(self, chosen: Sequence[tuple[int, int, int, Tensor]], draws: Draws) -> str:
        """Return the setting that explains the tokens, if there is one."""
        if all(float(logits.max() - logits[token]) == 0 for _, _, token, logits in chosen):
            return ": they are the most probable tokens (greedy)"
        if not draws:
            return ": they are not the most probable tokens"
        temperature = self._decoding.temperature or 1.0
        fitting = [value / 20 for value in range(2, 61) if self._explains(chosen, draws, value / 20, None)]
        if fitting:
            return f": temperature {fitting[len(fitting) // 2]:g}, the study asks for {temperature:g}"
        ranks = [int((logits > logits[token]).sum()) + 1 for _, _, token, logits in chosen]
        if self._explains(chosen, draws, temperature, max(ranks)):
            return f": only the {max(ranks)} most probable tokens can be drawn (top-k or top-p)"
        return ": another seed, or a distribution that was changed (top-p, a penalty)"

    def _explains(
        self,
        chosen: Sequence[tuple[int, int, int, Tensor]],
        draws: Draws,
        temperature: float,
        top: int | None,
    ) -> bool:
        """Return whether all tokens are drawn at this temperature, among the `top` most probable ones (None: all)."""
        for row, step, token, logits in chosen:
            scores = self._scores(logits, row, step, draws, temperature)
            if top is not None:
                scores = scores.masked_fill(logits < logits.topk(min(top, len(logits))).values[-1], -math.inf)
            if float(scores.max() - scores[token]) > _ALLOWED_GAP:
                return False
        return True


def _without_gaps(rows: Sequence[int], stay: Sequence[bool]) -> list[int]:
    """Return the rows that stay; the last ones take the places of those that leave."""
    count = sum(stay)
    last = [row for row, stays in zip(rows[count:], stay[count:], strict=True) if stays]
    return [row if stays else last.pop() for row, stays in zip(rows[:count], stay[:count], strict=True)]
