"""Gives a recorder what the machine and the audit of a phase have seen."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from aqnpipe.config.measured_noise import OperatorError
from aqnpipe.config.noise import FakeQuantization, Phase, requested_size
from aqnpipe.machine.machine import Noised
from aqnpipe.models.layout import layer_of
from aqnpipe.noise.audit.comparison import Comparison
from aqnpipe.noise.audit.expected_values import measured_size, spacing
from aqnpipe.noise.audit.random_numbers import Position, key_at
from aqnpipe.noise.audit.weight_check import compare_norms
from aqnpipe.noise.injection.requested import FIRST_MODULE, HIDDEN_STATES
from aqnpipe.noise.receipts.recorder import ReceiptRecorder
from aqnpipe.noise.receipts.rows import ReferenceSums
from aqnpipe.noise.receipts.sampling import sample
from aqnpipe.proof.operations import machine_name
from aqnpipe.proof.receipt import Cell, MachineReceipt, Requested
from aqnpipe.proof.recompute import Sampled, rounded

_FEW_BITS_LOST = 4.0
"""Results are measured whose slack is at most so many times the smallest one: in others most digits cancelled."""

_ESCAPES = ("of integers", "captured")
"""Counts that the machine keeps of products that cannot have the error."""


class PhaseMeasurements:
    """Measurements of one phase. `receipt` is what its audit writes, and continues the earlier ones of the run.

    `modules`: the names of the modules with noise, in the order of their places. `noised_parts`: the parts of the model
    with an error since they were entered. `sigma_of` returns the requested sigma of AQN on a norm.
    """

    def __init__(
        self,
        phase: Phase,
        position: Position,
        num_layers: int,
        modules: list[str],
        recorder: ReceiptRecorder,
        sigma_of: Callable[[str], float],
    ) -> None:
        self.noised_parts: set[int] = set()
        self._phase: Phase = phase
        self._position = position
        self._num_layers = num_layers
        self._modules = modules
        self._recorder = recorder
        self._sigma_of = sigma_of
        self._norms = Comparison()
        self._references: dict[str, ReferenceSums] = defaultdict(ReferenceSums)
        self.receipt = MachineReceipt(
            Requested((phase,), "", None), np.random.default_rng(key_at(position, f"audit.{phase}"))
        )
        self.receipt.passes = recorder.num_forwards(phase)
        self.receipt.gradient_passes = recorder.num_forwards("backward")
        self.receipt.audited_kinds = recorder.audited_kinds(phase)
        self.receipt.has_backward = bool(recorder.recomputed_numbers("backward"))

    def note(self, noised: Noised) -> None:
        """Count a result of an operator that has an error; a layer that is computed again counts once."""
        layer = noised.part if noised.part < self._num_layers else None
        phase: Phase = "backward" if noised.phase == "backward" else self._phase
        if phase == "backward":
            self._recorder.note_noised_gradient(layer)
        else:
            self.noised_parts.add(noised.part)
        if not noised.is_again:
            self._count(phase, layer, noised)

    def note_module(self, place: int, noised: Noised, exact: Tensor) -> None:
        """Count the input or output of a module that has an error."""
        if noised.is_again:
            return
        if place < FIRST_MODULE:
            self._recorder.measure_hidden(place, sample(exact), sample(noised.values))
            return
        name = self._modules[place - FIRST_MODULE]
        self._count(self._phase, layer_of(name), noised)
        self._recorder.count_module(self._phase, name)

    def _count(self, phase: Phase, layer: int | None, noised: Noised) -> None:
        self._recorder.count_call(phase, noised.operator, layer, noised.error, noised.num_elements)
        if noised.changed is not None:
            self._recorder.count_changed(phase, noised.operator, layer, noised.changed)

    def compare_norms(
        self, model: nn.Module, forward: int, exactly: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Compare the norm weights that a pass is about to read with the requested ones."""
        position = self._position._replace(forward=forward)
        with exactly():
            compare_norms(
                model,
                self._phase,
                position,
                self._recorder,
                self._norms,
                self.receipt.draws,
                self._sigma_of,
            )

    def measure(self, cell: Cell, found: Sampled, error: Any, dtype: torch.dtype) -> None:
        """Measure the elements of a compared result whose error rounding does not hide."""
        if cell.operator == HIDDEN_STATES:
            return
        # A result of 16 bits is rounded before its error, which says nothing about the error.
        clean = rounded(found.exact, dtype) if found.plain is None else found.plain
        used = found.found
        with np.errstate(divide="ignore", invalid="ignore"):
            relative = np.where(clean == 0, np.inf, (found.slack + found.after) / np.abs(clean))
        least = relative.min(initial=np.inf)
        usable = np.isfinite(used) & (relative <= max(_FEW_BITS_LOST * least, 0.01 * requested_size(error)))
        if not cell.operator.startswith("module."):
            differences = (used / np.where(clean == 0, np.inf, clean) - 1)[usable & (clean != 0)]
            self._references[cell.phase].squares += float(np.square(differences).sum())
            self._references[cell.phase].relative_elements += differences.size
        rounding = spacing(used, dtype) * np.sqrt((1 if found.plain is None else 2) / 12)
        if isinstance(error, OperatorError):
            # In units of the measured machine: the error over the size that it has there at this element.
            size = measured_size(error.figures, clean, found.input_rms)
            usable &= size > 0
            clean, used = size, size + (used - clean)
        elif isinstance(error, FakeQuantization):
            # The operands have the error: that of a result is relative to all of them.
            scale = np.full(clean.shape, np.sqrt(np.square(clean).mean()) if len(clean) else 0.0)
            usable = np.isfinite(used)
            clean, used = scale, scale + (used - clean)
        phase: Phase = "backward" if cell.phase == "backward" else self._phase
        layer, operator = layer_of(f"{cell.place.removeprefix('module ')}."), machine_name(cell.operator)
        self._recorder.measure_values(phase, operator, layer, clean[usable], used[usable], rounding[usable])

    def settle(self, counts: Mapping[tuple[str, str, str], int]) -> None:
        """Record what the audit found, and of what the machine `counts` what cannot have the error."""
        receipt, recorder = self.receipt, self._recorder
        self._add_audit(self._phase, self._norms)
        self._add_audit("backward", Comparison())
        for kind in receipt.audited_kinds:
            recorder.note_whole_audit(self._phase, kind)
        if receipt.operations is not None:
            recorder.count_flops(self._phase, *receipt.operations)
        for what, calls in receipt.escapes.items():
            recorder.count_escape(self._phase, what, calls)
        for (phase, operator, what), calls in counts.items():
            if what in _ESCAPES:
                where: Phase = "backward" if phase == "backward" else self._phase
                recorder.count_escape(where, f"{operator} {what}", calls)
        for line in receipt.notes:
            recorder.note_mismatch(f"{self._phase}: {line}")

    def _add_audit(self, phase: Phase, others: Comparison) -> None:
        seen = [seen for cell, seen in self.receipt.cells.items() if cell.phase == phase]
        numbers = others.numbers + sum(each.recomputed for each in seen)
        largest = max((each.largest_deviation for each in seen), default=0.0)
        reference = self._references[phase]
        reference.elements = sum(each.compared + each.recomputed for each in seen)
        reference.largest_difference = max((each.largest_difference for each in seen), default=0.0)
        contradictions = others.contradictions | dict.fromkeys(self.receipt.wrong_values(phase), 1)
        self._recorder.add_audit(phase, numbers, largest, contradictions, reference)
        kinds = self.receipt.observed if reference.elements else {}
        for kind, number in kinds.items():
            if (kind == "backward") == (phase == "backward"):
                self._recorder.count_audit(phase, kind, number)
