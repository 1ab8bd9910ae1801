"""Content of a receipt: the request, the table of what the study requires, and the table of what was seen."""

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field

from aqnpipe.config.arm import Arm
from aqnpipe.config.noise import (
    AdaptiveNoise,
    CacheNoise,
    Fault,
    ModuleNoise,
    NoiseSpec,
    OperatorNoise,
    Phase,
    requested_size,
)
from aqnpipe.noise.receipts.table import AQN, CACHE, REQUEST, SYNC, Row, TablePhase


class ReceiptModel(BaseModel):
    """Base of the parts of a receipt that are no rows: frozen, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")


class RecorderState(ReceiptModel):
    """Everything that a recorder has measured. Floats survive JSON bit for bit, so a restored recorder continues it."""

    rows: tuple[Row, ...] = ()

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy, without what was computed from the rows."""
        copied = super().model_copy(update=update, deep=deep)
        for name in ("phases", "cells"):
            vars(copied).pop(name, None)
        return copied

    @cached_property
    def phases(self) -> tuple[Row, ...]:
        """A row per phase, in the order of first appearance: all of its rows added up."""
        phases: dict[TablePhase, Row] = {}
        for row in self.rows:
            if row.operator not in (AQN, SYNC, CACHE, REQUEST) and row.fault < 0:
                phases.setdefault(row.phase, Row(row.phase)).include([row])
        return tuple(phases.values())

    @cached_property
    def cells(self) -> tuple[Row, ...]:
        """The rows of operators and modules with an error, by phase and layer, outside the layers last."""
        cells = [row for row in self.rows if row.error is not None]
        return tuple(sorted(cells, key=lambda row: (row.phase, row.layer is None, row.layer or 0, row.operator)))

    @property
    def fault_cells(self) -> tuple[Row, ...]:
        """The rows of simulated faults in forward passes."""
        cells = [row for row in self.rows if row.fault >= 0 and row.phase != "backward"]
        return tuple(sorted(cells, key=lambda row: (row.phase, row.fault)))

    @property
    def gradient_flows(self) -> tuple[Row, ...]:
        """The rows of gradients at simulated faults."""
        flows = [row for row in self.rows if row.fault >= 0 and row.phase == "backward"]
        return tuple(sorted(flows, key=lambda row: row.fault))

    @property
    def cache_cells(self) -> tuple[Row, ...]:
        """The rows of keys and values in a cache."""
        return tuple(row for row in self.rows if row.operator == CACHE)

    @property
    def weight_cells(self) -> tuple[Row, ...]:
        """The rows of AQN's noise."""
        return tuple(row for row in self.rows if row.operator == AQN)

    @property
    def weight_syncs(self) -> tuple[Row, ...]:
        """The rows of AQN's redraws, by step."""
        return tuple(sorted((row for row in self.rows if row.operator == SYNC), key=lambda row: row.step or 0))

    @property
    def mismatches(self) -> tuple[str, ...]:
        """How the noise and faults that were installed differ from the requested ones, and keys that are used twice."""
        lines = sorted(line for row in self.rows if row.operator == REQUEST for line in row.contradictions)
        return (
            *lines,
            *(
                f"{row.phase}: the noise of {count} batches has the same key ({key})"
                for row in self.phases
                for key, count in row.keys.items()
                if count > 1
            ),
        )

    @property
    def num_noised_modules(self) -> int:
        """Number of modules that the module noise selects."""
        return max((row.largest_selected for row in self.rows), default=0)


_NOISES = ("operator_noise", "module_noise", "kv_cache")


class ReceiptContent(RecorderState):
    """The requested noise of one training run or evaluation pass, and its measurements."""

    operator_noise: OperatorNoise | None
    module_noise: ModuleNoise | None = None
    kv_cache: CacheNoise | None = Field(default=None, exclude_if=lambda noise: noise is None)
    aqn: AdaptiveNoise | None = None
    faults: tuple[Fault, ...] = Field(default=(), description="requested simulated faults of the machine")
    expected_phases: tuple[Phase, ...] = Field(description="phases that must have run")
    required: tuple[Row, ...] = Field(
        default=(), description="runs of every phase and step that the study requires on each worker"
    )
    layer_factors: dict[int, float] | None = Field(
        default=None,
        description="requested factors on the schedule's sigma, from a sigmas file; null means 1 everywhere",
    )
    num_layers: int
    num_norms: int
    num_steps: int = Field(default=0, description="optimiser steps of the run; 0 for an evaluation")
    num_epochs: int = 0
    norms_watched: bool = Field(
        default=False, description="whether phases had to compare their norm weights with the clean ones"
    )
    steps_per_rollout: int = Field(default=1, description="optimiser steps that learn from a batch of rollouts; 0: any")
    num_workers: int = Field(
        default=1, description="data-parallel workers whose measurements are summed in this receipt"
    )

    def has_noise_of(self, wanted: Arm | NoiseSpec) -> bool:
        """Return whether the request is that of `wanted` on operators, modules and the cache."""
        return all(getattr(self, name) == getattr(wanted, name) for name in _NOISES)

    def with_measured(self, found: RecorderState) -> Self:
        """Return the receipt of the same request with other measurements."""
        return self.model_copy(update={"rows": found.rows})

    def requested_scale(self, phase: TablePhase) -> float:
        """Return the size of the error that operators should have in `phase`; 0 where none was requested."""
        noise = self.operator_noise
        return requested_size(noise.error) if noise and noise.is_active and phase in noise.phases else 0.0

    def measured_scale(self, phase: TablePhase) -> tuple[float, int]:
        """Return (root mean square relative error, number of measured elements) over all operators of `phase`."""
        cells = [cell for cell in self.cells if cell.phase == phase and not cell.is_module]
        total = sum(cell.measured_elements for cell in cells)
        squares = sum(cell.measured**2 * cell.measured_elements for cell in cells if cell.measured is not None)
        return (math.sqrt(squares / total), total) if total else (0.0, 0)
