"""Small random models of architectures that differ in norms, biases and branch ends."""

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

ARCHITECTURES = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM),
}


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
