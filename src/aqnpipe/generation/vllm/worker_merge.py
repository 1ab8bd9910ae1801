"""Judges what the tensor-parallel workers of an engine measured, and makes the measurements of one model of them.

The workers compute one forward together, with one noise: they must agree in all counts and have the same keys, and the
shares that had noise must together be the whole. A worker without noise is refused by its rank.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from aqnpipe.errors import ReceiptError
from aqnpipe.noise.kernels.shards import Shard
from aqnpipe.noise.receipts.merge import WorkerMeasurements
from aqnpipe.noise.receipts.receipt_content import RecorderState
from aqnpipe.noise.receipts.recorder import ReceiptRecorder
from aqnpipe.noise.receipts.rows import PhaseRecord, merged

Shares = Mapping[str, Iterable[Shard]]
"""The shares that had noise on one worker, by projection; every worker had noise on the whole of other results."""

_LISTED = 8


def merged_workers(
    workers: Sequence[WorkerMeasurements], shares: Sequence[Shares], recorder: ReceiptRecorder
) -> RecorderState:
    """Return the measurements of the model that `workers`, by rank, computed together; `shares` are those of each.

    `recorder` must have been made with the requested noise; its measurements are overwritten. Raises ReceiptError,
    which names the worker, if one of them had other noise than requested or than the others.
    """
    if len(workers) == 1:
        return workers[0].state
    problems = [
        f"vLLM's {worker.label}: {problem}" for worker in workers for problem in _own_problems(worker, recorder)
    ]
    for worker in workers[1:]:
        problems += [f"vLLM's {worker.label}: {each}" for each in _differences(workers[0].state, worker.state)]
    problems += _incomplete(shares)
    if problems:
        text = "; ".join(problems[:_LISTED])
        more = f"; {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
        raise ReceiptError(f"receipt refused: {text}{more}", tuple(problems))
    return _merged([worker.state for worker in workers])


def _own_problems(worker: WorkerMeasurements, recorder: ReceiptRecorder) -> list[str]:
    if not any(phase.forwards for phase in worker.state.phases):
        return []
    recorder.restore(worker.state)
    return recorder.receipt().problems()


def _differences(first: RecorderState, other: RecorderState) -> list[str]:
    """Return what differs on a worker although all compute the same forwards."""
    ours, theirs = ({phase.phase: phase for phase in state.phases} for state in (first, other))
    problems = []
    for name in dict.fromkeys([*ours, *theirs]):
        expected, found = (phases.get(name, PhaseRecord(name)) for phases in (ours, theirs))
        if found.forwards != expected.forwards:
            problems.append(f"{name}: {found.forwards} forward passes, worker 0 had {expected.forwards}")
        if found.modules != expected.modules:
            problems.append(
                f"{name}: module noise on {len(found.modules)} modules, worker 0 had {len(expected.modules)}"
            )
    if sorted(first.keys) != sorted(other.keys):
        problems.append("the noise has other keys than on worker 0")
    return problems + _call_differences(first, other) + _fault_differences(first, other)


def _call_differences(first: RecorderState, other: RecorderState) -> list[str]:
    counts = [{cell.place: (cell.calls, cell.elements) for cell in state.cells} for state in (first, other)]
    return [
        f"{phase} {operator} layer {'lm_head' if layer is None else layer}: {found[0]} noised calls on {found[1]} "
        f"elements, worker 0 had {expected[0]} on {expected[1]}"
        for place in dict.fromkeys([*counts[0], *counts[1]])
        for phase, operator, layer in [place]
        for expected, found in [(counts[0].get(place, (0, 0)), counts[1].get(place, (0, 0)))]
        if expected != found
    ]


def _fault_differences(first: RecorderState, other: RecorderState) -> list[str]:
    """Every worker applies a fault to the whole output of its site, and counts all of it."""
    counts = [
        {cell.place: (cell.calls, cell.elements, cell.num_faulty_channels) for cell in state.fault_cells}
        for state in (first, other)
    ]
    return [
        f"{phase}: fault {number} had other calls, elements or channels than on worker 0"
        for phase, number in dict.fromkeys([*counts[0], *counts[1]])
        if counts[0].get((phase, number)) != counts[1].get((phase, number))
    ]


def _incomplete(shares: Sequence[Shares]) -> list[str]:
    """Return the operators of which the shares with noise are not together the whole."""
    problems = []
    for operator in sorted({operator for own in shares for operator in own}):
        missing = [rank for rank, own in enumerate(shares) if operator not in own]
        if missing:
            problems.append(f"{operator}: noise on a share on some workers, but not on worker {missing[0]}")
            continue
        found = sorted({share for own in shares for share in own[operator]})
        for width in sorted({share.width for share in found}):
            if not _is_whole([share for share in found if share.width == width], width):
                columns = ", ".join(f"{s.start} to {s.start + s.size}" for s in found if s.width == width)
                problems.append(f"{operator}: noise on columns {columns} of {width}, expected all of them once")
    return problems


def _is_whole(shares: Sequence[Shard], width: int) -> bool:
    """Return whether different shares, sorted, are the columns 0 to `width` without a gap or an overlap."""
    end = 0
    for share in shares:
        if share.start != end:
            return False
        end += share.size
    return end == width


def _merged(states: Sequence[RecorderState]) -> RecorderState:
    """Return the measurements of the first worker, which counts whole results, with what all of them audited."""
    first = states[0]
    return replace(
        first,
        phases=[_merged_phase([state.phases[index] for state in states]) for index in range(len(first.phases))],
        foreign_faults=set().union(*(state.foreign_faults for state in states)),
        mismatches=set().union(*(state.mismatches for state in states)),
    )


def _merged_phase(phases: Sequence[PhaseRecord]) -> PhaseRecord:
    together = merged(phases)
    # A pass of the model, or of a layer, is one pass, however many workers computed it.
    return replace(
        phases[0],
        audited_whole=together.audited_whole,
        classified=together.classified,
        recomputed_numbers=together.recomputed_numbers,
        largest_deviation=together.largest_deviation,
        contradictions=together.contradictions,
        reference=together.reference,
        escaped=together.escaped,
    )
