"""Checks of a profile: whether its jobs can run from this machine."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from aqnpipe.cli.doctor.checks import Item, Status, build_check, version_checks
from aqnpipe.cli.doctor.slurm import SlurmPartition
from aqnpipe.cli.profile_file import (
    device_problem,
    devices_of_job,
    read_profile_file,
    shards_without_devices,
    whole_number,
)
from aqnpipe.config.plan import StudyPlan
from aqnpipe.config.study import Study, load_study_file
from aqnpipe.device import VISIBLE_DEVICES, resolve_device
from aqnpipe.errors import AqnpipeError, ConfigError, DeviceError
from aqnpipe.runtime.device_allocation import devices_of_machine

DEFAULT_STUDY = "config/config.yaml"


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
        return [Item(name="study", status="problem", found=str(error), advice="choose another with --configfile")]
    study_check = Item(name="study", status="ok", found=f"{name}: device {study.config.device}")
    workers_check = _workers_check(profile, study)
    shares = list(_share_checks(profile, study))
    if profile.get("executor") == "slurm":
        build = build_check(study.config.device)
        if build.status == "problem" and profile.get("precommand", "true") != "true":
            # The jobs get their environment from this command.
            build = build.model_copy(update={"status": "untested"})
        others = _other_kinds_checks(profile, study)
        of_jobs = _slurm_checks(profile, study, partitions)
        return [study_check, workers_check, *shares, build, _plugin_check(), *of_jobs, *others]
    return [study_check, workers_check, *shares, *_machine_checks(profile, study)]


def _workers_check(profile: Mapping[str, Any], study: Study) -> Item:
    """Return the check that a training run has one device per worker; a device without a worker would be idle."""
    train = profile.get("set-resources", {}).get("train", {})
    training = study.config.training
    if training is None:
        return Item(name="workers", status="ok", found="no training runs")
    workers = training.num_workers
    devices = devices_of_job(train)
    if devices is None or study.config.device == "cpu":
        return Item(name="workers", status="ok", found=f"{workers} per training run")
    found = f"{workers} per training run, on {devices} devices"
    if workers == devices:
        return Item(name="workers", status="ok", found=found)
    advice = "set the profile's train_devices and the study's training.num_workers to the same number"
    return Item(name="workers", status="problem" if workers > devices else "untested", found=found, advice=advice)


def _share_checks(profile: Mapping[str, Any], study: Study) -> Iterator[Item]:
    """Yield the check that every engine of an evaluation has its devices, of studies whose engines have several."""
    shards = study.config.generation.tensor_parallel
    given = profile.get("set-resources", {})
    # The rules of evaluations on further machines too.
    of_plan = StudyPlan(study).rules_by_kind().values()
    evaluating = [rule for rules in of_plan for rule, base in rules.items() if base in ("evaluate", "evaluate_run")]
    found = (shards_without_devices(rule, given.get(rule, {}), shards) for rule in evaluating)
    problem = next((line for line in found if line is not None), None)
    if problem is not None:
        advice = f"set evaluate_devices in the site block of the profile to {shards} or a multiple"
        yield Item(name="evaluations", status="problem", found=problem, advice=advice)
    elif shards > 1:
        yield Item(name="evaluations", status="ok", found=f"{shards} devices per worker")


def _plugin_check() -> Item:
    """Return the check of the executor plugin, which cluster profiles need."""
    name = "snakemake-executor-plugin-slurm"
    check = next(check for check in version_checks() if check.name == name)
    return check if check.status != "missing" else check.model_copy(update={"status": "problem"})


def _other_kinds_checks(profile: Mapping[str, Any], study: Study) -> Iterator[Item]:
    """Yield a problem for each rule on another kind of device than the study's to which the profile gives none."""
    given = profile.get("set-resources", {})
    for kind, rules in StudyPlan(study).rules_by_kind().items():
        for rule in rules if kind in VISIBLE_DEVICES else ():
            if rule not in given:
                advice = f"give {rule} a partition with {kind} in set-resources, or run these jobs where there are some"
                yield Item(name=rule, status="problem", found=f"the profile has no {kind} for it", advice=advice)


def _slurm_checks(
    profile: Mapping[str, Any], study: Study, partitions: tuple[SlurmPartition, ...] | None
) -> Iterator[Item]:
    """Yield a check per rule of the study with resources of its own in the profile, and one for all other jobs."""
    if not partitions:
        advice = "run this on a login node of the cluster, where sbatch works"
        yield Item(name="Slurm", status="problem", found="no cluster here", advice=advice)
        return
    defaults = profile.get("default-resources", {})
    yield _job_check("other jobs", defaults, partitions)
    planned = {rule for rules in StudyPlan(study).rules_by_kind().values() for rule in rules}
    for rule, resources in profile.get("set-resources", {}).items():
        if rule.endswith(tuple(f"_{kind}" for kind in VISIBLE_DEVICES)) and rule not in planned:
            continue
        yield _job_check(rule, {**defaults, **resources}, partitions)


def _job_check(job: str, requested: Mapping[str, Any], partitions: tuple[SlurmPartition, ...]) -> Item:
    name = str(requested.get("slurm_partition", ""))
    shown = ", ".join(f"{key} {requested[key]}" for key in ("slurm_partition", "gres", "runtime") if key in requested)
    nodes = [partition for partition in partitions if partition.name in name.split(",")]
    if not nodes:
        known = ", ".join(sorted({partition.name for partition in partitions}))
        return Item(name=job, status="problem", found=f"no partition {name}", advice=f"the cluster has {known}")
    reasons = {partition: _why_not(requested, partition) for partition in nodes}
    fitting = sum(partition.nodes for partition, reason in reasons.items() if not reason)
    if fitting >= (whole_number(requested.get("nodes")) or 1):
        return Item(name=job, status="ok", found=shown)
    offered = f"{fitting} nodes for the {requested['nodes']} of a job" if fitting else reasons[nodes[0]]
    return Item(name=job, status="problem", found=shown, advice=f"partition {name} has {offered}")


def _why_not(requested: Mapping[str, Any], partition: SlurmPartition) -> str:
    """Return the limit of the nodes of a partition that a job exceeds; empty if there is none."""
    gres, _, count = str(requested.get("gres", "")).rpartition(":")
    devices = partition.num_devices(gres)
    if gres and devices < (whole_number(count) or 0):
        return f"{devices} {gres} per node ({partition.gres or 'no gres'})"
    # Snakemake also takes texts such as 2d and 64GB, which are not compared.
    minutes, cpus, memory = (whole_number(requested.get(name)) or 0 for name in ("runtime", "cpus_per_task", "mem_mb"))
    if partition.minutes is not None and minutes > partition.minutes:
        return f"a time limit of {partition.minutes} minutes"
    if cpus > partition.cpus:
        return f"{partition.cpus} CPUs per node"
    if memory > partition.memory_mb:
        return f"{partition.memory_mb} MB per node"
    return ""


def _machine_checks(profile: Mapping[str, Any], study: Study) -> Iterator[Item]:
    """Yield checks of the device of the study and of the number of devices that jobs lease."""
    requested = study.config.device
    try:
        yield Item(name="device", status="ok", found=resolve_device(requested).label)
    except DeviceError as error:
        yield Item(name="device", status="problem", found=str(error))
    for kind in (kind for kind in StudyPlan(study).rules_by_kind() if kind is not None):
        problem = device_problem(kind)
        found = resolve_device(kind).label if problem is None else problem.removeprefix("device: ")
        yield Item(name=f"device of machines ({kind})", status="problem" if problem else "ok", found=found)
    given = profile.get("set-resources", {})
    leases = {rule: whole_number(resources.get("devices")) or 0 for rule, resources in given.items()}
    if not any(leases.values()):
        return
    kind, ids = devices_of_machine(requested)
    most = max(leases.values())
    offered = int(profile.get("resources", {}).get("devices", len(ids)))
    enough: Status = "ok" if most <= len(ids) and offered <= len(ids) else "problem"
    advice = (
        ""
        if enough == "ok"
        else f"one job reserves {most} and all jobs {offered}: set both in the site block of the profile"
    )
    if not ids:
        advice = (
            "no GPU or NPU in /dev, CUDA_VISIBLE_DEVICES or ASCEND_RT_VISIBLE_DEVICES; plain `snakemake` reserves none"
        )
    yield Item(name="leases", status=enough, found=f"{len(ids)} devices of kind {kind}", advice=advice)
