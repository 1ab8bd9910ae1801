"""Tensors in memory that nobody can change any more: written by one process of a node, read by others of its user.

The memory is a file without a name (memfd). It is freed with its processes, also after a kill, and the size of /dev/shm
does not limit it. After writing, it is sealed: the kernel refuses every further change, by any process. Readers open it
as /proc/<process>/fd/<number>, which the kernel allows only to processes of the same user.

Its content is the tensors, an index of them (JSON), and at the end the size of the index and a random token. The token
names this copy and is passed with the path. The content is not hashed: it cannot change after the seal, and readers
compare it with weights of their own.
"""

import errno
import fcntl
import json
import mmap
import os
import secrets
import struct
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from aqnpipe.errors import LostPeerError, ModelError, ReceiptError

SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
"""Neither the content, nor the size, nor these seals can be changed."""

_END = struct.Struct("<Q32s")
_ALIGNMENT = 64
_NO_MEMORY = (errno.ENOSPC, errno.ENOMEM, errno.EFBIG)


class Sealed(NamedTuple):
    """Where sealed memory can be read on this node while its writer lives, and the token at its end (64 hex digits)."""

    path: Path
    token: str


class SealedMemory:
    """Memory that is written one tensor after the other and then sealed; a context manager that frees it.

    Raises ModelError if the system has none to give.
    """

    def __init__(self) -> None:
        try:
            self._file = os.memfd_create("aqnpipe-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise ModelError(
                f"rollouts by vLLM: no memory file for a copy of the weights: {error.strerror}; "
                "generation.rollout_backend: transformers needs none"
            ) from error
        self._size = 0
        self._index: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def add(self, name: str, tensor: Tensor) -> None:
        """Append a tensor. Raises ModelError if the node has no memory left for it."""
        self._write(bytes(-self._size % _ALIGNMENT))
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._index.append({"name": name, "dtype": dtype, "shape": list(tensor.shape), "start": self._size})
        content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        self._write(content.numpy())

    def seal(self) -> Sealed:
        """Make the memory unchangeable; return where it can be read."""
        index = json.dumps(self._index).encode()
        self._write(index)
        token = secrets.token_hex(32)
        self._write(_END.pack(len(index), bytes.fromhex(token)))
        fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, SEALS)
        return Sealed(Path(f"/proc/{os.getpid()}/fd/{self._file}"), token)

    def _write(self, content: Any) -> None:
        left = memoryview(content)
        self._size += len(left)
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError as error:
            if error.errno not in _NO_MEMORY:
                raise
            raise ModelError(
                f"rollouts by vLLM: no memory on this node for a copy of the weights, after {self._size / 1e9:.1f} GB "
                f"({error.strerror}); generation.rollout_backend: transformers needs none"
            ) from error


def read_sealed(sealed: Sealed) -> dict[str, Tensor]:
    """Return the tensors in sealed memory by name, without copying them; changes of them stay in this process.

    Raises ReceiptError if the memory is not sealed or ends with another token, LostPeerError if it is gone, and
    ModelError if this process cannot map it.
    """
    path, token = sealed
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError) as error:
        # /proc/<process>/fd/<number>. A writer that lives has freed it only after an error of its own.
        raise LostPeerError(
            f"weight sync: the worker that wrote the weights, process {path.parent.parent.name}, has ended or failed"
        ) from error
    except OSError as error:
        raise ReceiptError(f"weight sync: {path} cannot be read: {error.strerror}") from error
    try:
        if not _is_sealed(file):
            raise ReceiptError(f"weight sync: {path} is not sealed, so its weights may change while they are read")
        memory = mmap.mmap(file, 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise ModelError(f"weight sync: the weights in {path} cannot be mapped: {error.strerror}") from error
    finally:
        os.close(file)
    index_size, found = _END.unpack_from(memory, len(memory) - _END.size)
    if found.hex() != token:
        raise ReceiptError(f"weight sync: {path} ends with {found.hex()[:12]}, the trainer's copy with {token[:12]}")
    index = json.loads(memory[-_END.size - index_size : -_END.size])
    return {entry["name"]: _tensor(memory, entry) for entry in index}


def _tensor(memory: mmap.mmap, entry: dict[str, Any]) -> Tensor:
    shape, dtype = torch.Size(entry["shape"]), getattr(torch, entry["dtype"])
    if shape.numel() == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=shape.numel(), offset=entry["start"]).view(shape)


def _is_sealed(file: int) -> bool:
    try:
        return fcntl.fcntl(file, fcntl.F_GET_SEALS) & SEALS == SEALS
    except OSError:
        # An ordinary file has no seals.
        return False
