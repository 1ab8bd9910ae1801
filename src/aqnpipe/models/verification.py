"""Compares a model in memory with the folder it was loaded from: its weights, its adapters and what it computes.

transformers renames some weights when it loads them, and fuses others: the experts of a layer are many matrices in the
files and one tensor in memory. What compares a model with its files undoes this, as `save_pretrained` does."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from aqnpipe.config.model import Dtype
from aqnpipe.errors import ModelError
from aqnpipe.models.adapted import find_base, has_only_adapters
from aqnpipe.models.adapters import refuse_other_adapters
from aqnpipe.models.layout import layer_of
from aqnpipe.models.loading import stored_weights
from aqnpipe.models.probe import refuse_other_outputs
from aqnpipe.models.shares import is_sharded, whole

_NAMES = ((".base_layer.", "."), (".lora_A.default.", ".lora_A."), (".lora_B.default.", ".lora_B."))
"""Names of the weights of a module with adapters: in memory, and in files."""


def refuse_other_weights(model: PreTrainedModel, folder: Path, dtype: Dtype) -> None:
    """Raise ModelError unless `model` is the one in `folder`: its weights bit for bit in `dtype`, and its outputs.

    Weights that the loader renames or fuses are compared as the files have them. Adapters are compared with those in
    `folder`, the weights below them with their base. The outputs are those of the folder's probe.
    """
    if has_only_adapters(folder):
        refuse_other_adapters(model, folder)
        _compare_weights(model, find_base(folder), dtype)
    else:
        _compare_weights(model, folder, dtype)
    refuse_other_outputs(model, folder)


def _compare_weights(model: PreTrainedModel, folder: Path, dtype: Dtype) -> None:
    wanted, compared = getattr(torch, dtype), 0
    kept_in_float32 = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    mixed = any(getattr(model, name, None) for name in kept_in_float32)
    for name, mine, in_file in weights_and_files(model, folder):
        compared += 1
        if mine.dtype != wanted and not mixed:
            raise ModelError(f"model {str(folder)!r}: {name} is in {mine.dtype}, requested {wanted}")
        stored = in_file.to(mine)
        if not torch.equal(mine, stored):
            # NaN is not equal to itself.
            what = "in memory is not the weight of this checkpoint"
            if stored.isnan().any():
                what = "has NaN in its file, expected numbers"
            raise ModelError(f"model {str(folder)!r}: {name} {what}")
    if not compared:
        raise ModelError(f"model {str(folder)!r}: none of its weights is in memory under its name")


def weights_and_files(model: nn.Module, folder: Path) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield name, weight in memory and tensor in the files of `folder`, for every weight that both have.

    A weight that the loader renamed or fused is compared by its names in the files, one decoder layer at a time. Those
    of a divided model are this worker's shares, renamed ones are gathered: a collective operation, in the same order on
    every worker.
    """
    # The state dict of a sharded model would free gathered weights.
    held = [*model.named_parameters(), *model.named_buffers()] if is_sharded(model) else model.state_dict().items()
    own = {name_in_files(name): weight.detach() for name, weight in held}
    parts: dict[int | None, dict[str, Tensor]] = {}
    with stored_weights(folder) as files:
        for name in (name for name in files if name in own):
            yield name, own[name], files[name].get_tensor(name)
        renamed = files.keys() - own.keys()
        for name in own if renamed else ():
            if name not in files:
                parts.setdefault(layer_of(name), {})[name] = own[name]
        for part in parts.values():
            converted = revert_weight_conversion(model, {name: whole(weight) for name, weight in part.items()})
            for name in (name for name in converted if name in renamed):
                yield name, converted[name], files[name].get_tensor(name)


def name_in_files(name: str) -> str:
    """Return the name in files of a weight that a model with adapters has in memory as `name`."""
    for in_memory, in_files in _NAMES:
        name = name.replace(in_memory, in_files)
    return name
