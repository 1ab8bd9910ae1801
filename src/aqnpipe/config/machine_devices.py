"""Machines with a device of their own, another one than that of the study: which jobs run there, and what cannot.

A study may diagnose on an NPU and train on GPUs. The jobs of such a machine are rules of their own, one per kind of
device, so that a profile gives each the resources of its device.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from aqnpipe.config.arm import Arm
from aqnpipe.config.noise import Machine
from aqnpipe.config.validation_messages import unknown
from aqnpipe.device import DeviceKind, RequestedDevice

if TYPE_CHECKING:
    from aqnpipe.config.study import AnyStudyConfig, StudyConfig


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


def arm_device_problems(study: "StudyConfig", arms: Mapping[str, Arm]) -> Iterator[str]:
    """Yield arms on a machine with another device than the study's: all training runs on that of the study."""
    for name in study.arms:
        yield from _misplaced(study, f"{study.arms_file}: arms.{name}.machine", arms[name].machine)


def machine_device_problems(study: "AnyStudyConfig", source: str) -> Iterator[str]:
    """Yield machines on another device than the study's whose jobs run on the study's, and devices without effect."""
    for number, losses in enumerate(study.loss_studies):
        yield from _misplaced(study, f"{source}: loss_studies.{number}.machine", losses.machine)
    yield from _misplaced(study, f"{source}: evaluation.pretrained_machine", study.evaluation.pretrained_machine)
    for name, machine in study.machines.items():
        is_used = name in study.evaluation.machines or _has_jobs(study, machine)
        if machine.device is not None and not is_used:
            why = "it was diagnosed elsewhere" if machine.diagnosed_in else "nothing is diagnosed in this study"
            yield (
                f"{source}: machines.{name}.device: found {machine.device}, which has no effect: {why}, it has no "
                "counterpart to measure, and evaluation.machines lacks it; remove device"
            )
    yield from _evaluation_problems(study, source)


def _evaluation_problems(study: "AnyStudyConfig", source: str) -> Iterator[str]:
    """Yield machines on which checkpoints cannot be evaluated, or would be as they are by the study itself."""
    where = f"{source}: evaluation.machines"
    for name in study.evaluation.machines:
        if name not in study.machines:
            yield f"{where}: {unknown('machine', name, study.machines)}"
            continue
        machine, counterpart = study.machines[name], study.machines[name].counterpart
        if other_kind(study, name) is None and not machine.faults and counterpart is None:
            yield (
                f"{where}: {name} computes as the study does, expected a machine with another device, simulated faults "
                "or a counterpart"
            )
        if counterpart is None:
            continue
        for role, model in study.models.items():
            if counterpart.attention not in (None, model.attention):
                yield (
                    f"{where}: {name} has counterpart.attention {counterpart.attention}, model {role} has "
                    f"{model.attention}: noise on attention would be another one, expected the same"
                )
            changed = (counterpart.dtype, counterpart.threads, counterpart.batch_size)
            usual = (model.dtype, study.evaluation.threads, study.evaluation.batch_size)
            same = all(new in (None, old) for new, old in zip(changed, usual, strict=True))
            if same and other_kind(study, name) is None:
                yield f"{where}: {name} has a counterpart with the dtype, threads and batch_size of model {role} here"


def _misplaced(study: "AnyStudyConfig", where: str, machine: str | None) -> Iterator[str]:
    kind = other_kind(study, machine) if machine in study.machines else None
    if kind is not None:
        yield (
            f"{where}: {machine} is on another device, {kind} (machines.{machine}.device), expected a machine on the "
            f"device of the study, {study.device}"
        )


def _has_jobs(study: "AnyStudyConfig", machine: Machine) -> bool:
    """Whether a machine is diagnosed, or its counterpart measured, by this study."""
    return machine.counterpart is not None or (study.training is not None and machine.diagnosed_in is None)
