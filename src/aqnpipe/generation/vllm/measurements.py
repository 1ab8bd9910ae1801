"""Checks the measurements that vLLM's workers return at the end of a pass, before a receipt is made of them."""

from collections.abc import Mapping, Sequence
from typing import Any

from aqnpipe.errors import ReceiptError
from aqnpipe.noise.injection.requested import FORWARD_KINDS
from aqnpipe.noise.kernels.shards import Shard
from aqnpipe.noise.receipts.merge import WorkerMeasurements
from aqnpipe.noise.receipts.receipt_content import RecorderState


def checked_measurements(
    replies: Sequence[Mapping[str, Any]],
    num_workers: int,
    min_forwards: int,
    audited_forwards: int,
    *,
    must_replay: bool = False,
) -> list[WorkerMeasurements]:
    """Return the measurements of each worker, by rank.

    `min_forwards`: the forward passes that the responses took at least. `audited_forwards`: those of the longest batch
    if operator noise was requested, else 0; a batch whose prompts alone were read took one. `must_replay`:
    CUDA graphs were requested, and some passes were steps that have them. Raises ReceiptError if the measurements of a
    worker are missing, do not cover all forward passes, or have operator noise that was not audited.
    """
    ranks = sorted(reply["rank"] for reply in replies)
    if ranks != list(range(num_workers)):
        raise ReceiptError(f"receipt invalid: measurements of workers {ranks}, expected {num_workers}")
    workers = workers_of(replies)
    for worker in workers:
        forwards = sum(phase.passes for phase in worker.state.phases)
        if forwards < min_forwards:
            raise ReceiptError(
                f"receipt invalid: vLLM's {worker.label} measured {forwards} forward passes, the responses took at "
                f"least {min_forwards}"
            )
        if must_replay and not any(phase.graph_replays for phase in worker.state.phases):
            raise ReceiptError(
                f"receipt invalid: vLLM's {worker.label} replayed no CUDA graph in {forwards} forward passes, which "
                "generation.cuda_graphs requests"
            )
        _check_audit(worker, audited_forwards)
    return workers


def _check_audit(worker: WorkerMeasurements, num_forwards: int) -> None:
    """Raise ReceiptError if no layer was observed in one of the kinds of forward passes."""
    for record in worker.state.phases:
        missing = [kind for kind in FORWARD_KINDS[:num_forwards] if not record.audited_passes.get(kind)]
        if missing:
            raise ReceiptError(
                f"receipt invalid: vLLM's {worker.label} audited no layer in {record.phase} "
                f"(forward passes over {' and over '.join(missing)})"
            )


def workers_of(replies: Sequence[Mapping[str, Any]]) -> list[WorkerMeasurements]:
    """Return the measurements of each worker, by rank, unchecked."""
    return [
        WorkerMeasurements(
            rank=reply["rank"],
            num_workers=reply["num_workers"],
            state=RecorderState.model_validate_json(reply["state"]),
        )
        for reply in sorted(replies, key=lambda reply: int(reply["rank"]))
    ]


def shares_of(replies: Sequence[Mapping[str, Any]]) -> list[dict[str, list[Shard]]]:
    """Return, by rank, the tensor-parallel shares that had noise, by operator."""
    return [
        {operator: [Shard(*share) for share in shares] for operator, shares in reply["shards"].items()}
        for reply in sorted(replies, key=lambda reply: int(reply["rank"]))
    ]
