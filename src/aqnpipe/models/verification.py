"""Compares a model in memory with the folder it was loaded from: its weights, its adapters and what it computes.

transformers renames some weights when it loads them, and fuses others: the experts of a layer are many matrices in the
files and one tensor in memory. What compares a model with its files undoes this, as `save_pretrained` does."""

from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from aqnpipe.config.model import Dtype
from aqnpipe.errors import ModelError
from aqnpipe.models.adapted import find_base, has_only_adapters
from aqnpipe.models.adapters import refuse_other_adapters
from aqnpipe.models.layout import layer_of
from aqnpipe.models.loading import stored_weights
from aqnpipe.models.probe import refuse_other_outputs
from aqnpipe.models.shares import whole


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
    # A module with an adapter has its own weights in `base_layer`.
    own = {name.replace(".base_layer.", "."): tensor for name, tensor in model.state_dict().items()}
    wanted, compared = getattr(torch, dtype), 0
    kept_in_float32 = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    mixed = any(getattr(model, name, None) for name in kept_in_float32)
    with stored_weights(folder) as files:
        renamed = as_stored(model, own, files.keys())
        for name, mine in chain(((name, own[name]) for name in files if name in own), renamed):
            compared += 1
            if mine.dtype != wanted and not mixed:
                raise ModelError(f"model {str(folder)!r}: {name} is in {mine.dtype}, requested {wanted}")
            stored = files[name].get_tensor(name).to(mine)
            if not torch.equal(mine, stored):
                # NaN is not equal to itself.
                what = "in memory is not the weight of this checkpoint"
                if stored.isnan().any():
                    what = "has NaN in its file, expected numbers"
                raise ModelError(f"model {str(folder)!r}: {name} {what}")
    if not compared:
        raise ModelError(f"model {str(folder)!r}: none of its weights is in memory under its name")


def as_stored(
    model: PreTrainedModel, weights: Mapping[str, Tensor], names: Collection[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield what `names`, those in the files, have of `weights` by another name, with that name.

    `weights`: of `model`, by their names in memory without adapters. One decoder layer is converted at a time. Shares
    of a divided model are gathered, a collective operation.
    """
    parts: dict[int | None, dict[str, Tensor]] = {}
    for name, weight in weights.items():
        if name not in names:
            parts.setdefault(layer_of(name), {})[name] = weight
    for part in parts.values():
        converted = revert_weight_conversion(model, {name: whole(weight) for name, weight in part.items()})
        yield from ((name, tensor) for name, tensor in converted.items() if name in names and name not in weights)
