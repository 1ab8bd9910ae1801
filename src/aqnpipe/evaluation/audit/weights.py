"""Digests of sampled weights: of a model in memory, and of the checkpoint on the disk that it must be."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aqnpipe.artifacts.provenance import short_digest
from aqnpipe.models.loading import stored_weights
from aqnpipe.models.prepared import find_base, has_only_adapters
from aqnpipe.models.verification import name_in_files
from aqnpipe.seeding import derive_seed

_FORMATS = (torch.float32, torch.bfloat16, torch.float16)


def digests_in_memory(model: Any) -> dict[str, str]:
    """Return a digest of one row of every weight of a model, by its name in files."""
    own = {name_in_files(name): tensor for name, tensor in model.state_dict().items()}
    return {name: tensor_digest(_row(tensor.detach(), name)) for name, tensor in sorted(own.items()) if tensor.ndim}


def differing_weight(found: Mapping[str, str], folder: Path) -> str | None:
    """Return the first weight of a checkpoint whose digest in any number format is not in `found`; None if all are.

    Of a checkpoint of adapters, its base is compared, too. Weights that the loader renames or fuses have no digest
    under their name and are not compared.
    """
    folders = [folder, find_base(folder)] if has_only_adapters(folder) else [folder]
    for each in folders:
        with stored_weights(each) as files:
            for name in sorted(found.keys() & files.keys()):
                stored = _row(files[name].get_slice(name), name)
                if found[name] not in {tensor_digest(stored), *(tensor_digest(stored.to(dtype)) for dtype in _FORMATS)}:
                    return name
    return None


def tensor_digest(tensor: Tensor, num_bytes: int = 4) -> str:
    """Return a digest of the bits of a tensor."""
    content = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(content, digest_size=num_bytes).hexdigest()


def combined(digests: Mapping[str, str]) -> str:
    """Return one digest of all digests."""
    return short_digest(sorted(digests.items()), 16)


def _row(tensor: Any, name: str) -> Tensor:
    """Return a row of a tensor, or of a slice of a file: all of a vector, one row of a matrix."""
    shape = list(tensor.shape if isinstance(tensor, Tensor) else tensor.get_shape())
    if len(shape) < 2:
        whole: Tensor = tensor if isinstance(tensor, Tensor) else tensor[:]
        return whole
    number = derive_seed(0, f"audited row of {name}", *shape) % shape[0]
    row: Tensor = tensor[number : number + 1]
    return row
