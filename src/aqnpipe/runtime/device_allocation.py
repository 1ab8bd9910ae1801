"""The devices that a job may use: those that Slurm gave it, or leases on a machine without a scheduler.

Torch (with torch_npu) may query the devices as soon as it is imported, so enter `allocated_devices` before the import.
"""

import os
import re
import shutil
import socket
import stat
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from aqnpipe.device import (
    VISIBLE_DEVICES,
    DeviceKind,
    RequestedDevice,
    can_compute_on,
    set_visible_devices,
    visible_ids,
)
from aqnpipe.errors import DeviceError
from aqnpipe.runtime.locks import FileLock

_DEVICE_FILES: dict[DeviceKind, str] = {"npu": "davinci[0-9]*", "cuda": "nvidia[0-9]*"}
_DEV = Path("/dev")
_SECONDS_BETWEEN_TRIES = 1.0

LEASES = Path("/tmp/aqnpipe-device-leases")  # noqa: S108 - only locks, nothing reads these files
"""One folder per machine, shared by the jobs of all studies and users."""


@dataclass(frozen=True)
class Allocation:
    """The devices that a job was given; without any, `kind` is cpu and `ids` is empty."""

    kind: DeviceKind
    ids: tuple[str, ...]
    leased: bool = False

    def __str__(self) -> str:
        """Return one line for the job's log."""
        if not self.ids:
            return "devices given: none"
        how = "leased" if self.leased else "given"
        return f"devices {how}: {VISIBLE_DEVICES[self.kind]}={','.join(self.ids)}"


def place_of_job() -> str:
    """Return the node and the Slurm job of this process, for its log."""
    job = _slurm_job()
    return f"node {this_node()}" + (f", Slurm job {job}" if job else "")


def nodes_of_job() -> tuple[str, ...]:
    """Return the nodes of this Slurm job by Slurm's names and in Slurm's order; none outside Slurm."""
    job = _slurm_job()
    if job is None:
        return ()
    # In a job step the environment variables name only the step's nodes, or contradict each other (Slurm 22.05).
    listed = re.search(r"^\s*NodeList=(\S+)", _details_of(job), re.MULTILINE)
    return _expanded(listed[1]) if listed else ()


def environment_of_node(node: str) -> dict[str, str]:
    """Return the environment variable that names the NPUs of this job on another of its nodes.

    Slurm itself sets the variable for GPUs there.
    """
    ids = slurm_npu_ids(_details_of(os.environ["SLURM_JOB_ID"]), node)
    return {VISIBLE_DEVICES["npu"]: ",".join(ids)} if ids else {}


@contextmanager
def allocated_devices(requested: RequestedDevice, num_leases: int = 0, num_devices: int = 1) -> Iterator[Allocation]:
    """Restrict this process to its devices while the body runs, and yield them.

    num_leases: how many devices of this machine, or of this Slurm job, to lease, waiting until they are free; 0 if the
    profile does not say. Then a job without a scheduler leases `num_devices`, those that its workers need, if the
    machine has several, and in a Slurm job with several a job that needs one leases one. Otherwise transformers would
    spread a single worker over all of them, which TRL refuses, and jobs that run at once would share the first one.
    Raises DeviceError if there are fewer devices than `num_leases`.
    """
    job = _slurm_job()
    if num_leases > 0:
        kind, ids = devices_of_machine(requested)
        if len(ids) < num_leases:
            raise DeviceError(_too_few(num_leases, len(ids)))
    elif job is None:
        kind, ids = devices_to_compute_on(requested)
        num_leases = num_devices if len(ids) > 1 else 0
    else:
        given = current_allocation(requested)
        kind, ids = given.kind, given.ids
        # Several workers may have devices on further nodes of the job too.
        num_leases = 1 if num_devices == 1 and requested != "cpu" and len(ids) > 1 else 0
    is_single = num_devices == 1 and requested != "cpu"
    if 0 < num_leases <= len(ids):
        # Slurm may number the devices of each of its jobs from 0.
        owner = f"job{job}-{kind}" if job else kind
        with lease_devices(LEASES, owner, ids, num_leases, _SECONDS_BETWEEN_TRIES) as taken:
            # Not undone: the process ends soon after the job, and until then it must not fall back to all devices.
            set_visible_devices(kind, taken)
            yield Allocation(kind, taken, leased=True)
        return
    allocation = current_allocation() if is_single else current_allocation(requested)
    if is_single and len(allocation.ids) > 1:
        allocation = replace(allocation, ids=allocation.ids[:1])
        set_visible_devices(allocation.kind, allocation.ids)
    yield allocation


def _too_few(num_leases: int, found: int) -> str:
    if job := _slurm_job():
        return f"devices: the profile gives {num_leases} of the devices of Slurm job {job} to a job, found {found}"
    return (
        f"devices: the profile gives {num_leases} of this machine's devices to a job, found {found} "
        f"({', '.join(_DEVICE_FILES.values())} in /dev, or CUDA_VISIBLE_DEVICES or ASCEND_RT_VISIBLE_DEVICES)"
    )


def devices_to_compute_on(requested: RequestedDevice) -> tuple[DeviceKind, tuple[str, ...]]:
    """Return kind and ids of the devices that a study can compute on here: those in the environment, else in /dev."""
    for kind in _DEVICE_FILES:
        if requested in (kind, "auto") and can_compute_on(kind):
            ids = visible_ids(kind) if VISIBLE_DEVICES[kind] in os.environ else _ids_in_dev(kind)
            if ids:
                return kind, ids
    return "cpu", ()


def computes_on_cpu(requested: RequestedDevice) -> bool:
    """Return whether jobs of a study compute on the CPU of this machine."""
    return devices_to_compute_on(requested)[0] == "cpu"


def current_allocation(requested: RequestedDevice = "auto") -> Allocation:
    """Return the devices that Slurm or the environment gave to this process.

    Slurm itself sets CUDA_VISIBLE_DEVICES, but no variable for NPUs (22.05). Their ids are read from `scontrol show job
    -d`, and this function sets ASCEND_RT_VISIBLE_DEVICES to them.
    """
    job = _slurm_job()
    if requested == "cpu" and shutil.which("scontrol") is None:
        job = None  # In a container of a Slurm job; a study on the CPU needs no device.
    if job is not None and not visible_ids("cuda") and not visible_ids("npu"):
        ids = slurm_npu_ids(_details_of(job), this_node())
        if ids:
            set_visible_devices("npu", ids)
    visible = (Allocation(kind, visible_ids(kind)) for kind in VISIBLE_DEVICES if visible_ids(kind))
    return next(visible, Allocation("cpu", ()))


def devices_of_machine(requested: RequestedDevice) -> tuple[DeviceKind, tuple[str, ...]]:
    """Return kind and ids of the devices that can be leased: those in the environment, otherwise those in /dev.

    In a Slurm job they are those of the job. A study on the CPU leases devices of any kind, as a rehearsal.
    """
    if _slurm_job() is not None:
        given = current_allocation(requested)
        return (given.kind, given.ids) if requested in (given.kind, "auto", "cpu") else ("cpu", ())
    kinds: list[DeviceKind] = [kind for kind in _DEVICE_FILES if requested in (kind, "auto", "cpu")]
    for found in (visible_ids, _ids_in_dev):
        for kind in kinds:
            ids = found(kind)
            if ids:
                return kind, ids
    return "cpu", ()


def slurm_npu_ids(details: str, node: str) -> tuple[str, ...]:
    """Parse a node's NPU ids from `scontrol show job -d`: `Nodes=npu01 ... GRES=npu:910c:4(IDX:0-3)`."""
    rows = re.findall(r"^\s*Nodes=(\S+) .*?GRES=\S*?npu(?::[\w.]+)*:\d+\(IDX:([\d,-]+)\)", details, re.MULTILINE)
    for nodes, indices in rows:
        if len(rows) == 1 or node in _expanded(nodes):
            return tuple(str(index) for index in _numbers(indices))
    return ()


def this_node() -> str:
    """Return this node's name: Slurm's name for it in a Slurm job, otherwise the host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def _slurm_job() -> str | None:
    """Return the id of the Slurm job that this process is in, an allocation of the user's own too."""
    return os.environ.get("SLURM_JOB_ID") or None


def _details_of(job: str) -> str:
    try:
        command = ["scontrol", "show", "job", "-d", job]
        done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603 - Slurm's own id
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        raise DeviceError(
            f"Slurm job {job} (SLURM_JOB_ID): cannot query its devices: {' '.join(reason.split())}; list them in "
            "CUDA_VISIBLE_DEVICES or ASCEND_RT_VISIBLE_DEVICES, or unset SLURM_JOB_ID outside the job"
        ) from error
    return done.stdout


def _expanded(nodes: str) -> tuple[str, ...]:
    """Return the node names of a Slurm node list: `npu[01-02,05]` are npu01, npu02 and npu05."""
    names: list[str] = []
    for prefix, inside in re.findall(r"([^,\[\]]+)(?:\[([\d,-]+)\])?", nodes):
        width = len(re.split("[,-]", inside)[0])
        names += [f"{prefix}{number:0{width}}" for number in _numbers(inside)] if inside else [prefix]
    return tuple(names)


def _numbers(text: str) -> list[int]:
    """Return the numbers of `0-2,5`: 0, 1, 2, 5."""
    ends = [part.partition("-") for part in text.split(",")]
    return [number for first, _, last in ends for number in range(int(first), int(last or first) + 1)]


def _ids_in_dev(kind: DeviceKind) -> tuple[str, ...]:
    """Return the numbers of the devices in /dev, as CUDA counts them.

    A container that was given two devices may have /dev/nvidia2 and /dev/nvidia3, which are devices 0 and 1 there.
    """
    found = [path for path in _DEV.glob(_DEVICE_FILES[kind]) if re.fullmatch(r"[a-z]+\d+", path.name)]
    return tuple(str(number) for number in range(len(found)))


@contextmanager
def lease_devices(
    folder: Path, kind: str, ids: Sequence[str], count: int, seconds_between_tries: float
) -> Iterator[tuple[str, ...]]:
    """Hold `count` of the devices `ids` of a kind while the body runs; wait until that many are free; yield their ids.

    kind: start of the names of the locks: the kind of device, with additional device identifiers.
    A job takes all devices that it needs or none, so two jobs never wait for each other. Raises DeviceError if a lock
    file cannot be opened.
    """
    while (held := _try_to_hold(folder, kind, ids, count)) is None:
        time.sleep(seconds_between_tries)
    taken, locks = held
    with locks:
        yield taken


def _try_to_hold(
    folder: Path, kind: str, ids: Sequence[str], count: int
) -> tuple[tuple[str, ...], AbstractContextManager[object]] | None:
    """Return `count` free devices and their locks; None, without holding any lock, if fewer are free."""
    held: list[str] = []
    with ExitStack() as stack:
        for name in ids:
            lock = stack.enter_context(_open(folder, f"{kind}-{name.replace('/', '_')}.lock"))
            if lock.acquire():
                held.append(name)
            if len(held) == count:
                return tuple(held), stack.pop_all()
    return None


def _open(folder: Path, name: str) -> FileLock:
    """Open a lock file; create it and its folder with permissions that let every user lock it."""
    path = folder / name
    try:
        with suppress(FileExistsError):
            folder.mkdir()
            folder.chmod(stat.S_IRWXU | stat.S_IRWXG | stat.S_IRWXO | stat.S_ISVTX)
        return FileLock(path, read_only=True)
    except OSError as error:
        raise DeviceError(f"{path}: cannot be opened as a lock file: {error.strerror}") from error
