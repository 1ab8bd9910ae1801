"""Tiny models with random weights of every decoder-only family of transformers, from its own config classes.

A family is a model type of transformers, some with a variant behind it, and the settings that differ from `SIZES`.
`LEFT_OUT` names every other model type for which transformers has a causal language model, with the reason.
"""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Settings of all families; a config class ignores those that it does not have."""

_WITHOUT = object()
"""Value of a setting that a family must not get."""

_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4}
_LATENT = {
    **{"num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8},
    **{"qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 1, "topk_group": 1},
}
"""Attention over a compressed cache (DeepSeek)."""
_INDEXED = {**_LATENT, "index_topk": 4, "index_head_dim": 16, "index_n_heads": 2}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
_LINEAR_ATTENTION = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "layer_types": ["linear_attention", "full_attention"],
}

FAMILIES: dict[str, Mapping[str, Any]] = {
    "afmoe": {"num_dense_layers": 1},
    "apertus": {},
    "arcee": {},
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2},
    "axk1": _LATENT,
    "axk2": _LATENT,
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "biogpt": {},
    "bitnet": {},
    "bloom": _GPT,
    "codegen": {**_GPT, "rotary_dim": 4, "n_positions": 64},
    "cohere": {},
    "cohere2": {},
    "cohere2_moe": {},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
            for kind in ("sliding_attention", "full_attention")
        },
    },
    "cpmant": {"dim_head": 8, "dim_ff": 48, "prompt_types": 4, "prompt_length": 4, "segment_types": 4},
    "ctrl": {**_GPT, "dff": 48, "n_positions": 64},
    "cwm": {},
    "dbrx": {
        **{"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, "head_dim": _WITHOUT},
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "deepseek_v32": _INDEXED,
    "deepseek_v4": {},
    "diffllama": {},
    "doge": {},
    "dots1": {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "ernie4_5": {},
    "ernie4_5_moe": {},
    "exaone4": {},
    "exaone_moe": {},
    "falcon": {"head_dim": _WITHOUT},
    "falcon with ALiBi": {"head_dim": _WITHOUT, "alibi": True},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64},
    "falcon_mamba": {"state_size": 8},
    "flex_olmo": {},
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {},
    "gemma3n_text": {
        **{"laurel_rank": 8, "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8},
        **{"num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"]},
        "activation_sparsity_pattern": [0.0, 0.0],
    },
    "gemma4_text": {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8, "global_head_dim": 8},
    "gemma4_text without inputs per layer": {"hidden_size_per_layer_input": 0, "global_head_dim": 8},
    "gemma4_unified_text": {},
    "glm": {},
    "glm4": {},
    "glm4_moe": {},
    "glm4_moe_lite": _LATENT,
    "glm_moe_dsa": _INDEXED,
    "gpt2": _GPT,
    "gpt_bigcode": _GPT,
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    "gpt_neox": {},
    "gpt_neox_japanese": {},
    "gpt_oss": {},
    "gptj": {**_GPT, "rotary_dim": 4, "n_positions": 64},
    "granite": {},
    "granite_swa": {},
    "granitemoe": {},
    "granitemoe_swa": {},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["linear_attention", "full_attention"]},
    "granitemoehybrid of attention alone": {**_MAMBA, "layer_types": ["full_attention", "full_attention"]},
    "granitemoeshared": {},
    "helium": {},
    "hrm_text": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {},
    "hy_v3": {},
    "hy_v4": _INDEXED,
    "hyperclovax": {},
    "inkling_text": {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8, "rel_extent": 16},
    "jais2": {},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8},
    "jetmoe": {},
    "kimi_linear": {
        **{**_LATENT, "linear_head_dim": 8, "linear_num_heads": 4},
        "layer_types": ["linear_attention", "full_attention"],
    },
    "laguna": {},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "llama": {},
    "llama4_text": {},
    "longcat_flash": {**_LATENT, "num_layers": 1},
    "mamba": {"state_size": 8},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8},
    "mellum": {},
    "mimo_v2_flash": {},
    "minicpm3": _LATENT,
    "minimax": {"layer_types": ["linear_attention", "full_attention"]},
    "minimax_m2": {},
    "minimax_m3_vl_text": {},
    "ministral": {},
    "ministral3": {},
    "mistral": {},
    "mixtral": {},
    "modernbert-decoder": {},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
    "nanochat": {},
    "nemotron": {},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1},
    "olmo": {},
    "olmo2": {},
    "olmo3": {},
    "olmo_hybrid": {},
    "olmoe": {},
    "openai-gpt": {**_GPT, "n_positions": 64},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "persimmon": {},
    "phi": {},
    "phi3": {},
    "phimoe": {},
    "qwen2": {},
    "qwen2_moe": {"shared_expert_intermediate_size": 16},
    "qwen3": {},
    "qwen3_5_moe_text": {**_LINEAR_ATTENTION, "shared_expert_intermediate_size": 16},
    "qwen3_5_text": _LINEAR_ATTENTION,
    "qwen3_moe": {},
    "qwen3_next": {**_LINEAR_ATTENTION, "shared_expert_intermediate_size": 16},
    "qwen4_exp_text": {
        **{**_LINEAR_ATTENTION, "shared_expert_intermediate_size": 16, "hc_lowrank": 8, "indexer_n_heads": 2},
        **{"indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8, "indexer_compress_ratio": 2},
    },
    "recurrent_gemma": {"lru_width": 32},
    "rwkv": {"attention_hidden_size": 32},
    "seed_oss": {},
    "smollm3": {},
    "solar_open": {},
    "stablelm": {},
    "starcoder2": {},
    "vaultgemma": {},
    "xglm": {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4},
    "xlstm": {"hidden_size": 128, "num_heads": 2, "num_blocks": 2, "head_dim": _WITHOUT},
    "youtu": _LATENT,
    "zamba": {
        **{"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
        **{"mamba_d_state": 8, "head_dim": _WITHOUT},
    },
    "zamba2": {
        **{"layers_block_type": ["linear_attention", "hybrid"], "mamba_d_state": 8, "head_dim": _WITHOUT},
        **{"chunk_size": 8, "adapter_rank": 8},
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}

LEFT_OUT: dict[str, tuple[str, ...]] = {
    "encoder, here with a causal mask": (
        *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert"),
        *("reformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm", "xlm-roberta"),
        *("xlm-roberta-xl", "xlnet", "xmod"),
    ),
    "decoder of an encoder-decoder": (
        *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "moshi", "musicgen"),
        *("musicgen_melody", "mvp", "pegasus", "plbart", "prophetnet", "trocr", "whisper"),
    ),
    "images or audio around a language model that is a family of its own, or has no text model to build alone": (
        *("emu3", "fuyu", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "git", "got_ocr2", "llama4", "mllama"),
        *("phi4_multimodal", "qwen3_5", "qwen3_5_moe", "qwen4_exp"),
    ),
    "assistant of speculative decoding": ("gemma4_assistant", "gemma4_unified_assistant"),
    "same code as gpt2": ("gpt-sw3",),
    "reads bytes in patches, which a second model finds": ("blt",),
}


_BY_LAYER = {"num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks", "layer_types"}
_BY_LAYER |= {"layers_block_type", "activation_sparsity_pattern"}


def tiny_model_of(family: str, attention: str = "eager", *, doubled: bool = False) -> PreTrainedModel:
    """Return the tiny model of `family` with random weights, in evaluation mode; `doubled`: with twice the layers."""
    settings = {key: value for key, value in {**SIZES, **FAMILIES[family]}.items() if value is not _WITHOUT}
    if doubled:
        settings |= {key: settings[key] * 2 for key in _BY_LAYER & settings.keys()}
        settings |= {"attention_types": [[["global", "local"], 2]]} if "attention_types" in settings else {}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = CONFIG_MAPPING[family.split()[0]](**settings)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return model.eval()
