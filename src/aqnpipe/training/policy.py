"""The policy to train: the number format of its weights, optional low-rank adapters, and its checkpoints.

With adapters, the reference of the KL term is the same model with its adapters switched off. Checkpoints are whole
weights or adapters alone. A record beside the weights describes the model and contains the digests of the files. It is
written last, so that a folder with a record is complete.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import convert_outputs_to_fp32
from transformers import PreTrainedModel

from aqnpipe.config.run import TrainingSpec
from aqnpipe.errors import ModelError
from aqnpipe.models.adapters import add_adapters, merge_loss, refuse_merge_loss, refuse_other_adapters, save_adapters
from aqnpipe.models.loading import CONFIG_FILES, describe_model, load_model
from aqnpipe.models.prepared import AdaptersHeader, has_only_adapters, read_prepared_model, write_prepared_model
from aqnpipe.models.sharding import is_sharded, whole_state_dict
from aqnpipe.models.verification import take_probe
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


@dataclass(frozen=True)
class CheckpointWriter:
    """Writes checkpoints of one run, which trains the model in the folder `base`.

    `merges`: rollouts or evaluations of the study receive the adapters merged into weights of the model's dtype.
    """

    spec: TrainingSpec
    base: Path
    tokenizer: Any
    merges: bool = False

    def write(self, model: PreTrainedModel, folder: Path, name: str) -> None:
        """Write `model` to `folder`; `name` is the source in its record.

        Raises ReceiptError if merging, for those that need it, would lose too much of the adapters' update.
        """
        probe = take_probe(model, self.spec.dtype)
        loss = self._save(model, folder)
        self.tokenizer.save_pretrained(folder)
        record = describe_model(folder, name)
        write_prepared_model(folder, record.model_copy(update={"probe": probe, "merge_loss": loss}))

    def _save(self, model: PreTrainedModel, folder: Path) -> float | None:
        """Save the trained weights; return what merging adapters would lose of their update."""
        header = self._header()
        if header is None:
            model.save_pretrained(folder, state_dict=whole_state_dict(model) if is_sharded(model) else None)
            return None
        dtype = getattr(torch, self.spec.dtype)
        loss = merge_loss(model, dtype)
        if self.merges:
            refuse_merge_loss(loss, dtype)
        folder.mkdir(parents=True, exist_ok=True)
        for path in (self.base / file for file in CONFIG_FILES):
            if path.is_file():
                shutil.copyfile(path, folder / path.name)
        save_adapters(model, folder, header)
        refuse_other_adapters(model, folder)
        return loss

    def _header(self) -> AdaptersHeader | None:
        lora = self.spec.training.lora
        if lora is None:
            return None
        base = read_prepared_model(self.base)
        return AdaptersHeader(
            base_source=base.source,
            base_weights_sha256=base.weights_sha256,
            dtype=self.spec.training.weights_dtype,
            rank=lora.rank,
            alpha=lora.alpha,
            target_modules=lora.target_modules,
        )
