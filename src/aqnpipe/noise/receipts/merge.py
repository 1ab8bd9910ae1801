"""Merges the measurements of all data-parallel workers into one receipt.

Each worker draws its own noise on operators, modules and hidden states, and applies its own faults. The sums behind
these measurements are added, so the merged figures equal those of a single recorder of all workers. Other values must
be equal on all workers: the synchronised policy, AQN on its weights, and the number of passes. They are kept once. A
missing worker, or a worker without part of its noise, is refused.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from aqnpipe.config.base import describe_validation_error
from aqnpipe.errors import ReceiptError
from aqnpipe.noise.receipts.receipt import Receipt
from aqnpipe.noise.receipts.receipt_content import TABLES, RecorderState
from aqnpipe.noise.receipts.recorder import ReceiptRecorder
from aqnpipe.noise.receipts.rows import WeightSync, grouped

_GENERATING_PHASES = frozenset({"rollout", "validation"})
"""In these phases the number of forward passes depends on the longest response of a worker's share."""


_RATIOS = ("squared_error_ratio", "expected_ratio", "ratio_error")
"""Measurements of a weight sync, made by each worker on hidden states of its own."""


@dataclass(frozen=True)
class WorkerMeasurements:
    """One worker's rank among `num_workers`, and the sums behind its receipt."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

    rank: int
    num_workers: int
    state: RecorderState

    @property
    def label(self) -> str:
        """Name of the worker in messages; ranks start at 0."""
        return f"worker {self.rank} of {self.num_workers}"

    def write(self, folder: Path) -> None:
        """Write the measurements to the file in `folder` that `read_measurements` reads."""
        folder.mkdir(parents=True, exist_ok=True)
        _path(folder, self.rank).write_bytes(_ADAPTER.dump_json(self))


_ADAPTER = TypeAdapter(WorkerMeasurements)


def read_measurements(folder: Path, num_workers: int) -> list[WorkerMeasurements]:
    """Return the measurements of all workers, by rank. Raises ReceiptError for missing, foreign or unreadable files."""
    missing = [rank for rank in range(num_workers) if not _path(folder, rank).is_file()]
    if missing:
        raise ReceiptError(
            f"receipt refused: no measurements of worker {', '.join(map(str, missing))} of {num_workers}"
        )
    workers = []
    for rank in range(num_workers):
        path = _path(folder, rank)
        try:
            worker = _ADAPTER.validate_json(path.read_bytes())
        except ValidationError as error:
            raise ReceiptError(f"receipt refused: {path}: {describe_validation_error(error)}") from None
        if (worker.rank, worker.num_workers) != (rank, num_workers):
            raise ReceiptError(f"receipt refused: {path} is of {worker.label}, expected {rank} of {num_workers}")
        workers.append(worker)
    return workers


def merged_receipt(
    recorder: ReceiptRecorder, workers: Sequence[WorkerMeasurements], *, routed: bool = False
) -> Receipt:
    """Return the checked receipt of all workers together; `recorder` ends in the merged state.

    `recorder` must have been made with the requested noise. Every worker's own receipt must pass its check, and all
    workers must agree. `routed` is for mixtures of experts: there the number of operator calls depends on the tokens
    and is not compared. Raises ReceiptError, which names the worker.
    """
    problems = []
    aqn = None
    for worker in workers:
        recorder.restore(worker.state)
        receipt = recorder.receipt()
        aqn = receipt.aqn
        problems += [f"{worker.label}: {problem}" for problem in receipt.problems()]
    per_worker_draws = aqn is not None and aqn.targets == "hidden_states"
    for worker in workers[1:]:
        differences = _differences(workers[0].state, worker.state, per_worker_draws, routed)
        problems += [f"{worker.label}: {difference}" for difference in differences]
    if problems:
        raise ReceiptError("receipt refused: " + "; ".join(problems), tuple(problems))
    recorder.restore(merge_states([worker.state for worker in workers], per_worker_draws=per_worker_draws))
    return recorder.receipt().model_copy(update={"num_workers": len(workers)}).check()


def merge_states(states: Sequence[RecorderState], *, per_worker_draws: bool) -> RecorderState:
    """Return the state of a single recorder of everything in `states`.

    `per_worker_draws`: every worker drew its own AQN noise (hidden states), instead of the same noise (weights).
    """
    first = states[0]
    tables: dict[str, Any] = {name: grouped(getattr(state, name) for state in states) for name in TABLES}
    if not per_worker_draws:
        tables["weight_cells"] = first.weight_cells
    return RecorderState(
        **tables,
        foreign_faults=set().union(*(state.foreign_faults for state in states)),
        weight_syncs=(
            [_merged_sync(syncs) for syncs in zip(*(state.weight_syncs for state in states), strict=True)]
            if per_worker_draws
            else first.weight_syncs
        ),
        num_noised_modules=first.num_noised_modules,
        mismatches=set().union(*(state.mismatches for state in states)) | _repeated_keys(states),
        keys=[key for state in states for key in state.keys],
    )


def _repeated_keys(states: Sequence[RecorderState]) -> set[str]:
    """Return a line for every key of noise that occurs in more than one part of an evaluation."""
    counts = Counter(key for state in states for key in state.keys)
    return {
        f"{phase}: the noise of {count} batches has the same key (seed {seed}, step {step})"
        for (phase, seed, step, _, _), count in counts.items()
        if count > 1
    }


def add_rollout(recorder: ReceiptRecorder, state: RecorderState) -> None:
    """Add the measurements of a rollout in an engine to the recorder of the run."""
    before = recorder.state()
    merged = merge_states([before, state], per_worker_draws=False)
    merged.weight_syncs = before.weight_syncs + state.weight_syncs
    merged.weight_cells = grouped((before.weight_cells, state.weight_cells))
    merged.num_noised_modules = max(before.num_noised_modules, state.num_noised_modules)
    recorder.restore(merged)


def _path(folder: Path, rank: int) -> Path:
    return folder / f"worker{rank}.json"


def _merged_sync(syncs: Sequence[WeightSync]) -> WeightSync:
    """Average the workers' measurements on their own hidden states, weighted by the number of elements."""
    elements = sum(sync.elements for sync in syncs)
    if not elements:
        return syncs[0]
    return syncs[0].model_copy(
        update={
            "elements": elements,
            "sigma_measured": (sum(sync.sigma_measured**2 * sync.elements for sync in syncs) / elements) ** 0.5,
            "squared_error_ratio": sum(sync.squared_error_ratio * sync.elements for sync in syncs) / elements,
            "expected_ratio": sum(sync.expected_ratio * sync.elements for sync in syncs) / elements,
            "ratio_error": sum((sync.ratio_error * sync.elements) ** 2 for sync in syncs) ** 0.5 / elements,
        }
    )


def _differences(first: RecorderState, other: RecorderState, per_worker_draws: bool, routed: bool) -> list[str]:
    """Return the differences of `other` from the first worker in values that must be equal on all workers."""
    return [
        *_phase_differences(first, other),
        *([] if routed else _call_differences(first, other)),
        *_sync_differences(first, other, per_worker_draws),
    ]


def _phase_differences(first: RecorderState, other: RecorderState) -> list[str]:
    ours, theirs = ({phase.phase: phase.forwards for phase in state.phases} for state in (first, other))
    problems = [f"phase {phase} ran, but not on worker 0" for phase in theirs if phase not in ours]
    for phase, forwards in ours.items():
        found = theirs.get(phase, 0)
        if found == 0 < forwards:
            problems.append(f"phase {phase} never ran, but did on worker 0")
        elif found != forwards and phase not in _GENERATING_PHASES:
            problems.append(f"{phase}: {found} passes, worker 0 had {forwards}")
    return problems


def _call_differences(first: RecorderState, other: RecorderState) -> list[str]:
    """Compare the noised calls of each operator per pass, which must be equal on all workers."""
    passes = [{phase.phase: phase.forwards for phase in state.phases} for state in (first, other)]
    cells = [{cell.place: cell for cell in state.cells} for state in (first, other)]
    problems = []
    for place in dict.fromkeys([*cells[0], *cells[1]]):
        phase, operator, layer = place
        calls = [worker_cells[place].calls if place in worker_cells else 0 for worker_cells in cells]
        # Quantised weights are cached within a generation, so they are counted once per generation.
        per = (
            [1, 1]
            if operator.endswith(".weight") and phase in _GENERATING_PHASES
            else [worker_passes.get(phase, 0) for worker_passes in passes]
        )
        if calls[1] * per[0] != calls[0] * per[1]:
            problems.append(
                f"{phase} {operator} layer {'lm_head' if layer is None else layer}: {calls[1]} noised calls in "
                f"{per[1]} passes, worker 0 had {calls[0]} in {per[0]}"
            )
    if first.num_noised_modules != other.num_noised_modules:
        problems.append(
            f"module noise selects {other.num_noised_modules} modules, {first.num_noised_modules} on worker 0"
        )
    return problems


def _sync_differences(first: RecorderState, other: RecorderState, per_worker_draws: bool) -> list[str]:
    if len(first.weight_syncs) != len(other.weight_syncs):
        return [f"AQN: {len(other.weight_syncs)} weight syncs, worker 0 had {len(first.weight_syncs)}"]
    measured = {"elements", "sigma_measured", *_RATIOS} if per_worker_draws else set()
    problems = []
    for ours, theirs in zip(first.weight_syncs, other.weight_syncs, strict=True):
        expected, found = ours.model_dump(exclude=measured), theirs.model_dump(exclude=measured)
        for name in expected:
            if expected[name] != found[name]:
                problems.append(
                    f"AQN step {ours.step}: {name} is {_short(found[name])}, {_short(expected[name])} on worker 0"
                )
    if not per_worker_draws and first.weight_cells != other.weight_cells:
        problems.append("AQN: the factors measured on the norms differ from those on worker 0")
    return problems


def _short(value: object) -> str:
    return str(value)[:12]
