"""Weights of a model in memory under the names and in the shapes of its files.

transformers renames some weights when it loads them, and fuses others: the experts of a layer are many matrices in the
files and one tensor in memory. What compares a model with its files undoes this, as `save_pretrained` does.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from aqnpipe.models.layout import layer_of
from aqnpipe.models.shares import whole


@contextmanager
def stored_weights(folder: Path) -> Iterator[Mapping[str, Any]]:
    """Open the safetensors files of a model folder; yield by the name of each weight the file that has it."""
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(path, framework="pt")) for path in sorted(folder.glob("*.safetensors"))]
        yield {name: file for file in files for name in file.keys()}  # noqa: SIM118


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
