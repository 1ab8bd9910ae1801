"""Merges the measurements of all data-parallel workers into one receipt.

The rows of all workers are added up, so the merged figures equal those of a single recorder of all workers. Some values
must be equal on all workers: the synchronised policy, AQN's sigma, and the number of passes. A worker without part of
its noise is refused.
"""

from collections.abc import Sequence
from typing import Any

from aqnpipe.errors import ReceiptError
from aqnpipe.noise.receipts.receipt import Receipt
from aqnpipe.noise.receipts.receipt_content import RecorderState
from aqnpipe.noise.receipts.recorder import ReceiptRecorder
from aqnpipe.noise.receipts.table import Row, grouped

_GENERATING_PHASES = frozenset({"rollout", "validation"})
"""In these phases the number of forward passes depends on the longest response of a worker's share."""


def label(rank: int, num_workers: int) -> str:
    """Return the name of a worker in messages; ranks start at 0."""
    return f"worker {rank} of {num_workers}"


def merged_receipt(recorder: ReceiptRecorder, states: Sequence[RecorderState], *, routed: bool = False) -> Receipt:
    """Return the checked receipt of all workers together, from their states by rank.

    `recorder` ends in the merged state; it must have been made with the requested noise. Every worker's own receipt
    must pass its check, and all workers must agree. `routed` is for mixtures of experts: there the number of operator
    calls depends on the tokens and is not compared. Raises ReceiptError, which names the worker.
    """
    problems = []
    for rank, state in enumerate(states):
        found = recorder.problems_of(state) + (_differences(states[0], state, routed) if rank else [])
        problems += [f"{label(rank, len(states))}: {line}" for line in found]
    if problems:
        raise ReceiptError("receipt invalid: " + "; ".join(problems), tuple(problems))
    recorder.restore(merge_states(states))
    return recorder.receipt().model_copy(update={"num_workers": len(states)}).check()


def merge_states(states: Sequence[RecorderState]) -> RecorderState:
    """Return the state of a single recorder of everything in `states`."""
    return RecorderState(rows=grouped(row for state in states for row in state.rows))


def _differences(first: RecorderState, other: RecorderState, routed: bool) -> list[str]:
    """Return the differences of `other` from the first worker in values that must be equal on all workers."""
    ours, theirs = ({row.phase: row.passes for row in state.phases} for state in (first, other))
    problems = [f"phase {phase} ran, but not on worker 0" for phase in theirs if phase not in ours]
    for phase, passes in ours.items():
        found = theirs.get(phase, 0)
        if found == 0 < passes:
            problems.append(f"phase {phase} never ran, but did on worker 0")
        elif found != passes and phase not in _GENERATING_PHASES:
            problems.append(f"{phase}: ran {found} times, on worker 0 {passes} times")
    if not routed:
        for mine, other_row in paired(first.cells, other.cells):
            per = [passes.get(mine.phase, 0) for passes in (ours, theirs)]
            if other_row.calls * per[0] != mine.calls * per[1]:
                where = f"{mine.phase} {mine.operator} layer {'lm_head' if mine.layer is None else mine.layer}"
                problems.append(
                    f"{where}: {other_row.calls} noised calls in {per[1]} runs, worker 0 had {mine.calls} in {per[0]}"
                )
        if first.num_noised_modules != other.num_noised_modules:
            problems.append(
                f"module noise selects {other.num_noised_modules} modules, {first.num_noised_modules} on worker 0"
            )
    return problems + _sync_differences(first, other)


def paired(ours: Sequence[Row], theirs: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Return the rows of both tables side by side, an empty row where one has none."""
    places = [{row.place: row for row in rows} for rows in (ours, theirs)]
    first, second = places
    return [(first.get(place, Row(*place)), second.get(place, Row(*place))) for place in {**first, **second}]


def _sync_differences(first: RecorderState, other: RecorderState) -> list[str]:
    if len(first.weight_syncs) != len(other.weight_syncs):
        return [f"AQN: {len(other.weight_syncs)} weight syncs, worker 0 had {len(first.weight_syncs)}"]
    return [
        f"AQN step {ours.step}: {name} is {_shown(value)}, {_shown(expected)} on worker 0"
        for ours, theirs in zip(first.weight_syncs, other.weight_syncs, strict=True)
        for name in ("sigma", "sigma_requested", "targets", "digests")
        if (value := getattr(theirs, name)) != (expected := getattr(ours, name))
    ]


def _shown(value: Any) -> str:
    return str(min(value) if isinstance(value, set) else value)[:12]
