"""The device of a job: CUDA GPUs, Ascend NPUs or the CPU. No other module uses torch's device backends.

Functions import torch where they need it, so that the configuration can be read without torch.
"""

import importlib
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Literal

from aqnpipe.errors import ConfigError, DeviceError

if TYPE_CHECKING:
    import torch

DeviceKind = Literal["cpu", "cuda", "npu"]
RequestedDevice = Literal["auto", "cpu", "cuda", "npu"]

VISIBLE_DEVICES: dict[DeviceKind, str] = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
"""The environment variable that lists the devices a process may use; schedulers set it."""

COLLECTIVES: dict[DeviceKind, str] = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
"""The torch.distributed backend of each kind of device."""

_ASCEND_ENVIRONMENT = {"VLLM_ASCEND_ENABLE_NZ": "0"}
"""Keeps weights in the plain layout on Ascend: in the NZ layout vLLM would misread a synchronised policy."""

_OTHER_NUMBERS = {
    "ACCELERATE_DYNAMO_BACKEND": ("", "no"),
    "DNNL_DEFAULT_FPMATH_MODE": ("", "strict"),
    "NVIDIA_TF32_OVERRIDE": ("", "0"),
    "ONEDNN_DEFAULT_FPMATH_MODE": ("", "strict"),
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": ("", "0"),
    "TRITON_F32_DEFAULT": ("", "ieee"),
}
"""Environment variables by which libraries round the operands of float32 products, or compile the model, and the values
(in lower case) that do neither.
"""

_NO_DEVICES = ("", "nodevfiles", "none", "void")
"""Values of CUDA_VISIBLE_DEVICES that mean no device, in lower case; Slurm writes `NoDevFiles`."""

_DEVICE_IDS: dict[DeviceKind, tuple[str, str]] = {
    "cuda": (r"\d+|(GPU|MIG)-[\w/-]+", "device numbers such as 0,1 or UUIDs such as GPU-8932f937"),
    "npu": (r"\d+", "device numbers such as 0,1"),
}
"""Form of an entry of the variable, as a pattern and in words."""


@dataclass(frozen=True)
class Device:
    """The devices visible to this process: their kind, their number (1 for the CPU) and their names."""

    kind: DeviceKind
    count: int
    names: tuple[str, ...]

    @property
    def label(self) -> str:
        """Text for run.json: `cpu`, or kind, number and name, as in `cuda: 8 x NVIDIA A100-SXM4-80GB`."""
        if self.kind == "cpu":
            return "cpu"
        return f"{self.kind}: {self.count} x {', '.join(dict.fromkeys(self.names))}"


def refuse_other_numbers() -> None:
    """Raise ConfigError if a variable of the environment makes products less exact than the study's number format."""
    for name, usual in _OTHER_NUMBERS.items():
        if (value := os.environ.get(name, "")).lower() not in usual:
            raise ConfigError(
                f"environment: {name} is {value!r}, which changes the numbers that every arm computes, expected it "
                f"unset or {usual[-1]!r}"
            )


def resolve_device(requested: RequestedDevice) -> Device:
    """Return the devices to compute on. `auto` selects NPUs if there are any, else GPUs, else the CPU.

    Raises DeviceError if the requested kind is missing, or if `auto` would select the CPU although the environment
    lists devices. The message contains what was found and the remedy.
    """
    if requested == "cpu":
        return Device("cpu", 1, ("cpu",))
    if requested != "auto":
        found = _visible(requested)
        if found is None:
            raise DeviceError(
                f"device: requested {requested}, found none: {_why_none(requested)}; `device: cpu` runs without"
            )
        return found
    for kind in ("npu", "cuda"):
        found = _visible(kind)
        if found is not None:
            return found
    for kind, variable in VISIBLE_DEVICES.items():
        if visible_ids(kind):
            raise DeviceError(
                f"device: auto found only the CPU, but {variable}={os.environ[variable]} lists devices: "
                f"{_why_none(kind)}; `device: cpu` runs without"
            )
    return Device("cpu", 1, ("cpu",))


def torch_device(kind: DeviceKind, local_rank: int = 0) -> str:
    """Return torch's name for the device of a process: `cpu`, `cuda:0`, `npu:3`.

    local_rank: number of the process on its node, which is the index of its device among the visible ones.
    """
    return "cpu" if kind == "cpu" else f"{kind}:{local_rank}"


def name_of_device(device: "torch.device") -> str | None:
    """Return the name of one GPU or NPU, such as `NVIDIA A100-SXM4-80GB`; None for a CPU."""
    for kind in VISIBLE_DEVICES:
        backend = _backend(kind) if device.type == kind else None
        if backend is not None:
            name: str = backend.get_device_name(device)
            return name
    return None


def uuid_of_device(device: "torch.device") -> str | None:
    """Return the UUID of one GPU, as `nvidia-smi` writes it; None where torch does not know it."""
    backend = _backend("cuda") if device.type == "cuda" else None
    uuid = getattr(backend.get_device_properties(device), "uuid", None) if backend is not None else None
    return None if uuid is None else f"GPU-{uuid}"


def nvidia_capability(kind: DeviceKind) -> tuple[int, int] | None:
    """Return the compute capability of this process's NVIDIA GPU, (9, 0) for an H100; None for any other device."""
    if kind != "cuda":
        return None
    import torch

    if torch.version.hip is not None:
        return None
    backend: ModuleType = torch.cuda
    capability: tuple[int, int] = backend.get_device_capability(local_device_index(kind))
    return capability


def visible_ids(kind: DeviceKind) -> tuple[str, ...]:
    """Return the device ids that the environment lists for this process; empty if it lists none.

    As for CUDA, a list ends at an empty or negative entry. Raises DeviceError for entries that CUDA would read as
    another device (`0-3` is device 0) and for repeated ones (CUDA would find no device).
    """
    if kind not in VISIBLE_DEVICES:
        return ()
    text = os.environ.get(VISIBLE_DEVICES[kind], "").strip()
    if text.lower() in _NO_DEVICES:
        return ()
    parts = (part.strip() for part in text.split(","))
    listed = takewhile(lambda part: part != "" and re.fullmatch(r"-\d+", part) is None, parts)
    ids = tuple(str(int(part)) if part.isdecimal() else part for part in listed)
    pattern, expected = _DEVICE_IDS[kind]
    if len(set(ids)) < len(ids) or not all(re.fullmatch(pattern, part) for part in ids):
        raise DeviceError(f"{VISIBLE_DEVICES[kind]}: found {text!r}, expected {expected}, with commas and each once")
    return ids


def local_device_index(kind: DeviceKind) -> int:
    """Return the index of this process's device among the visible ones.

    Each of several workers on a node sees either all devices of the node, and uses the one with its LOCAL_RANK, or only
    its own device.
    """
    return 0 if len(visible_ids(kind)) == 1 else int(os.environ.get("LOCAL_RANK", "0"))


def local_device_id(kind: DeviceKind) -> str:
    """Return the id of the GPU or NPU that this process computes on."""
    number, ids = local_device_index(kind), visible_ids(kind)
    return ids[number] if ids else str(number)


def can_compute_on(kind: DeviceKind) -> bool:
    """Return whether the installed torch was built for devices of a kind; without importing torch."""
    if kind == "npu":
        return find_spec("torch_npu") is not None
    torch = find_spec("torch")
    if kind == "cpu" or torch is None or torch.origin is None:
        return kind == "cpu"
    built = Path(torch.origin).with_name("version.py").read_text(encoding="utf-8")
    return re.search(r"^cuda\b[^=]*= *['\"]", built, re.MULTILINE) is not None


def set_visible_devices(kind: DeviceKind, ids: tuple[str, ...]) -> None:
    """Make only the devices `ids` visible to this process and its children. Call it before torch is imported."""
    os.environ[VISIBLE_DEVICES[kind]] = ",".join(ids)


def _visible(kind: DeviceKind) -> Device | None:
    backend = _backend(kind)
    if backend is None or not backend.is_available() or backend.device_count() == 0:
        return None
    count: int = backend.device_count()
    return Device(kind, count, tuple(backend.get_device_name(index) for index in range(count)))


def _backend(kind: DeviceKind) -> ModuleType | None:
    """Return `torch.cuda` or `torch.npu`; None if torch_npu is not installed."""
    if kind == "npu":
        if find_spec("torch_npu") is None:
            return None
        for name, value in _ASCEND_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        importlib.import_module("torch_npu")  # adds torch.npu
    module: ModuleType = getattr(importlib.import_module("torch"), kind)
    return module


def _why_none(kind: DeviceKind) -> str:
    """Return the reason why torch sees no device of this kind, and the remedy."""
    import torch

    if kind == "npu" and find_spec("torch_npu") is None:
        return "torch_npu is not installed (pip install torch-npu, in the version for this torch; it needs CANN)"
    if kind == "cuda" and torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA (install the build for your driver from pytorch.org)"
    variable = VISIBLE_DEVICES[kind]
    given = os.environ.get(variable)
    if given is not None and not visible_ids(kind):
        return f"{variable} is {given!r} (the job has no devices: request them from the scheduler)"
    return f"torch sees none (does {'npu-smi info' if kind == 'npu' else 'nvidia-smi'} show them?)"


def dispatch_keys() -> list[str]:
    """Return the keys of torch's dispatcher whose kernels compute on the devices of this process."""
    import torch

    found = ["CPU", "CUDA"] if torch.cuda.is_available() else ["CPU"]
    # The key of backends that are loaded as packages, such as torch_npu.
    return found if torch._C._get_privateuse1_backend_name() == "privateuseone" else [*found, "PrivateUse1"]


def is_being_captured(tensor: "torch.Tensor") -> bool:
    """Return whether what computes on `tensor` now is captured into a CUDA graph, to be replayed."""
    import torch

    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


@contextmanager
def determinism_requested() -> Iterator[None]:
    """Ask torch for deterministic algorithms in the body; operations without one run as they are, without a warning."""
    import torch

    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic.*")
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
