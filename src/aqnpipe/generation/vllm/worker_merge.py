"""Judges what the tensor-parallel workers of an engine measured, and makes the measurements of one model of them.

The workers compute one forward together, with one noise: they must agree in all counts and have the same keys, and the
shares that had noise must together be the whole. A worker without noise is refused by its rank.
"""

from collections.abc import Iterable, Mapping, Sequence

from aqnpipe.errors import ReceiptError
from aqnpipe.noise.kernels.shards import Shard
from aqnpipe.noise.receipts.merge import label, paired
from aqnpipe.noise.receipts.receipt_content import RecorderState
from aqnpipe.noise.receipts.recorder import ReceiptRecorder
from aqnpipe.noise.receipts.table import Row, grouped

Shares = Mapping[str, Iterable[Shard]]
"""The shares that had noise on one worker, by projection; every worker had noise on the whole of other results."""

_LISTED = 8

_AUDITED = (
    "audited_whole", "recomputed", "wrong", "largest_deviation", "contradictions", "compared", "largest_difference",
    "relative_elements", "relative_squares", "escaped",
)  # fmt: skip
"""Columns that every worker adds to. A pass of the model, or of a layer, is one, however many workers computed it."""


def merged_workers(
    states: Sequence[RecorderState], shares: Sequence[Shares], recorder: ReceiptRecorder
) -> RecorderState:
    """Return the measurements of the model that workers computed together: their `states` and `shares` by rank.

    `recorder` must have been made with the requested noise. Raises ReceiptError, which names the worker, if one of them
    had other noise than requested or than the others.
    """
    if len(states) == 1:
        return states[0]
    problems = []
    for rank, state in enumerate(states):
        own = recorder.problems_of(state) if any(phase.passes for phase in state.phases) else []
        found = own + (_differences(states[0], state) if rank else [])
        problems += [f"vLLM's {label(rank, len(states))}: {problem}" for problem in found]
    problems += _incomplete(shares)
    if problems:
        text = "; ".join(problems[:_LISTED])
        more = f"; {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
        raise ReceiptError(f"receipt invalid: {text}{more}", tuple(problems))
    return _merged(states)


def _differences(first: RecorderState, other: RecorderState) -> list[str]:
    """Return what differs on a worker although all compute the same forwards."""
    problems = []
    for ours, theirs in paired(first.phases, other.phases):
        if theirs.passes != ours.passes:
            problems.append(f"{ours.phase}: {theirs.passes} forward passes, worker 0 had {ours.passes}")
        if theirs.keys != ours.keys:
            problems.append("the noise has other keys than on worker 0")
        if theirs.modules != ours.modules:
            problems.append(
                f"{ours.phase}: module noise on {len(theirs.modules)} modules, worker 0 had {len(ours.modules)}"
            )
    problems += [
        f"{ours.phase} {ours.operator} layer {'lm_head' if ours.layer is None else ours.layer}: {theirs.calls} noised "
        f"calls on {theirs.elements} elements, worker 0 had {ours.calls} on {ours.elements}"
        for ours, theirs in paired(first.cells, other.cells)
        if (ours.calls, ours.elements) != (theirs.calls, theirs.elements)
    ]
    # Every worker applies a fault to the whole output of its site, and counts all of it.
    return problems + [
        f"{ours.phase}: {ours.operator} had other calls, elements or channels than on worker 0"
        for ours, theirs in paired(first.fault_cells, other.fault_cells)
        if _fault_counts(ours) != _fault_counts(theirs)
    ]


def _fault_counts(row: Row) -> tuple[int, int, int | None]:
    return row.calls, row.elements, row.num_faulty_channels


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
    audited = [Row(*row.place).include([row], _AUDITED) for state in states[1:] for row in state.rows]
    return RecorderState(rows=grouped([*states[0].rows, *audited]))
