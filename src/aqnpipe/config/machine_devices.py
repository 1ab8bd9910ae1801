"""Machines with a device of their own, another one than that of the study: which jobs run there.

A study may diagnose on an NPU and train on GPUs. The jobs of such a machine are rules of their own, one per kind of
device, so that a profile gives each the resources of its device.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from aqnpipe.device import DeviceKind, RequestedDevice

if TYPE_CHECKING:
    from aqnpipe.config.study import AnyStudyConfig


def rule_on(rule: str, kind: DeviceKind | None) -> str:
    """Return the name of the rule whose jobs run on devices of a kind; None: on the device of the study."""
    return rule if kind is None else f"{rule}_{kind}"


def evaluations_folder(machine: str | None = None) -> str:
    """Return the folder of evaluations in the results: those of a machine in `evaluation.machines`, or of the study."""
    return "eval" if machine is None else f"eval_on/{machine}"


def device_of(study: "AnyStudyConfig", machine: str) -> RequestedDevice:
    """Return the device of a machine: its own, else that of the study."""
    return study.machines[machine].device or study.device


def other_kind(study: "AnyStudyConfig", machine: str | None) -> DeviceKind | None:
    """Return the kind of device of a machine if it is another than the study's; None: it is the study's."""
    own = None if machine is None else study.machines[machine].device
    return None if own == study.device else own


def by_kind(study: "AnyStudyConfig", machines: Iterable[str]) -> dict[DeviceKind | None, tuple[str, ...]]:
    """Return the machines by `other_kind`, each once; the key None is always there."""
    found: dict[DeviceKind | None, tuple[str, ...]] = {None: ()}
    for machine in dict.fromkeys(machines):
        kind = other_kind(study, machine)
        found[kind] = (*found.get(kind, ()), machine)
    return found
