"""Audit of scoring: observes the forwards that give log-probabilities, and the gradient that reaches their logits.

The log-probabilities of some places of every row are computed again, in float64 and at the study's temperature, from
the logits of the reference, of the old policy and of the trained policy. With them the gradient of the study's loss is
known for every entry of the vocabulary (`aqnpipe.reference.grpo`). The one that autograd delivers at the logits must
equal it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aqnpipe.artifacts.training_facts import LOSS_GRADIENT
from aqnpipe.config.run import TrainingSpec
from aqnpipe.reference import grpo
from aqnpipe.reference.decoder import unobserved
from aqnpipe.seeding import derive_seed
from aqnpipe.training.audit.measure import Ledger, rounding_of
from aqnpipe.training.audit.rollouts import Completed, RolloutBook, Row, rows_of

_SLOPE_ERROR = 5e-6
"""Relative error of a derivative that the trainer computes in float32."""
_PROBABILITY_ERROR = 2e-5
"""Relative error of a probability that the trainer computes in float32."""
_LOG_PROBABILITY_ERROR = 2e-5
"""Absolute error of a log-probability that the trainer computes in float32."""
_CELLS_AT_ONCE = 64
"""Distributions over the vocabulary that are computed in float64 at the same time."""
_PASSED_ON = "_DDPSink"
"""Node in which data parallelism passes the outputs of the network on."""


@dataclass
class _MicroBatch:
    """A forward with gradients: its audited places (row of the batch, column), and what was computed there.

    directions: d(log-probability)/d(logits) [places, vocabulary]; gradient: what autograd delivered there.
    """

    rows: list[Row]
    cells: list[tuple[int, int]]
    values: list[float]
    directions: Tensor
    number_format: torch.dtype
    loss_scale: int
    gradient: Tensor | None = None

    def note(self, gradient: Tensor) -> None:
        """Add a gradient at the logits."""
        with unobserved():
            index = torch.tensor(self.cells, device=gradient.device)
            kept = gradient.detach()[index[:, 0], index[:, 1]].double().cpu() / self.loss_scale
        self.gradient = kept if self.gradient is None else self.gradient + kept


class ScoringAudit:
    """Observes the scoring forwards of one worker."""

    def __init__(self, spec: TrainingSpec, ledger: Ledger, end_token: int) -> None:
        self.book = RolloutBook()
        self._spec, self._ledger, self._end_token = spec, ledger, end_token
        self._batches: list[_MicroBatch] = []
        self._seen: list[grpo.Observed] = []
        self._is_wrong = False
        correction = spec.arm.importance_sampling
        # Importance weights may depend on whole completions.
        self._needs_all_places = correction is not None and correction.mode.startswith("sequence")
        # The study's loss may have log-probabilities of the policy before its steps on this rollout.
        self._needs_old = spec.training.steps_per_rollout > 1 or correction is not None

    def observe(self, kwargs: Mapping[str, Any], logits: Tensor, kind: str, is_audited: bool) -> None:
        """Note a scoring forward: `kind` is reference, old or trained. Call it outside all modes."""
        self.settle()
        rows, columns = rows_of(kwargs)
        tokens, most = kwargs["input_ids"].numel(), self._spec.training.tokens_per_micro_batch
        if most is not None and tokens > most:
            asked = f"the study asks for at most {most} (tokens_per_micro_batch)"
            self._ledger.report(f"a forward of {tokens} tokens, {asked}")
        for row in rows if kind == "trained" else ():
            if (problem := self.book.take(row)) is not None:
                self._ledger.report(problem)
            self._ledger.had_advantage |= any(completed.has_advantage for completed in self.book.candidates(row))
        whole = kind == "old" and self._needs_all_places
        cells = [
            (number, column)
            for number, row in enumerate(rows)
            for column in (range(len(row[1])) if whole else audited_places(row, columns, self._spec.random_seed))
        ]
        if not is_audited or not cells:
            return
        ids, temperature = kwargs["input_ids"][:, -columns:], self._spec.training.temperature
        values, directions = _log_probabilities(logits.detach(), ids, cells, temperature, kind == "trained")
        if kind != "trained":
            self._keep(rows, cells, values, kind)
            return
        batch = _MicroBatch(rows, cells, values, directions, logits.dtype, self._spec.loss_scale)
        self._batches.append(batch)
        if logits.requires_grad:
            logits.register_hook(batch.note)

    def _keep(self, rows: Sequence[Row], cells: Sequence[tuple[int, int]], values: Sequence[float], kind: str) -> None:
        by_row: list[dict[int, float]] = [{} for _ in rows]
        for (number, column), value in zip(cells, values, strict=True):
            by_row[number][column] = value
        for row, found in zip(rows, by_row, strict=True):
            free = [completed for completed in self.book.candidates(row) if getattr(completed, kind) is None]
            if free:
                setattr(free[0], kind, found)

    def settle(self) -> None:
        """Compare the gradients of the micro-batches whose backward pass is over."""
        batches, self._batches = self._batches, []
        for batch in batches:
            if batch.gradient is None:
                self._refuse("the loss of a micro-batch has no gradient at the logits")
            else:
                self._compare(batch, batch.gradient)

    def _refuse(self, problem: str) -> None:
        self._is_wrong = True
        self._ledger.report(problem)

    def end_step(self, step: int) -> None:
        """Report the cause if gradients of the step were wrong."""
        self.settle()
        seen, self._seen = self._seen, []
        if self._is_wrong:
            cause = grpo.cause_of(grpo.Observed.together(seen), self._spec.training) if seen else "it has no gradient"
            self._ledger.report(f"gradient of the loss in step {step}: {cause}")
        self._is_wrong = False

    def end_rollout(self) -> None:
        """Report completions that no micro-batch contained."""
        untrained = sum(not completed.is_trained for completed in self.book.completions)
        if untrained:
            of_all = f"{untrained} of {len(self.book.completions)}"
            self._ledger.report(f"{of_all} completions of a rollout were not trained on")
        self.book = RolloutBook()

    def _compare(self, batch: _MicroBatch, gradient: Tensor) -> None:
        """Compare the gradient with the study's; of several completions with the same tokens, the best one counts."""
        tried = [
            (place, completed)
            for place, (number, _) in enumerate(batch.cells)
            for completed in self.book.candidates(batch.rows[number])
        ]
        missing = next(filter(None, (self._missing(completed) for _, completed in tried)), None)
        if missing is not None:
            return self._refuse(missing)
        if not tried:
            return None
        fields = [self._token(batch, place, completed) for place, completed in tried]
        tokens, training = grpo.Tokens(*torch.tensor(fields, dtype=torch.float64).T), self._spec.training
        places = torch.tensor([place for place, _ in tried])
        along, observed = batch.directions[places], gradient[places]
        largest = along.abs().amax(-1).clamp_min(1e-30)
        allowed = self._allowed(tokens, batch, largest)
        differences = (observed - grpo.slopes(tokens, training)[:, None] * along).abs().amax(-1)
        ratios = (differences / (allowed * largest)).nan_to_num(nan=math.inf)
        undecided = set(places[grpo.at_the_clip(tokens, training)].tolist())
        best: dict[int, int] = {}
        for number, place in enumerate(places.tolist()):
            if place not in undecided and (place not in best or ratios[number] < ratios[best[place]]):
                best[place] = number
        chosen = list(best.values())
        self._is_wrong |= not self._ledger.compare(LOSS_GRADIENT, ratios[chosen], 1.0)
        # Along a very short direction the derivative is rounding error.
        shown = [number for number in chosen if float(along[number].square().sum()) > 1e-4]
        if shown:
            slopes = (observed * along).sum(-1) / along.square().sum(-1)
            rest = (observed - slopes[:, None] * along).norm(dim=-1)
            misfit = rest / observed.norm(dim=-1).clamp_min(1e-300)
            self._seen.append(grpo.Observed(tokens.at(shown), slopes[shown], allowed[shown], misfit[shown]))
        return None

    def _missing(self, completed: Completed) -> str | None:
        if self._spec.training.kl_coefficient > 0 and completed.reference is None:
            return "the reference log-probabilities of a completion were not computed by the reference model"
        if self._needs_old and completed.old is None:
            return "the old log-probabilities of a completion were not computed by the policy"
        return None

    def _allowed(self, tokens: grpo.Tokens, batch: _MicroBatch, largest: Tensor) -> Tensor:
        """Return the error of a derivative that rounding explains; `largest`: the largest entry of its direction."""
        training = self._spec.training
        kl = grpo.parts(tokens, training)[1].abs()
        whole = grpo.unclipped(tokens, training).abs() + training.kl_coefficient * kl
        of_kl = training.kl_coefficient * (kl + 1 / tokens.total)
        # Where a token is nearly certain, all entries of its direction are differences of numbers near 1 or near 0.
        error = _SLOPE_ERROR + _PROBABILITY_ERROR / (training.temperature * largest)
        rounding, limits = rounding_of(batch.number_format), torch.finfo(batch.number_format)
        error += rounding if rounding > 1e-6 else 0.0
        if self._needs_all_places:
            # The ratio of a completion sums the rounding errors of all its tokens.
            error += 2e-6 * tokens.row_tokens
        # Below the smallest normal number the spacing of a format no longer falls.
        least = limits.tiny * limits.eps / batch.loss_scale / largest
        return error * whole + _LOG_PROBABILITY_ERROR * of_kl + 1e-12 / tokens.total + least

    def _token(self, batch: _MicroBatch, place: int, completed: Completed) -> tuple[float, ...]:
        """Return the fields of `grpo.Tokens` at one place, in their order."""
        response, value, column = completed.row[1], batch.values[place], batch.cells[place][1]
        correction, is_padding, weight = self._spec.arm.importance_sampling, column >= len(response), 1.0
        old = (completed.old or {}) if self._needs_old and not is_padding else {}
        if old and correction is not None:
            known = sorted(other for other in old if other < len(response))
            sampled = [completed.sampled[other] for other in known]
            weights = grpo.importance_weights([old[other] for other in known], sampled, correction)
            weight = weights[known.index(column)]
        return (
            id(completed),
            max(1, len(response)),
            is_padding,
            bool(response) and response[-1] != self._end_token,
            completed.advantage,
            completed.reward,
            completed.centred,
            math.exp(min(value - old.get(column, value), 700.0)),
            weight,
            (completed.reference or {}).get(column, value) - value,
            self.book.tokens_per_worker / self._spec.training.steps_per_rollout,
        )


def audited_places(row: Row, width: int, seed: int) -> list[int]:
    """Return the places of a completion, in a batch of `width` places, that are audited: some tokens and a padding."""
    length = len(row[1])
    keyed = derive_seed(seed, "audited places", *row[1][:16], length)
    places = {length - 1, *((keyed >> 9 * number) % length for number in range(4))} if length else set()
    return sorted(places | ({length + keyed % (width - length)} if length < width else set()))


def reaches_around(loss: Tensor, logits: Tensor) -> bool:
    """Return whether autograd gets from `loss` to a weight on a path that `logits` are not on.

    A term such as a penalty of the weights, or of the hidden states, has no gradient at the logits.
    """
    seen: set[Any] = {logits.grad_fn, None}
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or _PASSED_ON in node.name():
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            return True
        waiting += [following for following, _ in node.next_functions]
    return False


def _log_probabilities(
    logits: Tensor, ids: Tensor, cells: Sequence[tuple[int, int]], temperature: float, needs_directions: bool
) -> tuple[list[float], Tensor]:
    """Return the log-probability of the token at every cell, and its derivative by the logits; in float64."""
    values: list[float] = []
    directions: list[Tensor] = []
    for index in torch.tensor(cells, device=logits.device).split(_CELLS_AT_ONCE):
        tokens = ids[index[:, 0], index[:, 1]]
        normalised = (logits[index[:, 0], index[:, 1]].double() / temperature).log_softmax(-1)
        values += normalised.gather(-1, tokens[:, None])[:, 0].tolist()
        if needs_directions:
            one_hot = torch.nn.functional.one_hot(tokens, normalised.shape[-1])
            directions.append((one_hot - normalised.exp()).div(temperature).cpu())
    return values, torch.cat(directions) if directions else torch.empty(0)
