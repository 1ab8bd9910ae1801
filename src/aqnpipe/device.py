"""What a job computes on: CUDA GPUs, Ascend NPUs or the CPU. The only module that reaches torch's device backends.

Torch is imported by the functions that need it, so that the configuration stays free of it.
"""

import importlib
import os
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Literal

from aqnpipe.errors import DeviceError

if TYPE_CHECKING:
    import torch

DeviceKind = Literal["cpu", "cuda", "npu"]
RequestedDevice = Literal["auto", "cpu", "cuda", "npu"]

VISIBLE_DEVICES: dict[DeviceKind, str] = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
"""The environment variable by which a scheduler says which devices a process may use."""

COLLECTIVES: dict[DeviceKind, str] = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
"""The backend of torch.distributed on each kind of device."""

_ASCEND_ENVIRONMENT = {"VLLM_ASCEND_ENABLE_NZ": "0"}
"""Weights stay in the plain layout on Ascend: a synchronised policy would be read wrongly from the NZ one."""

_NO_DEVICES = ("", "-1", "NoDevFiles")
"""What CUDA_VISIBLE_DEVICES holds where no device was given; the last is Slurm's word."""


@dataclass(frozen=True)
class Device:
    """The devices that this process sees: their kind, how many (1 for the CPU) and their names."""

    kind: DeviceKind
    count: int
    names: tuple[str, ...]

    @property
    def label(self) -> str:
        """What run.json says: `cpu`, or kind, number and name, as in `cuda: 8 x NVIDIA A100-SXM4-80GB`."""
        if self.kind == "cpu":
            return "cpu"
        return f"{self.kind}: {self.count} x {', '.join(dict.fromkeys(self.names))}"


def resolve_device(requested: RequestedDevice) -> Device:
    """Return the devices to compute on. `auto` takes NPUs where there are some, else GPUs, else the CPU.

    Raises DeviceError, saying what was found and how to get it, if what was requested is not there, or if `auto` would
    end on the CPU although the environment promises devices.
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
                f"device: auto found only the CPU, but {variable}={os.environ[variable]} promises devices: "
                f"{_why_none(kind)}; `device: cpu` runs without"
            )
    return Device("cpu", 1, ("cpu",))


def torch_device(kind: DeviceKind, local_rank: int = 0) -> str:
    """Return the name for torch of the device of a process: `cpu`, `cuda:0`, `npu:3`.

    local_rank: number of the process on its node; devices are counted among the visible ones.
    """
    return "cpu" if kind == "cpu" else f"{kind}:{local_rank}"


def name_of_device(device: "torch.device") -> str | None:
    """Return the name of one GPU or NPU, such as `NVIDIA A100-SXM4-80GB`; None for a device without one."""
    for kind in VISIBLE_DEVICES:
        backend = _backend(kind) if device.type == kind else None
        if backend is not None:
            name: str = backend.get_device_name(device)
            return name
    return None


def visible_ids(kind: DeviceKind) -> tuple[str, ...]:
    """Return the device ids that the environment gives to this process; none where it says nothing or gives none."""
    text = os.environ.get(VISIBLE_DEVICES[kind], "") if kind in VISIBLE_DEVICES else ""
    return () if text.strip() in _NO_DEVICES else tuple(part.strip() for part in text.split(","))


def local_device_index(kind: DeviceKind) -> int:
    """Return the number of this process's device among those that it sees.

    Of several workers on a node each may see all of its devices, and has the one of its own number (LOCAL_RANK), or see
    its own alone.
    """
    return 0 if len(visible_ids(kind)) == 1 else int(os.environ.get("LOCAL_RANK", "0"))


def local_device_id(kind: DeviceKind) -> str:
    """Return the id of the GPU or NPU that this process computes on."""
    number, ids = local_device_index(kind), visible_ids(kind)
    return ids[number] if ids else str(number)


def set_visible_devices(kind: DeviceKind, ids: tuple[str, ...]) -> None:
    """Let this process and its children see only the devices `ids`; to be called before torch is imported."""
    os.environ[VISIBLE_DEVICES[kind]] = ",".join(ids)


def _visible(kind: DeviceKind) -> Device | None:
    backend = _backend(kind)
    if backend is None or not backend.is_available() or backend.device_count() == 0:
        return None
    count: int = backend.device_count()
    return Device(kind, count, tuple(backend.get_device_name(index) for index in range(count)))


def _backend(kind: DeviceKind) -> ModuleType | None:
    """Return `torch.cuda` or `torch.npu`; None where the latter is not installed."""
    if kind == "npu":
        if find_spec("torch_npu") is None:
            return None
        for name, value in _ASCEND_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        importlib.import_module("torch_npu")  # adds torch.npu
    module: ModuleType = getattr(importlib.import_module("torch"), kind)
    return module


def _why_none(kind: DeviceKind) -> str:
    """Return why torch sees no device of a kind, and what to do."""
    import torch

    if kind == "npu" and find_spec("torch_npu") is None:
        return "torch_npu is not installed (pip install torch-npu, in the version made for this torch, beside CANN)"
    if kind == "cuda" and torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA (install the build for your driver from pytorch.org)"
    variable = VISIBLE_DEVICES[kind]
    given = os.environ.get(variable)
    if given is not None and not visible_ids(kind):
        return f"{variable} is {given!r} (the job was given none: ask the scheduler for them)"
    return f"torch sees none (does {'npu-smi info' if kind == 'npu' else 'nvidia-smi'} show them?)"
