"""Small models with random weights of fifteen architectures, and where each has its linears, norms and operations."""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

DTYPES = ("float32", "bfloat16", "float16")
LAYERS = 4
VOCABULARY = 256
HIDDEN = 64
HEADS = 4
HEAD = 16

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "head_dim": HEAD,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.12,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Place:
    """A module by its path in a layer (or in the model), and the output channels of one role in a fused module."""

    path: str
    start: int = 0
    width: int = HEAD

    @property
    def site(self) -> str:
        """Name by which a report would call the module."""
        return self.path.rsplit(".", 1)[-1]


_ATTENTION = {name[0]: Place(f"self_attn.{name}") for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
_MLP = {name.split("_")[0]: Place(f"mlp.{name}") for name in ("gate_proj", "up_proj", "down_proj")}
_BOTH = {"norm1": Place("input_layernorm"), "norm2": Place("post_attention_layernorm")}
_COMMON = {
    "attention": Place("self_attn"),
    "mlp": Place("mlp"),
    "act": Place("mlp.act_fn"),
    "layer": Place(""),
    "embedding": Place("model.embed_tokens"),
    "final_norm": Place("model.norm"),
    "lm_head": Place("lm_head"),
    "rotary": Place("model.rotary_emb"),
}
_DENSE = _COMMON | _ATTENTION | _MLP | _BOTH
_QK_NORMS = {"q_norm": Place("self_attn.q_norm"), "k_norm": Place("self_attn.k_norm")}
_EXPERTS = _COMMON | _ATTENTION | _BOTH | {"experts": Place("mlp.experts"), "router": Place("mlp.gate")}
_EXPERTS["act"] = Place("mlp.experts.act_fn")
_SHARED = {name.split("_")[0]: Place(f"mlp.shared_expert.{name}") for name in ("gate_proj", "up_proj", "down_proj")} | {
    "shared": Place("mlp.shared_expert"),
    "shared_gate": Place("mlp.shared_expert_gate"),
}


@dataclass(frozen=True)
class Architecture:
    """A model type of transformers, its settings beside `_SIZES`, its places by role, and what faults may ask for."""

    model_type: str
    places: dict[str, Place]
    traits: frozenset[str]
    settings: dict[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()


def _architecture(name: str, places: dict[str, Place], traits: str, *without: str, **settings: Any) -> Architecture:
    return Architecture(name, places, frozenset(traits.split()), settings, without)


_PHI3 = {name: place for name, place in _DENSE.items() if name not in ("q", "k", "v", "gate", "up", "act")} | {
    "q": Place("self_attn.qkv_proj", 0),
    "k": Place("self_attn.qkv_proj", HIDDEN),
    "v": Place("self_attn.qkv_proj", HIDDEN + 2 * HEAD),
    "gate": Place("mlp.gate_up_proj", 0),
    "up": Place("mlp.gate_up_proj", 128),
    "act": Place("mlp.activation_fn"),
}
_NEOX = {
    **{"attention": Place("attention"), "mlp": Place("mlp"), "act": Place("mlp.act"), "layer": Place("")},
    **{letter: Place("attention.query_key_value", HEAD * i) for i, letter in enumerate("qkv")},
    **{"o": Place("attention.dense"), "up": Place("mlp.dense_h_to_4h"), "down": Place("mlp.dense_4h_to_h")},
    **_BOTH,
    **{"embedding": Place("gpt_neox.embed_in"), "final_norm": Place("gpt_neox.final_layer_norm")},
    **{"lm_head": Place("embed_out"), "rotary": Place("gpt_neox.rotary_emb")},
}
_STARCODER = {name: place for name, place in _DENSE.items() if name != "gate"} | {
    "up": Place("mlp.c_fc"),
    "down": Place("mlp.c_proj"),
    "act": Place("mlp.act"),
}
_DEEPSEEK = (
    _COMMON
    | _BOTH
    | {
        "q": Place("self_attn.q_b_proj"),
        "k": Place("self_attn.kv_a_proj_with_mqa", 0, 8),
        "v": Place("self_attn.kv_b_proj", HEAD),
        "o": Place("self_attn.o_proj"),
        "q_norm": Place("self_attn.q_a_layernorm"),
        "k_norm": Place("self_attn.kv_a_layernorm"),
    }
)
_OLMO = _DENSE | _QK_NORMS | {"norm1": Place("post_attention_layernorm"), "norm2": Place("post_feedforward_layernorm")}
_GEMMA = _DENSE | {"norm3": Place("pre_feedforward_layernorm"), "norm4": Place("post_feedforward_layernorm")}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}

ARCHITECTURES: dict[str, Architecture] = {
    "qwen2": _architecture("qwen2", _DENSE, "rms silu gated gqa bias plain"),
    "qwen3": _architecture("qwen3", _DENSE | _QK_NORMS, "rms silu gated gqa plain"),
    "llama": _architecture("llama", _DENSE, "rms silu gated gqa plain"),
    "mistral": _architecture("mistral", _DENSE, "rms silu gated gqa plain", sliding_window=None),
    "gemma2": _architecture("gemma2", _GEMMA, "rms gelu gated gqa softcap", sliding_window=64),
    "gemma3": _architecture("gemma3_text", _GEMMA | _QK_NORMS, "rms gelu gated gqa", sliding_window=64),
    "phi3": _architecture("phi3", _PHI3, "rms silu gated gqa plain"),
    "olmo2": _architecture("olmo2", _OLMO, "rms silu gated gqa plain"),
    "mixtral": _architecture("mixtral", _EXPERTS, "rms silu gqa moe", sliding_window=None),
    "qwen2_moe": _architecture("qwen2_moe", _EXPERTS | _SHARED, "rms silu gqa moe shared"),
    "gpt_neox": _architecture("gpt_neox", _NEOX, "layernorm gelu bias", "head_dim"),
    "stablelm": _architecture("stablelm", _DENSE, "layernorm silu gated gqa bias", use_qkv_bias=True),
    "starcoder2": _architecture("starcoder2", _STARCODER, "layernorm gelu gqa bias", sliding_window=None),
    "cohere": _architecture(
        "cohere", {name: place for name, place in _DENSE.items() if name != "norm2"}, "layernorm silu gated gqa"
    ),
    "deepseek_v3": _architecture(
        "deepseek_v3",
        _DEEPSEEK,
        "latent",
        "head_dim",
        **_LATENT,
        **{"num_key_value_heads": HEADS, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    ),
}


@cache
def subject(name: str, dtype: str, attention: str = "eager", seed: int = 0) -> nn.Module:
    """Return a model with random weights, gains and biases, loaded from a folder as users load theirs.

    It has four layers of 64 channels and four heads of 16.
    """
    architecture = ARCHITECTURES[name]
    sizes = {key: value for key, value in _SIZES.items() if key not in architecture.without}
    config = CONFIG_MAPPING[architecture.model_type](**{**sizes, **architecture.settings})
    with torch.random.fork_rng():
        torch.manual_seed(1000 + seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        _draw_vectors(model)
    folder = Path(_folder().name) / f"{name}-{dtype}-{attention}-{seed}"
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation=attention)
    return loaded.eval()


@cache
def _folder() -> TemporaryDirectory[str]:
    """Return a folder for the models of this process; it is removed when the process ends."""
    return TemporaryDirectory(prefix="detection-")


@torch.no_grad()
def _draw_vectors(model: nn.Module) -> None:
    """Replace gains of 1 and biases of 0, behind which many faults would be invisible."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and "bias" not in name:
            parameter.add_(0.5 * torch.rand_like(parameter) - 0.25)
        elif parameter.dim() == 1:
            parameter.add_(0.2 * torch.randn_like(parameter))


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    """Return random token ids [batch, length]."""
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(77 + seed))
