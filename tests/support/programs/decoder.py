"""A decoder that knows nothing of noise: training with checkpoints, then generation."""

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

torch.manual_seed(0)
config = Qwen2Config(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
)
model = Qwen2ForCausalLM(config)
model.gradient_checkpointing_enable()
ids = torch.randint(5, 64, (4, 12))
for _ in range(2):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    with torch.no_grad():
        for weight in model.parameters():
            weight -= 0.1 * weight.grad
    model.zero_grad()
with torch.no_grad():
    logits = model.eval()(input_ids=ids).logits
print(f"{loss.item():.6f} {logits.square().mean().item():.6f}")
