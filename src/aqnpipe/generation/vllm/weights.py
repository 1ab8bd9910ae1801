"""Weights on their way from a trainer to vLLM's workers: one copy per node in sealed memory, compared bit for bit.

Of the workers on a node, the first writes its weights. Each worker then compares the sealed memory with its own
policy, and its engine compares what it holds with the sealed memory. An engine thus has the weights of its own worker's
policy, although another worker may have written them.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from aqnpipe.errors import ModelError, ReceiptError
from aqnpipe.generation.vllm.modules import EngineModel
from aqnpipe.generation.vllm.sealed_memory import Sealed, SealedMemory, read_sealed
from aqnpipe.models.layout import rms_norms, weight_of
from aqnpipe.models.shares import same_bits

Exchange = Callable[[Any], list[Any]]
"""Returns the argument of every worker, by rank; a collective operation."""


def for_engine(
    weights: Iterable[tuple[str, Tensor]], norms: Set[str], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield `weights` in `dtype`, the dtype of the engine; those named in `norms` keep the trainer's dtype.

    AQN noise can be smaller than the resolution of bfloat16.
    """
    for name, tensor in weights:
        yield name, tensor.detach().to(tensor.dtype if name in norms else dtype)


def refuse_without_room(num_bytes: int) -> None:
    """Raise ModelError if this node has not `num_bytes` of free memory, for one copy of the weights."""
    available = psutil.virtual_memory().available
    if num_bytes > available:
        raise ModelError(
            f"rollouts by vLLM: a copy of the weights takes {num_bytes / 1e9:.1f} GB, {available / 1e9:.1f} GB of this "
            "node's memory are free; generation.rollout_backend: transformers needs none"
        )


@contextmanager
def shared_weights(weights: Callable[[], Iterable[tuple[str, Tensor]]], exchange: Exchange) -> Iterator[Sealed]:
    """Yield the sealed memory with the weights of this node, for the body to load; a collective operation.

    `weights` returns them anew at each call: they are written in a first pass, and compared in a second. Raises
    ReceiptError if those of this worker differ from what was written.
    """
    own = (_node(), os.getpid())
    writer = next(worker for worker in exchange(own) if worker[0] == own[0])
    with ExitStack() as stack:
        memory = stack.enter_context(SealedMemory()) if writer == own else None
        for name, tensor in weights():
            if memory is not None:
                memory.add(name, tensor)
        sealed = dict(exchange((own, memory.seal() if memory is not None else None)))[writer]
        _refuse_other_weights(weights(), sealed)
        yield sealed
        # The memory is freed when all engines of the node have loaded it.
        exchange(None)


def load_sent_weights(engine: EngineModel, sealed: Sealed) -> None:
    """Load sealed weights into a worker's model, and compare every parameter of it with them, bit for bit.

    Raises what `read_sealed` raises, and ReceiptError if any parameter differs.
    """
    sent = read_sealed(sealed)
    for name, norm in rms_norms(engine.model, "all_norms").items():
        weight = weight_of(norm)
        if f"{name}.weight" in sent:
            weight.data = weight.data.to(sent[f"{name}.weight"].dtype)
    with torch.no_grad():
        engine.model.load_weights(sent.items())  # type: ignore[operator] # every vLLM model has this method
    # Read again: loading may have changed the tensors that it was given. What it changed is freed first.
    del sent
    sent, held = read_sealed(sealed), engine.weights()
    model = f"vLLM's {type(engine.model).__name__}"
    differing = sorted(sent.keys() ^ held.keys())
    if differing:
        raise ReceiptError(
            f"weight sync: {model} has {len(held)} parameters, the trainer sent {len(sent)}; on one side only: "
            f"{', '.join(differing[:3])}"
        )
    stale = [name for name, tensor in sent.items() if not _is_same(tensor, held[name])]
    if stale:
        raise ReceiptError(
            f"weight sync: {len(stale)} of {len(sent)} parameters of {model} differ from those that the trainer sent: "
            f"{', '.join(stale[:3])}"
        )


def _refuse_other_weights(weights: Iterable[tuple[str, Tensor]], sealed: Sealed) -> None:
    """Raise ReceiptError unless `weights` are those in sealed memory, all of them and bit for bit."""
    sent = read_sealed(sealed)
    differing = [name for name, tensor in weights if name not in sent or not _is_same(sent.pop(name), tensor)]
    if differing or sent:
        raise ReceiptError(
            "weight sync: the weights written for the engines of this node are not those of this worker's policy: "
            f"{', '.join([*differing, *sent][:3])}"
        )


def _is_same(sent: Tensor, held: Tensor) -> bool:
    return same_bits(sent.to(held.device), held)


def _node() -> str:
    """Return what processes that can open each other's memory have in common: machine, process ids, and user."""
    machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespaces = (os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "user"))
    return " ".join(map(str, (machine, *namespaces, os.getuid())))
