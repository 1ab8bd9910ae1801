"""One case of the benchmark: a fault or a healthy device on one model, diagnosed and judged."""

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import aqnpipe
from aqnpipe.artifacts.diagnoses import DiagnosisFile
from aqnpipe.config.diagnosis import DiagnosisMethod
from aqnpipe.errors import AqnpipeError, first_line
from machine_faults.base import MachineFault
from machine_faults.catalogue import FAULTS
from machine_faults.healthy import DEVICES
from machine_faults.models import ARCHITECTURES, DTYPES, LAYERS, subject
from machine_faults.observe import OBSERVABLE, clean, effect, outputs
from machine_faults.rare import NOT_FINITE

HEALTHY = "healthy"
THIS_MACHINE_SEEDS = 3
"""Draws of the weights of every model that is diagnosed on this machine as it is."""


@dataclass(frozen=True)
class Case:
    """A fault (by name) or a healthy device on a model with weights drawn by `seed`; `identity` identifies its row."""

    name: str
    group: str
    architecture: str
    dtype: str
    number: int
    seed: int = 0

    @property
    def identity(self) -> dict[str, Any]:
        """Columns that identify the row of this case."""
        keys = ("group", "name", "architecture", "dtype", "seed", "layer")
        return {key: getattr(self, key) for key in keys}

    @property
    def layer(self) -> int:
        """Layer of a fault of one layer."""
        return self.number % LAYERS


def fault_cases(models_per_fault: int) -> Iterator[Case]:
    """Yield every fault on several models; architectures and dtypes rotate."""
    for number, fault in enumerate(FAULTS.values()):
        for name, dtype in _rotation(fault.fits, number, models_per_fault):
            yield Case(fault.name, fault.group, name, dtype, number)


def healthy_cases(models_per_device: int) -> Iterator[Case]:
    """Yield every healthy device on several models; this machine itself on all of them."""
    for number, device in enumerate(DEVICES.values()):
        count, seeds = models_per_device, 1 if device.emulated else THIS_MACHINE_SEEDS
        for seed in range(seeds):
            for name, dtype in _rotation(device.fits, number, count):
                yield Case(device.name, HEALTHY, name, dtype, number, (number + seed) % 5)


def _rotation(fits: Any, number: int, count: int) -> list[tuple[str, str]]:
    """Return up to `count` pairs of architecture and dtype: first all architectures once, dtypes alternating."""
    names = list(ARCHITECTURES)
    names = names[number % len(names) :] + names[: number % len(names)]
    pairs = [
        (name, DTYPES[(index + number + turn) % len(DTYPES)])
        for turn in range(len(DTYPES))
        for index, name in enumerate(names)
    ]
    return [pair for pair in pairs if fits(*pair)][:count]


def run_case(case: Case) -> dict[str, Any]:
    """Run one case and return its row."""
    torch.set_num_threads(1)
    return _healthy_row(case) if case.group == HEALTHY else _fault_row(case, FAULTS[case.name])


def _healthy_row(case: Case) -> dict[str, Any]:
    device = DEVICES[case.name]
    model = subject(case.architecture, case.dtype, device.attention, seed=case.seed)
    with device.put_in(model):
        answer = _diagnose(model)
    return _row(case, device.attention, answer) | {"emulated": device.emulated}


def run_effect(case: Case) -> dict[str, Any]:
    """Return the effect of a fault on the outputs of the model; no diagnosis takes part."""
    torch.set_num_threads(1)
    fault = FAULTS[case.name]
    model = subject(case.architecture, case.dtype, fault.attention)
    clean(case.architecture, case.dtype, fault.attention, fault.backward)
    with fault.put_in(model, ARCHITECTURES[case.architecture], case.layer):
        found = outputs(model, gradients=fault.backward)
    change = effect(case.architecture, case.dtype, fault.attention, found, gradients=fault.backward)
    return case.identity | {"permanent": fault.permanent, "effect": change, "observable": change > OBSERVABLE}


def _fault_row(case: Case, fault: MachineFault) -> dict[str, Any]:
    architecture = ARCHITECTURES[case.architecture]
    model = subject(case.architecture, case.dtype, fault.attention)
    with fault.put_in(model, architecture, case.layer):
        answer = _diagnose(model, "all" if fault.group == NOT_FINITE else "exact")
    expected: list[int | None] = [None]
    if fault.where == "layer":
        expected = [(case.layer + item.layer_offset) % LAYERS for item in fault.changes] or [case.layer]
    judged = _judged(fault, fault.accepted_sites(architecture), expected, answer.verdict)
    return _row(case, fault.attention, answer) | judged


@dataclass(frozen=True)
class _Answer:
    verdict: DiagnosisFile | None
    problem: str
    seconds: float
    restored: bool


def _diagnose(model: nn.Module, method: DiagnosisMethod = "exact") -> _Answer:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    started, problem, verdict = time.perf_counter(), "", None
    try:
        # As `aqnpipe diagnose FOLDER` does: the weights in memory are compared with those of the folder.
        verdict = aqnpipe.diagnose(model, method=method, weights=Path(model.config.name_or_path))
    except AqnpipeError as error:
        problem = first_line(error)
    seconds = time.perf_counter() - started
    same = all(torch.equal(_words(value), _words(before[name])) for name, value in model.state_dict().items())
    return _Answer(verdict, problem, seconds, same)


def _words(x: Tensor) -> Tensor:
    """Return the bytes of x: NaN equals itself."""
    return x.contiguous().view(torch.uint8) if x.dim() else x


def _row(case: Case, attention: str, answer: _Answer) -> dict[str, Any]:
    verdict = answer.verdict
    return {
        **case.identity,
        "attention": attention,
        "verdict": verdict.verdict if verdict else "error",
        "reported": _reported(verdict) if verdict else answer.problem,
        "forwards": verdict.exact_forward_equivalents if verdict else None,
        "seconds": answer.seconds,
        "exact_faults": len(verdict.faults) if verdict else None,
        "restored": answer.restored,
        "reason": (verdict.reason if verdict else answer.problem)[:400],
    }


def _reported(verdict: DiagnosisFile) -> str:
    faults = [f"{f.scope if f.layer is None else f.layer}:{f.site}:{f.type}" for f in verdict.faults]
    return " ".join(faults[:12]) + (f" and {len(faults) - 12} more" if len(faults) > 12 else "")


def _judged(
    fault: MachineFault, sites: str, layers: Sequence[int | None], verdict: DiagnosisFile | None
) -> dict[str, Any]:
    """Return whether the report names every layer (or the device) of the fault, the operation, and other places."""
    faults = verdict.faults if verdict else ()
    if fault.where == "device":
        right = [f for f in faults if f.layer is None or _named_in_all(faults, f.site)]
        layer_right = bool(right)
    else:
        right = [f for f in faults if f.layer in layers]
        layer_right = {f.layer for f in right} >= set(layers)
    operation = [f for f in right if re.search(sites, f.site)]
    return {
        "device_wide": any(f.layer is None for f in faults),
        "layer_right": layer_right,
        "operation_right": bool(operation) and layer_right,
        "elsewhere": len(faults) - len(right),
    }


def _named_in_all(faults: Sequence[Any], site: str) -> bool:
    return len({f.layer for f in faults if f.site == site}) == LAYERS
