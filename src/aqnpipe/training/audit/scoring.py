"""Audit of scoring: observes the forwards that give log-probabilities, and the gradient that reaches their logits.

The log-probabilities of some places of every row are computed again, in float64 and at the study's temperature, from
the logits of the reference, of the old policy and of the trained policy. With them the gradient of the study's loss is
known for every entry of the vocabulary (`loss`), and the gradient that autograd delivers at the logits must equal it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from aqnpipe.artifacts.training_facts import LOSS_GRADIENT
from aqnpipe.config.run import TrainingSpec
from aqnpipe.training.audit.book import Completed, RolloutBook, Row, audited_places
from aqnpipe.training.audit.loss import (
    Token,
    cause_of,
    importance_weights,
    is_at_the_clip,
    kl_slope,
    policy_slope,
    slope,
)
from aqnpipe.training.audit.measure import Errors, rounding_of, unobserved

_SLOPE_ERROR = 5e-6
"""Relative error of a slope that the trainer computes in float32."""
_PROBABILITY_ERROR = 2e-5
"""Relative error of a probability that the trainer computes in float32."""
_LOG_PROBABILITY_ERROR = 2e-5
"""Absolute error of a log-probability that the trainer computes in float32."""
_CELLS_AT_ONCE = 64
"""Distributions over the vocabulary that are computed in float64 at the same time."""


@dataclass
class _Place:
    """One audited place of a micro-batch; `direction` is d(log-probability)/d(logits) [vocabulary]."""

    row: Row
    place: int
    log_probability: float
    direction: Tensor
    gradient: Tensor | None = None


@dataclass
class _MicroBatch:
    """A forward with gradients: its audited places, as (row of the batch, column) and what they are."""

    cells: list[tuple[int, int]]
    places: list[_Place]
    rounding: float
    has_gradient: bool = False


class ScoringAudit:
    """Observes the scoring forwards of one worker."""

    def __init__(self, spec: TrainingSpec, errors: Errors, report: Callable[[str], None], end_tokens: set[int]) -> None:
        self.book = RolloutBook()
        self._spec = spec
        self._errors = errors
        self._report = report
        self._end_tokens = end_tokens
        self._batches: list[_MicroBatch] = []
        self._tokens: list[Token] = []
        self._is_wrong = False

    @property
    def _needs_all_places(self) -> bool:
        """Return whether importance weights depend on whole completions."""
        correction = self._spec.arm.importance_sampling
        return correction is not None and correction.mode.startswith("sequence")

    @property
    def needs_old(self) -> bool:
        """Return whether the study's loss has log-probabilities of the policy before its steps on this rollout."""
        return self._spec.training.steps_per_rollout > 1 or self._spec.arm.importance_sampling is not None

    def begin_rollout(self, book: RolloutBook) -> None:
        """Expect the micro-batches of another rollout."""
        self.book = book

    def observe(self, kwargs: Mapping[str, Any], logits: Tensor, kind: str, is_audited: bool) -> None:
        """Note a scoring forward: `kind` is reference, old or trained. Call it outside all modes."""
        self.settle()
        rows, columns = _rows_of(kwargs)
        tokens, most = kwargs["input_ids"].numel(), self._spec.training.tokens_per_micro_batch
        if most is not None and tokens > most:
            self._report(f"a forward of {tokens} tokens, the study asks for at most {most} (tokens_per_micro_batch)")
        if kind == "trained":
            for row in rows:
                if (problem := self.book.take(row)) is not None:
                    self._report(problem)
        if not is_audited:
            return
        places = [self._places_of(row, columns, kind) for row in rows]
        cells = [(number, column) for number, found in enumerate(places) for column in found]
        if not cells:
            return
        ids, temperature = kwargs["input_ids"][:, -columns:], self._spec.training.temperature
        values, directions = _log_probabilities(logits.detach(), ids, cells, temperature, kind == "trained")
        if kind != "trained":
            self._keep(rows, cells, values, kind)
            return
        found = [
            _Place(rows[number], column, value, along)
            for (number, column), value, along in zip(cells, values, directions, strict=True)
        ]
        batch = _MicroBatch(cells, found, rounding_of(logits.dtype))
        self._batches.append(batch)
        if logits.requires_grad:
            logits.register_hook(lambda gradient: _note_gradient(batch, gradient))

    def _places_of(self, row: Row, columns: int, kind: str) -> Sequence[int]:
        if kind == "old" and self._needs_all_places:
            return range(len(row[1]))
        return audited_places(row, columns, self._spec.random_seed)

    def _keep(self, rows: Sequence[Row], cells: Sequence[tuple[int, int]], values: Sequence[float], kind: str) -> None:
        by_row: list[dict[int, float]] = [{} for _ in rows]
        for (number, column), value in zip(cells, values, strict=True):
            by_row[number][column] = value
        for row, found in zip(rows, by_row, strict=True):
            free = [c for c in self.book.candidates(row) if getattr(c, kind) is None]
            if free:
                setattr(free[0], kind, found)

    def settle(self) -> None:
        """Compare the gradients of the micro-batches whose backward pass is over."""
        batches, self._batches = self._batches, []
        for batch in batches:
            if not batch.has_gradient:
                self._report("the loss of a micro-batch has no gradient at the logits")
                self._is_wrong = True
                continue
            for place in batch.places:
                self._compare(place, batch.rounding)

    def end_step(self, step: int) -> None:
        """Report the cause if gradients of the step were wrong."""
        self.settle()
        tokens, self._tokens = self._tokens, []
        if self._is_wrong:
            cause = cause_of(tokens, self._spec) if tokens else "it is not that of the study's loss"
            self._report(f"gradient of the loss in step {step}: {cause}")
        self._is_wrong = False

    def end_rollout(self) -> None:
        """Report completions that no micro-batch contained."""
        if self.book.num_untrained:
            self._report(
                f"{self.book.num_untrained} of {len(self.book.completions)} completions of a rollout were not "
                "trained on"
            )
        self.book = RolloutBook()

    def _compare(self, place: _Place, rounding: float) -> None:
        candidates = self.book.candidates(place.row)
        if not candidates or place.gradient is None:
            return
        observed = place.gradient.double()
        length = float(place.direction.square().sum())
        found = float((observed * place.direction).sum()) / length if length > 1e-12 else 0.0
        misfit = float((observed - found * place.direction).norm()) / max(float(observed.norm()), 1e-300)
        missing = [self._missing(candidate) for candidate in candidates]
        if all(missing):
            self._is_wrong = True
            self._report(missing[0] or "")
            return
        tokens = [self._token(place, candidate) for candidate in candidates if not self._missing(candidate)]
        best: tuple[float, Token] | None = None
        for token in tokens:
            if is_at_the_clip(token, self._spec.training):
                return
            largest = max(float(place.direction.abs().max()), 1e-30)
            allowed = self._allowed(token, rounding, largest)
            difference = (observed - slope(token, self._spec) * place.direction).abs().max()
            ratio = float(difference) / (allowed * largest)
            if best is None or ratio < best[0]:
                best = (ratio, replace(token, slope=found, allowed=allowed, misfit=misfit))
        if best is None:
            return
        ratio, token = best
        self._errors.note(LOSS_GRADIENT, 1, min(ratio, 1e9) if not math.isnan(ratio) else 1e9)
        # Along a very short direction the slope is rounding error.
        if length > 1e-4:
            self._tokens.append(token)
        if not ratio <= 1:
            self._is_wrong = True

    def _missing(self, completed: Completed) -> str | None:
        if self._spec.training.kl_coefficient > 0 and completed.reference is None:
            return "the reference log-probabilities of a completion were not computed by the reference model"
        if self.needs_old and completed.old is None:
            return "the old log-probabilities of a completion were not computed by the policy"
        return None

    def _allowed(self, token: Token, rounding: float, largest: float) -> float:
        """Return the error of a slope that rounding explains; `largest`: the largest entry of its direction."""
        training = self._spec.training
        whole = abs(policy_slope(token, None)) + abs(training.kl_coefficient * kl_slope(token))
        of_kl = training.kl_coefficient * (abs(kl_slope(token)) + 1 / token.step_tokens)
        # Where a token is nearly certain, all entries of its direction are differences of numbers near 1 or near 0.
        error = _SLOPE_ERROR + _PROBABILITY_ERROR / (training.temperature * largest)
        error += rounding if rounding > 1e-6 else 0.0
        if self._needs_all_places:
            # The ratio of a completion sums the rounding errors of all its tokens.
            error += 2e-6 * token.row_tokens
        return error * whole + _LOG_PROBABILITY_ERROR * of_kl + 1e-12 / token.step_tokens

    def _token(self, place: _Place, completed: Completed) -> Token:
        row, correction = place.row[1], self._spec.arm.importance_sampling
        is_padding = place.place >= len(row)
        old, weight = place.log_probability, 1.0
        if self.needs_old and completed.old is not None and not is_padding:
            old = completed.old[place.place]
            if correction is not None:
                known = sorted(place_ for place_ in completed.old if place_ < len(row))
                sampled = [completed.sampled[place_] for place_ in known]
                weights = importance_weights([completed.old[place_] for place_ in known], sampled, correction)
                weight = weights[known.index(place.place)]
        gap = None
        if completed.reference is not None and place.place in completed.reference:
            gap = completed.reference[place.place] - place.log_probability
        return Token(
            row=id(completed),
            row_tokens=max(1, len(row)),
            is_padding=is_padding,
            is_unfinished=bool(row) and row[-1] not in self._end_tokens,
            advantage=completed.advantage,
            reward=completed.reward,
            centred_reward=completed.centred_reward,
            ratio=math.exp(min(place.log_probability - old, 700.0)),
            weight=weight,
            reference_gap=gap,
            step_tokens=self.book.tokens_per_worker / self._spec.training.steps_per_rollout,
        )


def _log_probabilities(
    logits: Tensor, ids: Tensor, cells: Sequence[tuple[int, int]], temperature: float, needs_directions: bool
) -> tuple[list[float], list[Tensor]]:
    """Return the log-probability of the token at every cell, and its derivative by the logits; in float64."""
    values: list[float] = []
    directions: list[Tensor] = []
    for start in range(0, len(cells), _CELLS_AT_ONCE):
        index = torch.tensor(cells[start : start + _CELLS_AT_ONCE], device=logits.device)
        tokens = ids[index[:, 0], index[:, 1]]
        normalised = (logits[index[:, 0], index[:, 1]].double() / temperature).log_softmax(-1)
        values += normalised.gather(-1, tokens[:, None])[:, 0].tolist()
        if needs_directions:
            one_hot = torch.nn.functional.one_hot(tokens, normalised.shape[-1])
            directions += list((one_hot - normalised.exp()).div(temperature).cpu())
    return values, directions


def _note_gradient(batch: _MicroBatch, gradient: Tensor) -> None:
    with unobserved():
        index = torch.tensor(batch.cells, device=gradient.device)
        kept = gradient.detach()[index[:, 0], index[:, 1]].cpu()
    for place, value in zip(batch.places, kept, strict=True):
        place.gradient = value if place.gradient is None else place.gradient + value
    batch.has_gradient = True


def _rows_of(kwargs: Mapping[str, Any]) -> tuple[list[Row], int]:
    """Return the rows that a scoring forward read, without padding, and its number of completion places."""
    ids, mask = kwargs["input_ids"].tolist(), kwargs["attention_mask"].tolist()
    columns = int(kwargs["logits_to_keep"]) - 1
    rows = []
    for tokens, visible in zip(ids, mask, strict=True):
        seen = [token if shown else None for token, shown in zip(tokens, visible, strict=True)]
        prompt = tuple(token for token in seen[:-columns] if token is not None)
        completion = tuple(token for token in seen[-columns:] if token is not None)
        rows.append((prompt, completion))
    return rows, columns
