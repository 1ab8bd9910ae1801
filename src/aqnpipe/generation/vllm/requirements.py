"""Checks the requirements of vLLM before it starts; its own error messages come from other processes and are long."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aqnpipe.device import DeviceKind
from aqnpipe.errors import ModelError
from aqnpipe.generation.vllm.plugin import is_vllm_installed

_INSTALL = {
    "cpu": "make vllm (an environment of its own for a CPU, .venv-vllm)",
    "cuda": "make setup DEVICE=cuda",
    "npu": "docs/how-to/ascend-cluster.md says where it can be had",
}

_OTHER_NAMES = {
    "hidden_size": ("n_embd", "d_model"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_hidden_layers": ("n_layer", "n_layers"),
}
"""Keys of config.json that some families (GPT-2, BLOOM, MPT) name differently."""

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
    named = dict(config)
    for name, others in _OTHER_NAMES.items():
        found = next((config[key] for key in (name, *others) if isinstance(config.get(key), int)), None)
        if found is None:
            raise ModelError(
                f"{folder / 'config.json'}: no {name}, which vLLM needs; generation.backend: transformers runs without "
                "vLLM"
            )
        named[name] = found
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
