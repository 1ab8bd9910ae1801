"""Weights on their way from a trainer to its worker of vLLM, and the proof that they arrived.

They pass through a buffer (`weight_buffer`), some at a time. That the engine computes with them does not rest on the
buffer, nor on when it was written and read: when all are loaded, the worker returns a digest of every parameter that it
holds, and the trainer compares them with digests of its own policy's weights. A random key, drawn for each sync, makes
answers from another sync differ.
"""

from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

import torch
from torch import Tensor

from aqnpipe.errors import ReceiptError
from aqnpipe.generation.vllm.modules import EngineModel
from aqnpipe.models.layout import rms_norms, weight_of

BUFFER_BYTES = 1 << 28  # Weights of this size are sent together; a larger one alone.

_CHUNK = 1 << 20
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def for_engine(
    weights: Iterable[tuple[str, Tensor]], norms: Set[str], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield `weights` in `dtype`, the dtype of the engine; those named in `norms` keep the trainer's dtype.

    AQN noise can be smaller than the resolution of bfloat16.
    """
    for name, tensor in weights:
        yield name, tensor.detach().to(tensor.dtype if name in norms else dtype)


def in_buffers(weights: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield `weights` in lists of at most `BUFFER_BYTES`, or of one weight."""
    found: list[tuple[str, Tensor]] = []
    for each in weights:
        if found and sum(tensor.nbytes for _, tensor in (*found, each)) > BUFFER_BYTES:
            yield found
            found = []
        found.append(each)
    if found:
        yield found


def load_sent(engine: EngineModel, sent: Mapping[str, Tensor]) -> None:
    """Load weights into a worker's model; norms take the format of those sent."""
    for name, norm in rms_norms(engine.model, "all_norms").items():
        weight = weight_of(norm)
        if f"{name}.weight" in sent:
            weight.data = weight.data.to(sent[f"{name}.weight"].dtype)
    with torch.no_grad():
        engine.model.load_weights(sent.items())  # type: ignore[operator] # every vLLM model has this method
    if any(tensor.is_cuda for tensor in sent.values()):
        # The trainer frees the memory when this process has answered.
        torch.accelerator.synchronize()


class Digests:
    """Digests of tensors under a key: of the bits, number format and shape, equal on every device.

    The bits are words of an integer format, and the digest is their sum, each times a random number, modulo 2^64: a
    multilinear hash (Lemire and Kaser, arXiv:1202.4961), of chunks and then of chunks' sums. It misses a difference
    with a probability of about 2^-32.

    >>> digests, values = Digests(1), torch.tensor([0.0, float("nan")])
    >>> [digests.of(values) == each for each in (Digests(1).of(values), digests.of(-values), Digests(2).of(values))]
    [True, False, False]
    """

    def __init__(self, key: int) -> None:
        self._factors = torch.empty(_CHUNK, dtype=torch.int64).random_(generator=torch.Generator().manual_seed(key))

    def of(self, tensor: Tensor) -> str:
        """Return the digest of a tensor."""
        content = tensor.detach()
        if content.device.type not in ("cpu", "cuda"):
            content = content.cpu()  # Whether integers of an NPU wrap around was not tried.
        words = content.contiguous().reshape(-1).view(_WORDS[content.element_size()])
        factors = self._factors = self._factors.to(words.device)
        total = torch.zeros((), dtype=torch.int64, device=words.device)
        for number, chunk in enumerate(words.split(_CHUNK)):
            total += (chunk.long() * factors[: len(chunk)]).sum() * (factors[number] | 1)
        return f"{content.dtype} {list(content.shape)} {int(total)}"


def refuse_other_weights(model: str, sent: Mapping[str, str], held: Mapping[str, Any]) -> None:
    """Raise ReceiptError unless the digests of what an engine holds are those of what the trainer sent."""
    differing = sorted(sent.keys() ^ held.keys())
    if differing:
        raise ReceiptError(
            f"weight sync: {model} has {len(held)} parameters, the trainer sent {len(sent)}; on one side only: "
            f"{', '.join(differing[:3])}"
        )
    stale = [name for name, digest in sent.items() if held[name] != digest]
    if stale:
        raise ReceiptError(
            f"weight sync: {len(stale)} of {len(sent)} parameters of {model} differ from those that the trainer sent: "
            f"{', '.join(stale[:3])}"
        )
