"""Whether the jobs of a profile can run from this machine."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yte

from aqnpipe.cli.doctor.checks import Check, Status, version_checks
from aqnpipe.cli.doctor.slurm import SlurmPartition
from aqnpipe.config.study import Study, load_study_file
from aqnpipe.device import resolve_device
from aqnpipe.errors import AqnpipeError, ConfigError, DeviceError
from aqnpipe.runtime.device_allocation import devices_of_machine

DEFAULT_STUDY = "config/config.yaml"


def read_profile(name: str) -> dict[str, Any]:
    """Return a profile's keys as Snakemake reads them: `profiles/<name>/config.yaml`, or the folder `name`."""
    for path in (Path("profiles", name, "config.yaml"), Path(name, "config.yaml")):
        if path.is_file():
            with path.open(encoding="utf-8") as file:
                keys: dict[str, Any] = yte.process_yaml(file, require_use_yte=True)
            return keys
    known = sorted(path.parent.name for path in Path("profiles").glob("*/config.yaml"))
    raise ConfigError(f"--profile: no profile {name!r}, found {', '.join(known) or 'no folder profiles here'}")


def profile_checks(profile: Mapping[str, Any], partitions: tuple[SlurmPartition, ...] | None) -> list[Check]:
    """Return what a profile needs and whether it is there; one check with status `problem`: it cannot run here."""
    name = profile.get("configfile", DEFAULT_STUDY)
    try:
        study = load_study_file(Path(name))
    except AqnpipeError as error:
        return [Check(name="study", status="problem", found=str(error), advice="choose another by --configfile")]
    study_check = Check(name="study", status="ok", found=f"{name}: device {study.config.device}")
    workers_check = _workers_check(profile, study)
    if profile.get("executor") == "slurm":
        return [study_check, workers_check, _plugin_check(), *_slurm_checks(profile, partitions)]
    return [study_check, workers_check, *_machine_checks(profile, study)]


def _workers_check(profile: Mapping[str, Any], study: Study) -> Check:
    """Every worker of a training run needs a device of its own, and a device without a worker is idle."""
    train = profile.get("set-resources", {}).get("train", {})
    workers = study.config.training.num_workers
    given = train.get("devices") or str(train.get("gres", "")).rpartition(":")[2]
    if not given or study.config.device == "cpu":
        return Check(name="workers", status="ok", found=f"{workers} per training run")
    devices = int(given) * int(train.get("nodes", 1))
    found = f"{workers} per training run, on {devices} devices"
    if workers == devices:
        return Check(name="workers", status="ok", found=found)
    advice = "set the profile's train_devices and the study's training.num_workers to the same number"
    return Check(name="workers", status="problem" if workers > devices else "untested", found=found, advice=advice)


def _plugin_check() -> Check:
    """The executor plugin, which only these profiles need, is a problem where it is not there."""
    name = "snakemake-executor-plugin-slurm"
    check = next(one for one in version_checks() if one.name == name)
    return check if check.status != "missing" else check.model_copy(update={"status": "problem"})


def _slurm_checks(profile: Mapping[str, Any], partitions: tuple[SlurmPartition, ...] | None) -> Iterator[Check]:
    """One check per rule that the profile sends somewhere, and one for all the others."""
    if not partitions:
        advice = "start it where sbatch works: a login node of the cluster"
        yield Check(name="Slurm", status="problem", found="no cluster here", advice=advice)
        return
    defaults = profile.get("default-resources", {})
    yield _job_check("other jobs", defaults, partitions)
    for rule, resources in profile.get("set-resources", {}).items():
        yield _job_check(rule, {**defaults, **resources}, partitions)


def _job_check(job: str, requested: Mapping[str, Any], partitions: tuple[SlurmPartition, ...]) -> Check:
    name = str(requested.get("slurm_partition", ""))
    shown = ", ".join(f"{key} {requested[key]}" for key in ("slurm_partition", "gres", "runtime") if key in requested)
    nodes = [one for one in partitions if one.name == name]
    if not nodes:
        known = ", ".join(sorted({one.name for one in partitions}))
        return Check(name=job, status="problem", found=f"no partition {name}", advice=f"the cluster has {known}")
    reasons = {one: _why_not(requested, one) for one in nodes}
    fitting = sum(one.nodes for one, reason in reasons.items() if not reason)
    if fitting >= int(requested.get("nodes", 1)):
        return Check(name=job, status="ok", found=shown)
    lacks = f"{fitting} nodes for the {requested['nodes']} of a job" if fitting else reasons[nodes[0]]
    return Check(name=job, status="problem", found=shown, advice=f"partition {name} has {lacks}")


def _why_not(requested: Mapping[str, Any], partition: SlurmPartition) -> str:
    """Return what a node of the partition lacks for a job; empty if nothing."""
    gres, _, count = str(requested.get("gres", "")).rpartition(":")
    devices = partition.num_devices(gres)
    if gres and devices < int(count):
        return f"{devices} {gres} per node ({partition.gres or 'no gres'})"
    if partition.minutes is not None and int(requested.get("runtime", 0)) > partition.minutes:
        return f"a time limit of {partition.minutes} minutes"
    if int(requested.get("cpus_per_task", 1)) > partition.cpus:
        return f"{partition.cpus} CPUs per node"
    if int(requested.get("mem_mb", 0)) > partition.memory_mb:
        return f"{partition.memory_mb} MB per node"
    return ""


def _machine_checks(profile: Mapping[str, Any], study: Study) -> Iterator[Check]:
    """The study's device, and as many of them as a job leases."""
    requested = study.config.device
    try:
        yield Check(name="device", status="ok", found=resolve_device(requested).label)
    except DeviceError as error:
        yield Check(name="device", status="problem", found=str(error))
    leases = {rule: int(one.get("devices", 0)) for rule, one in profile.get("set-resources", {}).items()}
    if not any(leases.values()):
        return
    kind, ids = devices_of_machine(requested)
    most = max(leases.values())
    offered = int(profile.get("resources", {}).get("devices", len(ids)))
    enough: Status = "ok" if most <= len(ids) and offered <= len(ids) else "problem"
    advice = (
        "" if enough == "ok" else f"a job leases {most} and all jobs {offered}: set both in the profile's site block"
    )
    yield Check(name="leases", status=enough, found=f"{len(ids)} devices of kind {kind}", advice=advice)
