"""The policy to train: the number format of its weights, and optional low-rank adapters.

With adapters, the reference of the KL term is the same model with its adapters switched off.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate.utils import convert_outputs_to_fp32
from transformers import PreTrainedModel

from aqnpipe.config.run import TrainingSpec
from aqnpipe.errors import ModelError
from aqnpipe.models.adapters import add_adapters
from aqnpipe.models.loading import load_model
from aqnpipe.models.prepared import has_only_adapters
from aqnpipe.seeding import derive_seed


@dataclass(frozen=True)
class BaseWeights:
    """Placeholder for the reference model when it is the policy with its adapters switched off."""


def load_policy(spec: TrainingSpec, folder: Path) -> PreTrainedModel:
    """Return the model in `folder`, prepared for training: trainable weights have the dtype `training.weights_dtype`.

    With adapters, the base weights are frozen and keep the model's own dtype. Raises ModelError if the model cannot be
    loaded, is itself a checkpoint of adapters, or has no module with a name in `training.lora.target_modules`.
    """
    if has_only_adapters(folder):
        raise ModelError(f"model {str(folder)!r}: a checkpoint of adapters, expected a whole model to train")
    lora = spec.training.lora
    if lora is None:
        return load_model(folder, dtype=spec.training.weights_dtype, attention=spec.attention)
    model = load_model(folder, dtype=spec.dtype, attention=spec.attention)
    add_adapters(model, lora, seed=derive_seed(spec.random_seed, "lora"))
    dtype = getattr(torch, spec.training.weights_dtype)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return model


def compute_in(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Make forward passes of a float32 model compute in 16-bit `dtype` and return float32, as accelerate does."""
    model.forward = convert_outputs_to_fp32(torch.autocast(device_type=model.device.type, dtype=dtype)(model.forward))


def autocast_dtype(spec: TrainingSpec) -> torch.dtype | None:
    """Return the format in which forward passes compute if it is not that of the stored weights; None if it is.

    As in accelerate, a model in float32 whose weights are stored in bfloat16 computes in bfloat16.
    """
    if spec.training.lora is not None or spec.dtype == spec.training.weights_dtype:
        return None
    return torch.float16 if spec.dtype == "float16" else torch.bfloat16
