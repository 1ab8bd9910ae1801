"""Content of a receipt: the request, and the rows of what was measured."""

import math
from dataclasses import dataclass, field
from typing import ClassVar

from pydantic import ConfigDict, Field, TypeAdapter

from aqnpipe.config.noise import AdaptiveNoise, Fault, ModuleNoise, OperatorNoise, Phase, requested_size
from aqnpipe.noise.receipts.passes import PassRow
from aqnpipe.noise.receipts.rows import (
    FaultCell,
    GradientFlow,
    NoiseCell,
    PhaseRecord,
    ReceiptModel,
    WeightCell,
    WeightSync,
)

TABLES = ("cells", "phases", "fault_cells", "gradient_flows", "weight_cells", "passes")
"""The tables of a recorder, by the names that they have in `RecorderState` and, but for `passes`, in a receipt."""


@dataclass
class RecorderState:
    """Everything that a `ReceiptRecorder` has measured. The requested noise is not part of it.

    `keys` are those of the noise of an evaluation: phase, seed, step, micro-step and rank of each batch.

    Floats survive JSON bit for bit, so a restored recorder ends with the same receipt.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

    cells: list[NoiseCell]
    phases: list[PhaseRecord]
    fault_cells: list[FaultCell]
    gradient_flows: list[GradientFlow]
    foreign_faults: set[str]
    weight_syncs: list[WeightSync]
    weight_cells: list[WeightCell]
    num_noised_modules: int
    mismatches: set[str] = field(default_factory=set)
    passes: list[PassRow] = field(default_factory=list)
    keys: list[tuple[Phase, int, int, int, int]] = field(default_factory=list)

    def to_json(self) -> str:
        """Return the state as JSON."""
        return _ADAPTER.dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str) -> "RecorderState":
        """Return the state that `to_json` wrote. Raises pydantic's ValidationError on anything else."""
        return _ADAPTER.validate_json(text)


_ADAPTER = TypeAdapter(RecorderState)


class ReceiptContent(ReceiptModel):
    """The requested noise of one training run or evaluation pass, and its measurements."""

    operator_noise: OperatorNoise | None
    module_noise: ModuleNoise | None = None
    aqn: AdaptiveNoise | None = None
    faults: tuple[Fault, ...] = Field(default=(), description="requested simulated faults of the machine")
    expected_phases: tuple[Phase, ...] = Field(description="phases that must have run")
    phases: tuple[PhaseRecord, ...]
    cells: tuple[NoiseCell, ...]
    weight_syncs: tuple[WeightSync, ...]
    weight_cells: tuple[WeightCell, ...] = ()
    fault_cells: tuple[FaultCell, ...] = ()
    gradient_flows: tuple[GradientFlow, ...] = ()
    foreign_faults: tuple[str, ...] = Field(
        default=(), description="modules with a simulated fault that is not one of `faults`"
    )
    mismatches: tuple[str, ...] = Field(
        default=(),
        exclude_if=lambda found: not found,
        description="settings of the installed noise that differ from the requested ones; absent if there are none",
    )
    layer_factors: dict[int, float] | None = Field(
        default=None,
        description="requested factors on the schedule's sigma, from a sigmas file; null means 1 everywhere",
    )
    num_layers: int
    num_norms: int
    num_noised_modules: int = Field(default=0, description="number of modules that the module noise selects")
    num_steps: int = Field(default=0, description="optimiser steps of the run; 0 for an evaluation pass")
    num_epochs: int = 0
    norms_watched: bool = Field(
        default=False, description="whether phases had to compare their norm weights with the clean ones"
    )
    steps_per_rollout: int = Field(default=1, description="optimiser steps that learn from a batch of rollouts; 0: any")
    num_workers: int = Field(
        default=1, description="data-parallel workers whose measurements are summed in this receipt"
    )

    def requested_scale(self, phase: Phase) -> float:
        """Return the size of the error that operators should have in `phase`; 0 where none was requested."""
        noise = self.operator_noise
        return requested_size(noise.error) if noise and noise.is_active and phase in noise.phases else 0.0

    def measured_scale(self, phase: Phase) -> tuple[float, int]:
        """Return (root mean square relative error, number of measured elements) over all operators of `phase`."""
        cells = [
            cell for cell in self.cells if cell.phase == phase and not cell.is_module and cell.measured is not None
        ]
        total = sum(cell.measured_elements for cell in cells)
        if not total:
            return 0.0, 0
        squares = sum(cell.measured**2 * cell.measured_elements for cell in cells if cell.measured is not None)
        return math.sqrt(squares / total), total
