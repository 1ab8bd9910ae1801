"""Receipts: what was requested, what was measured, and the check that refuses any gap between the two."""

import math
from typing import Self

from pydantic import BaseModel, ConfigDict, Field

from aqnpipe.config.noise import (
    AdaptiveNoise,
    ErrorKind,
    ErrorModel,
    FakeQuantization,
    Fault,
    ModuleNoise,
    OperatorNoise,
    Phase,
    RelativeGaussian,
    requested_size,
)
from aqnpipe.errors import ReceiptError
from aqnpipe.noise.schedule import sigma_at

SAMPLING_SIGMAS = 5.0
"""Width of the acceptance band in standard errors of the measurement: a false alarm in under one of a million cells."""


_EXACT = 1e-3
"""Relative band of an error that is not random: what float32 rounding of a small bias may do."""


_MASKING_FAULTS = frozenset({"dead_zone", "saturation", "spike"})
"""Faults that put another value in place of an element, which then has no gradient; the others add to it."""


class ReceiptModel(BaseModel):
    """Base of receipt parts: frozen, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class NoiseCell(ReceiptModel):
    """Error on one operator, or one kind of module, of one layer in one phase.

    `measured` is a root mean square over `measured_elements` sampled elements, `mean_error` the mean of the same: of
    (y' - y)/y over non-zero y for relative errors, of y' - y for absolute ones, of (y' - y)*sign(y) for a bias.
    `requested` is what `measured` should be: the error's scale; for number formats, which round, an upper bound.
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

    @property
    def is_module(self) -> bool:
        """Whether module noise made this cell."""
        return self.operator.startswith("module.")

    @property
    def where(self) -> str:
        """The place in words."""
        return f"{self.phase} {self.operator} layer {'lm_head' if self.layer is None else self.layer}"

    def standard_error(self) -> float:
        """Relative standard error of `measured` for Gaussian noise: 1/sqrt(2n)."""
        return 1 / math.sqrt(2 * self.measured_elements) if self.measured_elements else math.inf

    def problems(self, tolerance: float) -> list[str]:
        """Return what does not fit between requested and measured; `tolerance` is a relative allowance for rounding."""
        if self.measured is None or self.mean_error is None or not self.measured_elements:
            return [f"{self.where}: {self.calls} noised calls but nothing measured"]
        match self.error:
            case "relative_gaussian" | "absolute_gaussian":
                band = SAMPLING_SIGMAS * self.standard_error() + tolerance
                mean_band = self.requested * (SAMPLING_SIGMAS / math.sqrt(self.measured_elements) + tolerance)
                mean_requested = 0.0
            case "systematic_bias":
                band, mean_band, mean_requested = (
                    _EXACT + tolerance,
                    self.requested * (_EXACT + tolerance),
                    self.requested,
                )
            case "mantissa_truncation":
                if not 0 < self.measured < self.requested or self.mean_error > 0:
                    return [
                        f"{self.where}: measured a relative error of {self.measured:.4g} with mean "
                        f"{self.mean_error:.3g}, expected one below {self.requested:.4g} and toward zero"
                    ]
                return []
            case "fake_quantization":
                if not 0 < self.measured < self.requested:
                    return [f"{self.where}: measured a relative error of {self.measured:.4g}, expected one in (0, 1)"]
                return []
        if not abs(self.measured / self.requested - 1) <= band:
            return [
                f"{self.where}: measured scale {self.measured:.4g}, requested {self.requested:.4g} (band {band:.1%})"
            ]
        if not abs(self.mean_error - mean_requested) <= mean_band:
            return [
                f"{self.where}: mean error {self.mean_error:.3g} is not {mean_requested:.3g} (band {mean_band:.2g})"
            ]
        return []


class PhaseRecord(ReceiptModel):
    """What happened in one phase, noise or not.

    The witness recomputes outputs of linear modules with every hook of torch bypassed and compares them with what the
    model really used, whatever installed it: `reference_check_difference` is the largest absolute difference (exactly 0 where
    no noise was requested), `reference_check_scale` the root mean square relative difference, over `reference_checked_elements`. Products
    too small to be told from the rounding of their sum with a bias are not among these.
    """

    phase: Phase
    forwards: int
    noised_calls: int
    reference_checked_elements: int
    reference_check_difference: float
    reference_check_scale: float
    escaped: dict[str, int] = Field(description="calls that hold a matrix product which the noise does not reach")
    forward_flops: int = Field(
        default=0,
        description="operations of one forward pass, or of one on each worker or in each batch of an evaluation, from "
        "the shapes; 0: not counted",
    )
    noised_flops: int = Field(default=0, description="of those, operations whose result operator noise reached")
    modules_noised: int = Field(default=0, description="different modules that module noise reached")
    norms_checked: int = Field(
        default=0, description="passes of a phase before which the norm weights were compared with the clean ones"
    )
    norms_noised: int = Field(default=0, description="of those, how often they were others than the clean ones")

    @property
    def noised_share(self) -> float | None:
        """Share of the operations of a forward pass that operator noise reached; None if they were not counted."""
        return self.noised_flops / self.forward_flops if self.forward_flops else None


class FaultCell(ReceiptModel):
    """What one simulated fault did in one phase; elements are all values of its site's output, on any channel."""

    fault: int = Field(ge=0, description="number among the receipt's faults")
    phase: Phase
    calls: int
    elements: int
    affected_elements: int = Field(description="elements that left the site other than they came")
    num_channels: int
    num_faulty_channels: int

    @property
    def survival_rate(self) -> float:
        """Share of elements that pass the fault unchanged."""
        return 1 - self.affected_elements / self.elements if self.elements else 1.0


class GradientFlow(ReceiptModel):
    """The gradient at a fault's site over all backward passes: what arrives behind the fault, and what passes it.

    `elements` are those that carried a gradient, `zeroed_elements` those of them that lost it at the site (several
    faults on one site share this), `leaked_elements` those that the fault changed and that passed a gradient all the
    same. The norms are Euclidean, over all elements of all passes.
    """

    fault: int = Field(ge=0, description="number among the receipt's faults")
    calls: int
    elements: int
    zeroed_elements: int
    leaked_elements: int
    norm: float
    zeroed_norm: float

    @property
    def zeroed_share(self) -> float:
        """Share of the elements that carry a gradient which the site sets to zero."""
        return self.zeroed_elements / self.elements if self.elements else 0.0

    @property
    def zeroed_norm_share(self) -> float:
        """Norm of the gradient that the site sets to zero, as a share of the norm that arrives."""
        return self.zeroed_norm / self.norm if self.norm else 0.0


class WeightSync(ReceiptModel):
    """One redraw of AQN noise on the policy that rolls out: on its norm weights, or on its hidden states.

    `sigma_scheduled` is what the trainer took from the schedule; `sigma_requested` the root mean square over all elements
    after per-layer factors, `sigma_measured` the same of what was really added (hidden states: relative, of samples).
    The hashes are of the norm weights, which are clean before and after whatever the target.
    """

    step: int
    sigma_scheduled: float
    sigma_requested: float
    sigma_measured: float
    targets: int = Field(description="norms, or decoder layers, that AQN was set to work on")
    elements: int = Field(description="elements that were noised and measured")
    squared_error_ratio: float = Field(description="mean of (measured/requested)^2 over elements; 1 is exact")
    clean_sha256_before: str
    clean_sha256_after: str


class WeightCell(ReceiptModel):
    """AQN noise in one layer over the whole run, as a factor on the schedule's sigma."""

    layer: int | None = Field(description="decoder layer; null is a norm outside the layers")
    measured_factor: float
    elements: int


class Receipt(ReceiptModel):
    """The measured account of one training run or one evaluation pass."""

    operator_noise: OperatorNoise | None
    module_noise: ModuleNoise | None = None
    aqn: AdaptiveNoise | None = None
    faults: tuple[Fault, ...] = Field(default=(), description="simulated faults that the machine was requested to have")
    expected_phases: tuple[Phase, ...] = Field(description="phases that must have run")
    phases: tuple[PhaseRecord, ...]
    cells: tuple[NoiseCell, ...]
    weight_syncs: tuple[WeightSync, ...]
    weight_cells: tuple[WeightCell, ...] = ()
    fault_cells: tuple[FaultCell, ...] = ()
    gradient_flows: tuple[GradientFlow, ...] = ()
    foreign_faults: tuple[str, ...] = Field(
        default=(), description="modules that had a simulated fault which is none of `faults`"
    )
    mismatches: tuple[str, ...] = Field(
        default=(),
        exclude_if=lambda found: not found,
        description="settings of the installed noise that differ from the requested ones; absent if there are none",
    )
    layer_factors: dict[int, float] | None = Field(
        default=None,
        description="factors on the schedule's sigma that a sigmas file requested; null means 1 everywhere",
    )
    num_layers: int
    num_norms: int
    num_noised_modules: int = Field(default=0, description="modules that module noise was requested")
    num_steps: int = Field(default=0, description="optimiser steps of the run; 0 for an evaluation pass")
    num_epochs: int = 0
    norms_watched: bool = Field(
        default=False, description="whether phases had to compare their norm weights with the clean ones"
    )
    steps_per_rollout: int = Field(default=1, description="optimiser steps that learn from one batch of rollouts")
    num_workers: int = Field(default=1, description="data-parallel workers whose accounts this receipt sums up")

    def check(self, tolerance: float = 0.0) -> Self:
        """Return self, or raise ReceiptError listing every gap between what was requested and what was measured.

        `tolerance` is an extra relative allowance on top of the sampling error (rounding of low-precision formats).
        """
        problems = self.problems(tolerance)
        if problems:
            raise ReceiptError("receipt refused: " + "; ".join(problems))
        return self

    def problems(self, tolerance: float = 0.0) -> list[str]:
        """Return every gap between what was requested and what was measured, in words."""
        return [
            *self.mismatches,
            *self._phases_that_did_not_run(),
            *self._noise_where_none_was_requested(),
            *self._operator_noise_missing(),
            *self._module_noise_missing(),
            *self._noise_of_wrong_size(tolerance),
            *self._reference_check_problems(tolerance),
            *self._weight_noise_problems(),
            *self._norm_problems(),
            *self._fault_problems(),
        ]

    def requested_scale(self, phase: Phase) -> float:
        """Size of the error that operators should have in `phase`; 0 where none was requested."""
        noise = self.operator_noise
        return requested_size(noise.error) if noise and noise.is_active and phase in noise.phases else 0.0

    def _is_requested(self, noise: OperatorNoise | ModuleNoise | None, phase: Phase) -> bool:
        return noise is not None and noise.is_active and phase in noise.phases

    def measured_scale(self, phase: Phase) -> tuple[float, int]:
        """(root mean square relative error, number of measured elements) over all cells of `phase`."""
        cells = [
            cell for cell in self.cells if cell.phase == phase and not cell.is_module and cell.measured is not None
        ]
        total = sum(cell.measured_elements for cell in cells)
        if not total:
            return 0.0, 0
        squares = sum(cell.measured**2 * cell.measured_elements for cell in cells if cell.measured is not None)
        return math.sqrt(squares / total), total

    def _phases_that_did_not_run(self) -> list[str]:
        ran = {record.phase for record in self.phases if record.forwards > 0}
        problems = [f"phase {phase} never ran" for phase in self.expected_phases if phase not in ran]
        for noise in (self.operator_noise, self.module_noise):
            # A training without KL has no reference phase, so a single requested phase may be missing.
            if noise is not None and noise.is_active and not ran & set(noise.phases):
                problems.append(f"noise was requested in {', '.join(noise.phases)} alone, which never ran")
        return problems

    def _noise_where_none_was_requested(self) -> list[str]:
        problems = []
        for record in self.phases:
            operators, modules = (
                self._is_requested(noise, record.phase) for noise in (self.operator_noise, self.module_noise)
            )
            noised = {cell.is_module for cell in self.cells if cell.phase == record.phase and cell.calls}
            if (record.noised_calls and not (operators or modules)) or (
                (False in noised and not operators) or (True in noised and not modules)
            ):
                problems.append(
                    f"{record.phase}: {record.noised_calls} operator calls were noised, none were requested"
                )
            if not operators and record.reference_check_difference != 0.0:
                problems.append(
                    f"{record.phase}: operators differ from bare torch by {record.reference_check_difference:.3g}, "
                    "no noise was requested"
                )
        return problems

    def _operator_noise_missing(self) -> list[str]:
        noise = self.operator_noise
        if noise is None:
            return []
        problems = []
        wanted = {layer for layer in range(self.num_layers) if noise.error_in(layer) is not None}
        head = noise.error_in(None) is not None
        for record in self.phases:
            if not self._is_requested(noise, record.phase):
                continue
            reached: dict[int | None, set[str]] = {}
            for cell in self.cells:
                if cell.phase == record.phase and cell.calls > 0 and not cell.is_module:
                    reached.setdefault(cell.layer, set()).add(cell.operator.split(".")[0])
            missing = sorted(wanted - reached.keys())
            if missing:
                problems.append(f"{record.phase}: noise was requested but never reached layers {missing}")
            unwanted = sorted(layer for layer in reached if layer is not None and layer not in wanted)
            if unwanted:
                problems.append(f"{record.phase}: layers {unwanted} were noised, they were not requested")
            for kinds in _operator_kinds(noise):
                without = sorted(layer for layer in wanted & reached.keys() if not kinds & reached[layer])
                if without:
                    problems.append(f"{record.phase}: no {' or '.join(sorted(kinds))} was noised in layers {without}")
            if head != (None in reached):
                state = "not noised although requested" if head else "noised although excluded"
                problems.append(f"{record.phase}: lm_head was {state}")
            for operator, calls in record.escaped.items():
                advice = (
                    "use eager attention, or ask for attention: fused" if "attention" in operator else "not supported"
                )
                problems.append(f"{record.phase}: {calls} calls of {operator} escaped the noise ({advice})")
        return problems

    def _module_noise_missing(self) -> list[str]:
        noise = self.module_noise
        if noise is None:
            return []
        return [
            f"{record.phase}: module noise reached {record.modules_noised} of {self.num_noised_modules} modules"
            for record in self.phases
            if self._is_requested(noise, record.phase)
            and (record.modules_noised != self.num_noised_modules or not self.num_noised_modules)
        ]

    def _noise_of_wrong_size(self, tolerance: float) -> list[str]:
        problems = []
        for cell in self.cells:
            error = self._error_requested(cell)
            if error is None or (cell.error, cell.requested) != (error.kind, requested_size(error)):
                problems.append(f"{cell.where}: noised with {cell.error} {cell.requested:g}, which was not requested")
            else:
                problems += cell.problems(tolerance)
        return problems

    def _error_requested(self, cell: NoiseCell) -> ErrorModel | None:
        if cell.is_module:
            return self.module_noise.error if self.module_noise else None
        return self.operator_noise.error_in(cell.layer) if self.operator_noise else None

    def _reference_check_problems(self, tolerance: float) -> list[str]:
        problems = []
        for record in self.phases:
            if record.phase == "backward" or not record.forwards:
                continue
            if not record.reference_checked_elements:
                problems.append(f"{record.phase}: no operator output was compared with bare torch")
                continue
            noise, requested = self.operator_noise, self.requested_scale(record.phase)
            if noise is None or not requested or noise.layers is not None or noise.layer_scales:
                continue
            if not isinstance(noise.error, RelativeGaussian):
                if record.reference_check_scale == 0:
                    problems.append(
                        f"{record.phase}: the reference check saw no error, requested {noise.error.kind} {requested:g}"
                    )
                continue
            band = SAMPLING_SIGMAS / math.sqrt(2 * record.reference_checked_elements) + tolerance
            if not abs(record.reference_check_scale / requested - 1) <= band:
                problems.append(
                    f"{record.phase}: the reference check saw scale {record.reference_check_scale:.4g}, requested {requested:.4g} "
                    f"(band {band:.1%})"
                )
        return problems

    def _fault_problems(self) -> list[str]:
        problems = [f"{name}: a simulated fault was there, none was requested" for name in self.foreign_faults]
        unknown = {cell.fault for cell in self.fault_cells} - set(range(len(self.faults)))
        problems += [f"a fault number {number} struck, {len(self.faults)} were requested" for number in sorted(unknown)]
        for number, fault in enumerate(self.faults):
            where = f"fault {fault.type} in layer {fault.layer} ({fault.site})"
            cells = {cell.phase: cell for cell in self.fault_cells if cell.fault == number}
            for record in self.phases:
                if record.phase != "backward" and (record.phase not in cells or not cells[record.phase].calls):
                    problems.append(f"{record.phase}: {where} did not run")
            if cells and not any(cell.affected_elements for cell in cells.values()):
                elements = sum(cell.elements for cell in cells.values())
                problems.append(f"{where} changed none of {elements} elements")
            problems += self._gradient_problems(number, fault, where)
        return problems

    def _gradient_problems(self, number: int, fault: Fault, where: str) -> list[str]:
        flow = next((one for one in self.gradient_flows if one.fault == number), None)
        if flow is None:
            ran = any(record.phase == "backward" and record.forwards for record in self.phases)
            return [f"backward: no gradient was seen at {where}"] if ran else []
        if fault.type in _MASKING_FAULTS and flow.leaked_elements:
            return [f"backward: {where}: {flow.leaked_elements} elements that it replaced passed a gradient"]
        alone = sum(other.layer == fault.layer and other.site == fault.site for other in self.faults) == 1
        if fault.type not in _MASKING_FAULTS and alone and flow.zeroed_elements:
            return [f"backward: {where}: {flow.zeroed_elements} gradients were zeroed, it has no reason to"]
        return []

    def _weight_noise_problems(self) -> list[str]:
        if self.aqn is None:
            return [f"AQN ran at {len(self.weight_syncs)} syncs, none was requested"] if self.weight_syncs else []
        steps = [sync.step for sync in self.weight_syncs]
        problems = []
        due = list(range(0, self.num_steps, self.steps_per_rollout))
        if steps != due:
            problems.append(f"AQN: {len(steps)} weight syncs, expected one at each of {len(due)} steps")
        if (self.aqn.layer_sigmas_from is None) != (self.layer_factors is None):
            problems.append("AQN: per-layer sigmas and the file that sets them do not go together")
        return problems + self._weight_sync_problems(self.aqn) + self._layer_factor_problems()

    def _weight_sync_problems(self, noise: AdaptiveNoise) -> list[str]:
        problems = []
        for sync in self.weight_syncs:
            if sync.clean_sha256_before != sync.clean_sha256_after:
                problems.append(f"AQN step {sync.step}: norm weights were not restored")
            if sync.targets not in self._aqn_target_counts(noise):
                problems.append(
                    f"AQN step {sync.step}: {sync.targets} targets, expected {self._aqn_target_counts(noise)[0]} "
                    f"({noise.targets})"
                )
            due = sigma_at(noise.schedule, sync.step, self.num_steps, self.num_epochs)
            if not math.isclose(sync.sigma_scheduled, due, rel_tol=1e-9):
                problems.append(
                    f"AQN step {sync.step}: the trainer took sigma {sync.sigma_scheduled:.4g}, "
                    f"the schedule says {due:.4g}"
                )
            if sync.sigma_requested == 0:
                if sync.sigma_measured != 0:
                    problems.append(f"AQN step {sync.step}: measured sigma {sync.sigma_measured:.3g}, requested 0")
            elif not sync.elements or not abs(sync.squared_error_ratio - 1) <= SAMPLING_SIGMAS * math.sqrt(
                2 / sync.elements
            ):
                problems.append(
                    f"AQN step {sync.step}: measured sigma {sync.sigma_measured:.4g}, requested {sync.sigma_requested:.4g}"
                )
        return problems

    def _norm_problems(self) -> list[str]:
        """AQN may be on the norm weights in the rollout, and must be there whenever it was requested; nowhere else."""
        if not self.norms_watched:
            return []
        on_norms = self.aqn is not None and self.aqn.targets != "hidden_states"
        due = self.num_workers * sum(sync.sigma_requested > 0 for sync in self.weight_syncs) if on_norms else 0
        problems = []
        for record in self.phases:
            # Without AQN nothing says what the reference's are.
            if record.phase == "backward" or (record.phase == "reference" and self.aqn is None):
                continue
            requested = due if record.phase == "rollout" else 0
            if not record.norms_checked:
                problems.append(f"{record.phase}: its norm weights were never compared with the clean ones")
            elif record.norms_noised != requested:
                problems.append(
                    f"{record.phase}: computed with noise on the norm weights in {record.norms_noised} of "
                    f"{record.norms_checked} passes, requested in {requested}"
                )
        return problems

    def _aqn_target_counts(self, noise: AdaptiveNoise) -> tuple[int, ...]:
        """Return how many targets a sync may have; auto depends on the kind of model, which is not recorded."""
        match noise.targets:
            case "auto":
                return self.num_norms, self.num_layers
            case "all_norms":
                return (self.num_norms,)
            case "post_attention" | "hidden_states":
                return (self.num_layers,)

    def _layer_factor_problems(self) -> list[str]:
        problems = []
        for cell in self.weight_cells:
            requested = (
                1.0 if cell.layer is None or self.layer_factors is None else self.layer_factors.get(cell.layer, 0.0)
            )
            if not abs(cell.measured_factor - requested) <= requested * SAMPLING_SIGMAS / math.sqrt(2 * cell.elements):
                where = "outside the layers" if cell.layer is None else f"in layer {cell.layer}"
                problems.append(
                    f"AQN: norms {where} got {cell.measured_factor:.3f} times the schedule's sigma, requested {requested:.3f}"
                )
        wanted = {layer for layer, factor in (self.layer_factors or {}).items() if factor > 0}
        missing = sorted(wanted - {cell.layer for cell in self.weight_cells})
        if missing and any(sync.sigma_requested > 0 for sync in self.weight_syncs):
            problems.append(f"AQN: sigmas were requested layers {missing}, nothing was measured there")
        return problems


def _operator_kinds(noise: OperatorNoise) -> list[set[str]]:
    """Return groups of operators; every noised layer must show one of each group."""
    if isinstance(noise.error, FakeQuantization):
        return [{"linear"}]
    attention = {"scaled_dot_product_attention"} if noise.attention == "fused" else {"matmul", "bmm"}
    return [
        {"linear"},
        attention,
        *([{"rms_norm", "layer_norm"}, {"silu", "gelu"}] if noise.operators == "all" else []),
    ]
