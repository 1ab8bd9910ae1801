"""Weights in sealed memory: what was written is read, by other processes of the user too, and cannot change."""

import fcntl
import mmap
import os
import subprocess
import sys

import pytest
import torch

from aqnpipe.errors import ModelError, ReceiptError
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
        [sys.executable, "-c", READER, str(sealed.path), sealed.sha256], capture_output=True, text=True, check=True
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
    ):
        with pytest.raises(PermissionError):
            change()
    with pytest.raises(ModelError, match="no memory on this node for a copy of the weights"):
        memory.add("late", torch.ones(1))
    assert torch.equal(read_sealed(sealed)["scalar"], TENSORS["scalar"])


def test_the_digest_is_that_of_names_and_contents():
    digests = set()
    for name, value in (("a", 1.0), ("a", 2.0), ("b", 1.0), ("a", 1.0)):
        with SealedMemory() as memory:
            memory.add(name, torch.tensor([value]))
            digests.add(memory.seal().sha256)
    assert len(digests) == 3


def test_memory_that_is_not_sealed_or_another_is_refused(memory, tmp_path):
    open_memory = f"/proc/{os.getpid()}/fd/{memory._file}"
    with pytest.raises(ReceiptError, match="is not sealed, so its weights may change"):
        read_sealed(Sealed(open_memory, "0" * 64))
    sealed = memory.seal()
    with pytest.raises(ReceiptError, match=r"has SHA-256 \w{12}, the trainer sent 000000000000"):
        read_sealed(Sealed(sealed.path, "0" * 64))
    (tmp_path / "copy").write_bytes(sealed.path.read_bytes())
    with pytest.raises(ReceiptError, match="is not sealed"):
        read_sealed(Sealed(tmp_path / "copy", sealed.sha256))


def test_it_is_freed_at_the_end():
    with SealedMemory() as memory:
        sealed = memory.seal()
        assert sealed.path.exists()
    with pytest.raises(ReceiptError, match="cannot be read: No such file"):
        read_sealed(sealed)
