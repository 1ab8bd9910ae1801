"""Collects measurements while phases run, and makes a receipt of them: of one worker, or of all of them together.

The rows of all workers are added up, so the merged figures equal those of a single recorder of all workers. Some values
must be equal on all workers: the synchronised policy, AQN's sigma, and the number of passes. A worker without part of
its noise is refused.
"""

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from pydantic import BaseModel, TypeAdapter
from torch import Tensor, nn

from aqnpipe.config.noise import NoiseSpec, Phase
from aqnpipe.errors import ReceiptError
from aqnpipe.models.layout import is_rms_norm, layer_of, norms_sha256, weight_of
from aqnpipe.models.sharding import matrices_sha256
from aqnpipe.noise.receipts.receipt import Receipt, RecorderState
from aqnpipe.noise.receipts.table import REQUEST, SYNC, Row, Rows, grouped
from aqnpipe.noise.schedule import sigma_at

_JSON = TypeAdapter(Any)

Differences = Callable[[RecorderState, RecorderState], list[str]]
"""Returns what differs on a worker from the first one although both must have the same."""

_LISTED = 8

_GENERATING_PHASES = frozenset({"rollout", "validation"})
"""In these phases the number of forward passes depends on the longest response of a worker's share."""


class ReceiptRecorder(Rows):
    """Accumulates the measurements of a run or an evaluation pass, for its receipt.

    The receipt compares the measurements with `requested`; `about`: its other fields, see `Receipt`. The
    recorder injects nothing. `seed` is the seed that all noise must be drawn with; None accepts any.
    `clean_norm_weights` are the norm weights without AQN, by module name, if they are known. `hidden`: what was
    measured of AQN's noise on the hidden states of each layer, until the end of the rollout or of the actor's pass.
    """

    def __init__(self, requested: NoiseSpec, *, seed: int | None = None, **about: Any) -> None:
        super().__init__()
        self.requested = requested
        self._request = Receipt(**{name: getattr(requested, name) for name in NoiseSpec.model_fields}, **about)
        self._seed = seed
        self._step: int | None = None
        self._pending: list[tuple[Row, str, Tensor]] = []
        self._keys: set[tuple[Phase, int, int, int, int]] = set()
        self.hidden: dict[int, Row] = {}
        self._noised_in_backward: set[int | None] = set()
        self.clean_norm_weights: dict[str, Tensor] = {}
        self._clean_norms: str | None = None
        self._clean_matrices: str | None = None

    # -- the table -----------------------------------------------------------------------------------------------------

    def add(
        self, phase: Phase, step: int | None = None, layer: int | None = None, operator: str = "", **columns: Any
    ) -> None:
        """Add to columns of the row of a place; see `Row`. Numbers may be tensors, which stay on their device."""
        row = self.row(phase, step, layer, operator)
        for name, value in columns.items():
            if isinstance(value, Tensor):
                self._pending.append((row, name, value))
            else:
                row.add(**{name: value})

    def seen(self, phase: Phase, *columns: str) -> Row:
        """Return these columns of a phase, over all of its rows."""
        self.settle()
        return Row(phase).include((row for row in self.rows.values() if row.phase == phase), columns)

    def note_noised_gradient(self, layer: int | None) -> None:
        """Note that a gradient in a layer (None: the output projection) had an error in the present backward pass."""
        self._noised_in_backward.add(layer)

    def count_backward(self, step: int) -> None:
        """Note a backward pass, and in how many parts of the model gradients had an error."""
        self.add("backward", step, passes=1, noised_parts=len(self._noised_in_backward))
        self._noised_in_backward.clear()

    def count_replays(self, phase: Phase, step: int, number: int) -> None:
        """Note passes of the model that were replayed from CUDA graphs."""
        if number:
            self.add(phase, None if phase == "evaluation" else step, passes=number, graph_replays=number)

    def settle(self) -> None:
        """Sum the kept tensors, so that memory stays constant over a long run."""
        pending, self._pending = self._pending, []
        for device in dict.fromkeys(value.device for _, _, value in pending):
            kept = [each for each in pending if each[2].device == device]
            # All of a device at once, because each reading waits for it.
            values = torch.stack([value.double().reshape(()) for _, _, value in kept]).tolist()
            for (row, name, _), value in zip(kept, values, strict=True):
                row.add(**{name: value if isinstance(getattr(row, name), float) else int(value)})

    def for_rehearsal(self) -> "ReceiptRecorder":
        """Return a recorder with the same request for a pass of training that is computed twice; no receipt sees it.

        It knows which passes were audited, so that the rehearsal is audited where the pass itself is.
        """
        other = copy.copy(self)
        other._pending, other._keys, other.hidden, other._noised_in_backward = [], set(), {}, set()
        phases: tuple[Phase, ...] = ("actor_forward", "backward")
        seen = [self.seen(phase, "passes", "audited_whole", "recomputed") for phase in phases]
        other.rows = {row.place: row for row in seen}
        return other

    # -- the request ---------------------------------------------------------------------------------------------------

    def note_installed(self, where: str, **parts: BaseModel | Sequence[BaseModel] | None) -> None:
        """Note how `parts` of a `NoiseSpec`, by field name, differ from the requested ones. `where` begins the line."""
        for name, installed in parts.items():
            for mismatch in mismatches(name, installed, getattr(self.requested, name)):
                self.note_mismatch(f"{where}: {mismatch}")

    def note_mismatch(self, line: str) -> None:
        """Note how the noise differs from the requested one; the receipt is refused with this line."""
        self.row("forward", operator=REQUEST).add(contradictions={line: 1})

    def begin_step(self, step: int) -> None:
        """Note the number of optimiser steps done; the noise of the coming phases must be keyed by it."""
        self._step = step
        self._keys = {key for key in self._keys if key[2] >= step}

    def note_key(self, phase: Phase, seed: int, step: int, micro_step: int, rank: int) -> None:
        """Note the key of a phase, which must have the seed and the step of the run and may occur only once."""
        if self._seed is not None and seed != self._seed:
            self.note_mismatch(f"{phase}: the noise is keyed by seed {seed}, requested {self._seed}")
        if self._step is not None and phase != "validation" and step != self._step:
            self.note_mismatch(f"{phase}: the noise is keyed by step {step} at step {self._step}")
        key = (phase, seed, step, micro_step, rank)
        if key in self._keys:
            self.note_mismatch(f"{phase}: the key of its noise is used twice (step {step}, part {micro_step})")
        self._keys.add(key)
        if phase == "evaluation":
            more = f", part {micro_step}, rank {rank}" if micro_step or rank else ""
            self.add(phase, keys={f"seed {seed}, step {step}{more}": 1})

    def position(self, seed: int, step: int) -> tuple[int, int]:
        """Return the seed and step that noise must be keyed by; those given where the recorder knows none."""
        return seed if self._seed is None else self._seed, step if self._step is None else self._step

    def requested_sigma(self, step: int, target: int | str) -> float:
        """Return the sigma that AQN's schedule requests at `step` for a decoder layer, or a norm by its name."""
        aqn, run = self.requested.aqn, self._request
        if aqn is None:
            return 0.0
        layer, norm = (layer_of(target), target) if isinstance(target, str) else (target, "")
        return aqn.factor(layer, run.layer_factors, norm) * sigma_at(aqn.schedule, step, run.num_steps, run.num_epochs)

    # -- AQN -----------------------------------------------------------------------------------------------------------

    def note_clean_norms(self, model: nn.Module) -> None:
        """Note the policy's present norm weights as the clean ones: at the start, and after each optimiser step."""
        if self._request.norms_watched:
            self.expect_clean_norms(norms_sha256(model), model)
            self._clean_matrices = matrices_sha256(model)

    def expect_clean_norms(self, sha256: str, model: nn.Module | None = None) -> None:
        """Note the SHA-256 of the clean norm weights, computed in another process, and those of `model` if it has them.

        Weights of `model` with another SHA-256 are found when its first phase begins.
        """
        self._clean_norms = sha256
        if model is not None:
            norms = {name: module for name, module in model.named_modules() if is_rms_norm(module)}
            self.clean_norm_weights = {name: weight_of(norm).detach().clone() for name, norm in norms.items()}

    def watch_norms(self, phase: Phase, model: nn.Module) -> None:
        """Compare the norm weights of `model`, before it computes, with the clean ones, which only AQN may change.

        The reference model has the norm weights of the start, known from the first redraw of AQN noise. Raises
        ReceiptError if a sample of the matrices differs from the values after the last optimiser step.
        """
        clean = self._clean_norms
        if phase == "reference":
            first = next((row for row in self.rows.values() if row.operator == SYNC), None)
            clean = min(first.digests) if first is not None else None
        if not self._request.norms_watched or clean is None:
            return
        if phase != "reference" and self._clean_matrices not in (None, matrices_sha256(model)):
            raise ReceiptError(f"receipt invalid: {phase}: the matrices are not those of the last optimiser step")
        self.add(phase, norms_checked=1, norms_noised=int(norms_sha256(model) != clean))

    def refuse_stray_hidden_noise(self) -> None:
        """Raise ReceiptError if training noised hidden states outside a rollout; a rollout settles its own samples."""
        if self.hidden and self._request.norms_watched:
            layers = sorted(self.hidden)
            raise ReceiptError(f"receipt invalid: AQN noised the hidden states of layers {layers} outside the rollout")

    # -- all of it -----------------------------------------------------------------------------------------------------

    def state(self) -> RecorderState:
        """Return a copy of all measurements so far. Call it between phases, because `restore` restores sums only."""
        self.refuse_stray_hidden_noise()
        self.settle()
        return RecorderState(rows=tuple(map(copy.copy, self.rows.values())))

    def restore(self, state: RecorderState) -> None:
        """Continue from `state` and drop all measurements so far."""
        self.rows = {row.place: row for row in map(copy.copy, state.rows)}
        self._keys.clear()
        self._pending.clear()
        self.hidden.clear()

    def receipt(self) -> Receipt:
        """Return the receipt of everything recorded so far."""
        return self._request.model_copy(update={"rows": self.state().rows})

    def problems_of(self, state: RecorderState) -> list[str]:
        """Return the problems of the receipt of one worker of several."""
        return self._request.model_copy(update={"rows": state.rows}).problems(is_share=True)


def mismatches(name: str, installed: Any, requested: Any) -> list[str]:
    """Return one line per setting that differs between two specifications (models, tuples of models, or None)."""
    if installed == requested:
        return []
    return list(_compare(name, *(_JSON.dump_python(value, mode="json") for value in (installed, requested))))


def _compare(where: str, installed: Any, requested: Any) -> Iterator[str]:
    if installed == requested:
        return
    if isinstance(installed, dict) and isinstance(requested, dict):
        for key in {**requested, **installed}:
            yield from _compare(f"{where}.{key}", installed.get(key), requested.get(key))
    elif isinstance(installed, list) and isinstance(requested, list) and len(installed) == len(requested):
        for number, pair in enumerate(zip(installed, requested, strict=True)):
            yield from _compare(f"{where}[{number}]", *pair)
    else:
        yield f"{where}: installed {json.dumps(installed)}, requested {json.dumps(requested)}"


def label(rank: int, num_workers: int) -> str:
    """Return the name of a worker in messages; ranks start at 0."""
    return f"worker {rank} of {num_workers}"


def merged_receipt(recorder: ReceiptRecorder, states: Sequence[RecorderState], *, routed: bool = False) -> Receipt:
    """Return the checked receipt of all workers together, from their states by rank.

    `recorder` ends in the merged state; it must have been made with the requested noise. Every worker's own receipt
    must pass its check, and all workers must agree. `routed` is for mixtures of experts: there the number of operator
    calls depends on the tokens and is not compared. Raises ReceiptError, which names the worker.
    """
    refuse(problems_of_workers(recorder, states, partial(_differences, routed)))
    recorder.restore(merge_states(states))
    return recorder.receipt().model_copy(update={"num_workers": len(states)}).check()


def problems_of_workers(
    recorder: ReceiptRecorder, states: Sequence[RecorderState], differences: Differences, engine: str = ""
) -> list[str]:
    """Return the problems of every worker's own receipt, and its `differences` from the first worker."""
    problems = []
    for rank, state in enumerate(states):
        found = recorder.problems_of(state) + (differences(states[0], state) if rank else [])
        problems += [f"{engine}{label(rank, len(states))}: {line}" for line in found]
    return problems


def refuse(problems: Sequence[str]) -> None:
    """Raise ReceiptError if there are any problems; its message has the first of them."""
    if problems:
        more = f"; {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
        raise ReceiptError(f"receipt invalid: {'; '.join(problems[:_LISTED])}{more}", tuple(problems))


def merge_states(states: Sequence[RecorderState]) -> RecorderState:
    """Return the state of a single recorder of everything in `states`."""
    return RecorderState(rows=grouped(row for state in states for row in state.rows))


def differing(pairs: Iterable[tuple[Row, Row]], *columns: str) -> list[str]:
    """Return one line per column of a row that has another value than on worker 0; `pairs`: see `paired`."""
    return [
        f"{_where(first)}: {name} is {_shown(value, expected)}, {_shown(expected, value)} on worker 0"
        for first, other in pairs
        for name in columns
        if (value := getattr(other, name)) != (expected := getattr(first, name))
    ]


def paired(ours: Sequence[Row], theirs: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Return the rows of both tables side by side, an empty row where one has none."""
    first, second = ({row.place: row for row in rows} for rows in (ours, theirs))
    return [(first.get(place, Row(*place)), second.get(place, Row(*place))) for place in {**first, **second}]


def _differences(routed: bool, first: RecorderState, other: RecorderState) -> list[str]:
    """Return the differences of `other` from the first worker in values that must be equal on all workers."""
    phases, syncs = paired(first.phases, other.phases), paired(first.weight_syncs, other.weight_syncs)
    equally_often = [
        pair for pair in phases if pair[0].phase not in _GENERATING_PHASES or not all(row.passes for row in pair)
    ]
    both_drew = [pair for pair in syncs if all(row.calls for row in pair)]
    return [
        *differing(equally_often, "passes"),
        *([] if routed else _other_calls(first, other) + differing(phases, "largest_selected")),
        *differing(syncs, "calls"),
        *differing(both_drew, "sigma", "sigma_requested", "targets", "digests"),
    ]


def _other_calls(first: RecorderState, other: RecorderState) -> list[str]:
    """Return the operators with another number of noised calls in each pass than on the first worker."""
    passes = [{row.phase: row.passes for row in state.phases} for state in (first, other)]
    problems = []
    for mine, theirs in paired(first.cells, other.cells):
        ours, own = (found.get(mine.phase, 0) for found in passes)
        if theirs.calls * ours != mine.calls * own:
            problems.append(
                f"{mine.where}: {theirs.calls} noised calls in {own} runs, worker 0 had {mine.calls} in {ours}"
            )
    return problems


def _where(row: Row) -> str:
    return f"AQN step {row.step}" if row.operator == SYNC else row.where if row.operator else row.phase


def _shown(value: Any, other: Any) -> str:
    """Return a value in words; of a set or a mapping what the other one does not have."""
    return str(min(set(value) - set(other), default="no other") if isinstance(value, set | dict) else value)
