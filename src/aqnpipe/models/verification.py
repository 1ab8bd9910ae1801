"""Compares a model in memory with the folder it was loaded from: its weights, its adapters and what it computes."""

from itertools import chain
from pathlib import Path

import torch
from transformers import PreTrainedModel

from aqnpipe.config.model import Dtype
from aqnpipe.errors import ModelError
from aqnpipe.models.adapted import find_base, has_only_adapters
from aqnpipe.models.adapters import refuse_other_adapters
from aqnpipe.models.probe import refuse_other_outputs
from aqnpipe.models.stored_names import as_stored, stored_weights


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
