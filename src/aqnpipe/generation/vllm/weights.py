"""Weights on their way from a trainer to vLLM's workers: one safetensors file, known by its digest."""

from collections.abc import Mapping, Set
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from aqnpipe.artifacts.provenance import sha256_of_file
from aqnpipe.errors import ReceiptError
from aqnpipe.generation.vllm.modules import EngineModel
from aqnpipe.models.layout import rms_norms, weight_of


def send_weights(weights: Mapping[str, Tensor], norms: Set[str], dtype: torch.dtype, path: Path) -> str:
    """Write `weights` to `path` in the format that the engine computes in, and return the SHA-256 of the file.

    The `norms` among their names stay in the trainer's own format: AQN's noise may be smaller than what bfloat16 can
    tell apart. Of names that share one tensor (tied embeddings) the first is sent.
    """
    kept, sent = set(), {}
    for name, tensor in weights.items():
        place = (tensor.data_ptr(), tensor.shape)
        if place not in kept:
            sent[name] = tensor.detach().to(tensor.dtype if name in norms else dtype).contiguous()
            kept.add(place)
    save_file(sent, path)
    return sha256_of_file(path)


def take_weights(engine: EngineModel, path: Path, sha256: str) -> None:
    """Load what `send_weights` wrote into a worker's model, and compare every parameter with it, bit for bit.

    Raises ReceiptError if the file is another one, or if the model holds anything else than what was sent.
    """
    found = sha256_of_file(path)
    if found != sha256:
        raise ReceiptError(f"weight sync: {path} has SHA-256 {found[:12]}, the trainer sent {sha256[:12]}")
    sent = load_file(path)
    for name, norm in rms_norms(engine.model, "all_norms").items():
        weight = weight_of(norm)
        if f"{name}.weight" in sent:
            weight.data = weight.data.to(sent[f"{name}.weight"].dtype)
    with torch.no_grad():
        engine.model.load_weights(sent.items())  # type: ignore[operator] # every model of vLLM has it
    held = engine.weights()
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
            f"weight sync: {len(stale)} of {len(sent)} parameters of {model} are not what the trainer sent: "
            f"{', '.join(stale[:3])}"
        )


def _is_same(sent: Tensor, held: Tensor) -> bool:
    return sent.dtype == held.dtype and torch.equal(sent.to(held.device), held)
