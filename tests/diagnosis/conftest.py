from collections.abc import Callable

import pytest
import torch
from random_models import random_model_of
from transformers import Qwen2Config, Qwen2ForCausalLM

from aqnpipe.config.diagnosis import DiagnosisConfig

VOCABULARY = 100


@pytest.fixture(scope="session")
def small_config() -> DiagnosisConfig:
    return DiagnosisConfig(num_prompts=3, num_repeats=3, gain_trials=3)


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Qwen2ForCausalLM]:
    """Random Qwen2 of a seed; 64 channels, eager attention."""

    def make(seed: int = 0, num_layers: int = 5) -> Qwen2ForCausalLM:
        torch.set_num_threads(1)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            config = Qwen2Config(
                vocab_size=VOCABULARY,
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=num_layers,
                num_attention_heads=2,
                num_key_value_heads=1,
                attn_implementation="eager",
            )
            return Qwen2ForCausalLM(config).eval()

    return make


@pytest.fixture(scope="session")
def prompt_ids() -> list[torch.Tensor]:
    """Three prompts of different lengths, as they come from a tokenizer."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in (24, 31, 40)]


@pytest.fixture(scope="session")
def random_model() -> Callable[..., torch.nn.Module]:
    """Small random models of architectures that differ in norms, biases and branch ends, in any dtype."""
    return random_model_of
