"""Checks the measurements that vLLM's workers return at the end of a pass, before a receipt is made of them."""

from collections.abc import Mapping, Sequence
from typing import Any

from aqnpipe.errors import ReceiptError
from aqnpipe.noise.injection.requested import FORWARD_KINDS
from aqnpipe.noise.kernels.shards import Shard
from aqnpipe.noise.receipts.merge import label
from aqnpipe.noise.receipts.receipt_content import RecorderState


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
    by_rank = sorted(replies, key=lambda reply: int(reply["rank"]))
    return [RecorderState.model_validate_json(reply["state"]) for reply in by_rank]


def shares_of(replies: Sequence[Mapping[str, Any]]) -> list[dict[str, list[Shard]]]:
    """Return, by rank, the tensor-parallel shares that had noise, by operator."""
    return [
        {operator: [Shard(*share) for share in shares] for operator, shares in reply["shards"].items()}
        for reply in sorted(replies, key=lambda reply: int(reply["rank"]))
    ]
