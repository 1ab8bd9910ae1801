"""vLLM's batch-invariant mode: where rollouts use it, and what the record says where they do not."""

import os
import sys
from types import SimpleNamespace

import pytest
import torch

from aqnpipe.device import nvidia_capability
from aqnpipe.errors import ReceiptError
from aqnpipe.generation.vllm.batch_invariance import why_not_batch_invariant
from aqnpipe.generation.vllm.engine import VllmEngine
from aqnpipe.generation.vllm.launch import start
from aqnpipe.generation.vllm.worker import is_batch_invariant

H100 = {"is_requested": True, "device": "cuda", "capability": (9, 0), "noised_rollouts": False}


@pytest.mark.parametrize("changes", [{}, {"capability": (8, 0)}, {"capability": (12, 0)}], ids=str)
def test_the_mode_is_used_where_the_device_has_it(changes):
    assert why_not_batch_invariant(**{**H100, **changes}) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"is_requested": False}, "generation.rollout_batch_invariance is false"),
        ({"device": "cpu", "capability": None}, "of kind cpu"),
        ({"device": "npu", "capability": None}, "of kind npu"),
        ({"capability": None}, "NVIDIA GPUs only"),
        ({"capability": (7, 5)}, "needs compute capability 8.0 or above, the device has 7.5"),
        ({"noised_rollouts": True}, "the arm has operator noise in rollouts"),
    ],
)
def test_the_reason_is_one_line(changes, reason):
    found = why_not_batch_invariant(**{**H100, **changes})
    assert found is not None
    assert reason in found
    assert "\n" not in found


def test_the_capability_is_that_of_this_process_on_a_gpu_of_nvidia(monkeypatch):
    capabilities = {0: (8, 0), 1: (9, 0)}
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(get_device_capability=capabilities.__getitem__))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert nvidia_capability("cuda") == (9, 0)
    assert nvidia_capability("cpu") is nvidia_capability("npu") is None
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert nvidia_capability("cuda") is None


@pytest.mark.parametrize(("requested", "seen"), [(True, "1"), (False, "0"), (None, "users")])
def test_the_workers_get_the_mode_that_was_decided(tmp_path, monkeypatch, requested, seen):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "users")
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=lambda: dict(os.environ)))
    assert start(tmp_path, {}, "cpu", 1, requested)["VLLM_BATCH_INVARIANT"] == seen
    assert os.environ["VLLM_BATCH_INVARIANT"] == "users"


@pytest.mark.parametrize(("requested", "found"), [(True, [True, False]), (False, [True]), (True, [False])])
def test_a_worker_in_the_other_mode_is_refused(requested, found):
    engine = SimpleNamespace(_workers=[{"batch_invariant": mode} for mode in found])
    with pytest.raises(ReceiptError, match=rf"batch-invariant mode: requested {requested}, its workers report"):
        VllmEngine._check_invariance(engine, requested)
    VllmEngine._check_invariance(engine, None)
    VllmEngine._check_invariance(SimpleNamespace(_workers=[{"batch_invariant": requested}]), requested)


def test_a_worker_reports_the_mode_that_is_in_force(monkeypatch):
    module = "vllm.model_executor.determinism.batch_invariant"
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    monkeypatch.delitem(sys.modules, module, raising=False)
    assert is_batch_invariant() is False
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(_batch_invariant_MODE=True))
    assert is_batch_invariant() is True
