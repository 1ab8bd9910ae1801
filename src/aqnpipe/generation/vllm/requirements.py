"""Checks the requirements of vLLM before it starts; its own error messages come from other processes and are long."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aqnpipe.config.generation import why_not_shared
from aqnpipe.config.model import common_names
from aqnpipe.device import DeviceKind, resolve_device
from aqnpipe.errors import DeviceError, ModelError
from aqnpipe.generation.vllm.plugin import is_vllm_installed

_INSTALL = {
    "cpu": "make vllm (a separate environment for a CPU, .venv-vllm)",
    "cuda": "make setup DEVICE=cuda",
    "npu": "docs/how-to/ascend-cluster.md says where it can be had",
}

_SIZES = ("hidden_size", "num_attention_heads", "num_hidden_layers")
_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def check_vllm(device: DeviceKind) -> None:
    """Raise ModelError, with the install command, if vLLM is not installed."""
    if not is_vllm_installed():
        raise ModelError(
            f"generation.backend: vllm was requested but is not installed here: {_INSTALL[device]}; "
            "backend: transformers runs without vLLM"
        )


def with_common_names(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of config.json with the common names of its sizes; ModelError if a size is missing."""
    named = common_names(config)
    for name in _SIZES:
        if not isinstance(named.get(name), int):
            raise ModelError(
                f"{folder / 'config.json'}: no {name}, which vLLM needs; generation.backend: transformers runs without "
                "vLLM"
            )
    return named


def check_model(folder: Path, config: Mapping[str, Any], device: DeviceKind) -> None:
    """Raise ModelError if vLLM does not implement the model, or has no attention kernel for its head size.

    `config` is the content of config.json.
    """
    from vllm import ModelRegistry

    architecture = (config.get("architectures") or ["none"])[0]
    if architecture not in ModelRegistry.get_supported_archs():
        raise ModelError(
            f"{folder / 'config.json'}: vLLM has no model class {architecture}; generation.backend: transformers "
            "runs without vLLM"
        )
    sizes = with_common_names(folder, config)
    head_size = sizes.get("head_dim") or sizes["hidden_size"] // sizes["num_attention_heads"]
    if device == "cpu" and head_size not in _CPU_HEAD_SIZES:
        raise ModelError(
            f"{folder / 'config.json'}: head_dim is {head_size}, vLLM on a CPU supports "
            f"{', '.join(map(str, _CPU_HEAD_SIZES))}; generation.backend: transformers supports any"
        )


def check_tensor_parallel(folder: Path, config: Mapping[str, Any], device: DeviceKind, num_workers: int) -> None:
    """Refuse a number of tensor-parallel workers that the model or this machine does not allow.

    `config`: content of config.json with common names. Raises ModelError if the number is below 1 or the model's layers
    cannot be shared by so many, DeviceError if fewer devices (on a CPU: cores) are visible.
    """
    if num_workers < 1:
        raise ModelError(f"tensor parallelism: found {num_workers}, expected 1 or more")
    if num_workers == 1:
        return
    reason = why_not_shared(config, num_workers)
    if reason is not None:
        raise ModelError(f"{folder / 'config.json'}: tensor parallelism over {num_workers} workers: {reason}")
    found = len(os.sched_getaffinity(0)) if device == "cpu" else resolve_device(device).count
    if found < num_workers:
        what = "CPU cores" if device == "cpu" else f"{device} devices"
        raise DeviceError(
            f"tensor parallelism over {num_workers} workers: found {found} {what}; every worker of an engine needs one"
        )
