"""Detects checkpoints that learned nothing: their weights are those of the model that they were trained from."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from aqnpipe.models.adapted import ADAPTERS_FILE
from aqnpipe.models.loading import stored_tensors

if TYPE_CHECKING:
    from torch import Tensor

_SECOND_FACTOR = ".lora_B.weight"


def is_untrained(checkpoint: Path, model: Path) -> bool:
    """Return whether every weight of a checkpoint is `model`'s, in the checkpoint's number format; False if it is gone.

    Adapters are untrained as long as their second factors are zero, because these start at zero.
    """
    if (checkpoint / ADAPTERS_FILE).is_file():
        return not any(
            bool(tensor.any()) for name, tensor in stored_tensors(checkpoint) if name.endswith(_SECOND_FACTOR)
        )
    trained = list(_names(checkpoint))
    if not trained or set(trained) != set(_names(model)):
        return False
    before = _Weights(model)
    return all(before.holds(name, tensor) for name, tensor in stored_tensors(checkpoint))


class _Weights:
    """The weights in a folder, each read when it is compared."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        self._files = {
            name: file
            for file in (safe_open(path, framework="pt") for path in sorted(folder.glob("*.safetensors")))
            for name in file.keys()  # noqa: SIM118
        }

    def holds(self, name: str, tensor: "Tensor") -> bool:
        import torch

        own: Tensor = self._files[name].get_tensor(name)
        return own.shape == tensor.shape and torch.equal(own.to(tensor.dtype), tensor)


def _names(folder: Path) -> Iterator[str]:
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as tensors:
            yield from tensors.keys()
