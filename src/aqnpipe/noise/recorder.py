"""Collects measurements while phases run and turns them into a receipt."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from aqnpipe.config.noise import OperatorNoise, Phase, WeightNoise
from aqnpipe.noise.receipt import NoiseCell, PhaseRecord, Receipt, WeightCell, WeightSync

MEASURED_ELEMENTS_PER_CALL = 256


@dataclass
class _RatioSums:
    """Running sums of relative errors."""

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
        ratio = difference[known] / before[known]
        self.count += ratio.numel()
        self.total += ratio.sum().item()
        self.squares += ratio.square().sum().item()

    @property
    def root_mean_square(self) -> float:
        return (self.squares / self.count) ** 0.5 if self.count else 0.0


@dataclass
class _Cell:
    asked: float
    calls: int = 0
    elements: int = 0
    ratios: _RatioSums = field(default_factory=_RatioSums)
    pending: list[tuple[Tensor, Tensor]] = field(default_factory=list)


@dataclass
class _FactorSums:
    squares: float = 0.0
    elements: int = 0


@dataclass
class _PhaseSums:
    forwards: int = 0
    noised_calls: int = 0
    witness: _RatioSums = field(default_factory=_RatioSums)
    witnessed_elements: int = 0
    escaped: dict[str, int] = field(default_factory=lambda: defaultdict(int))


class ReceiptRecorder:
    """Accumulates what injections measure over a run or an evaluation pass; `receipt()` gives the account."""

    def __init__(
        self,
        *,
        operator_noise: OperatorNoise | None,
        weight_noise: WeightNoise | None,
        expected_phases: tuple[Phase, ...],
        num_layers: int,
        num_norms: int,
        num_steps: int = 0,
        num_epochs: int = 0,
        layer_factors: Mapping[int, float] | None = None,
    ) -> None:
        self.operator_noise = operator_noise
        self.weight_noise = weight_noise
        self._expected_phases = expected_phases
        self._num_layers = num_layers
        self._num_norms = num_norms
        self._cells: dict[tuple[Phase, str, int | None], _Cell] = {}
        self._phases: dict[Phase, _PhaseSums] = {}
        self._num_steps = num_steps
        self._num_epochs = num_epochs
        self._layer_factors = dict(layer_factors) if layer_factors is not None else None
        self._weight_syncs: list[WeightSync] = []
        self._weight_factors: dict[int | None, _FactorSums] = defaultdict(_FactorSums)

    def count_forward(self, phase: Phase) -> None:
        """Note one forward (or backward) pass of the model in `phase`."""
        self._phase(phase).forwards += 1

    def count_escape(self, phase: Phase, function: str) -> None:
        """Note a call that holds a matrix product out of reach."""
        self._phase(phase).escaped[function] += 1

    def count_call(self, phase: Phase, operator: str, layer: int | None, asked: float, elements: int) -> None:
        """Note one noised operator call on `elements` elements."""
        cell = self._cells.setdefault((phase, operator, layer), _Cell(asked))
        cell.calls += 1
        cell.elements += elements
        self._phase(phase).noised_calls += 1

    def measure(self, phase: Phase, operator: str, layer: int | None, before: Tensor, after: Tensor) -> None:
        """Keep a sample of an output before and after its noise (same shapes); summed up by `settle`."""
        self._cells[phase, operator, layer].pending.append((before, after))

    def witness(self, phase: Phase, bare: Tensor, used: Tensor) -> None:
        """Compare outputs recomputed by bare torch with those that the model used (same shapes)."""
        sums = self._phase(phase)
        sums.witness.add(bare, used)
        sums.witnessed_elements += bare.numel()

    def add_weight_sync(self, sync: WeightSync) -> None:
        """Note one redraw of AQN noise."""
        self._weight_syncs.append(sync)

    def measure_weight_factor(self, layer: int | None, squared_factors: float, elements: int) -> None:
        """Add the sum of (added noise / scheduled sigma)^2 over the weights of one norm."""
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

    def receipt(self) -> Receipt:
        """Return the account of everything recorded so far."""
        self.settle()
        return Receipt(
            operator_noise=self.operator_noise,
            weight_noise=self.weight_noise,
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
                    asked=cell.asked,
                    measured=cell.ratios.root_mean_square if cell.ratios.count else None,
                    mean_error=cell.ratios.total / cell.ratios.count if cell.ratios.count else None,
                    measured_elements=cell.ratios.count,
                )
                for (phase, operator, layer), cell in sorted(
                    self._cells.items(), key=lambda item: (item[0][0], item[0][2] is None, item[0][2] or 0, item[0][1])
                )
            ),
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
        )

    def _phase(self, phase: Phase) -> _PhaseSums:
        return self._phases.setdefault(phase, _PhaseSums())
