"""Devices of jobs: whether this machine, or a profile, has those that a study asks for."""

import os
from collections.abc import Mapping
from typing import Any

from aqnpipe.device import RequestedDevice, resolve_device
from aqnpipe.errors import DeviceError
from aqnpipe.runtime.device_allocation import devices_to_compute_on


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
    gres = str(given.get("gres", "")).rpartition(":")[2]
    for name, found, per_job in (
        ("devices", whole_number(given.get("devices")), 1),
        ("gres", whole_number(gres), nodes),
    ):
        if shards == 1 or found is None or workers is None or per_job is None:
            continue
        # An engine is on one node.
        fitting = found // shards * per_job
        if fitting < workers:
            return (
                f"set-resources: {rule}: {name}: found {found} devices{' per node' if name == 'gres' else ''}, enough "
                f"for {fitting} of {workers} workers with the {shards} of generation.tensor_parallel each"
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
