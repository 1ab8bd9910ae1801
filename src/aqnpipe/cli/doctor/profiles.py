"""Checks of a profile: whether its jobs can run from this machine."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from aqnpipe.cli.doctor.checks import Item, Status, build_check, checked, version_checks
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
from aqnpipe.errors import AqnpipeError, ConfigError
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
    given, plan = profile.get("set-resources", {}), StudyPlan(study)
    checks = [Item(name="study", status="ok", found=f"{name}: device {study.config.device}")]
    checks += [_workers_check(given.get("train", {}), study), *_share_checks(given, plan)]
    if profile.get("executor") != "slurm":
        return [*checks, *_machine_checks(profile, plan)]
    build = build_check(study.config.device)
    if build.status == "problem" and profile.get("precommand", "true") != "true":
        # The jobs get their environment from this command.
        build = build.model_copy(update={"status": "untested"})
    plugin = next(check for check in version_checks() if check.name == "snakemake-executor-plugin-slurm")
    if plugin.status == "missing":
        plugin = plugin.model_copy(update={"status": "problem"})
    return [*checks, build, plugin, *_slurm_checks(profile, plan, partitions), *_other_kinds_checks(given, plan)]


def _workers_check(given: Mapping[str, Any], study: Study) -> Item:
    """Return the check that a training run has one device per worker; a device without a worker would be idle."""
    training, devices = study.config.training, devices_of_job(given)
    if training is None:
        return Item(name="workers", status="ok", found="no training runs")
    workers = training.num_workers
    if devices is None or study.config.device == "cpu" or workers == devices:
        where = "" if devices is None or study.config.device == "cpu" else f", on {devices} devices"
        return Item(name="workers", status="ok", found=f"{workers} per training run{where}")
    advice = "set the profile's train_devices and the study's training.num_workers to the same number"
    status: Status = "problem" if workers > devices else "untested"
    return Item(name="workers", status=status, found=f"{workers} per training run, on {devices} devices", advice=advice)


def _share_checks(given: Mapping[str, Any], plan: StudyPlan) -> Iterator[Item]:
    """Yield the check that every engine of an evaluation has its devices, of studies whose engines have several."""
    shards = plan.study.config.generation.tensor_parallel
    # The rules of evaluations on further machines too.
    rules = [pair for rules in plan.rules_by_kind().values() for pair in rules.items()]
    evaluating = [rule for rule, base in rules if base in ("evaluate", "evaluate_run")]
    problems = filter(None, (shards_without_devices(rule, given.get(rule, {}), shards) for rule in evaluating))
    if shards > 1:
        advice = f"set evaluate_devices in the site block of the profile to {shards} or a multiple"
        yield checked("evaluations", next(problems, None), f"{shards} devices per worker", advice)


def _other_kinds_checks(given: Mapping[str, Any], plan: StudyPlan) -> Iterator[Item]:
    """Yield a problem for each rule on another kind of device than the study's to which the profile gives none."""
    for kind, rules in plan.rules_by_kind().items():
        for rule in rules if kind in VISIBLE_DEVICES else ():
            if rule not in given:
                advice = f"give {rule} a partition with {kind} in set-resources, or run these jobs where there are some"
                yield Item(name=rule, status="problem", found=f"the profile has no {kind} for it", advice=advice)


def _slurm_checks(
    profile: Mapping[str, Any], plan: StudyPlan, partitions: tuple[SlurmPartition, ...] | None
) -> Iterator[Item]:
    """Yield a check per rule of the study with resources of its own in the profile, and one for all other jobs."""
    if not partitions:
        advice = "run this on a login node of the cluster, where sbatch works"
        yield Item(name="Slurm", status="problem", found="no cluster here", advice=advice)
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
        return Item(name=job, status="problem", found=f"no partition {name}", advice=f"the cluster has {known}")
    if fitting >= (whole_number(requested.get("nodes")) or 1):
        return Item(name=job, status="ok", found=shown)
    offered = f"{fitting} nodes for the {requested['nodes']} of a job" if fitting else next(iter(reasons.values()))
    return Item(name=job, status="problem", found=shown, advice=f"partition {name} has {offered}")


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
        problem = device_problem(wanted)
        found = resolve_device(wanted).label if problem is None else ""
        yield checked(name, problem if problem is None or kind is None else problem.removeprefix("device: "), found)
    leased = [whole_number(given.get("devices")) or 0 for given in profile.get("set-resources", {}).values()]
    most = max(leased, default=0)
    if not most:
        return
    device, ids = devices_of_machine(requested)
    offered, found = int(profile.get("resources", {}).get("devices", len(ids))), f"{len(ids)} devices of kind {device}"
    advice = f"one job reserves {most} and all jobs {offered}: set both in the site block of the profile"
    if not ids:
        variables = " or ".join(VISIBLE_DEVICES.values())
        advice = f"no GPU or NPU in /dev, {variables}; plain `snakemake` reserves none"
    yield checked("leases", found if max(most, offered) > len(ids) else None, found, advice)
