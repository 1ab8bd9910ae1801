"""Collects measurements while phases run and turns them into a receipt."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from aqnpipe.config.noise import (
    AdaptiveNoise,
    ErrorModel,
    Fault,
    ModuleNoise,
    OperatorNoise,
    Phase,
    Quantity,
    asked_size,
    quantity_of,
)
from aqnpipe.noise.faults import ActiveFault
from aqnpipe.noise.receipt import FaultCell, GradientFlow, NoiseCell, PhaseRecord, Receipt, WeightCell, WeightSync

MEASURED_ELEMENTS_PER_CALL = 256


@dataclass
class _RatioSums:
    """Running sums of errors, in the unit of their kind (see `Quantity`)."""

    quantity: Quantity = "relative"
    count: int = 0
    total: float = 0.0
    squares: float = 0.0
    largest_difference: float = 0.0

    def add(self, before: Tensor, after: Tensor) -> None:
        before, after = before.double(), after.double()
        difference = after - before
        if before.numel():
            self.largest_difference = max(self.largest_difference, difference.abs().max().item())
        known = before != 0
        match self.quantity:
            case "relative":
                ratio = difference[known] / before[known]
            case "absolute":
                ratio = difference
            case "outward":
                ratio = difference[known] * before[known].sign()
        self.count += ratio.numel()
        self.total += ratio.sum().item()
        self.squares += ratio.square().sum().item()

    @property
    def root_mean_square(self) -> float:
        return (self.squares / self.count) ** 0.5 if self.count else 0.0


@dataclass
class _Cell:
    error: ErrorModel
    ratios: _RatioSums
    calls: int = 0
    elements: int = 0
    pending: list[tuple[Tensor, Tensor]] = field(default_factory=list)


@dataclass
class _FactorSums:
    squares: float = 0.0
    elements: int = 0


@dataclass
class _FaultSums:
    """Counts of one fault in one phase; those of tensors are read when they are settled."""

    calls: int = 0
    elements: int = 0
    affected_elements: int = 0
    pending: list[Tensor] = field(default_factory=list)

    def settle(self) -> None:
        self.affected_elements += sum(int(count) for count in self.pending)
        self.pending.clear()


@dataclass
class _GradientSums:
    """Sums over the gradients at one fault: elements carried, zeroed and leaked, squared norm carried and zeroed."""

    calls: int = 0
    totals: Tensor = field(default_factory=lambda: torch.zeros(5, dtype=torch.float64))
    pending: list[Tensor] = field(default_factory=list)

    def settle(self) -> None:
        for sums in self.pending:
            self.totals += sums.cpu()
        self.pending.clear()


@dataclass
class _PhaseSums:
    forwards: int = 0
    noised_calls: int = 0
    witness: _RatioSums = field(default_factory=_RatioSums)
    witnessed_elements: int = 0
    escaped: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    flops: int | None = None
    noised_flops: int = 0
    modules: set[str] = field(default_factory=set)


class ReceiptRecorder:
    """Accumulates what injections measure over a run or an evaluation pass; `receipt()` gives the account.

    `faults` are those of the machine; a cached threshold is that of the first call of this run or pass.
    """

    def __init__(
        self,
        *,
        operator_noise: OperatorNoise | None,
        module_noise: ModuleNoise | None = None,
        aqn: AdaptiveNoise | None = None,
        faults: Sequence[Fault] = (),
        expected_phases: tuple[Phase, ...],
        num_layers: int,
        num_norms: int,
        num_steps: int = 0,
        num_epochs: int = 0,
        layer_factors: Mapping[int, float] | None = None,
    ) -> None:
        self.operator_noise = operator_noise
        self.module_noise = module_noise
        self.aqn = aqn
        self.active_faults = tuple(ActiveFault(fault) for fault in faults)
        self._expected_phases = expected_phases
        self._num_layers = num_layers
        self._num_norms = num_norms
        self._cells: dict[tuple[Phase, str, int | None], _Cell] = {}
        self._phases: dict[Phase, _PhaseSums] = {}
        self._num_steps = num_steps
        self._num_epochs = num_epochs
        self._layer_factors = dict(layer_factors) if layer_factors is not None else None
        self._num_noised_modules = 0
        self._hidden: list[tuple[int, Tensor, Tensor]] = []
        self._faults: dict[tuple[Phase, int], _FaultSums] = defaultdict(_FaultSums)
        self._gradients: dict[int, _GradientSums] = defaultdict(_GradientSums)
        self._foreign_faults: set[str] = set()
        self._weight_syncs: list[WeightSync] = []
        self._weight_factors: dict[int | None, _FactorSums] = defaultdict(_FactorSums)

    def count_forward(self, phase: Phase) -> None:
        """Note one forward (or backward) pass of the model in `phase`."""
        self._phase(phase).forwards += 1

    def count_escape(self, phase: Phase, function: str) -> None:
        """Note a call that holds a matrix product out of reach."""
        self._phase(phase).escaped[function] += 1

    def count_call(self, phase: Phase, operator: str, layer: int | None, error: ErrorModel, elements: int) -> None:
        """Note one noised operator or module call on `elements` elements."""
        cell = self._cells.get((phase, operator, layer))
        if cell is None:
            cell = self._cells[phase, operator, layer] = _Cell(error, _RatioSums(quantity_of(error)))
        cell.calls += 1
        cell.elements += elements
        self._phase(phase).noised_calls += 1

    def expect_modules(self, count: int) -> None:
        """Note how many modules the module noise selects."""
        self._num_noised_modules = count

    def count_module(self, phase: Phase, name: str) -> None:
        """Note that module noise reached the module `name`."""
        self._phase(phase).modules.add(name)

    def wants_flops(self, phase: Phase) -> bool:
        """Tell whether the operations of a forward pass in `phase` are still to be counted: one is enough."""
        return self._phase(phase).flops is None

    def count_flops(self, phase: Phase, flops: int) -> None:
        """Note the operations of one whole forward pass."""
        self._phase(phase).flops = flops

    def count_noised_flops(self, phase: Phase, flops: int) -> None:
        """Add operations of that pass whose result was noised."""
        self._phase(phase).noised_flops += flops

    def measure(self, phase: Phase, operator: str, layer: int | None, before: Tensor, after: Tensor) -> None:
        """Keep a sample of an output before and after its noise (same shapes); summed up by `settle`."""
        self._cells[phase, operator, layer].pending.append((before, after))

    def witness(self, phase: Phase, bare: Tensor, used: Tensor) -> None:
        """Compare outputs recomputed by bare torch with those that the model used (same shapes)."""
        sums = self._phase(phase)
        sums.witness.add(bare, used)
        sums.witnessed_elements += bare.numel()

    def measure_hidden(self, layer: int, before: Tensor, after: Tensor) -> None:
        """Keep a sample of a layer's hidden states before and after AQN's relative noise (same shapes)."""
        self._hidden.append((layer, before, after))

    def settle_hidden(self) -> dict[int, tuple[float, int]]:
        """Return per layer (sum of squared relative errors, number of elements) measured since the last call."""
        sums: dict[int, _RatioSums] = defaultdict(_RatioSums)
        for layer, before, after in self._hidden:
            sums[layer].add(before, after)
        self._hidden.clear()
        return {layer: (one.squares, one.count) for layer, one in sums.items()}

    def note_foreign_faults(self, modules: Sequence[str]) -> None:
        """Note modules with a simulated fault that is none of this recorder's."""
        self._foreign_faults.update(modules)

    def count_fault(self, phase: Phase, number: int, changed: Tensor) -> None:
        """Note one call of the site of fault `number`; `changed` is the mask of elements that the fault changed."""
        sums = self._faults[phase, number]
        sums.calls += 1
        sums.elements += changed.numel()
        sums.pending.append(changed.sum())

    def count_fault_gradient(self, number: int, changed: Tensor, arrived: Tensor, passed: Tensor) -> None:
        """Note the gradient that arrived behind fault `number` and what of it passed through (same shapes).

        `changed` is the mask of elements that the fault changed in the forward pass.
        """
        zeroed = (arrived != 0) & (passed == 0)
        squares = arrived.double().square()
        sums = self._gradients[number]
        sums.calls += 1
        sums.pending.append(
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
        """Return (elements, affected elements) over all faults in `phase` up to now."""
        self.settle()
        sums = [one for (when, _), one in self._faults.items() if when == phase]
        return sum(one.elements for one in sums), sum(one.affected_elements for one in sums)

    def add_weight_sync(self, sync: WeightSync) -> None:
        """Note one redraw of AQN noise."""
        self._weight_syncs.append(sync)

    def measure_sigma_factor(self, layer: int | None, squared_factors: float, elements: int) -> None:
        """Add the sum of (added noise / scheduled sigma)^2 over elements of one target."""
        sums = self._weight_factors[layer]
        sums.squares += squared_factors
        sums.elements += elements

    def settle(self) -> None:
        """Sum up the kept samples, so that memory stays flat over a long run."""
        for cell in self._cells.values():
            if cell.pending:
                before, after = zip(*cell.pending, strict=True)
                cell.ratios.add(torch.cat(before), torch.cat(after))
                cell.pending.clear()
        for fault in self._faults.values():
            fault.settle()
        for gradient in self._gradients.values():
            gradient.settle()

    def receipt(self) -> Receipt:
        """Return the account of everything recorded so far."""
        self.settle()
        return Receipt(
            operator_noise=self.operator_noise,
            module_noise=self.module_noise,
            aqn=self.aqn,
            expected_phases=self._expected_phases,
            phases=tuple(
                PhaseRecord(
                    phase=phase,
                    forwards=sums.forwards,
                    noised_calls=sums.noised_calls,
                    witnessed_elements=sums.witnessed_elements,
                    witness_difference=sums.witness.largest_difference,
                    witness_scale=sums.witness.root_mean_square,
                    escaped=dict(sums.escaped),
                    forward_flops=sums.flops or 0,
                    noised_flops=sums.noised_flops,
                    modules_noised=len(sums.modules),
                )
                for phase, sums in self._phases.items()
            ),
            cells=tuple(
                NoiseCell(
                    phase=phase,
                    operator=operator,
                    layer=layer,
                    calls=cell.calls,
                    elements=cell.elements,
                    error=cell.error.kind,
                    asked=asked_size(cell.error),
                    measured=cell.ratios.root_mean_square if cell.ratios.count else None,
                    mean_error=cell.ratios.total / cell.ratios.count if cell.ratios.count else None,
                    measured_elements=cell.ratios.count,
                )
                for (phase, operator, layer), cell in sorted(
                    self._cells.items(), key=lambda item: (item[0][0], item[0][2] is None, item[0][2] or 0, item[0][1])
                )
            ),
            faults=tuple(active.fault for active in self.active_faults),
            fault_cells=tuple(self._fault_cell(*place, sums) for place, sums in sorted(self._faults.items())),
            gradient_flows=tuple(_flow(number, sums) for number, sums in sorted(self._gradients.items())),
            foreign_faults=tuple(sorted(self._foreign_faults)),
            weight_syncs=tuple(self._weight_syncs),
            weight_cells=tuple(
                WeightCell(layer=layer, measured_factor=(sums.squares / sums.elements) ** 0.5, elements=sums.elements)
                for layer, sums in self._weight_factors.items()
            ),
            layer_factors=self._layer_factors,
            num_steps=self._num_steps,
            num_epochs=self._num_epochs,
            num_layers=self._num_layers,
            num_norms=self._num_norms,
            num_noised_modules=self._num_noised_modules,
        )

    def _phase(self, phase: Phase) -> _PhaseSums:
        return self._phases.setdefault(phase, _PhaseSums())

    def _fault_cell(self, phase: Phase, number: int, sums: _FaultSums) -> FaultCell:
        channels = self.active_faults[number].channels
        return FaultCell(
            fault=number,
            phase=phase,
            calls=sums.calls,
            elements=sums.elements,
            affected_elements=sums.affected_elements,
            num_channels=len(channels),
            num_faulty_channels=int(channels.sum()),
        )


def _flow(number: int, sums: _GradientSums) -> GradientFlow:
    carried, zeroed, leaked, squares, zeroed_squares = sums.totals.tolist()
    return GradientFlow(
        fault=number,
        calls=sums.calls,
        elements=int(carried),
        zeroed_elements=int(zeroed),
        leaked_elements=int(leaked),
        norm=squares**0.5,
        zeroed_norm=zeroed_squares**0.5,
    )
