"""Checks what the workers of an engine measured in a pass, and makes the measurements of one model of them.

Tensor-parallel workers compute one forward together, with one noise: they must agree in all counts and have the same
keys, and the shares that had noise must together be the whole. A worker without noise is refused by its rank.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from aqnpipe.errors import ReceiptError
from aqnpipe.noise.injection.sites import FORWARD_KINDS
from aqnpipe.noise.kernels.shards import Shard
from aqnpipe.noise.receipts.receipt import RecorderState
from aqnpipe.noise.receipts.recorder import ReceiptRecorder, differing, label, paired, problems_of_workers, refuse
from aqnpipe.noise.receipts.table import Row, grouped

Shares = Mapping[str, Iterable[Shard]]
"""The shares that had noise on one worker, by projection; every worker had noise on the whole of other results."""

_AUDITED = (
    "audited_whole", "recomputed", "wrong", "largest_deviation", "contradictions", "compared", "largest_difference",
    "escaped",
)  # fmt: skip
"""Columns that every worker adds to. A pass of the model, or of a layer, is one, however many workers computed it."""


def checked_measurements(
    replies: Sequence[Mapping[str, Any]],
    num_workers: int,
    min_forwards: int,
    audited_forwards: int,
    *,
    must_replay: bool = False,
) -> list[RecorderState]:
    """Return what each worker recorded, by rank.

    `min_forwards`: the forward passes that the responses took at least. `audited_forwards`: those of the longest batch
    if operator noise was requested, else 0; a batch whose prompts alone were read took one. `must_replay`:
    CUDA graphs were requested, and some passes were steps that have them. Raises ReceiptError if the measurements of a
    worker are missing, do not cover all forward passes, or have operator noise that was not audited.
    """
    ranks = sorted(reply["rank"] for reply in replies)
    if ranks != list(range(num_workers)):
        raise ReceiptError(f"receipt invalid: measurements of workers {ranks}, expected {num_workers}")
    states = states_of(replies)
    for rank, state in enumerate(states):
        worker = f"vLLM's {label(rank, num_workers)}"
        forwards = sum(phase.passes for phase in state.phases)
        if forwards < min_forwards:
            raise ReceiptError(
                f"receipt invalid: {worker} measured {forwards} forward passes, the responses took at least "
                f"{min_forwards}"
            )
        if must_replay and not any(phase.graph_replays for phase in state.phases):
            raise ReceiptError(
                f"receipt invalid: {worker} replayed no CUDA graph in {forwards} forward passes, which "
                "generation.cuda_graphs requests"
            )
        for record in state.phases:
            missing = [kind for kind in FORWARD_KINDS[:audited_forwards] if not record.audited_passes.get(kind)]
            if missing:
                raise ReceiptError(
                    f"receipt invalid: {worker} audited no layer in {record.phase} "
                    f"(forward passes over {' and over '.join(missing)})"
                )
    return states


def states_of(replies: Sequence[Mapping[str, Any]]) -> list[RecorderState]:
    """Return what each worker recorded, by rank, unchecked."""
    return [RecorderState.model_validate_json(reply["state"]) for reply in sorted(replies, key=_rank)]


def shares_of(replies: Sequence[Mapping[str, Any]]) -> list[dict[str, list[Shard]]]:
    """Return, by rank, the tensor-parallel shares that had noise, by operator."""
    return [
        {operator: [Shard(*share) for share in shares] for operator, shares in reply["shards"].items()}
        for reply in sorted(replies, key=_rank)
    ]


def _rank(reply: Mapping[str, Any]) -> int:
    return int(reply["rank"])


def merged_workers(
    states: Sequence[RecorderState], shares: Sequence[Shares], recorder: ReceiptRecorder
) -> RecorderState:
    """Return the measurements of the model that workers computed together: their `states` and `shares` by rank.

    The first worker counts whole results; what all of them audited is added. `recorder` must have been made with the
    requested noise. Raises ReceiptError, which names the worker, if one of them had other noise than requested or than
    the others.
    """
    if len(states) == 1:
        return states[0]
    refuse([*problems_of_workers(recorder, states, _differences, "vLLM's "), *_incomplete(shares)])
    audited = [Row(*row.place).include([row], _AUDITED) for state in states[1:] for row in state.rows]
    return RecorderState(rows=grouped([*states[0].rows, *audited]))


def _differences(first: RecorderState, other: RecorderState) -> list[str]:
    """Return what differs on a worker although all compute the same forwards, and apply a fault to whole outputs."""
    return [
        *differing(paired(first.phases, other.phases), "passes", "keys", "modules"),
        *differing(paired(first.cells, other.cells), "calls", "elements"),
        *differing(paired(first.fault_cells, other.fault_cells), "calls", "elements", "num_faulty_channels"),
    ]


def _incomplete(shares: Sequence[Shares]) -> list[str]:
    """Return the operators of which the shares with noise are not together the whole, each column once."""
    problems = []
    for operator in sorted({operator for own in shares for operator in own}):
        missing = [rank for rank, own in enumerate(shares) if operator not in own]
        if missing:
            problems.append(f"{operator}: noise on a share on some workers, but not on worker {missing[0]}")
            continue
        found = sorted({share for own in shares for share in own[operator]})
        for width in sorted({share.width for share in found}):
            same = [share for share in found if share.width == width]
            *starts, end = accumulate((share.size for share in same), initial=0)
            if [share.start for share in same] != starts or end != width:
                columns = ", ".join(f"{share.start} to {share.start + share.size}" for share in same)
                problems.append(f"{operator}: noise on columns {columns} of {width}, expected all of them once")
    return problems
