"""A decoder that knows nothing of noise: training with checkpoints, then logits. The words change it on the way."""

import contextlib
import copy
import sys
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer


class Wrapped(GradientCheckpointingLayer):
    """A layer around a layer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        return self.inner(*args, **kwargs)


torch.manual_seed(0)
config = Qwen2Config(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
)
model: Any = Qwen2ForCausalLM(config)
if "adapted" in sys.argv:
    model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "down_proj"]))
model.gradient_checkpointing_enable()
ids = torch.randint(5, 64, (4, 12))
layers = model.get_decoder().layers
if "retried" in sys.argv:
    failing = layers[1].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    with contextlib.suppress(ZeroDivisionError):
        model(input_ids=ids)
    failing.remove()
for step in range(2):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.grad is not None:
                weight -= 0.1 * weight.grad
    model.zero_grad()
    if "cleared" in sys.argv:
        layers[1]._forward_hooks.clear()
    if "exchanged" in sys.argv:
        layers[0], layers[1] = layers[1], layers[0]
    if "copied" in sys.argv:
        layers[1] = copy.deepcopy(layers[1])
    if "wrapped" in sys.argv and not step:
        layers[1] = Wrapped(layers[1])
    if "called" in sys.argv:
        layers[1].register_forward_hook(lambda m, args, kwargs, _: m.forward(*args, **kwargs), with_kwargs=True)
with torch.no_grad():
    logits = model.eval()(input_ids=ids).logits
print(f"{loss.item():.6f} {logits.square().mean().item():.6f}")
