"""Audit of scoring: observes the forwards that give log-probabilities, and the gradient that reaches their logits.

The log-probabilities of some places of every row are computed again, in float64 and at the study's temperature, from
the logits of the reference, of the old policy and of the trained policy. With them the gradient of the study's loss is
known for every entry of the vocabulary (`aqnpipe.reference.grpo`). The one that autograd delivers at the logits must
equal it.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from aqnpipe.artifacts.training_facts import LOSS_GRADIENT
from aqnpipe.config.run import TrainingSpec
from aqnpipe.reference import grpo, loss_causes
from aqnpipe.reference.decoder import unobserved
from aqnpipe.seeding import derive_seed
from aqnpipe.training.audit.measure import Ledger, rounding_of

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

Row = tuple[tuple[int, ...], tuple[int, ...]]
"""Token ids of a prompt and of its completion."""


@dataclass
class Completed:
    """One completion of the current rollout, and its log-probabilities by place, as far as forwards computed them.

    `sampled` and `experts` are what the sampler noted.
    """

    row: Row
    reward: float
    centred: float
    advantage: float
    sampled: Sequence[float]
    experts: Tensor | None = None
    reference: dict[int, float] | None = None
    old: dict[int, float] | None = None
    is_trained: bool = False

    @property
    def has_advantage(self) -> bool:
        """Return whether the reward differs from the mean of its group by more than rounding."""
        return not math.isclose(self.reward, self.reward - self.centred)


@dataclass
class RolloutBook:
    """The completions of one rollout on this worker. `tokens`: of all workers together, as a mean per worker."""

    completions: list[Completed] = field(default_factory=list)
    tokens_per_worker: float = 0.0

    def __post_init__(self) -> None:
        self._by_row: dict[Row, list[Completed]] = defaultdict(list)
        for completed in self.completions:
            self._by_row[completed.row].append(completed)

    def candidates(self, row: Row) -> list[Completed]:
        """Return the completions with these tokens: several rows of a group may have the same."""
        return self._by_row.get(row, [])

    def take(self, row: Row) -> str | None:
        """Note that a row is trained on; return what is wrong with it."""
        found = self.candidates(row)
        if not found:
            return "a micro-batch has a row that is no completion of the rollout (other tokens, or another mask)"
        free = next((completed for completed in found if not completed.is_trained), None)
        if free is None:
            return "a completion was trained on twice"
        free.is_trained = True
        return None


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
        self._spec, self._ledger, self._report, self._end_token = spec, ledger, ledger.report, end_token
        self._batches: list[_MicroBatch] = []
        self._seen: list[loss_causes.Observed] = []
        self._is_wrong = False

    @property
    def _needs_all_places(self) -> bool:
        """Return whether importance weights depend on whole completions."""
        correction = self._spec.arm.importance_sampling
        return correction is not None and correction.mode.startswith("sequence")

    @property
    def _needs_old(self) -> bool:
        """Return whether the study's loss has log-probabilities of the policy before its steps on this rollout."""
        return self._spec.training.steps_per_rollout > 1 or self._spec.arm.importance_sampling is not None

    def observe(self, kwargs: Mapping[str, Any], logits: Tensor, kind: str, is_audited: bool) -> None:
        """Note a scoring forward: `kind` is reference, old or trained. Call it outside all modes."""
        self.settle()
        rows, columns = rows_of(kwargs)
        tokens, most = kwargs["input_ids"].numel(), self._spec.training.tokens_per_micro_batch
        if most is not None and tokens > most:
            self._report(f"a forward of {tokens} tokens, the study asks for at most {most} (tokens_per_micro_batch)")
        if kind == "trained":
            for row in rows:
                if (problem := self.book.take(row)) is not None:
                    self._report(problem)
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
                self._report("the loss of a micro-batch has no gradient at the logits")
                self._is_wrong = True
            else:
                self._compare(batch, batch.gradient)

    def end_step(self, step: int) -> None:
        """Report the cause if gradients of the step were wrong."""
        self.settle()
        seen, self._seen = self._seen, []
        if self._is_wrong:
            together = loss_causes.Observed.together(seen) if seen else None
            cause = loss_causes.cause_of(together, self._spec.training) if together else "it has no gradient"
            self._report(f"gradient of the loss in step {step}: {cause}")
        self._is_wrong = False

    def end_rollout(self) -> None:
        """Report completions that no micro-batch contained."""
        untrained = sum(not completed.is_trained for completed in self.book.completions)
        if untrained:
            self._report(f"{untrained} of {len(self.book.completions)} completions of a rollout were not trained on")
        self.book = RolloutBook()

    def _compare(self, batch: _MicroBatch, gradient: Tensor) -> None:
        """Compare the gradient with the study's; of several completions with the same tokens, the best one counts."""
        tried = [
            (place, completed)
            for place, (number, _) in enumerate(batch.cells)
            for completed in self.book.candidates(batch.rows[number])
        ]
        missing = [problem for _, completed in tried if (problem := self._missing(completed)) is not None]
        if missing or not tried:
            for problem in missing[:1]:
                self._is_wrong = True
                self._report(problem)
            return
        tokens = grpo.Tokens.of([self._token(batch, place, completed) for place, completed in tried])
        places = torch.tensor([place for place, _ in tried])
        along, observed = batch.directions[places], gradient[places]
        largest = along.abs().amax(-1).clamp_min(1e-30)
        allowed = self._allowed(tokens, batch, largest)
        differences = (observed - grpo.slopes(tokens, self._spec.training)[:, None] * along).abs().amax(-1)
        ratios = (differences / (allowed * largest)).nan_to_num(nan=math.inf)
        undecided = set(places[grpo.at_the_clip(tokens, self._spec.training)].tolist())
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
            self._seen.append(loss_causes.Observed(tokens.at(shown), slopes[shown], allowed[shown], misfit[shown]))

    def _missing(self, completed: Completed) -> str | None:
        if self._spec.training.kl_coefficient > 0 and completed.reference is None:
            return "the reference log-probabilities of a completion were not computed by the reference model"
        if self._needs_old and completed.old is None:
            return "the old log-probabilities of a completion were not computed by the policy"
        return None

    def _allowed(self, tokens: grpo.Tokens, batch: _MicroBatch, largest: Tensor) -> Tensor:
        """Return the error of a derivative that rounding explains; `largest`: the largest entry of its direction."""
        training = self._spec.training
        kl = grpo.kl_slopes(tokens, training).abs()
        whole = grpo.unclipped_slopes(tokens, training).abs() + training.kl_coefficient * kl
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

    def _token(self, batch: _MicroBatch, place: int, completed: Completed) -> dict[str, float]:
        """Return the fields of `grpo.Tokens` at one place."""
        response, value, column = completed.row[1], batch.values[place], batch.cells[place][1]
        correction, is_padding, weight = self._spec.arm.importance_sampling, column >= len(response), 1.0
        old: dict[int, float] = {}
        if completed.old is not None and self._needs_old and not is_padding:
            old = completed.old
        if old and correction is not None:
            known = sorted(other for other in old if other < len(response))
            sampled = [completed.sampled[other] for other in known]
            weights = grpo.importance_weights([old[other] for other in known], sampled, correction)
            weight = weights[known.index(column)]
        return {
            "row": id(completed),
            "row_tokens": max(1, len(response)),
            "padding": is_padding,
            "unfinished": bool(response) and response[-1] != self._end_token,
            "advantage": completed.advantage,
            "reward": completed.reward,
            "centred": completed.centred,
            "ratio": math.exp(min(value - old.get(column, value), 700.0)),
            "weight": weight,
            "gap": (completed.reference or {}).get(column, value) - value,
            "total": self.book.tokens_per_worker / self._spec.training.steps_per_rollout,
        }


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
    for start in range(0, len(cells), _CELLS_AT_ONCE):
        index = torch.tensor(cells[start : start + _CELLS_AT_ONCE], device=logits.device)
        tokens = ids[index[:, 0], index[:, 1]]
        normalised = (logits[index[:, 0], index[:, 1]].double() / temperature).log_softmax(-1)
        values += normalised.gather(-1, tokens[:, None])[:, 0].tolist()
        if needs_directions:
            one_hot = torch.nn.functional.one_hot(tokens, normalised.shape[-1])
            directions.append((one_hot - normalised.exp()).div(temperature).cpu())
    return values, torch.cat(directions) if directions else torch.empty(0)


def rows_of(kwargs: Mapping[str, Any]) -> tuple[list[Row], int]:
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
