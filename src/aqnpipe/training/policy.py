"""The policy to train: the number format of its weights, and optional low-rank adapters.

Adapters are inserted into the model itself, without a wrapper around it, so layers, norms and hooks keep their places.
The reference of the KL term is then the same model with its adapters switched off.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import inject_adapter_in_model
from peft.tuners.lora import Linear as AdaptedLinear
from torch import Tensor, nn
from transformers import PreTrainedModel

from aqnpipe.config.run import TrainingSpec
from aqnpipe.config.training import LoraConfig
from aqnpipe.errors import ModelError
from aqnpipe.models.layout import layer_of
from aqnpipe.models.loading import load_model
from aqnpipe.seeding import derive_seed

_ADAPTER = "default"


@dataclass(frozen=True)
class BaseWeights:
    """Placeholder for the reference model when it is the policy with its adapters switched off."""


def load_policy(spec: TrainingSpec, folder: Path) -> PreTrainedModel:
    """Return the model in `folder`, prepared for training: trainable weights have the dtype `training.weights_dtype`.

    With adapters, the base weights are frozen and keep the model's own dtype. Raises ModelError if the model cannot be
    loaded or has no module with a name in `training.lora.target_modules`.
    """
    lora = spec.training.lora
    if lora is None:
        return load_model(folder, dtype=spec.training.weights_dtype, attention=spec.attention)
    model = load_model(folder, dtype=spec.dtype, attention=spec.attention)
    _add_adapters(model, lora, seed=derive_seed(spec.random_seed, "lora"))
    dtype = getattr(torch, spec.training.weights_dtype)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return model


def computes_in_mixed_precision(spec: TrainingSpec) -> bool:
    """Return True if forward passes compute in another number format than that of the stored weights."""
    return spec.training.lora is None and spec.dtype != spec.training.weights_dtype


def has_adapters(model: nn.Module) -> bool:
    """Return True if any module of `model` has a low-rank adapter."""
    return any(isinstance(module, AdaptedLinear) for module in model.modules())


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Switch the adapters off while the body runs, so that it computes with the base weights only."""
    layers = [module for module in model.modules() if isinstance(module, AdaptedLinear)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def merged_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of `model` with adapters merged: W + B A alpha/rank, under the names without adapters.

    The model itself does not change. Without adapters this is its own state dict.
    """
    adapted = {name: module for name, module in model.named_modules() if isinstance(module, AdaptedLinear)}
    merged = {}
    for key, tensor in model.state_dict().items():
        owner = next((name for name in adapted if key.startswith(f"{name}.")), None)
        if owner is None:
            merged[key] = tensor
        elif key.startswith(f"{owner}.base_layer."):
            last_part = key.removeprefix(f"{owner}.base_layer.")
            if last_part == "weight":
                with torch.no_grad():
                    delta = adapted[owner].get_delta_weight(_ADAPTER)
                    tensor = (tensor.to(delta.dtype) + delta).to(tensor.dtype)
            merged[f"{owner}.{last_part}"] = tensor
    return merged


def _add_adapters(model: PreTrainedModel, lora: LoraConfig, seed: int) -> None:
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for target in lora.target_modules:
        if not any(name.endswith(f".{target}") and layer_of(name) is not None for name in linears):
            found = sorted({name.rsplit(".", 1)[-1] for name in linears if layer_of(name) is not None})
            raise ModelError(
                f"training.lora.target_modules: {target!r} is no linear module of the layers of this "
                f"{type(model).__name__}, expected a subset of {', '.join(found)}"
            )
    config = PeftLoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type] # declared int, used as a factor
        lora_dropout=lora.dropout,
        target_modules=list(lora.target_modules),
        bias="none",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model, adapter_name=_ADAPTER)
