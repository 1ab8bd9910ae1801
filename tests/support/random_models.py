"""Small random models of architectures that differ in norms, biases and branch ends."""

from collections.abc import Iterable

import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CohereConfig,
    DeepseekV3Config,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPTNeoXConfig,
    GraniteMoeConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MptConfig,
    OlmoeConfig,
    OPTConfig,
    PhiConfig,
    PhimoeConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    StableLmConfig,
    Starcoder2Config,
)

ARCHITECTURES = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM),
}


def formats_of(families: Iterable[str], turn: int) -> list[tuple[str, torch.dtype, str]]:
    """Return every family in bfloat16 and one other format, once with each attention kernel; two turns are disjoint."""
    kernels, others = ("eager", "sdpa"), (torch.float32, torch.float16)
    cases = []
    for number, family in enumerate(sorted(families), start=turn):
        cases += [
            (family, torch.bfloat16, kernels[number % 2]),
            (family, others[(number + number // 2) % 2], kernels[(number + 1) % 2]),
        ]
    return cases


def random_model_of(architecture: str = "qwen2", dtype=torch.float32, num_layers: int = 3, seed: int = 0, **overrides):
    """Four heads of 24 channels on two key-value heads, 96 channels."""
    make_config, make_model = ARCHITECTURES[architecture]
    settings = {
        "vocab_size": 50,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "attn_implementation": "eager",
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
        **overrides,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make_model(make_config(**settings))
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # Qwen2 starts with biases of zero, trained ones are not
                torch.nn.init.normal_(parameter, std=0.5)
    return model.to(dtype).eval()


_MIXTURES = {
    "mixtral": (MixtralConfig, {"num_local_experts": 4}),
    "qwen2_moe": (Qwen2MoeConfig, {"num_experts": 4, "shared_expert_intermediate_size": 16}),
    "qwen3_moe": (Qwen3MoeConfig, {"num_experts": 4, "head_dim": 8}),
    "olmoe": (OlmoeConfig, {"num_experts": 4}),
    "granitemoe": (GraniteMoeConfig, {"num_local_experts": 4}),
    "deepseek_v3": (
        DeepseekV3Config,
        {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "num_key_value_heads": 4}
        | {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
    ),
}


def random_mixture_of(architecture: str, **overrides):
    """Two layers of 32 channels with four experts, of which two compute each token."""
    make_config, own = _MIXTURES[architecture]
    settings = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        **own,
        **overrides,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(make_config(**settings), attn_implementation="eager").eval()


_LAYER_NORM_MODELS = {
    "gpt_neox": (GPTNeoXConfig, {}),
    "gpt2": (GPT2Config, {"n_embd": 32, "n_layer": 2, "n_head": 4}),
    "phi": (PhiConfig, {}),
    "opt": (OPTConfig, {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "stablelm": (StableLmConfig, {}),
    "starcoder2": (Starcoder2Config, {}),
    "cohere": (CohereConfig, {}),
    "phimoe": (PhimoeConfig, {"num_local_experts": 4}),
    "bloom": (BloomConfig, {"n_layer": 2, "n_head": 4}),
    "mpt": (MptConfig, {"d_model": 32, "n_heads": 4, "n_layers": 2}),
}
LAYER_NORM_ARCHITECTURES = tuple(_LAYER_NORM_MODELS)


def random_layer_norm_model_of(architecture: str):
    """Two layers of 32 channels, four heads."""
    make_config, own = _LAYER_NORM_MODELS[architecture]
    settings = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        **own,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(make_config(**settings), attn_implementation="eager").eval()
