"""Detects checkpoints that learned nothing: their weights are those of the model that they were trained from."""

from pathlib import Path

from aqnpipe.models.adapted import ADAPTERS_FILE
from aqnpipe.models.loading import stored_tensors, stored_weights

_SECOND_FACTOR = ".lora_B.weight"


def is_untrained(checkpoint: Path, model: Path) -> bool:
    """Return whether every weight of a checkpoint is `model`'s, in the checkpoint's number format; False if it is gone.

    Adapters are untrained as long as their second factors are zero, because these start at zero.
    """
    import torch

    if (checkpoint / ADAPTERS_FILE).is_file():
        return not any(
            bool(tensor.any()) for name, tensor in stored_tensors(checkpoint) if name.endswith(_SECOND_FACTOR)
        )
    with stored_weights(model) as before:
        num_equal = 0
        for name, tensor in stored_tensors(checkpoint):
            if name not in before or not torch.equal(before[name].get_tensor(name).to(tensor.dtype), tensor):
                return False
            num_equal += 1
        return num_equal == len(before) > 0
