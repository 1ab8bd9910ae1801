"""Which models parity maps, proven on random weights, and which it refuses."""

import pytest
import torch
from random_models import random_model_of
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    GPTNeoXConfig,
    GraniteConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
)

from aqnpipe.errors import ModelError
from aqnpipe.parity.mapping import ModelTaps, prove

SIZES = {
    "vocab_size": 50,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def model_of(config):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("architecture", ["qwen2", "llama", "qwen3", "gemma2"])
def test_every_operator_of_a_known_family_is_proven(architecture):
    model = random_model_of(architecture)
    _, proven = prove(model)
    assert max(row["loose"] for row in proven.operators.values()) < 1
    assert {"layers.1.rotary_k", "layers.1.attention", "layers.1.activation", "lm_head"} <= proven.operators.keys()
    assert all(row["is_linked"] for row in proven.operators.values())
    mapped = {operator.name for operator in ModelTaps(model).operators}
    assert {name.replace("layers.1.", "layers.2.") for name in proven.operators} <= mapped


def test_merged_projections_are_mapped():
    _, proven = prove(model_of(Phi3Config(**SIZES, pad_token_id=0)))
    assert {"layers.0.qkv_proj", "layers.0.gate_up_proj", "layers.0.rotary_q"} <= proven.operators.keys()


def test_scaled_branches_are_known_to_be_no_links():
    _, proven = prove(model_of(GraniteConfig(**SIZES, residual_multiplier=0.3)))
    assert not proven.operators["layers.1.mlp_residual"]["is_linked"]
    assert proven.operators["layers.1.q_proj"]["is_linked"]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MixtralConfig(**SIZES), "mixture of experts"),
        (GPTNeoXConfig(**SIZES), "no linear that makes queries and keys"),
        (OPTConfig(**SIZES, ffn_dim=128, word_embed_proj_dim=96), "expected a row of channels for each"),
        (CohereConfig(**SIZES, use_qk_norm=True, pad_token_id=0, bos_token_id=1, eos_token_id=2), "gain of each head"),
    ],
)
def test_other_families_are_refused_in_one_line(config, reason):
    with pytest.raises(ModelError, match=reason):
        prove(model_of(config))


def test_a_family_with_attention_of_its_own_is_refused(monkeypatch):
    from transformers.models.qwen2 import modeling_qwen2

    class OwnAttention:
        def get_interface(self, name, default):
            return default

    monkeypatch.setattr(modeling_qwen2, "ALL_ATTENTION_FUNCTIONS", OwnAttention())
    with pytest.raises(ModelError, match=r"did not see layers.0.rotary_q, layers.0.rotary_k, layers.0.attention run"):
        prove(random_model_of("qwen2"))


def test_a_family_whose_operator_computes_something_else_is_refused(monkeypatch):
    from transformers.models.qwen2 import modeling_qwen2

    original = modeling_qwen2.apply_rotary_pos_emb
    monkeypatch.setattr(
        modeling_qwen2, "apply_rotary_pos_emb", lambda q, k, cos, sin, **kwargs: original(q, k, cos, -sin, **kwargs)
    )
    with pytest.raises(ModelError, match=r"on random weights its layers.0.rotary_q is not what parity takes it for"):
        prove(random_model_of("qwen2"))
