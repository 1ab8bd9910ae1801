"""Sends weights from a trainer to vLLM's workers: one safetensors file, verified by its SHA-256."""

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
    """Write `weights` to `path` in `dtype`, the dtype of the engine; return the SHA-256 of the file.

    Weights named in `norms` keep the trainer's dtype, because AQN noise can be smaller than the resolution of bfloat16.
    If several names share one tensor (tied embeddings), only the first is sent.
    """
    seen, sent = set(), {}
    for name, tensor in weights.items():
        place = (tensor.data_ptr(), tensor.shape)
        if place not in seen:
            sent[name] = tensor.detach().to(tensor.dtype if name in norms else dtype).contiguous()
            seen.add(place)
    save_file(sent, path)
    return sha256_of_file(path)


def load_sent_weights(engine: EngineModel, path: Path, sha256: str) -> None:
    """Load the file of `send_weights` into a worker's model, and compare every parameter with it, bit for bit.

    Raises ReceiptError if the file has another SHA-256, or if any parameter of the model differs from the file.
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
        engine.model.load_weights(sent.items())  # type: ignore[operator] # every vLLM model has this method
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
            f"weight sync: {len(stale)} of {len(sent)} parameters of {model} differ from those that the trainer sent: "
            f"{', '.join(stale[:3])}"
        )


def _is_same(sent: Tensor, held: Tensor) -> bool:
    return sent.dtype == held.dtype and torch.equal(sent.to(held.device), held)
