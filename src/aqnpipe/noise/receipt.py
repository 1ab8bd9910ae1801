"""Receipts: what was asked for, what was measured, and the check that refuses any gap between the two."""

import math
from typing import Self

from pydantic import BaseModel, ConfigDict, Field

from aqnpipe.config.noise import OperatorNoise, Phase, WeightNoise
from aqnpipe.errors import ReceiptError
from aqnpipe.noise.schedule import sigma_at

SAMPLING_SIGMAS = 5.0
"""Width of the acceptance band in standard errors of the measurement: a false alarm in under one of a million cells."""


class ReceiptModel(BaseModel):
    """Base of receipt parts: frozen, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class NoiseCell(ReceiptModel):
    """Noise on one operator of one layer in one phase.

    `measured` is the root mean square of (y' - y)/y over `measured_elements` sampled non-zero elements; `mean_error` is
    the mean of the same ratio, which a zero-mean error keeps near 0.
    """

    phase: Phase
    operator: str
    layer: int | None = Field(description="decoder layer; null is the output projection (lm_head)")
    calls: int
    elements: int
    asked: float
    measured: float | None
    mean_error: float | None
    measured_elements: int

    def standard_error(self) -> float:
        """Relative standard error of `measured` for Gaussian noise: 1/sqrt(2n)."""
        return 1 / math.sqrt(2 * self.measured_elements) if self.measured_elements else math.inf


class PhaseRecord(ReceiptModel):
    """What happened in one phase, noise or not.

    The witness recomputes outputs of linear modules with every hook of torch bypassed and compares them with what the
    model really used, whatever installed it: `witness_difference` is the largest absolute difference (exactly 0 where
    no noise was asked), `witness_scale` the root mean square relative difference, over `witnessed_elements`.
    """

    phase: Phase
    forwards: int
    noised_calls: int
    witnessed_elements: int
    witness_difference: float
    witness_scale: float
    escaped: dict[str, int] = Field(description="calls that hold a matrix product which the noise does not reach")


class WeightSync(ReceiptModel):
    """One redraw of AQN noise on the rollout copy's norm weights.

    `sigma_scheduled` is what the trainer took from the schedule; `sigma_asked` the root mean square over all elements
    after per-layer factors, `sigma_measured` the same of what was really added.
    """

    step: int
    sigma_scheduled: float
    sigma_asked: float
    sigma_measured: float
    norms: int
    elements: int
    squared_error_ratio: float = Field(description="mean of (measured/asked)^2 over elements; 1 is exact")
    clean_sha256_before: str
    clean_sha256_after: str


class WeightCell(ReceiptModel):
    """AQN noise on the norms of one layer over the whole run, as a factor on the schedule's sigma."""

    layer: int | None = Field(description="decoder layer; null is a norm outside the layers")
    measured_factor: float
    elements: int


class Receipt(ReceiptModel):
    """The measured account of one training run or one evaluation pass."""

    operator_noise: OperatorNoise | None
    weight_noise: WeightNoise | None
    expected_phases: tuple[Phase, ...] = Field(description="phases that must have run")
    phases: tuple[PhaseRecord, ...]
    cells: tuple[NoiseCell, ...]
    weight_syncs: tuple[WeightSync, ...]
    weight_cells: tuple[WeightCell, ...] = ()
    layer_factors: dict[int, float] | None = Field(
        default=None,
        description="factors on the schedule's sigma that a sigmas file asked for; null means 1 everywhere",
    )
    num_layers: int
    num_norms: int
    num_steps: int = Field(default=0, description="optimiser steps of the run; 0 for an evaluation pass")
    num_epochs: int = 0

    def check(self, tolerance: float = 0.0) -> Self:
        """Return self, or raise ReceiptError listing every gap between what was asked and what was measured.

        `tolerance` is an extra relative allowance on top of the sampling error (rounding of low-precision formats).
        """
        problems = self.problems(tolerance)
        if problems:
            raise ReceiptError("receipt refused: " + "; ".join(problems))
        return self

    def problems(self, tolerance: float = 0.0) -> list[str]:
        """Return every gap between what was asked and what was measured, in words."""
        return [
            *self._phases_that_did_not_run(),
            *self._noise_where_none_was_asked(),
            *self._noise_missing(),
            *self._noise_of_wrong_size(tolerance),
            *self._witness_problems(tolerance),
            *self._weight_noise_problems(),
        ]

    def asked_scale(self, phase: Phase) -> float:
        """Relative scale that operators should have in `phase`; 0 where no noise was asked."""
        noise = self.operator_noise
        return noise.relative_scale if noise and phase in noise.phases else 0.0

    def measured_scale(self, phase: Phase) -> tuple[float, int]:
        """(root mean square relative error, number of measured elements) over all cells of `phase`."""
        cells = [cell for cell in self.cells if cell.phase == phase and cell.measured is not None]
        total = sum(cell.measured_elements for cell in cells)
        if not total:
            return 0.0, 0
        squares = sum(cell.measured**2 * cell.measured_elements for cell in cells if cell.measured is not None)
        return math.sqrt(squares / total), total

    def _phases_that_did_not_run(self) -> list[str]:
        ran = {record.phase for record in self.phases if record.forwards > 0}
        return [f"phase {phase} never ran" for phase in self.expected_phases if phase not in ran]

    def _noise_where_none_was_asked(self) -> list[str]:
        problems = []
        for record in self.phases:
            if self.asked_scale(record.phase) > 0:
                continue
            if record.noised_calls:
                problems.append(
                    f"{record.phase}: {record.noised_calls} operator calls were noised, none were asked for"
                )
            if record.witness_difference != 0.0:
                problems.append(
                    f"{record.phase}: operators differ from bare torch by {record.witness_difference:.3g}, "
                    "no noise was asked"
                )
        return problems

    def _noise_missing(self) -> list[str]:
        noise = self.operator_noise
        if noise is None or noise.relative_scale == 0:
            return []
        problems = []
        wanted = set(noise.layers) if noise.layers is not None else set(range(self.num_layers))
        for record in self.phases:
            if record.phase not in noise.phases:
                continue
            reached = {cell.layer for cell in self.cells if cell.phase == record.phase and cell.calls > 0}
            missing = sorted(wanted - reached)
            if missing:
                problems.append(f"{record.phase}: noise was asked for but never reached layers {missing}")
            unwanted = sorted(layer for layer in reached if layer is not None and layer not in wanted)
            if unwanted:
                problems.append(f"{record.phase}: layers {unwanted} were noised, they were not asked for")
            if noise.include_lm_head != (None in reached):
                state = "not noised although asked for" if noise.include_lm_head else "noised although excluded"
                problems.append(f"{record.phase}: lm_head was {state}")
            for operator, calls in record.escaped.items():
                problems.append(f"{record.phase}: {calls} calls of {operator} escaped the noise (use eager attention)")
        return problems

    def _noise_of_wrong_size(self, tolerance: float) -> list[str]:
        problems = []
        for cell in self.cells:
            where = f"{cell.phase} {cell.operator} layer {'lm_head' if cell.layer is None else cell.layer}"
            if cell.measured is None or cell.mean_error is None or not cell.measured_elements:
                problems.append(f"{where}: {cell.calls} noised calls but nothing measured")
                continue
            band = SAMPLING_SIGMAS * cell.standard_error() + tolerance
            if not abs(cell.measured / cell.asked - 1) <= band:
                problems.append(
                    f"{where}: measured scale {cell.measured:.4g}, asked {cell.asked:.4g} (band {band:.1%})"
                )
            bias_band = SAMPLING_SIGMAS * cell.asked / math.sqrt(cell.measured_elements) + tolerance * cell.asked
            if not abs(cell.mean_error) <= bias_band:
                problems.append(f"{where}: mean relative error {cell.mean_error:.3g} is not 0 (band {bias_band:.2g})")
        return problems

    def _witness_problems(self, tolerance: float) -> list[str]:
        problems = []
        for record in self.phases:
            if record.phase == "backward" or not record.forwards:
                continue
            if not record.witnessed_elements:
                problems.append(f"{record.phase}: no operator output was compared with bare torch")
                continue
            asked = self.asked_scale(record.phase)
            if asked == 0 or (self.operator_noise is not None and self.operator_noise.layers is not None):
                continue
            band = SAMPLING_SIGMAS / math.sqrt(2 * record.witnessed_elements) + tolerance
            if not abs(record.witness_scale / asked - 1) <= band:
                problems.append(
                    f"{record.phase}: the witness saw scale {record.witness_scale:.4g}, asked {asked:.4g} "
                    f"(band {band:.1%})"
                )
        return problems

    def _weight_noise_problems(self) -> list[str]:
        if self.weight_noise is None:
            return [f"AQN ran at {len(self.weight_syncs)} syncs, none was asked for"] if self.weight_syncs else []
        steps = [sync.step for sync in self.weight_syncs]
        problems = []
        if steps != list(range(self.num_steps)):
            problems.append(f"AQN: {len(steps)} weight syncs, expected one at each of {self.num_steps} steps")
        if (self.weight_noise.layer_sigmas_from is None) != (self.layer_factors is None):
            problems.append("AQN: per-layer sigmas and the file that sets them do not go together")
        return problems + self._weight_sync_problems(self.weight_noise) + self._layer_factor_problems()

    def _weight_sync_problems(self, noise: WeightNoise) -> list[str]:
        problems = []
        for sync in self.weight_syncs:
            if sync.clean_sha256_before != sync.clean_sha256_after:
                problems.append(f"AQN step {sync.step}: norm weights were not restored")
            if sync.norms == 0:
                problems.append(f"AQN step {sync.step}: no norm was touched")
            due = sigma_at(noise.schedule, sync.step, self.num_steps, self.num_epochs)
            if not math.isclose(sync.sigma_scheduled, due, rel_tol=1e-9):
                problems.append(
                    f"AQN step {sync.step}: the trainer took sigma {sync.sigma_scheduled:.4g}, "
                    f"the schedule says {due:.4g}"
                )
            if sync.sigma_asked == 0:
                if sync.sigma_measured != 0:
                    problems.append(f"AQN step {sync.step}: measured sigma {sync.sigma_measured:.3g}, asked 0")
            elif not abs(sync.squared_error_ratio - 1) <= SAMPLING_SIGMAS * math.sqrt(2 / sync.elements):
                problems.append(
                    f"AQN step {sync.step}: measured sigma {sync.sigma_measured:.4g}, asked {sync.sigma_asked:.4g}"
                )
        return problems

    def _layer_factor_problems(self) -> list[str]:
        problems = []
        for cell in self.weight_cells:
            asked = 1.0 if cell.layer is None or self.layer_factors is None else self.layer_factors.get(cell.layer, 0.0)
            if not abs(cell.measured_factor - asked) <= asked * SAMPLING_SIGMAS / math.sqrt(2 * cell.elements):
                where = "outside the layers" if cell.layer is None else f"in layer {cell.layer}"
                problems.append(
                    f"AQN: norms {where} got {cell.measured_factor:.3f} times the schedule's sigma, asked {asked:.3f}"
                )
        missing = sorted(set(self.layer_factors or ()) - {cell.layer for cell in self.weight_cells})
        if missing and any(sync.sigma_asked > 0 for sync in self.weight_syncs):
            problems.append(f"AQN: sigmas were asked for layers {missing}, nothing was measured there")
        return problems
