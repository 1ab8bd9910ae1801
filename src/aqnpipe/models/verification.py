"""Compares a model in memory with the folder it was loaded from: its weights, its adapters and what it computes."""

from pathlib import Path

import torch
from safetensors import safe_open
from transformers import PreTrainedModel

from aqnpipe.config.model import Dtype
from aqnpipe.errors import ModelError
from aqnpipe.models.adapted import find_base, has_only_adapters
from aqnpipe.models.adapters import refuse_other_adapters
from aqnpipe.models.probe import refuse_other_outputs


def refuse_other_weights(model: PreTrainedModel, folder: Path, dtype: Dtype) -> None:
    """Raise ModelError unless `model` is the one in `folder`: its weights bit for bit in `dtype`, and its outputs.

    Weights that the loader renames or fuses are not compared; at least one must be comparable. Adapters are compared
    with those in `folder`, the weights below them with their base. The outputs are those of the folder's probe.
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
    mixed = bool(getattr(model, "_keep_in_fp32_modules", None))
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                if name not in own:
                    continue
                compared += 1
                mine = own[name]
                if mine.dtype != wanted and not mixed:
                    raise ModelError(f"model {str(folder)!r}: {name} is in {mine.dtype}, requested {wanted}")
                stored = tensors.get_tensor(name).to(mine)
                if not torch.equal(mine, stored):
                    # NaN is not equal to itself.
                    what = "in memory is not the weight of this checkpoint"
                    if stored.isnan().any():
                        what = "has NaN in its file, expected numbers"
                    raise ModelError(f"model {str(folder)!r}: {name} {what}")
    if not compared:
        raise ModelError(f"model {str(folder)!r}: none of its weights is in memory under its name")
