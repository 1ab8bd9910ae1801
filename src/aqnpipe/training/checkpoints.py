"""Writes the checkpoints of a run: whole weights or adapters alone, and a probe of what the trainer's model computes.

A record beside the weights describes the model and contains the digests of the files. It is written last, so that a
folder with a record is complete.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from aqnpipe.config.run import TrainingSpec
from aqnpipe.models.adapters import merge_loss, refuse_merge_loss, refuse_other_adapters, save_adapters
from aqnpipe.models.loading import CONFIG_FILES, describe_model
from aqnpipe.models.prepared import AdaptersHeader, read_prepared_model, write_prepared_model
from aqnpipe.models.sharding import is_sharded, whole_state_dict
from aqnpipe.models.verification import take_probe


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
