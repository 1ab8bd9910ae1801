"""A noisy machine for a whole program that knows nothing of it: `aqnpipe exec` and every process that it starts.

Models are found as they are called: a module that no other module calls is a model, and its layers are places. Every
process writes its receipt while it runs, because some are killed at their end.
"""

import atexit
import multiprocessing
import multiprocessing.util
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from aqnpipe.artifacts.measured_errors import with_figures
from aqnpipe.config.base import describe_validation_error
from aqnpipe.config.measured_noise import MeasuredError
from aqnpipe.config.noise import FakeQuantization, Fault, OperatorSet, OutputErrorModel, PlacedError
from aqnpipe.errors import AqnpipeError, ConfigError, ModelError
from aqnpipe.machine.operators import ELEMENTWISE, NOISED
from aqnpipe.models.layout import decoder_layers, output_projection, site_module
from aqnpipe.models.parts import PlaceHook, parts_of
from aqnpipe.noise.injection.faults import FaultHook
from aqnpipe.noise.kernels.gaussian import NoiseStream
from aqnpipe.noise.noisy import machine_and_audit, with_figures_of
from aqnpipe.noise.receipts.table import Row, fault_operator
from aqnpipe.proof.observation import watch_backward
from aqnpipe.proof.receipt import MachineReceipt
from aqnpipe.proof.request import AuditRequest
from aqnpipe.seeding import derive_seed

_OUTSIDE = 0
_STREAM = "forward"
_FIRST_SECONDS, _SHARE_OF_TIME = 1.0, 0.01
"""A process may spend so many seconds on writing its receipt, and this share of its time."""

_BEHIND = ".behind"
"""Ending of a file beside a receipt that lacks what its process has computed since it was written."""

IN_OPTIMISER = "in an optimiser"

_FIRST_PROJECTIONS = ("q_proj", "q_a_proj", "qkv_proj", "query_key_value")


@dataclass
class _PlacedFault:
    """A fault at a place of a model. The projection at `projection_path` computes once in every call of the layer."""

    number: int
    hook: PlaceHook
    path: str
    projection_path: str | None
    projection: nn.Module | None = None
    handle: RemovableHandle | None = None


class ProgramMachine(BaseModel):
    """Machine that the environment asks for. `only`: paths of layers, with wildcards, or names of operators."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    error: Annotated[OutputErrorModel | FakeQuantization | MeasuredError, Field(discriminator="kind")] | None = None
    seed: int = 0
    backward: bool = True
    operators: OperatorSet = "matmul"
    only: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()
    receipts: Path

    @property
    def requested(self) -> AuditRequest:
        """The request to the audit, of all places and operators; what a receipt must show."""
        is_all = self.operators == "all"
        return AuditRequest(self.error, self.seed, (0, 0, 0), _STREAM, None, self.backward, elementwise=is_all)


class _Written(BaseModel):
    """File of one process: its program, and the rows of its receipt."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    argv: list[str]
    torch: str
    rows: tuple[Row, ...]


def begin(specification: str) -> None:
    """Simulate a machine from now to the end of this process. Raises ConfigError for a wrong specification."""
    try:
        settings = ProgramMachine.model_validate_json(specification)
    except ValidationError as error:
        raise ConfigError(f"AQNPIPE_MACHINE: {describe_validation_error(error)}") from error
    sys.excepthook = partial(_in_one_line, sys.excepthook)
    program = _Program(settings)
    program.start()
    os.register_at_fork(after_in_child=program.restart)


def _in_one_line(print_traceback: Callable[..., Any], kind: Any, error: BaseException, traceback: Any) -> None:
    """End a program with one line and exit code 2 where the requested machine does not fit it; others as before."""
    if not isinstance(error, AqnpipeError):
        print_traceback(kind, error, traceback)
        return
    sys.stderr.write(f"ERROR: {error}\n")
    raise SystemExit(2)


class _Program:
    """The machine of this process and its receipt."""

    def __init__(self, settings: ProgramMachine) -> None:
        self._settings = settings
        known = NOISED | (ELEMENTWISE if settings.operators == "all" else frozenset())
        operators = frozenset(pattern for pattern in settings.only if pattern in known)
        self._patterns = [pattern for pattern in settings.only if pattern not in operators]
        self._operators = operators or None
        self._selected: set[int] | None = set() if self._patterns else None
        # Every part of a decoder has measured errors of its own.
        self._errors: dict[int, PlacedError] | None = {} if isinstance(settings.error, MeasuredError) else None
        self._models: set[nn.Module] = set()
        self._handles: list[Any] = []
        self._numbers: dict[nn.Module, int] = {}
        self._placed: dict[nn.Module, list[_PlacedFault]] = {}
        self._projections: dict[nn.Module, set[int]] = {}
        # Calls of faulty layers in the present pass, by the number of the fault.
        self._layer_calls: Counter[int] = Counter()
        self._until_the_end = ExitStack()
        self._prepare()

    def _prepare(self) -> None:
        settings = self._settings
        self._process, self._began, self._spent = os.getpid(), time.monotonic(), 0.0
        self._is_behind = False
        self._writing = threading.RLock()
        self.receipt = MachineReceipt(
            settings.requested, np.random.default_rng(derive_seed(settings.seed, "exec audit"))
        )
        self._faults = _rows_of(settings.faults, self.receipt)
        error = with_figures(settings.error) if isinstance(settings.error, MeasuredError) else settings.error
        asked = settings.requested._replace(
            error=error, selected=self._selected, operators=self._operators, errors=self._errors
        )
        self._machine, self._audit = machine_and_audit(asked, self.receipt, _OUTSIDE)
        self._machine.observe_outside = self._observe_outside

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
        for placed in [each for every in self._placed.values() for each in every]:
            if placed.handle is not None:
                placed.handle.remove()
        for known in (self._models, self._numbers, self._placed, self._projections, self._layer_calls):
            known.clear()
        if self._errors is not None:
            self._errors.clear()
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
        if self._placed:
            self._keep_faults(module)
            if module in self._projections and torch._C._current_autograd_node() is None:
                self._layer_calls.update(self._projections[module])
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
        if self._errors is not None and new:
            found = self._measured_errors(module)
            self._errors |= {
                number: found[parts.modules[path]]
                for path, number in numbers.items()
                if parts.modules[path] in found and (self._selected is None or number in self._selected)
            }
        # A wrapper around a model that is known, such as PEFT's, has the parts of that model.
        modules = {self._numbers[part]: part for part in parts.modules.values()}
        roots = [root for root in parts.roots if root not in self._models]
        self._models.update(roots, modules.values())
        self._handles += self._machine.add_model(roots, {self._numbers[part]: part for part in new.values()})
        # This call of the module has collected its hooks already; those behind it run.
        self._machine.places.enter_root(module)
        if self._settings.error is not None:
            self._handles += self._audit.add_model(roots, modules, {number: path for path, number in numbers.items()})
            self._audit.enter(module, args, {})
        if new and self._faults:
            self._add_faults(module)
            self._keep_faults(module)
        end = PlaceHook(self._end_pass)
        self._handles += [root.register_forward_hook(end) for root in roots]

    def _measured_errors(self, model: Any) -> dict[nn.Module, PlacedError]:
        """Return the errors of the parts of a decoder; none of another model, such as a loss.

        Raises ConfigError if the parity is of another model than this decoder.
        """
        layers = _layers_of(model)
        if layers is None or not isinstance(self._settings.error, MeasuredError):
            return {}
        error = with_figures_of(model, self._settings.error)
        found: dict[nn.Module, PlacedError] = {layer: error.in_layer(index) for index, layer in enumerate(layers)}
        return found | {output_projection(model): error.in_layer(None)}

    def _end_pass(self, *_: Any) -> None:
        for number, calls in self._layer_calls.items():
            self._faults[number].passes += calls
        self._layer_calls.clear()
        self._write_while_running()

    def _add_faults(self, model: nn.Module) -> None:
        """Find the places of the faults in a decoder; raise ModelError if a layer of it lacks the site."""
        layers = _layers_of(model)
        if layers is None:
            # The receipt refuses a fault that no model of the program has.
            return
        paths = {module: path for path, module in model.named_modules()}
        self._placed[model] = []
        for number, (fault, row) in enumerate(zip(self._settings.faults, self._faults, strict=True)):
            if fault.layer < len(layers):
                site = site_module(model, fault.layer, fault.site)
                hook = PlaceHook(FaultHook(fault, row, partial(self._fault_call, number)))
                projection = _first_projection(layers[fault.layer], fault.site)
                place = None if projection is None else paths[projection]
                self._placed[model].append(_PlacedFault(number, hook, paths[site], place))

    def _keep_faults(self, model: nn.Module) -> None:
        """Put the faults on what is at their places now: a program may exchange a layer, or remove its hooks."""
        if model in self._placed and not self._machine.places.local.roots:
            # What is left is of a pass that an exception ended: the layer may not have come to its fault.
            self._layer_calls.clear()
        for placed in self._placed.get(model, ()):
            site, projection = _module_at(model, placed.path), _module_at(model, placed.projection_path)
            if site is None:
                self.receipt.note(f"{placed.path} of {type(model).__name__} is gone, and its fault with it")
                continue
            if projection is not None and projection is not placed.projection:
                if placed.projection is not None:
                    self._projections[placed.projection].discard(placed.number)
                self._projections.setdefault(projection, set()).add(placed.number)
                placed.projection = projection
            # A copy of a layer has hooks with the same numbers.
            if placed.handle is None or site._forward_hooks.get(placed.handle.id) is not placed.hook:
                if placed.handle is not None:
                    placed.handle.remove()
                placed.handle = site.register_forward_hook(placed.hook)

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
        elif not self._is_behind and os.getpid() == self._process:
            self._is_behind = True
            self._file.with_suffix(_BEHIND).touch()

    def _write(self) -> None:
        if os.getpid() != self._process:
            return
        with self._writing:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            unfinished = self._file.with_suffix(".part")
            unfinished.write_text(self._content().model_dump_json())
            unfinished.replace(self._file)
            if self._is_behind:
                self._is_behind = False
                self._file.with_suffix(_BEHIND).unlink(missing_ok=True)

    def _content(self) -> _Written:
        seen = MachineReceipt(self._settings.requested, self.receipt.draws)
        # Copies: other threads go on.
        seen.include(list(self.receipt.rows.values()))
        seen.count(dict(self._machine.counts))
        return _Written(argv=sys.argv, torch=torch.__version__, rows=tuple(seen.rows.values()))

    @property
    def _file(self) -> Path:
        return self._settings.receipts / f"{self._process}.json"


def _layers_of(model: nn.Module) -> nn.ModuleList | None:
    """Return the layers of a decoder; None of another model, such as a loss or an encoder."""
    try:
        return decoder_layers(model)
    except ModelError:
        return None


def _module_at(model: nn.Module, path: str | None) -> nn.Module | None:
    try:
        return None if path is None else model.get_submodule(path)
    except AttributeError:
        return None


def _first_projection(layer: nn.Module, site: str) -> nn.Module | None:
    """Return the projection that computes once in every call of a site; None where none is known."""
    if site not in ("layer_output", "attention_output"):
        return None
    named = {path.rpartition(".")[2]: module for path, module in layer.named_modules()}
    return next((named[name] for name in _FIRST_PROJECTIONS if name in named), None)


def _rows_of(faults: Sequence[Fault], receipt: MachineReceipt) -> list[Row]:
    return [receipt.row("forward", None, fault.layer, fault_operator(n)) for n, fault in enumerate(faults)]


def read_receipts(folder: Path, machine: ProgramMachine) -> tuple[MachineReceipt, list[Row], int, int]:
    """Return the receipt of all processes that wrote one to `folder`, its rows of faults, and two numbers of processes.

    Of those that computed, and of those that were killed before they recorded their last products.
    """
    total, num_processes = MachineReceipt(machine.requested, np.random.default_rng(0)), 0
    for path in sorted(folder.glob("*.json")):
        written = _Written.model_validate_json(path.read_bytes())
        num_processes += any(row.outcomes or (row.fault >= 0 and (row.calls or row.passes)) for row in written.rows)
        total.include(written.rows)
    return total, _rows_of(machine.faults, total), num_processes, len(list(folder.glob(f"*{_BEHIND}")))
