"""Profiles: settings of a machine, which Snakemake reads with the template language YTE, and the devices of its jobs.

Snakemake ends in a page of its usage where a profile cannot be read, and takes numbers as they are: `train_devices:
eight` would be a job with `eight` eight times as many cores. Here each mistake is one line.
"""

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from aqnpipe.config.base import FrozenModel
from aqnpipe.config.study import read_study_file, shown_path
from aqnpipe.config.validation_messages import DURATION_PATTERN, GRES_PATTERN, PARTITION_PATTERN, did_you_mean
from aqnpipe.config.yaml_file import read_yaml_file, validated
from aqnpipe.device import VISIBLE_DEVICES, RequestedDevice, resolve_device, visible_ids
from aqnpipe.errors import EXIT_USER_ERROR, AqnpipeError, ConfigError, DeviceError
from aqnpipe.runtime.device_allocation import devices_to_compute_on

_TEMPLATE = ("__definitions__", "__variables__")

HOOK = "refuse_unreadable_studies"
"""The function of the default profile that reads the other ones; a profile that calls it is not read by it."""

_Count = Annotated[int, Field(ge=1)]
_Minutes = _Count | Annotated[str, Field(pattern=DURATION_PATTERN)]
_Partition = Annotated[str, Field(pattern=PARTITION_PATTERN)]
_Gres = Annotated[str, Field(pattern=GRES_PATTERN)]


class SiteBlock(FrozenModel):
    """The site block of the profiles a100, ascend and workstation; a key that a profile lacks has a default here."""

    account: str = ""
    cpu_partition: _Partition = "cpu"
    device_partition: _Partition = "gpu"
    device_gres: _Gres = "gpu"
    devices: _Count = 1
    train_devices: _Count = 1
    train_nodes: _Count = 1
    evaluate_devices: _Count = 1
    evaluate_nodes: _Count = 1
    evaluate_whole_runs: bool = False
    single_devices: _Count = 1
    npu_partition: _Partition | Annotated[str, Field(max_length=0)] = ""
    npu_gres: _Gres = "npu"
    cuda_partition: _Partition | Annotated[str, Field(max_length=0)] = ""
    cuda_gres: _Gres = "gpu"
    cpus_per_device: _Count = 1
    mem_mb_per_device: _Count = 1
    # Slurm ends training ten minutes before its limit, so that it can write a resume point.
    train_minutes: Annotated[int, Field(gt=10)] | Annotated[str, Field(pattern=DURATION_PATTERN)] = 2880
    single_minutes: _Minutes = 240
    cpu_minutes: _Minutes = 120
    setup: Annotated[str, Field(min_length=1)] = "true"


def read_profile_file(path: Path) -> dict[str, Any]:
    """Return the keys of a profile as Snakemake reads them; ConfigError if it, or its site block, is wrong."""
    import yte  # imports numpy, which is slow

    content = read_yaml_file(path)
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a mapping of Snakemake's options")
    if not content.get("__use_yte__"):
        return content
    variables: dict[str, Any] = {}
    try:
        yte.process_yaml(io.StringIO(_dumped(content, _TEMPLATE)), variables=variables)
        refuse_wrong_site(content.get("__variables__") or {}, variables, path)
        rest = [key for key in content if key not in _TEMPLATE]
        keys: dict[str, Any] = yte.process_yaml(io.StringIO(_dumped(content, rest)), variables=variables)
    except yte.exceptions.YteError as error:
        raise ConfigError(f"{path}: {_reason(error, variables)}") from error
    return keys


def refuse_wrong_site(written: Iterable[str], values: Mapping[str, Any], path: Path) -> None:
    """Raise ConfigError for a wrong value in a site block. Variables that a site added are its own."""
    block = {name: values[name] for name in written if name in SiteBlock.model_fields}
    validated(SiteBlock, block, f"{path}: site block")


def refuse_unreadable_profiles(names: Iterable[str]) -> None:
    """Raise ConfigError for a mistake in the profiles that are given to Snakemake; it reports a missing one itself."""
    from snakemake.cli import get_profile_dir

    for name in names:
        found = get_profile_dir(name)
        if found is None or not found[1].is_file() or HOOK in found[1].read_text(encoding="utf-8", errors="replace"):
            continue
        # What a profile says, it says when Snakemake reads it.
        with contextlib.redirect_stderr(io.StringIO()):
            read_profile_file(found[1])


def refuse_unreadable_studies() -> None:
    """End this process with one line if a profile or study given to Snakemake cannot be read, or lists of devices.

    Snakemake reads these files before the workflow, and ends in a traceback if it cannot. The default profile, which
    Snakemake reads before everything else, calls this.
    """
    try:
        for kind in VISIBLE_DEVICES:
            visible_ids(kind)
        refuse_unreadable_profiles(_given_profiles())
        for path in _given_studies():
            read_study_file(shown_path(path))
    except AqnpipeError as error:
        sys.stderr.write(f"ERROR: {error}\n")
        sys.exit(EXIT_USER_ERROR)


def _number_in_given_study(section: str, key: str) -> int:
    """Return a number in the study given to Snakemake, for a profile; 1 if it says nothing."""
    number: object = 1
    for path in _given_studies():
        try:
            content = read_study_file(shown_path(path)).get(section)
        except AqnpipeError:
            return 1  # The default profile ends with its line.
        if isinstance(content, Mapping):
            number = content.get(key, number)
    return number if isinstance(number, int) and number > 0 else 1


workers_of_given_study = partial(_number_in_given_study, "training", "num_workers")
shards_of_given_study = partial(_number_in_given_study, "generation", "tensor_parallel")


def _given_studies() -> list[Path]:
    """Return the study files that Snakemake reads: those of the command line, else those of the last profile."""
    given = _given_to_snakemake()
    if given.configfile:
        return list(given.configfile)
    return next((files for name in reversed(_given_profiles()) if (files := _studies_of_profile(name))), [])


def _given_profiles() -> list[str]:
    """Return the names of the profiles that Snakemake reads, besides the default one."""
    return _given_to_snakemake().profile or [os.environ.get("SNAKEMAKE_PROFILE", "none")]


def _given_to_snakemake() -> argparse.Namespace:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--configfile", "--configfiles", nargs="+", action="extend", default=[], type=Path)
    parser.add_argument("--profile", action="append", default=[])
    return parser.parse_known_args()[0]


def _studies_of_profile(name: str) -> list[Path]:
    """Return the study files that a profile names. Snakemake itself reports a profile that cannot be read."""
    import yaml
    import yte
    from snakemake.cli import get_profile_dir

    found = get_profile_dir(name)
    if found is None:
        return []
    folder, file = found
    try:
        text = file.read_text(encoding="utf-8")
        content = yaml.safe_load(text)
        named = content.get("configfile") if isinstance(content, dict) else None
        if isinstance(named, str) and named.startswith("?"):
            named = yte.process_yaml(text).get("configfile")
    except (OSError, UnicodeDecodeError, yaml.YAMLError, yte.exceptions.YteError):
        return []
    if isinstance(named, str):
        # As Snakemake: a file beside the profile hides one in the working directory.
        path = os.path.expanduser(os.path.expandvars(named))
        return [folder / path if (folder / path).exists() else Path(path)]
    return [Path(each) for each in named] if isinstance(named, list) else []


def _dumped(content: Mapping[str, Any], keys: Iterable[str]) -> str:
    import yaml

    return yaml.safe_dump({key: content[key] for key in keys if key in content}, sort_keys=False, allow_unicode=True)


def _reason(error: BaseException, variables: Mapping[str, Any]) -> str:
    """Return why a template cannot be processed; YTE wraps the reason in an error per level."""
    while isinstance(error.__context__, Exception):
        error = error.__context__
    if isinstance(error, AqnpipeError):
        return str(error)
    if isinstance(error, NameError):
        known = [name for name, value in variables.items() if isinstance(value, str | int)]
        return f"site block: missing key {error.name}{did_you_mean(str(error.name), known)}"
    return f"cannot be processed: {type(error).__name__}: {' '.join(str(error).split())}"


def device_problem(requested: RequestedDevice) -> str | None:
    """Return why this machine cannot run jobs on the requested kind of device; None if it can, or for `auto`."""
    if requested in ("auto", "cpu"):
        return None
    try:
        resolve_device(requested)
    except DeviceError as error:
        return str(error)
    return None


def shards_problem(requested: RequestedDevice, shards: int) -> str | None:
    """Return why no engine of an evaluation can have a device for each of its `shards` here; None if it can.

    For jobs of this machine. An existing Ray cluster may have devices elsewhere.
    """
    if shards == 1 or os.environ.get("RAY_ADDRESS"):
        return None
    kind, ids = devices_to_compute_on(requested)
    if kind == "cpu" and requested not in ("cpu", "auto"):
        return None  # `device_problem` says why there is none.
    found = len(ids) or len(os.sched_getaffinity(0))
    if shards <= found:
        return None
    what = "CPU cores" if kind == "cpu" else f"{kind} devices"
    return f"generation.tensor_parallel: found {shards}, this machine has {found} {what}; every worker needs one"


def shards_without_devices(rule: str, given: Mapping[str, Any], shards: int) -> str | None:
    """Return why the devices that a profile gives to an evaluating job do not fit its engines; None if they do.

    given: the resources of the rule in the profile. shards: `generation.tensor_parallel`, the devices of each of its
    `workers`. Resources that are not numbers are left to Snakemake.
    """
    workers, nodes = (whole_number(given.get(name, 1)) for name in ("workers", "nodes"))
    gres = whole_number(str(given.get("gres", "")).rpartition(":")[2])
    resources = (("devices", "", whole_number(given.get("devices")), 1), ("gres", " per node", gres, nodes))
    if shards == 1 or workers is None:
        return None
    for name, where, found, per_job in resources:
        # An engine is on one node.
        if found is not None and per_job is not None and (fitting := found // shards * per_job) < workers:
            return (
                f"set-resources: {rule}: {name}: found {found} devices{where}, enough for {fitting} of {workers} "
                f"workers with the {shards} of generation.tensor_parallel each"
            )
    return None


def workers_problem(requested: RequestedDevice, workers: int, given: Mapping[str, Any], *, here: bool) -> str | None:
    """Return why the workers of a training run have no device each; None if they have, or compute on CPU cores.

    given: the resources of rule train in the profile. here: whether the job runs on this machine.
    """
    devices = devices_of_job(given)
    if requested == "cpu" or (here and os.environ.get("RAY_ADDRESS")):
        return None
    if devices is not None and devices < workers:
        return (
            f"training.num_workers: found {workers}, the profile gives a training run {devices} devices, expected one "
            "for each worker (train_devices in its site block)"
        )
    kind, ids = devices_to_compute_on(requested) if here else ("cpu", ())
    if kind != "cpu" and len(ids) < workers:
        return (
            f"training.num_workers: found {workers}, this machine has {len(ids)} {kind} devices; every worker needs one"
        )
    return None


def devices_of_job(given: Mapping[str, Any]) -> int | None:
    """Return how many devices the resources of a job are, on all its nodes; None if the profile does not say."""
    leased, gres = whole_number(given.get("devices")), whole_number(str(given.get("gres", "")).rpartition(":")[2])
    if leased is not None or gres is None:
        return leased
    return gres * (whole_number(given.get("nodes", 1)) or 1)


def whole_number(value: object) -> int | None:
    """Return a resource as a number; None if it is not a whole one, which is left to Snakemake."""
    return int(str(value)) if str(value).isdecimal() else None
