"""Identity of a capture: digests of the model's files, the state of its weights in memory, device and versions."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from aqnpipe.artifacts.hardware import read_hardware
from aqnpipe.artifacts.provenance import sha256_of_json
from aqnpipe.config.model import read_model_config, source_kind
from aqnpipe.models.loading import describe_model
from aqnpipe.models.prepared import PreparedModel
from aqnpipe.noise.kernels.shards import Shard

_COMPARED_VALUES = 4096
"""Values of each parameter that are compared with the files; every optimiser step changes some of them."""

_NOT_NUMERIC = ("transformers_version", "torch_dtype", "dtype")


def public_name(source: str) -> str:
    """Return the name of a model that may be sent elsewhere: no folders above it."""
    return Path(source).resolve().name if source_kind(source) == "folder" else source


def model_facts(folder: Path, source: str) -> dict[str, Any]:
    """Return the fields of a capture's identity that come from the files of a model."""
    described = _described(folder, public_name(source), _stamps(folder))
    config = {
        key: value
        for key, value in read_model_config(folder).items()
        if not key.startswith("_") and key not in _NOT_NUMERIC
    }
    has_tokenizer = any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json"))
    return {
        "model": public_name(source),
        "weights_sha256": described.weights_sha256,
        "tokenizer_sha256": described.tokenizer_sha256 if has_tokenizer else None,
        "config": config,
    }


def _stamps(folder: Path) -> tuple[tuple[object, ...], ...]:
    """Return what changes with the files of a folder, but for two writes in one tick of the file system's clock.

    A program cannot set the time of the change.
    """
    found = [(path, path.stat()) for path in sorted(folder.glob("*")) if path.is_file()]
    return tuple((path.name, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns) for path, at in found)


@lru_cache(maxsize=8)
def _described(folder: Path, name: str, stamps: tuple[tuple[object, ...], ...]) -> PreparedModel:
    """Return the record of a model folder. Its files are read once while they are unchanged, which takes seconds."""
    return describe_model(folder, name)


def machine_facts(device: torch.device) -> dict[str, Any]:
    """Return the fields that say where a capture was made, without serial numbers and host names."""
    hardware = read_hardware(device)
    return {
        "device": f"{device.type} ({hardware.name})",
        "driver": hardware.driver,
        "toolkit": hardware.toolkit,
        "numerics": {
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "deterministic_algorithms": str(torch.are_deterministic_algorithms_enabled()),
        },
    }


def tokens_sha256(sequences: Sequence[Sequence[int]]) -> str:
    """Return the SHA-256 of the token ids of all sequences."""
    return sha256_of_json([list(map(int, ids)) for ids in sequences])


class Share(NamedTuple):
    """The part of a weight that a tensor-parallel worker has: some rows (`dim` 0) or columns (`dim` 1)."""

    dim: int
    shard: Shard

    def is_of(self, tensor: Tensor) -> bool:
        """Return whether it is a part of this weight, by its shape."""
        return tensor.dim() > self.dim and tensor.shape[self.dim] == self.shard.width

    def of_whole(self, tensor: Tensor) -> Tensor:
        """Return the part of the whole weight."""
        return tensor.narrow(self.dim, self.shard.start, self.shard.size)

    def without_padding(self, held: Tensor) -> Tensor:
        """Return what a worker holds, without the rows that pad a vocabulary."""
        return held.narrow(self.dim, 0, self.shard.size)


def compare_with_files(
    held: Mapping[str, Tensor],
    folder: Path,
    shares: Mapping[str, Share] | None = None,
    *,
    every_value: bool = False,
) -> tuple[int, tuple[str, ...]]:
    """Return how many parameters in memory were compared with the model's files, and the names of those that differ.

    About 4,096 evenly spaced values of each are compared, unless it shall be every value, after rounding to the dtype
    in memory. Parameters that have another name or shape in the files are not compared. `shares`: which part of a
    parameter this process holds.
    """
    compared, stale = 0, []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as stored:
            for name in sorted(set(stored.keys()) & held.keys()):
                tensor, own = stored.get_tensor(name), held[name].detach()
                share = None if shares is None else shares.get(name)
                if share is not None and share.is_of(tensor):
                    tensor, own = share.of_whole(tensor), share.without_padding(own)
                if tensor.shape != own.shape:
                    continue
                compared += 1
                step = 1 if every_value else max(1, own.numel() // _COMPARED_VALUES)
                if not torch.equal(tensor.reshape(-1)[::step].to(own.dtype), own.reshape(-1)[::step].cpu()):
                    stale.append(name)
    return compared, tuple(stale)
