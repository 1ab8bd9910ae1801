"""Weights between a trainer and an engine: the buffer that another process reads ends with its writer."""

import errno
import inspect
import mmap
import os
import subprocess
import sys

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from aqnpipe.errors import ModelError
from aqnpipe.generation.vllm.weights import WeightBuffer, opened, plain, rebuilding

CPU = torch.device("cpu")
TENSORS = {
    "scalar": torch.tensor(3.5),
    "odd": torch.tensor([1.0, -2.0, float("inf")], dtype=torch.bfloat16),
    "transposed": torch.arange(6.0).view(2, 3).T,
    "empty": torch.empty(0, 4),
    "whole numbers": torch.tensor([[2**40, -1]]),
}


def test_tensors_are_read_as_they_were_written():
    with WeightBuffer(list(TENSORS.items())) as buffer:
        found = opened(buffer.shared(), buffer.index, CPU)
        assert list(found) == list(TENSORS)
        for name, tensor in TENSORS.items():
            assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(found[name], tensor)
        assert all(start % 64 == 0 for *_, start in buffer.index)
    with WeightBuffer([("empty", TENSORS["empty"])]) as buffer:
        assert opened(buffer.shared(), buffer.index, CPU)["empty"].shape == (0, 4)


READER = """
import json, sys, torch
from aqnpipe.generation.vllm.weights import opened
tensors = opened(*json.loads(sys.argv[1]), torch.device("cpu"))
tensors["odd"].fill_(0)
print(tensors["transposed"].tolist())
"""


def test_another_process_reads_it_from_plain_data_and_changes_nothing():
    import json

    with WeightBuffer(list(TENSORS.items())) as buffer:
        sent = json.dumps([buffer.shared(), buffer.index])
        shown = subprocess.run([sys.executable, "-c", READER, sent], capture_output=True, text=True, check=True)
        assert shown.stdout.strip() == "[[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]"
        assert torch.equal(opened(buffer.shared(), buffer.index, CPU)["odd"], TENSORS["odd"])


WRITER = """
import torch
from aqnpipe.generation.vllm.weights import WeightBuffer
buffer = WeightBuffer([("a", torch.ones(1))])
print(buffer.shared()[0], flush=True)
input()
"""


def test_it_is_freed_at_the_end_and_with_a_writer_that_was_killed():
    with WeightBuffer([("a", torch.ones(1))]) as buffer:
        (path,) = shared = buffer.shared()
        assert os.path.exists(path)
    with pytest.raises(ModelError, match=rf"^weight sync: {path} cannot be read: No such file or directory$"):
        opened(shared, buffer.index, CPU)
    with subprocess.Popen([sys.executable, "-c", WRITER], stdin=-1, stdout=-1, text=True) as writer:
        shared = [writer.stdout.readline().strip()]
        assert opened(shared, buffer.index, CPU)["a"].tolist() == [1.0]
        writer.kill()
    with pytest.raises(ModelError, match="cannot be read"):
        opened(shared, buffer.index, CPU)


def test_a_host_without_memory_is_one_line_before_anything_is_written(monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    open_files = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(
        ModelError, match=r"no memory on this node for 0\.0 GB of weights \(Cannot allocate memory\); g"
    ):
        WeightBuffer([("a", torch.ones(1))])
    assert len(os.listdir("/proc/self/fd")) == open_files


def test_memory_that_cannot_be_mapped_is_one_line(monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with WeightBuffer([("a", torch.ones(1))]) as buffer:
        monkeypatch.setattr(mmap, "mmap", refuse)
        with pytest.raises(ModelError, match=r"^weight sync: \S+ cannot be read: Cannot allocate memory$"):
            opened(buffer.shared(), buffer.index, CPU)


def test_the_handle_of_device_memory_is_that_of_torch_for_this_process_device():
    """Without a GPU only the order of the arguments can be tested: those of torch's own function for CUDA IPC."""
    names = list(inspect.signature(rebuild_cuda_tensor).parameters)
    shared = plain(names)
    assert (
        [*names[7:10], *names[11:]]
        == shared
        == [
            *("storage_handle", "storage_size_bytes", "storage_offset_bytes"),
            *("ref_counter_handle", "ref_counter_offset", "event_handle", "event_sync_required"),
        ]
    )
    shared[names.index("storage_size_bytes") - 7] = 640
    assert dict(zip(names, rebuilding(shared, torch.device("cuda", 3)), strict=True)) == {
        **{name: name for name in shared if isinstance(name, str)},
        "tensor_cls": torch.Tensor,
        "tensor_size": torch.Size([640]),
        "tensor_stride": (1,),
        "tensor_offset": 0,
        "storage_cls": torch.UntypedStorage,
        "dtype": torch.uint8,
        "storage_device": 3,
        "storage_size_bytes": 640,
        "requires_grad": False,
    }
