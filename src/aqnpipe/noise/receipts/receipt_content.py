"""Content of a receipt: the request, and the measurements of each operator, phase, fault and AQN redraw."""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from aqnpipe.config.noise import (
    AdaptiveNoise,
    ErrorKind,
    Fault,
    ModuleNoise,
    OperatorNoise,
    Phase,
    requested_size,
)

SAMPLING_SIGMAS = 5.0
"""Width of an acceptance band in standard errors of the measurement: below one false alarm in a million cells."""

_LEAST_SHARE = 0.5
"""Noise is refused if less than this share is measured of what rounding must leave of it."""

_HALF_A_STEP = math.sqrt(3)
"""Half the distance between neighbouring numbers, in standard deviations of rounding to them."""

_FEWEST_FOR_A_SIZE = 64
"""Elements from which on half of the requested scale cannot be chance: 5.6 standard errors."""


def left_by_rounding(size: float, rounding: float | None) -> float:
    """Return the least root mean square that rounding leaves of errors of `size`, as it moves none by over half a step.

    `rounding`: standard deviation of the rounding. An error below half a step may be lost as a whole: this is what a
    number format does to it, and no mistake.
    """
    return max(size - _HALF_A_STEP * (rounding or 0.0), 0.0)


class ReceiptModel(BaseModel):
    """Base of receipt parts: frozen, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class NoiseCell(ReceiptModel):
    """Error on one operator, or one kind of module, of one layer in one phase.

    `measured` is the root mean square over `measured_elements` sampled elements, `mean_error` their mean. The quantity
    is (y' - y)/y over non-zero y for relative errors, y' - y for absolute ones, (y' - y)*sign(y) for a bias, and for
    measured errors y' - y in units of the measured machine: over the size of its error at y.
    `requested` is the expected value of `measured`: the error's scale, or an upper bound for roundings of a number
    format and errors of a user's own.
    """

    phase: Phase
    operator: str
    layer: int | None = Field(description="decoder layer; null is the output projection or outside the layers")
    error: ErrorKind
    calls: int
    elements: int
    requested: float
    measured: float | None
    mean_error: float | None
    measured_elements: int
    changed_elements: int | None = Field(
        default=None,
        exclude_if=lambda found: found is None,
        description="of an error of a user's own: how many of `elements` it changed; else absent",
    )
    zeros: int = Field(
        default=0,
        exclude_if=lambda found: not found,
        description="further elements that were recomputed: zero without and with the error; absent if there are none",
    )
    rounding: float | None = Field(
        default=None,
        exclude_if=lambda found: found is None,
        description="root mean square of what rounding the result adds, where it is visible beside the error",
    )

    @property
    def is_lost(self) -> bool:
        """Return whether rounding to the number format left less than half of the requested size."""
        return self.measured is not None and self.rounding is not None and self.measured < self.requested / 2

    @property
    def is_zero(self) -> bool:
        """Return whether it is of a gradient that was zero wherever recomputed: noise on it has no relative size."""
        return self.phase == "backward" and not self.measured_elements and self.zeros > 0

    @property
    def is_module(self) -> bool:
        """Return whether the cell belongs to module noise."""
        return self.operator.startswith("module.")

    @property
    def where(self) -> str:
        """Phase, operator and layer, for messages."""
        if self.layer is None and self.operator.startswith("norm."):
            return f"{self.phase} {self.operator} outside the layers"
        return f"{self.phase} {self.operator} layer {'lm_head' if self.layer is None else self.layer}"

    def problems(self) -> list[str]:
        """Return what contradicts the request in the measured size. The audit compares the numbers themselves."""
        if self.error == "measured" and not self.requested:
            # An operator whose measured error is zero: the audit compares its values, there is no size.
            return []
        if self.is_zero:
            return []
        if self.measured is None or self.mean_error is None or not self.measured_elements:
            return [f"{self.where}: {self.calls} noised calls but nothing measured"]
        is_gaussian = self.error in ("relative_gaussian", "absolute_gaussian", "measured")
        is_too_small = self.measured < _LEAST_SHARE * left_by_rounding(self.requested, self.rounding)
        if is_gaussian and is_too_small and self.measured_elements >= _FEWEST_FOR_A_SIZE:
            return [
                f"{self.where}: measured scale {self.measured:.3g}, requested {self.requested:.3g}, of which rounding "
                f"to the number format explains {self.requested - left_by_rounding(self.requested, self.rounding):.3g}"
            ]
        if self.error == "fake_quantization" and not 0 < self.measured < self.requested:
            return [f"{self.where}: measured a relative error of {self.measured:.4g}, expected one in (0, 1)"]
        return []


class PhaseRecord(ReceiptModel):
    """Counts and measurements of one phase, noised or clean.

    The audit observes some passes of layers in torch's dispatcher. In these it classifies every operation, and
    recomputes sampled numbers of the noise from keys of its own; `contradictions` counts what it found otherwise than
    requested. The reference check compares results with those of exact products: of all operators, in float64, or in
    vLLM's engines those of linear modules in plain torch. `reference_check_difference` is the largest absolute
    difference, beyond rounding, where no noise was requested: exactly 0. `reference_check_scale` is the root mean
    square relative difference where noise was requested.
    """

    phase: Phase
    forwards: int
    noised_calls: int
    reference_checked_elements: int
    reference_check_difference: float
    reference_check_scale: float
    audited_passes: dict[str, int] = Field(
        default_factory=dict, description="observed passes of layers, by kind of forward; the observation is at random"
    )
    recomputed_numbers: int = Field(default=0, description="elements whose noise was recomputed from independent keys")
    largest_deviation: float = Field(
        default=0.0, description="their largest difference from the recomputed values; 1 is what rounding explains"
    )
    contradictions: dict[str, int] = Field(
        default_factory=dict, description="what the audit found otherwise than requested"
    )
    escaped: dict[str, int] = Field(description="calls with a matrix product inside that the noise does not reach")
    forward_flops: int = Field(
        default=0,
        description="operations of one forward pass, computed from the shapes, summed over workers or over the batches "
        "of an evaluation; 0: not counted",
    )
    noised_flops: int = Field(default=0, description="part of these operations whose result has operator noise")
    gradients: tuple[int, ...] | None = Field(
        default=None,
        exclude_if=lambda found: found is None,
        description="decoder layers whose inputs needed a gradient, and the output projection as the number after "
        "them; absent in phases without a backward pass",
    )
    modules_noised: int = Field(default=0, description="number of different modules with module noise")
    norms_checked: int = Field(
        default=0, description="how often a phase compared its norm weights with the clean ones before it computed"
    )
    norms_noised: int = Field(default=0, description="how many of these comparisons found other weights")

    @property
    def noised_share(self) -> float | None:
        """Share of a forward pass's operations that have operator noise; None if they were not counted."""
        return self.noised_flops / self.forward_flops if self.forward_flops else None


@dataclass(kw_only=True)
class FaultCell:
    """Effect of one simulated fault in one phase; elements are all values of its site's output, on any channel."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    fault: Annotated[int, Field(ge=0, description="index among the receipt's faults")]
    phase: Phase
    calls: int = 0
    elements: int = 0
    affected_elements: Annotated[int, Field(description="elements changed by the fault")] = 0
    num_channels: int
    num_faulty_channels: int

    @property
    def survival_rate(self) -> float:
        """Share of elements that the fault leaves unchanged."""
        return 1 - self.affected_elements / self.elements if self.elements else 1.0


class GradientFlow(ReceiptModel):
    """Gradient at a fault's site over all backward passes: the gradient that arrives, and the part that passes on.

    `elements` have a non-zero gradient behind the fault. `zeroed_elements` of them have none before it; several faults
    on one site share this count. `leaked_elements` were changed by the fault and passed a gradient nevertheless. The
    norms are Euclidean, over all elements of all passes.
    """

    fault: int = Field(ge=0, description="index among the receipt's faults")
    calls: int
    elements: int
    zeroed_elements: int
    leaked_elements: int
    norm: float
    zeroed_norm: float

    @property
    def zeroed_share(self) -> float:
        """Share of the elements with a gradient whose gradient the site sets to zero."""
        return self.zeroed_elements / self.elements if self.elements else 0.0

    @property
    def zeroed_norm_share(self) -> float:
        """Norm of the gradient that the site sets to zero, as a share of the norm that arrives."""
        return self.zeroed_norm / self.norm if self.norm else 0.0


class WeightSync(ReceiptModel):
    """One redraw of AQN noise on the rollout policy: on its norm weights, or on its hidden states.

    `sigma_scheduled` is the sigma that the trainer used. `sigma_requested` is the root mean square over all elements
    after per-layer factors. `sigma_measured` is that of the added noise (hidden states: relative, from samples). The
    hashes are of the norm weights, which are clean before and after, for every target.
    """

    step: int
    sigma_scheduled: float
    sigma_requested: float
    sigma_measured: float
    targets: int = Field(description="number of norms, or decoder layers, that AQN targets")
    elements: int = Field(description="elements that were noised and measured")
    squared_error_ratio: float = Field(description="mean of (measured/requested)^2 over elements")
    expected_ratio: float = Field(description="what it should be: 1, or what rounding to 16 bits makes of it")
    ratio_error: float = Field(description="standard error of squared_error_ratio")
    clean_sha256_before: str
    clean_sha256_after: str


class WeightCell(ReceiptModel):
    """AQN noise in one layer and phase over the whole run, as a factor on the schedule's sigma."""

    phase: Phase = Field(default="rollout", exclude_if=lambda phase: phase == "rollout")
    layer: int | None = Field(description="decoder layer; null is a norm outside the layers")
    measured_factor: float
    elements: int
    rounding_factor: float = Field(description="what rounding to a 16-bit number format multiplies the factor by")
    standard_error: float = Field(description="relative standard error of measured_factor")


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
    steps_per_rollout: int = Field(default=1, description="optimiser steps that learn from one batch of rollouts")
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
