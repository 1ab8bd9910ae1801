"""Weights in sealed memory: what was written is read, by other processes of the user too, and cannot change."""

import errno
import fcntl
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from aqnpipe.errors import LostPeerError, ModelError, ReceiptError
from aqnpipe.generation.vllm.sealed_memory import Sealed, SealedMemory, read_sealed

TENSORS = {
    "scalar": torch.tensor(3.5),
    "odd": torch.tensor([1.0, -2.0, float("inf")], dtype=torch.bfloat16),
    "transposed": torch.arange(6.0).view(2, 3).T,
    "empty": torch.empty(0, 4),
    "whole numbers": torch.tensor([[2**40, -1]]),
}


@pytest.fixture
def memory():
    with SealedMemory() as memory:
        for name, tensor in TENSORS.items():
            memory.add(name, tensor)
        yield memory


def test_tensors_are_read_as_they_were_written(memory):
    found = read_sealed(memory.seal())
    assert list(found) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name], tensor)


READER = """
import sys
from pathlib import Path
from aqnpipe.generation.vllm.sealed_memory import Sealed, read_sealed
tensors = read_sealed(Sealed(Path(sys.argv[1]), sys.argv[2]))
tensors["odd"].fill_(0)
print(tensors["transposed"].tolist())
"""


def test_another_process_reads_it_and_cannot_change_what_others_read(memory):
    sealed = memory.seal()
    shown = subprocess.run(
        [sys.executable, "-c", READER, str(sealed.path), sealed.token], capture_output=True, text=True, check=True
    )
    assert shown.stdout.strip() == "[[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]"
    assert torch.equal(read_sealed(sealed)["odd"], TENSORS["odd"])


def test_nothing_can_be_written_after_the_seal(memory):
    sealed = memory.seal()
    number = int(sealed.path.name)
    for change in (
        lambda: os.pwrite(number, b"x", 0),
        lambda: os.truncate(number, 1),
        lambda: sealed.path.write_bytes(b"x"),
        lambda: mmap.mmap(number, 0),
        lambda: fcntl.fcntl(number, fcntl.F_ADD_SEALS, 0),
        lambda: memory.add("late", torch.ones(1)),
    ):
        with pytest.raises(PermissionError):
            change()
    assert torch.equal(read_sealed(sealed)["scalar"], TENSORS["scalar"])


def test_every_copy_has_a_token_of_its_own():
    tokens = set()
    for _ in range(2):
        with SealedMemory() as memory:
            memory.add("a", torch.ones(1))
            tokens.add(memory.seal().token)
    assert [len(token) for token in tokens] == [64, 64]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EIO])
def test_only_missing_memory_is_called_that(monkeypatch, number):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    with SealedMemory() as memory:
        monkeypatch.setattr("aqnpipe.generation.vllm.sealed_memory.os.write", refuse)
        with pytest.raises(OSError if number == errno.EIO else ModelError) as refused:
            memory.add("a", torch.ones(1))
    if number != errno.EIO:
        assert f"no memory on this node for a copy of the weights, after 0.0 GB ({os.strerror(number)})" in str(
            refused.value
        )


def test_a_system_that_gives_no_memory_file_or_mapping_is_one_line(memory, monkeypatch):
    sealed = memory.seal()

    def refuse(*_, **__):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(ModelError, match=r"^weight sync: the weights in \S+ cannot be mapped: Cannot allocate memory$"):
        read_sealed(sealed)
    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(ModelError, match="no memory file for a copy of the weights: Cannot allocate memory;"):
        SealedMemory()


def test_memory_that_is_not_sealed_or_another_is_refused(memory, tmp_path):
    open_memory = f"/proc/{os.getpid()}/fd/{memory._file}"
    with pytest.raises(ReceiptError, match="is not sealed, so its weights may change"):
        read_sealed(Sealed(open_memory, "0" * 64))
    sealed = memory.seal()
    with pytest.raises(ReceiptError, match=rf"ends with {sealed.token[:12]}, the trainer's copy with 000000000000"):
        read_sealed(Sealed(sealed.path, "0" * 64))
    (tmp_path / "copy").write_bytes(sealed.path.read_bytes())
    with pytest.raises(ReceiptError, match="is not sealed"):
        read_sealed(Sealed(tmp_path / "copy", sealed.token))


WRITER = """
import torch
from aqnpipe.generation.vllm.sealed_memory import SealedMemory
memory = SealedMemory()
memory.add("a", torch.ones(1))
sealed = memory.seal()
print(sealed.path, sealed.token, flush=True)
input()
"""


def test_a_writer_that_was_killed_is_named():
    with subprocess.Popen([sys.executable, "-c", WRITER], stdin=-1, stdout=-1, text=True) as writer:
        path, token = writer.stdout.readline().split()
        sealed = Sealed(Path(path), token)
        assert read_sealed(sealed)["a"].tolist() == [1.0]
        writer.kill()
    expected = f"^weight sync: the worker that wrote the weights, process {writer.pid}, has ended or failed$"
    with pytest.raises(LostPeerError, match=expected):
        read_sealed(sealed)


def test_it_is_freed_at_the_end():
    with SealedMemory() as memory:
        sealed = memory.seal()
        assert sealed.path.exists()
    with pytest.raises(LostPeerError, match=f"process {os.getpid()}, has ended or failed"):
        read_sealed(sealed)
