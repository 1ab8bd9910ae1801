"""The start of vLLM and its modes, with a stand-in for vLLM itself."""

import os
import sys
from types import SimpleNamespace

import pytest
import torch

from aqnpipe.device import nvidia_capability
from aqnpipe.errors import ModelError, ReceiptError
from aqnpipe.generation.vllm.engine import VllmEngine
from aqnpipe.generation.vllm.launch import kv_cache_bytes, refuse_too_large, start, why_not_batch_invariant
from aqnpipe.generation.vllm.worker import is_batch_invariant

QWEN_1_5B = {"num_attention_heads": 12, "num_key_value_heads": 2, "num_hidden_layers": 28, "hidden_size": 1536}


@pytest.mark.parametrize(("dtype", "bytes_each"), [("float32", 4), ("bfloat16", 2)])
def test_the_cache_holds_a_full_batch(dtype, bytes_each):
    # Keys and values of 2 heads of 128 channels in 28 layers; 300 tokens fill 3 blocks of 128, a row has one more.
    per_token = 2 * 28 * 2 * 128 * bytes_each
    assert kv_cache_bytes(QWEN_1_5B, dtype, max_tokens=300, batch_size=10) == (10 * (3 + 1) + 1) * 128 * per_token


def test_head_dim_counts_where_a_model_names_it():
    assert kv_cache_bytes({**QWEN_1_5B, "head_dim": 64}, "float32", 128, 1) == 3 * 128 * 2 * 28 * 2 * 64 * 4


@pytest.mark.parametrize(("num_workers", "heads"), [(2, 1), (4, 1)])
def test_a_tensor_parallel_worker_caches_its_heads_and_at_least_one(num_workers, heads):
    per_block = 128 * 2 * 28 * heads * 128 * 2
    assert kv_cache_bytes(QWEN_1_5B, "bfloat16", 128, 1, num_workers) == 3 * per_block


def test_too_little_memory_is_one_line_with_the_remedy(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(bytes(2_000_000))
    refuse_too_large(tmp_path, 1_000_000, 3_000_000)
    with pytest.raises(
        ModelError, match=r"needs 5\.0 GB .* 3\.0 GB of memory are free: .*evaluation\.batch_size"
    ) as refused:
        refuse_too_large(tmp_path, 5_000_000_000, 3_000_000_000)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("device", "expected"), [("cuda", "5"), ("cpu", "4,5")])
def test_an_engine_sees_the_device_of_its_process_or_all_if_it_has_several_workers(
    tmp_path, monkeypatch, device, expected
):
    """Ray makes all GPUs of a node visible to each training worker, and an engine uses the first visible one."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=lambda: dict(os.environ)))
    several = start(tmp_path, {}, device, threads=3, num_devices=2)
    assert several["CUDA_VISIBLE_DEVICES"] == "4,5"
    seen = start(tmp_path, {}, device, threads=3)
    assert (seen["CUDA_VISIBLE_DEVICES"], seen["OMP_NUM_THREADS"], seen["VLLM_HOST_IP"]) == (expected, "3", "127.0.0.1")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert "VLLM_HOST_IP" not in os.environ


def test_engines_run_on_the_model_runner_that_takes_the_stop_processor(tmp_path, monkeypatch):
    """On GPUs vLLM's default is another one, which refuses the interface of the processor when the engine starts."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=lambda: dict(os.environ)))
    assert start(tmp_path, {}, "cuda", threads=1)["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1"


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
