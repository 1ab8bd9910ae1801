"""A noisy machine for a whole program that knows nothing of it: `aqnpipe exec` and every process that it starts.

Models are found as they are called: a module that no other module calls is a model, and its layers are places. Every
process writes its receipt while it runs, because some are killed at their end.
"""

import atexit
import json
import multiprocessing
import multiprocessing.util
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from aqnpipe.config.base import describe_validation_error
from aqnpipe.config.noise import FakeQuantization, Fault, OperatorSet, OutputErrorModel
from aqnpipe.config.own_noise import OwnError
from aqnpipe.errors import ConfigError, ModelError
from aqnpipe.machine.machine import Machine, NoiseKey, Request
from aqnpipe.machine.operators import ELEMENTWISE, NOISED
from aqnpipe.machine.quantized import mark_weights
from aqnpipe.models.layout import decoder_layers
from aqnpipe.models.parts import PlaceHook, parts_of
from aqnpipe.models.sites import site_module
from aqnpipe.noise.injection.faults import FaultHook, FaultRecord
from aqnpipe.noise.kernels.stream import NoiseStream
from aqnpipe.proof.audit import Audit, AuditRequest
from aqnpipe.proof.observation import watch_backward
from aqnpipe.proof.receipt import Cell, MachineReceipt, Requested, Seen, described
from aqnpipe.seeding import derive_seed

_OUTSIDE = 0
_STREAM = "forward"
_FIRST_SECONDS, _SHARE_OF_TIME = 0.2, 0.01
"""A process may spend so many seconds on writing its receipt, and this share of its time."""

IN_OPTIMISER = "in an optimiser"


class ProgramMachine(BaseModel):
    """Machine that the environment asks for. `only`: paths of layers, with wildcards, or names of operators."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    error: Annotated[OutputErrorModel | FakeQuantization, Field(discriminator="kind")] | None = None
    seed: int = 0
    backward: bool = True
    operators: OperatorSet = "matmul"
    only: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()
    receipts: Path

    @property
    def requested(self) -> Requested:
        """Return what a receipt must show."""
        phases = () if self.error is None else (_STREAM, "backward") if self.backward else (_STREAM,)
        own = self.error if isinstance(self.error, OwnError) else None
        scale = getattr(self.error, "scale", None)
        return Requested(phases, described(self.error), scale, self.operators == "all", own)


def begin(specification: str) -> None:
    """Simulate a machine from now to the end of this process. Raises ConfigError for a wrong specification."""
    try:
        settings = ProgramMachine.model_validate_json(specification)
    except ValidationError as error:
        raise ConfigError(f"AQNPIPE_MACHINE: {describe_validation_error(error)}") from error
    program = _Program(settings)
    program.start()
    os.register_at_fork(after_in_child=program.restart)


class _Program:
    """The machine of this process and its receipt."""

    def __init__(self, settings: ProgramMachine) -> None:
        self._settings = settings
        known = NOISED | (ELEMENTWISE if settings.operators == "all" else frozenset())
        operators = frozenset(pattern for pattern in settings.only if pattern in known)
        self._patterns = [pattern for pattern in settings.only if pattern not in operators]
        self._operators = operators or None
        self._selected: set[int] | None = set() if self._patterns else None
        self._models: set[nn.Module] = set()
        self._handles: list[Any] = []
        self._numbers: dict[nn.Module, int] = {}
        self._until_the_end = ExitStack()
        self._prepare()

    def _prepare(self) -> None:
        settings = self._settings
        self._process, self._began, self._spent = os.getpid(), time.monotonic(), 0.0
        self._writing = threading.RLock()
        self._faults = tuple(map(FaultRecord, settings.faults))
        is_all = settings.operators == "all"
        self.receipt = MachineReceipt(
            settings.requested, np.random.default_rng(derive_seed(settings.seed, "exec audit"))
        )
        request = AuditRequest(
            settings.error,
            settings.seed,
            (0, 0, 0),
            _STREAM,
            self._selected,
            settings.backward,
            self._operators,
            is_all,
        )
        self._audit = Audit(request, self.receipt, _OUTSIDE)
        key = NoiseKey(settings.seed)
        self._machine = Machine(
            Request(settings.error, key, _OUTSIDE, _STREAM, self._selected, settings.backward, self._operators, is_all),
            self._observe_outside,
        )
        self._audit.exactly = self._machine.exactly
        self._identity: int | None = None

    def start(self) -> None:
        """Replace the kernels and watch modules, optimisers and backward passes."""
        self._machine.start(before_first=self._identify)
        self._until_the_end.enter_context(self._machine.whole_checkpoints())
        nn.modules.module.register_module_forward_pre_hook(self._called)
        register_optimizer_step_pre_hook(lambda *_: self._machine.switch_off(IN_OPTIMISER))
        register_optimizer_step_post_hook(lambda *_: self._machine.switch_off(None))
        watch_backward(self._backward)
        atexit.register(self._write)
        # Processes of multiprocessing end without atexit, and forget finalizers of their parent.
        multiprocessing.util.register_after_fork(self, _Program._write_at_end)

    def restart(self) -> None:
        """Begin a receipt and random numbers of its own in a forked process."""
        self._machine.stop()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._models.clear()
        self._numbers.clear()
        self._prepare()
        self._machine.start(before_first=self._identify)

    def _write_at_end(self) -> None:
        multiprocessing.util.Finalize(None, self._write, exitpriority=0)

    def _identify(self) -> None:
        """Give this process random numbers of its own, when it is known which of several it is."""
        rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK")
        family = getattr(multiprocessing.current_process(), "_identity", ())
        number = derive_seed(0, "process", int(rank or 0), *family) if rank not in (None, "0") or family else 0
        self._machine.set_rank(number)
        # Programs may end without a last word.
        self._write()
        self._audit.request = self._audit.request._replace(position=(0, 0, number))

    def _called(self, module: nn.Module, args: Any) -> None:
        if self._machine.places.local.roots or module in self._models:
            return
        self._machine.identify()
        self._machine.add_backends()
        parts = parts_of(module)
        new = {path: part for path, part in parts.modules.items() if part not in self._numbers}
        for part in new.values():
            self._numbers[part] = len(self._numbers) + 1
        numbers = {path: self._numbers[part] for path, part in parts.modules.items()}
        if self._selected is not None:
            self._selected |= {n for path, n in numbers.items() if any(fnmatch(path, p) for p in self._patterns)}
        # A wrapper around a model that is known, such as PEFT's, has the parts of that model.
        modules = {self._numbers[part]: part for part in parts.modules.values()}
        roots = [root for root in parts.roots if root not in self._models]
        self._models.update(roots, modules.values())
        self._handles += self._machine.add_model(roots, {self._numbers[part]: part for part in new.values()})
        # This call of the module has collected its hooks already; those behind it run.
        self._machine.places.enter_root(module)
        if self._settings.error is not None:
            self._handles += self._audit.add_model(roots, modules, {number: path for path, number in numbers.items()})
            mark_weights(module)
            self._audit.enter(module, args, {})
        if new:
            self._add_faults(module)
        written = PlaceHook(self._write_while_running)
        self._handles += [root.register_forward_hook(written) for root in roots]

    def _add_faults(self, model: nn.Module) -> None:
        """Put the faults on a decoder that has their layers; raise ModelError if such a layer lacks the site."""
        try:
            layers = decoder_layers(model)
        except ModelError:
            # A loss, an encoder: the receipt refuses a fault that no model of the program has.
            return
        for number, record in enumerate(self._faults):
            if record.fault.layer >= len(layers):
                continue
            site = site_module(model, record.fault.layer, record.fault.site)
            call = partial(self._fault_call, number)
            self._handles.append(site.register_forward_hook(PlaceHook(FaultHook(record, call))))

    def _fault_call(self, number: int) -> int:
        # By place, so that a layer that is computed again has the same fault.
        return self._machine.request.key.derived(f"fault.{_STREAM}", self._machine.places.passed(), number)

    def _observe_outside(
        self, phase: str, operator: str, result: Tensor, factors: tuple[Tensor, ...], source: NoiseStream
    ) -> None:
        self._audit.observe_outside(phase, operator, result, factors, source)
        self._write_while_running()

    @contextmanager
    def _backward(self) -> Iterator[None]:
        with self._audit.backward():
            yield
        self._write_while_running()

    def _write_while_running(self, *_: Any) -> None:
        """Write the receipt unless that has taken too much time already: workers of Ray and engines end by a kill."""
        now = time.monotonic()
        if self._spent < _FIRST_SECONDS + _SHARE_OF_TIME * (now - self._began):
            self._write()
            self._spent += time.monotonic() - now

    def _write(self) -> None:
        if os.getpid() != self._process:
            return
        with self._writing:
            self._settings.receipts.mkdir(parents=True, exist_ok=True)
            target = self._settings.receipts / f"{self._process}.json"
            unfinished = target.with_suffix(".part")
            unfinished.write_text(json.dumps(_content(self.receipt, self._machine.counts, self._faults)))
            unfinished.replace(target)


def _content(
    receipt: MachineReceipt, counts: Counter[tuple[str, str, str]], faults: Sequence[FaultRecord]
) -> dict[str, Any]:
    return {
        "argv": sys.argv,
        "torch": torch.__version__,
        # Copies: other threads go on.
        "cells": [[*cell, asdict(seen)] for cell, seen in list(receipt.cells.items())],
        "counts": [[*key, number] for key, number in list(counts.items())],
        "escapes": receipt.escapes,
        "notes": receipt.notes,
        "passes": [receipt.passes, receipt.backward_passes, receipt.audited_passes],
        "faults": [[record.calls, record.elements, record.affected_elements] for record in faults],
    }


def read_receipts(folder: Path, machine: ProgramMachine) -> tuple[MachineReceipt, tuple[FaultRecord, ...], int]:
    """Return the receipt and the faults of all processes that wrote one to `folder`, and how many of them computed."""
    total, num_processes = MachineReceipt(machine.requested, np.random.default_rng(0)), 0
    faults = tuple(map(FaultRecord, machine.faults))
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text())
        num_processes += bool(content["counts"]) or any(calls for calls, _, _ in content["faults"])
        total.count({(phase, operator, what): number for phase, operator, what, number in content["counts"]})
        for *cell, seen in content["cells"]:
            total.add(Cell(*cell), Seen(**seen))
        for kind, found in ((total.escapes, content["escapes"]), (total.notes, content["notes"])):
            for what, number in found.items():
                total.note(kind, what, number)
        passes, backward, audited = content["passes"]
        total.passes, total.backward_passes = total.passes + passes, total.backward_passes + backward
        total.audited_passes += audited
        for record, (calls, elements, affected) in zip(faults, content["faults"], strict=True):
            record.calls, record.elements = record.calls + calls, record.elements + elements
            record.affected_elements += affected
    return total, faults, num_processes
