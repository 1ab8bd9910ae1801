"""Collects measurements while phases run and makes a receipt of them."""

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor, nn

from aqnpipe.config.noise import (
    AppliedError,
    NoiseSpec,
    Phase,
    quantity_of,
)
from aqnpipe.errors import ReceiptError
from aqnpipe.models.layout import is_rms_norm, layer_of, matrices_sha256, norms_sha256, weight_of
from aqnpipe.noise.receipts.mismatches import mismatches
from aqnpipe.noise.receipts.passes import PassRow, RequiredPasses, pass_problems
from aqnpipe.noise.receipts.receipt import Receipt
from aqnpipe.noise.receipts.receipt_content import TABLES, RecorderState
from aqnpipe.noise.receipts.rounding import FloatArray
from aqnpipe.noise.receipts.rows import (
    FaultCell,
    GradientFlow,
    NoiseCell,
    PhaseRecord,
    RatioSums,
    ReferenceSums,
    WeightCell,
    WeightSync,
    merged,
)
from aqnpipe.noise.schedule import sigma_at

_CellKey = tuple[Phase, str, int | None]


class ReceiptRecorder:
    """Accumulates the measurements of a run or an evaluation pass, for its receipt.

    The receipt compares the measurements with `requested`. The recorder injects nothing. With `watch_norms`, every
    phase compares the norm weights of its model with the clean ones. `seed` is the seed that all noise must be drawn
    with; None accepts any. `clean_norm_weights` are the norm weights without AQN, by module name, if they are known.
    `required_passes`: what a training must do in each step.
    """

    def __init__(
        self,
        requested: NoiseSpec,
        *,
        expected_phases: tuple[Phase, ...],
        num_layers: int,
        num_norms: int,
        num_steps: int = 0,
        num_epochs: int = 0,
        steps_per_rollout: int = 1,
        watch_norms: bool = False,
        layer_factors: Mapping[int, float] | None = None,
        seed: int | None = None,
        required_passes: Sequence[RequiredPasses] = (),
    ) -> None:
        self.requested = requested
        self.clean_norm_weights: dict[str, Tensor] = {}
        self._seed = seed
        self._step: int | None = None
        self._keys: set[tuple[Phase, int, int, int, int]] = set()
        self._expected_phases = expected_phases
        self._num_layers = num_layers
        self._num_norms = num_norms
        # The tables, by the place of each row.
        self._cells: dict[_CellKey, NoiseCell] = {}
        self._phases: dict[Phase, PhaseRecord] = {}
        self._fault_cells: dict[tuple[Phase, int], FaultCell] = {}
        self._gradient_flows: dict[int, GradientFlow] = {}
        self._weight_cells: dict[tuple[Phase, int | None], WeightCell] = {}
        self._passes: dict[tuple[Phase, int], PassRow] = {}
        self._required_passes = tuple(required_passes)
        self._noised_in_backward: set[int | None] = set()
        self._num_steps = num_steps
        self._num_epochs = num_epochs
        self._steps_per_rollout = steps_per_rollout
        self._watch_norms = watch_norms
        self._clean_norms: str | None = None
        self._clean_matrices: str | None = None
        self._layer_factors = dict(layer_factors) if layer_factors is not None else None
        self._num_noised_modules = 0
        self._hidden: list[tuple[int, Tensor, Tensor]] = []
        self._foreign_faults: set[str] = set()
        self._mismatches: set[str] = set()
        self._weight_syncs: list[WeightSync] = []
        # Tensors stay on their device until `settle` reads them all.
        self._changed: dict[_CellKey, list[Tensor]] = defaultdict(list)
        self._affected: dict[tuple[Phase, int], list[Tensor]] = defaultdict(list)
        self._flows: dict[int, list[Tensor]] = defaultdict(list)

    def note_installed(self, where: str, **parts: BaseModel | Sequence[BaseModel] | None) -> None:
        """Note how `parts` of a `NoiseSpec`, by field name, differ from the requested ones. `where` begins the line."""
        for name, installed in parts.items():
            found = mismatches(name, installed, getattr(self.requested, name))
            self._mismatches.update(f"{where}: {mismatch}" for mismatch in found)

    def note_mismatch(self, line: str) -> None:
        """Note how the noise differs from the requested one; the receipt is refused with this line."""
        self._mismatches.add(line)

    def begin_step(self, step: int) -> None:
        """Note the number of optimiser steps done; the noise of the coming phases must be keyed by it."""
        self._step = step
        self._keys = {key for key in self._keys if key[2] >= step}

    def note_key(self, phase: Phase, seed: int, step: int, micro_step: int, rank: int) -> None:
        """Note the key of a phase, which must have the seed and the step of the run and may occur only once."""
        if self._seed is not None and seed != self._seed:
            self._mismatches.add(f"{phase}: the noise is keyed by seed {seed}, requested {self._seed}")
        if self._step is not None and phase != "validation" and step != self._step:
            self._mismatches.add(f"{phase}: the noise is keyed by step {step} at step {self._step}")
        key = (phase, seed, step, micro_step, rank)
        if key in self._keys:
            self._mismatches.add(f"{phase}: the key of its noise is used twice (step {step}, part {micro_step})")
        self._keys.add(key)

    def position(self, seed: int, step: int) -> tuple[int, int]:
        """Return the seed and step that noise must be keyed by; those given where the recorder knows none."""
        return seed if self._seed is None else self._seed, step if self._step is None else self._step

    def count_forward(self, phase: Phase) -> None:
        """Note one forward (or backward) pass of the model in `phase`."""
        self._phase(phase).forwards += 1

    def note_passes(self, row: PassRow) -> None:
        """Add passes of a phase in a step. Of an evaluation the table of answers says that every question was read."""
        if row.phase != "evaluation":
            self._passes.setdefault(row.place, PassRow(*row.place)).add(row)

    def count_replays(self, phase: Phase, step: int, number: int) -> None:
        """Note passes of the model that were replayed from CUDA graphs."""
        if number:
            self._phase(phase).forwards += number
            self._phase(phase).graph_replays += number
            self.note_passes(PassRow(phase, step, passes=number))

    def count_backward(self, step: int) -> None:
        """Note a backward pass, and in how many parts of the model gradients had an error."""
        self.count_forward("backward")
        self.note_passes(PassRow("backward", step, passes=1, noised_parts=len(self._noised_in_backward)))
        self._noised_in_backward.clear()

    def note_noised_gradient(self, layer: int | None) -> None:
        """Note that a gradient in a layer (None: the output projection) had an error in the present backward pass."""
        self._noised_in_backward.add(layer)

    def num_forwards(self, phase: Phase) -> int:
        """Return the number of passes of `phase` so far."""
        return self._phases[phase].forwards if phase in self._phases else 0

    def note_clean_norms(self, model: nn.Module) -> None:
        """Note the policy's present norm weights as the clean ones: at the start, and after each optimiser step."""
        if self._watch_norms:
            self._clean_norms = norms_sha256(model)
            self._keep_clean_norms(model)
            self._clean_matrices = matrices_sha256(model)

    def expect_clean_norms(self, sha256: str, model: nn.Module | None = None) -> None:
        """Note the SHA-256 of the clean norm weights, computed in another process, and those of `model` if it has them.

        Weights of `model` with another SHA-256 are found when its first phase begins.
        """
        self._clean_norms = sha256
        if model is not None:
            self._keep_clean_norms(model)

    def _keep_clean_norms(self, model: nn.Module) -> None:
        self.clean_norm_weights = {
            name: weight_of(module).detach().clone() for name, module in model.named_modules() if is_rms_norm(module)
        }

    def watch_norms(self, phase: Phase, model: nn.Module) -> None:
        """Compare the norm weights of `model`, before it computes, with the clean ones, which only AQN may change.

        The reference model has the norm weights of the start, known from the first redraw of AQN noise. Raises
        ReceiptError if a sample of the matrices differs from the values after the last optimiser step.
        """
        clean = self._clean_norms
        if phase == "reference":
            clean = self._weight_syncs[0].clean_sha256_before if self._weight_syncs else None
        if not self._watch_norms or clean is None:
            return
        if phase != "reference" and self._clean_matrices not in (None, matrices_sha256(model)):
            raise ReceiptError(f"receipt refused: {phase}: the matrices are not those of the last optimiser step")
        sums = self._phase(phase)
        sums.norms_checked += 1
        sums.norms_noised += norms_sha256(model) != clean

    def count_escape(self, phase: Phase, function: str, calls: int = 1) -> None:
        """Note calls with a matrix product inside that the noise does not reach."""
        escaped = self._phase(phase).escaped
        escaped[function] = escaped.get(function, 0) + calls

    def count_call(self, phase: Phase, operator: str, layer: int | None, error: AppliedError, elements: int) -> None:
        """Note one noised operator or module call on `elements` elements."""
        cell = self._cells.get((phase, operator, layer))
        if cell is None:
            cell = NoiseCell(phase, operator, layer, error, RatioSums(quantity_of(error)))
            self._cells[phase, operator, layer] = cell
        cell.calls += 1
        cell.elements += elements
        self._phase(phase).noised_calls += 1

    def count_changed(self, phase: Phase, operator: str, layer: int | None, changed: Tensor) -> None:
        """Keep the number of elements (a tensor of one number) that an error of a user's own changed in a call."""
        self._changed[phase, operator, layer].append(changed)

    def expect_modules(self, count: int) -> None:
        """Note the number of modules that the module noise selects."""
        self._num_noised_modules = count

    def count_module(self, phase: Phase, name: str) -> None:
        """Note that module noise reached the module `name`."""
        self._phase(phase).modules.add(name)

    def audited_kinds(self, phase: Phase) -> set[str]:
        """Return the kinds of forwards that have been observed as a whole in `phase`."""
        return set(self._phases[phase].audited_whole) if phase in self._phases else set()

    def recomputed_numbers(self, phase: Phase) -> int:
        """Return the number of elements whose noise was recomputed in `phase`."""
        return self._phases[phase].recomputed_numbers if phase in self._phases else 0

    def note_whole_audit(self, phase: Phase, kind: str) -> None:
        """Note that a forward of this kind has been observed as a whole."""
        self._phase(phase).audited_whole.add(kind)

    def count_audit(self, phase: Phase, kind: str, number: int = 1) -> None:
        """Note observed passes of a kind."""
        passes = self._phase(phase).audited_passes
        passes[kind] = passes.get(kind, 0) + number

    def add_audit(
        self,
        phase: Phase,
        numbers: int,
        largest_deviation: float,
        contradictions: Mapping[str, int],
        reference: ReferenceSums,
    ) -> None:
        """Add the result of comparisons with recomputed values, and with plain torch."""
        if numbers or contradictions or reference.elements:
            found = PhaseRecord(
                phase,
                recomputed_numbers=numbers,
                largest_deviation=largest_deviation,
                contradictions=dict(contradictions),
                reference=reference,
            )
            self._phases[phase] = merged([self._phase(phase), found])

    def requested_sigma(self, step: int, target: int | str) -> float:
        """Return the sigma that AQN's schedule requests at `step` for a decoder layer, or a norm by its name."""
        aqn = self.requested.aqn
        if aqn is None:
            return 0.0
        layer, norm = (layer_of(target), target) if isinstance(target, str) else (target, "")
        factor = aqn.factor(layer, self._layer_factors, norm)
        return factor * sigma_at(aqn.schedule, step, self._num_steps, self._num_epochs)

    def note_gradient(self, phase: Phase, place: int, needed: bool) -> None:
        """Note whether the input of a part of the model needs a gradient, in a forward with a backward pass."""
        sums = self._phase(phase)
        sums.gradients = (sums.gradients or set()) | ({place} if needed else set())

    def count_flops(self, phase: Phase, flops: int, noised: int) -> None:
        """Note the operations of one whole forward pass, and those whose result was noised; one pass is enough."""
        sums = self._phase(phase)
        if sums.flops is None:
            sums.flops, sums.noised_flops = flops, noised

    def measure_values(
        self,
        phase: Phase,
        operator: str,
        layer: int | None,
        clean: FloatArray,
        used: FloatArray,
        rounding: FloatArray,
    ) -> None:
        """Add sampled values of an output before and after its noise.

        `rounding`: the standard deviation of the rounding of each value to its number format.
        """
        cell = self._cells.get((phase, operator, layer))
        if cell is not None:
            cell.ratios.add_values(clean, used)
            cell.ratios.add_rounding(clean, rounding)

    def measure_hidden(self, layer: int, before: Tensor, after: Tensor) -> None:
        """Keep a sample of a layer's hidden states before and after AQN's relative noise (same shapes)."""
        self._hidden.append((layer, before, after))

    def refuse_stray_hidden_noise(self) -> None:
        """Raise ReceiptError if training noised hidden states outside a rollout; a rollout settles its own samples."""
        if self._hidden and self._watch_norms:
            layers = sorted({layer for layer, _, _ in self._hidden})
            raise ReceiptError(f"receipt refused: AQN noised the hidden states of layers {layers} outside the rollout")

    def settle_hidden(self, sigmas: Mapping[int, float]) -> dict[int, RatioSums]:
        """Return the relative errors measured per layer since the last call; `sigmas`: of the noise, by layer."""
        sums: dict[int, RatioSums] = defaultdict(RatioSums)
        for layer, before, after in self._hidden:
            sums[layer].add(before, after, sigmas[layer])
        self._hidden.clear()
        return dict(sums)

    def note_foreign_faults(self, modules: Sequence[str]) -> None:
        """Note modules with a simulated fault that this recorder does not record."""
        self._foreign_faults.update(modules)

    def count_fault(self, phase: Phase, number: int, channels: Tensor, changed: Tensor) -> None:
        """Record one call of the site of fault `number`.

        `channels`: mask [channels] of the faulty ones; `changed`: mask of the elements that the fault changed.
        """
        sums = self._fault_cells.get((phase, number))
        if sums is None:
            sums = FaultCell(
                fault=number, phase=phase, num_channels=len(channels), num_faulty_channels=int(channels.sum())
            )
            self._fault_cells[phase, number] = sums
        sums.calls += 1
        sums.elements += changed.numel()
        self._affected[phase, number].append(changed.sum())

    def count_fault_gradient(self, number: int, changed: Tensor, arrived: Tensor, passed: Tensor) -> None:
        """Note the gradient that arrived behind fault `number`, and the part of it that passed (same shapes).

        `changed` is the mask of elements that the fault changed in the forward pass.
        """
        zeroed = (arrived != 0) & (passed == 0)
        squares = arrived.double().square()
        self._gradient_flows.setdefault(number, GradientFlow(number)).calls += 1
        self._flows[number].append(
            torch.stack(
                [
                    (arrived != 0).sum(),
                    zeroed.sum(),
                    (changed & (passed != 0)).sum(),
                    squares.sum(),
                    (squares * zeroed).sum(),
                ]
            )
        )

    def fault_counts(self, phase: Phase) -> tuple[int, int]:
        """Return (elements, affected elements) over all faults in `phase` so far."""
        self.settle()
        faults = [sums for (when, _), sums in self._fault_cells.items() if when == phase]
        return sum(sums.elements for sums in faults), sum(sums.affected_elements for sums in faults)

    @property
    def last_weight_sync(self) -> WeightSync | None:
        """The latest redraw of AQN noise, if there was one."""
        return self._weight_syncs[-1] if self._weight_syncs else None

    def add_weight_sync(self, sync: WeightSync) -> None:
        """Note one redraw of AQN noise."""
        self._weight_syncs.append(sync)

    def measure_sigma_factor(self, measured: WeightCell) -> None:
        """Add the sums of (added noise / scheduled sigma)^2 over the elements of one target."""
        before = self._weight_cells.get(measured.place)
        self._weight_cells[measured.place] = measured if before is None else merged([before, measured])

    def settle(self) -> None:
        """Sum the kept samples, so that memory stays constant over a long run."""
        for key, counts in self._changed.items():
            self._cells[key].changed += sum(int(count) for count in counts)
        for place, counts in self._affected.items():
            self._fault_cells[place].affected_elements += sum(int(count) for count in counts)
        for number, flows in self._flows.items():
            for flow in flows:
                self._gradient_flows[number].add(flow.tolist())
        self._changed.clear()
        self._affected.clear()
        self._flows.clear()

    def state(self) -> RecorderState:
        """Return a copy of all measurements so far. Call it between phases, because `restore` restores sums only."""
        self.refuse_stray_hidden_noise()
        self.settle()
        tables: dict[str, Any] = {name: list(getattr(self, f"_{name}").values()) for name in TABLES}
        return copy.deepcopy(
            RecorderState(
                **tables,
                foreign_faults=self._foreign_faults,
                mismatches=self._mismatches,
                weight_syncs=self._weight_syncs,
                num_noised_modules=self._num_noised_modules,
                keys=sorted(self._keys) if not self._num_steps else [],
            )
        )

    def restore(self, state: RecorderState) -> None:
        """Continue from `state` and drop all measurements so far."""
        state = copy.deepcopy(state)
        for name in TABLES:
            setattr(self, f"_{name}", {row.place: row for row in getattr(state, name)})
        self._foreign_faults = state.foreign_faults
        self._mismatches = state.mismatches
        self._weight_syncs = state.weight_syncs
        self._num_noised_modules = state.num_noised_modules
        self._keys = set(state.keys)
        self._changed.clear()
        self._affected.clear()
        self._flows.clear()
        self._hidden.clear()

    def check_so_far(self, steps_done: int) -> None:
        """Raise ReceiptError if the noise of a run that has made `steps_done` optimiser steps is not as requested."""
        problems = self.receipt(steps_done).problems(steps_done)
        if problems:
            raise ReceiptError(f"receipt refused after step {steps_done}: " + "; ".join(problems), tuple(problems))

    def receipt(self, steps_done: int | None = None) -> Receipt:
        """Return the receipt of everything recorded so far, of a run that has made `steps_done` steps (None: all)."""
        state = self.state()
        steps = self._num_steps if steps_done is None else steps_done
        missed = pass_problems(self._required_passes, self._passes, self._noised_parts(), steps)
        return Receipt(
            operator_noise=self.requested.operator_noise,
            module_noise=self.requested.module_noise,
            aqn=self.requested.aqn,
            expected_phases=self._expected_phases,
            phases=tuple(state.phases),
            cells=tuple(sorted(state.cells, key=_order)),
            faults=self.requested.faults,
            fault_cells=tuple(sorted(state.fault_cells, key=lambda cell: cell.place)),
            gradient_flows=tuple(sorted(state.gradient_flows, key=lambda flow: flow.fault)),
            foreign_faults=tuple(sorted(state.foreign_faults)),
            mismatches=(*sorted(state.mismatches), *missed),
            weight_syncs=tuple(state.weight_syncs),
            weight_cells=tuple(state.weight_cells),
            layer_factors=self._layer_factors,
            num_steps=self._num_steps,
            num_epochs=self._num_epochs,
            steps_per_rollout=self._steps_per_rollout,
            norms_watched=self._watch_norms,
            num_layers=self._num_layers,
            num_norms=self._num_norms,
            num_noised_modules=self._num_noised_modules,
        )

    def _noised_parts(self) -> dict[Phase, int]:
        """Return in how many parts of the model each pass of a phase needs an error, for the phases that have noise."""
        noise = self.requested.operator_noise
        if noise is None or not noise.is_active:
            return {}
        places = range(self._num_layers + 1)
        noised = {place for place in places if noise.error_in(place if place < self._num_layers else None) is not None}
        needing = [sums.gradients for sums in self._phases.values() if sums.gradients is not None]
        with_gradients = noised.intersection(set().union(*needing)) if needing else noised
        return {phase: len(with_gradients if phase == "backward" else noised) for phase in noise.phases}

    def _phase(self, phase: Phase) -> PhaseRecord:
        sums = self._phases.get(phase)
        if sums is None:
            sums = self._phases[phase] = PhaseRecord(phase)
        return sums


def _order(cell: NoiseCell) -> tuple[str, bool, int, str]:
    """Return the sort key of a cell: phase, layer (outside the layers last), operator."""
    return cell.phase, cell.layer is None, cell.layer or 0, cell.operator
