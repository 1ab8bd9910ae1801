"""Gives a recorder what the machine and the audit of a phase have seen."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from aqnpipe.config.measured_noise import OperatorError
from aqnpipe.config.noise import AppliedError, FakeQuantization, Phase, quantity_of, requested_size
from aqnpipe.machine.machine import Noised
from aqnpipe.models.layout import layer_of, rms_norms, weight_of
from aqnpipe.noise.injection.sites import FIRST_MODULE, HIDDEN_STATES, hidden_stream
from aqnpipe.noise.receipts.recorder import ReceiptRecorder
from aqnpipe.noise.receipts.table import Place, Row
from aqnpipe.proof.comparison import compare, measured_size, spacing, wrong_weights
from aqnpipe.proof.operations import machine_name
from aqnpipe.proof.operators import MODULE_STREAM
from aqnpipe.proof.random_numbers import Draws, FloatArray, derived_key
from aqnpipe.proof.receipt import MachineReceipt
from aqnpipe.proof.recompute import Draw, Sampled, unchanged
from aqnpipe.proof.request import AuditRequest

_FEW_BITS_LOST = 4.0
"""Results are measured whose slack is at most so many times the smallest one: in others most digits cancelled."""

_SAMPLES_OF_HIDDEN, _SAMPLES_IN_OTHER_PASSES = 1024, 64

_OF_THE_AUDIT = ("recomputed", "wrong", "largest_deviation", "compared", "largest_difference")
"""Columns of the audit's rows that are about sums of a study's rows, too."""

_ESCAPES = ("of integers", "captured")
"""Counts that the machine keeps of products that cannot have the error."""


@dataclass
class PhaseMeasurements:
    """Measurements of one phase. `receipt` is what its audit writes, and continues the earlier ones of the run.

    `modules`: the names of the modules with noise, in the order of their places. `noised_parts`: the parts of the model
    with an error since they were entered. `norms`: what was found of norm weights. `sigma_of` returns the requested
    sigma of AQN on a norm.
    """

    asked: AuditRequest
    phase: Phase
    num_layers: int
    modules: list[str]
    recorder: ReceiptRecorder
    sigma_of: Callable[[str], float]
    noised_parts: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.norms = Row(self.phase)
        self.receipt = MachineReceipt(self.asked, np.random.default_rng(self._key(f"audit.{self.phase}", 0)))
        earlier = self.recorder.seen(self.phase, "passes", "audited_whole")
        self.receipt.forward.add(passes=earlier.passes, audited_whole=earlier.audited_whole)
        earlier = self.recorder.seen("backward", "passes", "recomputed")
        self.receipt.forward.gradient_passes = earlier.passes
        self.receipt.backward.recomputed = earlier.recomputed

    def _key(self, stream: str, *counters: int) -> int:
        return derived_key(self.asked.seed, stream, *self.asked.position, *counters)

    def note(self, noised: Noised) -> None:
        """Count a result of an operator that has an error; a layer that is computed again counts once."""
        layer = noised.part if noised.part < self.num_layers else None
        phase = self._phase_of(noised.phase)
        if phase == "backward":
            self.recorder.note_noised_gradient(layer)
        else:
            self.noised_parts.add(noised.part)
        if not noised.is_again:
            self._count(phase, layer, noised)

    def note_module(self, place: int, noised: Noised, exact: Tensor, passed: int, call: int) -> None:
        """Count the input or output of a module that has an error; `call` of the place in a pass."""
        if noised.is_again:
            return
        if place < FIRST_MODULE:
            self._measure_hidden(place, noised, exact, passed, call)
            return
        name = self.modules[place - FIRST_MODULE]
        self._count(self.phase, layer_of(name), noised)
        self.recorder.add(self.phase, modules={name})

    def _count(self, phase: Phase, layer: int | None, noised: Noised) -> None:
        row = self.recorder.row(phase, None, layer, noised.operator)
        row.error = row.error or noised.error
        row.calls += 1
        row.elements += noised.num_elements
        if noised.changed is not None:
            self.recorder.add(*row.place[:4], changed=noised.changed)

    def _measure_hidden(self, layer: int, noised: Noised, exact: Tensor, passed: int, call: int) -> None:
        """Recompute noise on hidden states in every pass: more of it in the first ones, and in powers of two."""
        count = _SAMPLES_IN_OTHER_PASSES if passed & (passed - 1) else _SAMPLES_OF_HIDDEN
        draws = Draws.of(self._key(hidden_stream(self.phase), passed, layer), call, MODULE_STREAM)
        found = unchanged(exact, noised.values, Draw(self.receipt.draws, count).places(noised.values), noised.shards)
        seen = compare(found, noised.error, draws, noised.values.dtype)
        row = self.recorder.hidden.setdefault(layer, Row(self.phase))
        # Of a zero the error has no relative size.
        row.add(elements=int((np.isfinite(found.found) & (found.exact != 0)).sum()), squares=seen["found_squares"])
        row.add(recomputed=seen["recomputed"], wrong=seen["wrong"])

    def compare_norms(self, model: nn.Module, exactly: Callable[[], AbstractContextManager[None]]) -> None:
        """Compare sampled weights of every RMSNorm that a pass is about to read with the requested ones.

        In a rollout AQN's targets have the noise of the step, the same in all forwards of the rollout. Everywhere else
        they are clean. Nothing is compared if the recorder does not know the clean weights.
        """
        clean, aqn = self.recorder.clean_norm_weights, self.recorder.requested.aqn
        if not clean or self.phase == "reference":
            return
        calls: dict[str, int] = {}
        if aqn is not None and aqn.targets != "hidden_states" and self.phase == "rollout":
            calls = {name: call for call, name in enumerate(rms_norms(model, aqn.targets))}
        seed, step, row = self.asked.seed, self.asked.position[0], self.norms
        with exactly():
            for name, module in model.named_modules():
                if name not in clean:
                    continue
                sigma, weight = self.sigma_of(name) if name in calls else 0.0, weight_of(module).detach()
                wrong = wrong_weights(clean[name], weight, sigma, seed, step, calls.get(name, 0), self.receipt.draws)
                row.recomputed += len(wrong) if sigma else 0
                if wrong.any():
                    requested = f"the noise of step {step}" if sigma else "clean weights"
                    what = f"{wrong.mean():.0%} of the sampled weights are not as requested: {requested}"
                    row.add(contradictions={f"AQN: {name}: {what}": 1})

    def measure(self, cell: Place, found: Sampled, error: Any, dtype: torch.dtype) -> None:
        """Measure the elements of a compared result whose error rounding does not hide."""
        if cell.operator == HIDDEN_STATES:
            return
        # A result of 16 bits is rounded before its error, which says nothing about the error.
        clean = found.plain(dtype)
        used = found.found
        with np.errstate(divide="ignore", invalid="ignore"):
            relative = np.where(clean == 0, np.inf, (found.slack + found.after) / np.abs(clean))
        least = relative.min(initial=np.inf)
        usable = np.isfinite(used) & (relative <= max(_FEW_BITS_LOST * least, 0.01 * requested_size(error)))
        rounding = spacing(used, dtype) * np.sqrt((1 if found.constant is None else 2) / 12)
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
        row = self.recorder.rows.get(self._place(cell))
        if row is not None and row.error is not None:
            row.add(**_error_sums(row.error, clean[usable], used[usable], rounding[usable]))

    def settle(self, counts: Mapping[tuple[str, str, str], int]) -> None:
        """Record what the audit found, and of what the machine `counts` what cannot have the error."""
        receipt, recorder = self.receipt, self.recorder
        compared = {cell: seen for cell, seen in receipt.cells.items() if seen.compared + seen.recomputed}
        for cell, seen in compared.items():
            row = recorder.row(*self._place(cell)[:4]).include([seen], _OF_THE_AUDIT)
            row.compared += seen.recomputed
        recorder.row(self.phase).include([self.norms]).include([receipt.forward], ["audited_whole"])
        audits: dict[Phase, Row] = {self.phase: receipt.forward, "backward": receipt.backward}
        for phase, audited in audits.items():
            if any(cell.phase == phase for cell in compared):
                recorder.add(phase, contradictions=dict.fromkeys(receipt.wrong_values(phase), 1))
                recorder.row(phase).include([audited], ["audited_passes"])
        if not recorder.row(self.phase).flops:
            # One pass is enough.
            recorder.row(self.phase).include([receipt.forward], ["flops", "noised_flops"])
        for row in receipt.rows.values():
            if row.escaped:
                recorder.add(self.phase, operator=row.operator, escaped=row.escaped)
        for (where, operator, what), calls in counts.items():
            if what in _ESCAPES:
                recorder.add(self._phase_of(where), operator=f"{operator} {what}", escaped=calls)
        for line in receipt.forward.contradictions:
            recorder.note_mismatch(f"{self.phase}: {line}")

    def _place(self, cell: Place) -> Place:
        layer = layer_of(f"{cell.path.removeprefix('module ')}.")
        return Place(self._phase_of(cell.phase), layer=layer, operator=machine_name(cell.operator))

    def _phase_of(self, name: str) -> Phase:
        return "backward" if name == "backward" else self.phase


def _error_sums(error: AppliedError, clean: FloatArray, used: FloatArray, rounding: FloatArray) -> dict[str, Any]:
    """Return the columns of values before and after an error; `rounding`: the standard deviations of their rounding."""
    difference, known, quantity = used - clean, clean != 0, quantity_of(error)
    is_relative = quantity in ("relative", "measured")
    if is_relative:
        ratio = difference[known] / clean[known]
    else:
        ratio = difference if quantity == "absolute" else difference[known] * np.sign(clean[known])
    rounded = rounding[known] / clean[known] if is_relative else rounding
    return {
        "measured_elements": ratio.size,
        "error_sum": float(ratio.sum()),
        "squares": float(np.square(ratio).sum()),
        "rounding_squares": float(np.square(rounded).sum()),
        "zeros": int((~known & (used == 0)).sum()),
    }
