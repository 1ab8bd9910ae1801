"""The start of vLLM, with a stand-in for vLLM itself."""

import os
import sys
from types import SimpleNamespace

import pytest

from aqnpipe.errors import ModelError
from aqnpipe.generation.vllm.launch import kv_cache_bytes, refuse_too_large, start

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
