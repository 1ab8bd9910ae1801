"""Shared fixtures: one torch thread (results on CPU depend on it) and a small random model."""

import os

import pytest
import torch

# Triton decides when it is imported, which transformers does, whether its kernels are interpreted on CPU tensors.
os.environ["TRITON_INTERPRET"] = "0" if torch.cuda.is_available() else "1"

from transformers import Qwen2Config, Qwen2ForCausalLM


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run slow files first: one of them at the end would keep one process busy and the other idle."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def random_qwen2(num_layers: int = 3, seed: int = 0, **overrides) -> Qwen2ForCausalLM:
    """A Qwen2 with random weights, 32 channels wide, eager attention."""
    settings = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "attn_implementation": "eager",
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
    }
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(Qwen2Config(**{**settings, **overrides})).eval()


@pytest.fixture
def model() -> Qwen2ForCausalLM:
    return random_qwen2()


@pytest.fixture(scope="session")
def make_model():
    return random_qwen2
