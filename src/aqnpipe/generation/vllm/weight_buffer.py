"""Memory that a trainer writes and a worker of vLLM reads: some weights at a time, then it is freed.

On a GPU, which a training worker shares with its engine, it is memory of that GPU, opened in the other process through
CUDA IPC: weights never leave the device. Elsewhere it is a file without a name in the host's memory (memfd). Both are
freed with their processes, also after a kill, and the size of /dev/shm limits neither.

Nothing here proves what arrives: see `weights`.
"""

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from aqnpipe.errors import ModelError

_ALIGNMENT = 64


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
