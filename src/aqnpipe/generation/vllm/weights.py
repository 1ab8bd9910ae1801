"""Weights on their way from a trainer to its worker of vLLM, and the proof that they arrived.

They pass through a buffer that a trainer writes and a worker reads: some weights at a time, then it is freed. On a GPU,
which a training worker shares with its engine, it is memory of that GPU, opened in the other process through CUDA IPC:
weights never leave the device. Elsewhere it is a file without a name in the host's memory (memfd). Both are freed with
their processes, also after a kill, and the size of /dev/shm limits neither.

That the engine computes with them does not rest on the buffer, nor on when it was written and read: when all are
loaded, the worker returns a digest of every parameter that it holds, and the trainer compares them with digests of its
own policy's weights. A random key, drawn for each sync, makes answers from another sync differ.
"""

import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from aqnpipe.errors import ModelError, ReceiptError
from aqnpipe.generation.vllm.modules import EngineModel
from aqnpipe.models.layout import rms_norms, weight_of

BUFFER_BYTES = 1 << 28  # Weights of this size are sent together; a larger one alone.

_ALIGNMENT = 64
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


class WeightBuffer:
    """Holds copies of `weights`, which are on one device; a context manager that frees them.

    `index`: name, dtype, shape and first byte of each. Raises ModelError if the host has no memory for them.
    """

    def __init__(self, weights: Sequence[tuple[str, Tensor]]) -> None:
        self.index: list[tuple[str, str, list[int], int]] = []
        size = 0
        for name, tensor in weights:
            self.index.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), size))
            size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        device = weights[0][1].device
        self._file = None if device.type == "cuda" else _memory_file(size)
        self._content = torch.empty(size, dtype=torch.uint8, device=device) if self._file is None else _map(self._file)
        for (_, tensor), copy in zip(weights, _views(self._content, self.index).values(), strict=True):
            copy.copy_(tensor.detach())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        del self._content
        if self._file is not None:
            os.close(self._file)

    def shared(self) -> list[Any]:
        """Return, as plain data, what `opened` needs; for one opening, because torch counts those of device memory."""
        if self._file is not None:
            return [f"/proc/{os.getpid()}/fd/{self._file}"]
        torch.accelerator.synchronize(self._content.device)
        return plain(reduce_tensor(self._content)[1])


def opened(shared: Sequence[Any], index: Sequence[Sequence[Any]], device: torch.device) -> dict[str, Tensor]:
    """Return the weights in another process's buffer by name, uncopied; what changes them is not seen there.

    `device`: the GPU, by its number in this process. Raises ModelError if this process cannot open host memory.
    """
    if len(shared) > 1:
        return _views(rebuild_cuda_tensor(*rebuilding(shared, device)), index)
    try:
        with Path(shared[0]).open("rb") as file:
            return _views(_map(file.fileno(), mmap.ACCESS_COPY), index)
    except OSError as error:
        raise ModelError(f"weight sync: {shared[0]} cannot be read: {error.strerror}") from error


def plain(arguments: Sequence[Any]) -> list[Any]:
    """Return of the arguments of `rebuild_cuda_tensor` those that are handles and numbers; see `rebuilding`."""
    return [*arguments[7:10], *arguments[11:]]


def rebuilding(shared: Sequence[Any], device: torch.device) -> list[Any]:
    """Return the arguments of `rebuild_cuda_tensor`, of which `shared` are the plain ones, for bytes on `device`."""
    size = torch.Size([shared[1]])
    of_tensor = [torch.Tensor, size, (1,), 0, torch.UntypedStorage, torch.uint8, device.index or 0]
    return [*of_tensor, *shared[:3], False, *shared[3:]]


def _views(content: Tensor, index: Sequence[Sequence[Any]]) -> dict[str, Tensor]:
    found = {}
    for name, dtype, shape, start in index:
        number_format = getattr(torch, dtype)
        end = start + torch.Size(shape).numel() * number_format.itemsize
        found[name] = content[start:end].view(number_format).view(shape)
    return found


def _memory_file(size: int) -> int:
    file = os.memfd_create("aqnpipe-weights", os.MFD_CLOEXEC)
    try:
        # Without it, memory that the system does not have would end the process when it is written.
        os.posix_fallocate(file, 0, max(size, 1))
    except OSError as error:
        os.close(file)
        raise ModelError(
            f"rollouts by vLLM: no memory on this node for {size / 1e9:.1f} GB of weights ({error.strerror}); "
            "generation.rollout_backend: transformers needs none"
        ) from error
    return file


def _map(file: int, access: int = mmap.ACCESS_WRITE) -> Tensor:
    return torch.frombuffer(mmap.mmap(file, 0, access=access), dtype=torch.uint8)


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
