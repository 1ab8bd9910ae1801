"""Merges the measurements of all data-parallel workers into one receipt.

The rows of all workers are added up, so the merged figures equal those of a single recorder of all workers. Some values
must be equal on all workers: the synchronised policy, AQN's sigma, and the number of passes. A worker without part of
its noise is refused.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from aqnpipe.errors import ReceiptError
from aqnpipe.noise.receipts.receipt import Receipt
from aqnpipe.noise.receipts.receipt_content import RecorderState
from aqnpipe.noise.receipts.recorder import ReceiptRecorder
from aqnpipe.noise.receipts.table import SYNC, Row, grouped

Differences = Callable[[RecorderState, RecorderState], list[str]]
"""Returns what differs on a worker from the first one although both must have the same."""

_LISTED = 8

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
