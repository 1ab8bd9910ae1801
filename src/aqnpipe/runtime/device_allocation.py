"""Which devices a job may use: those that Slurm gave it, or leases on a machine without a scheduler.

Torch (with torch_npu) may look at the devices as soon as it is imported: enter `allocated_devices` before that.
"""

import os
import re
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from aqnpipe.device import VISIBLE_DEVICES, DeviceKind, RequestedDevice, set_visible_devices, visible_ids
from aqnpipe.errors import DeviceError
from aqnpipe.runtime.device_leases import LEASES, lease_devices

_DEVICE_FILES: dict[DeviceKind, str] = {"npu": "davinci[0-9]*", "cuda": "nvidia[0-9]*"}
_SECONDS_BETWEEN_TRIES = 1.0


@dataclass(frozen=True)
class Allocation:
    """The devices that a job was given; `kind` is cpu and `ids` empty where it was given none."""

    kind: DeviceKind
    ids: tuple[str, ...]
    leased: bool = False

    def __str__(self) -> str:
        """One line for the job's log."""
        if not self.ids:
            return "devices given: none"
        how = "leased" if self.leased else "given"
        return f"devices {how}: {VISIBLE_DEVICES[self.kind]}={','.join(self.ids)}"


def place_of_job() -> str:
    """Return where this process runs, for its log: the node, by Slurm's name for it, and the Slurm job."""
    job = os.environ.get("SLURM_JOB_ID")
    return f"node {this_node()}" + (f", Slurm job {job}" if job else "")


def nodes_of_job() -> tuple[str, ...]:
    """Return the nodes of this Slurm job, by Slurm's names for them, in its order; none outside Slurm."""
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        return ()
    # The variables of a job step name its own nodes only, or contradict each other (22.05).
    listed = re.search(r"^\s*NodeList=(\S+)", _details_of(job), re.MULTILINE)
    return _expanded(listed[1]) if listed else ()


def environment_of_node(node: str) -> dict[str, str]:
    """Return what to set for processes of this job on another of its nodes: which NPUs they may use.

    GPUs are named by Slurm itself there.
    """
    ids = slurm_npu_ids(_details_of(os.environ["SLURM_JOB_ID"]), node)
    return {VISIBLE_DEVICES["npu"]: ",".join(ids)} if ids else {}


@contextmanager
def allocated_devices(requested: RequestedDevice, num_leases: int = 0) -> Iterator[Allocation]:
    """Let this process see only its devices while the body runs, and yield which they are.

    num_leases: devices to lease from this machine, waiting until so many are free; 0 where a scheduler gives them.
    Raises DeviceError if the machine does not have so many.
    """
    if num_leases == 0:
        yield current_allocation()
        return
    job = os.environ.get("SLURM_JOB_ID")
    if job is not None:
        raise DeviceError(
            f"device leases: found Slurm job {job}, expected a machine without a scheduler "
            "(profile workstation is for those)"
        )
    kind, ids = devices_of_machine(requested)
    if len(ids) < num_leases:
        raise DeviceError(
            f"device leases: the profile gives {num_leases} of this machine's devices to a job, found {len(ids)} "
            f"({', '.join(_DEVICE_FILES.values())} in /dev, or CUDA_VISIBLE_DEVICES or ASCEND_RT_VISIBLE_DEVICES)"
        )
    with lease_devices(LEASES, kind, ids, num_leases, _SECONDS_BETWEEN_TRIES) as taken:
        set_visible_devices(kind, taken)
        # The process ends soon after the job; until then it must not fall back to all devices, so nothing is undone.
        yield Allocation(kind, taken, leased=True)


def current_allocation() -> Allocation:
    """Return what Slurm or the environment gave to this process.

    Slurm says CUDA_VISIBLE_DEVICES of itself. Of NPUs it says nothing (22.05): their ids are read from `scontrol show
    job -d`, and ASCEND_RT_VISIBLE_DEVICES is set.
    """
    job = os.environ.get("SLURM_JOB_ID")
    if job is not None and not visible_ids("cuda") and not visible_ids("npu"):
        ids = slurm_npu_ids(_details_of(job), this_node())
        if ids:
            set_visible_devices("npu", ids)
    for kind in VISIBLE_DEVICES:
        if visible_ids(kind):
            return Allocation(kind, visible_ids(kind))
    return Allocation("cpu", ())


def devices_of_machine(requested: RequestedDevice) -> tuple[DeviceKind, tuple[str, ...]]:
    """Return kind and ids of the devices that leases are given on: those of the environment, else those in /dev.

    A study on the CPU leases whatever there is: a rehearsal.
    """
    kinds: list[DeviceKind] = [kind for kind in _DEVICE_FILES if requested in (kind, "auto", "cpu")]
    for found in (visible_ids, _ids_in_dev):
        for kind in kinds:
            ids = found(kind)
            if ids:
                return kind, ids
    return "cpu", ()


def slurm_npu_ids(details: str, node: str) -> tuple[str, ...]:
    """Return the NPU ids of a node from `scontrol show job -d`: `Nodes=npu01 ... GRES=npu:910c:4(IDX:0-3)`."""
    rows = re.findall(r"^\s*Nodes=(\S+) .*?GRES=\S*?npu(?::[\w.]+)*:\d+\(IDX:([\d,-]+)\)", details, re.MULTILINE)
    for nodes, indices in rows:
        if len(rows) == 1 or node in _expanded(nodes):
            return tuple(str(index) for index in _numbers(indices))
    return ()


def this_node() -> str:
    """Return the name of the node that this process runs on, as Slurm calls it where there is Slurm."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def _details_of(job: str) -> str:
    try:
        command = ["scontrol", "show", "job", "-d", job]
        done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603 - Slurm's own id
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        raise DeviceError(f"Slurm job {job}: cannot ask for its devices: {' '.join(reason.split())}") from error
    return done.stdout


def _expanded(nodes: str) -> tuple[str, ...]:
    """Return the node names of a Slurm node list: `npu[01-02,05]` are npu01, npu02 and npu05."""
    names: list[str] = []
    for prefix, inside in re.findall(r"([^,\[\]]+)(?:\[([\d,-]+)\])?", nodes):
        if not inside:
            names.append(prefix)
            continue
        width = len(re.split("[,-]", inside)[0])
        names.extend(f"{prefix}{number:0{width}}" for number in _numbers(inside))
    return tuple(names)


def _numbers(text: str) -> list[int]:
    """Return the numbers of `0-2,5`: 0, 1, 2, 5."""
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers.extend(range(int(first), int(last or first) + 1))
    return numbers


def _ids_in_dev(kind: DeviceKind) -> tuple[str, ...]:
    found = [re.search(r"\d+$", path.name) for path in Path("/dev").glob(_DEVICE_FILES[kind])]
    return tuple(str(number) for number in sorted(int(match.group()) for match in found if match))
