"""Receipts: the requested noise, the measured noise, and a check that refuses every mismatch between the two.

A receipt has the request, the table of what the study requires, and the table of what was seen. The checks are in three
modules: `passes`, `operator_checks` (operators and modules) and `other_checks` (AQN, caches, faults). Evaluations and
loss studies have one receipt per pass.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field

from aqnpipe.artifacts.evaluations import EvaluationFacts
from aqnpipe.config.arm import Arm
from aqnpipe.config.noise import (
    AdaptiveNoise,
    CacheNoise,
    Fault,
    FaultOrder,
    ModuleNoise,
    NoiseSpec,
    OperatorNoise,
    Phase,
    requested_size,
)
from aqnpipe.config.run import LossCondition
from aqnpipe.errors import ReceiptError
from aqnpipe.noise.receipts.operator_checks import operator_problems
from aqnpipe.noise.receipts.other_checks import aqn_problems, cache_problems, fault_problems
from aqnpipe.noise.receipts.passes import pass_problems
from aqnpipe.noise.receipts.table import AQN, CACHE, REQUEST, SYNC, Row, Shown, TablePhase


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


class Receipt(Shown, RecorderState):
    """Requested and measured noise of one training run or one evaluation pass."""

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

    @property
    def table_rows(self) -> tuple[Row, ...]:
        """The rows of `table()`: all."""
        return self.rows

    def check(self, steps_done: int | None = None) -> Self:
        """Return self, or raise ReceiptError with every mismatch between requested and measured noise."""
        problems = self.problems(steps_done)
        if problems:
            when = "" if steps_done is None else f" after step {steps_done}"
            raise ReceiptError(f"receipt invalid{when}: " + "; ".join(problems), tuple(problems))
        return self

    def problems(self, steps_done: int | None = None, *, is_share: bool = False) -> list[str]:
        """Return one line per mismatch between requested and measured noise.

        `steps_done`: number of optimiser steps so far, by which the noise of the first ones must be measured; None: the
        run has ended, and so must be all that was requested. `is_share`: the receipt is of one worker of several.
        """
        steps = self.num_steps if steps_done is None else steps_done
        return [
            *self.mismatches,
            *pass_problems(self, steps),
            *operator_problems(self, has_ended=steps_done is None, is_share=is_share),
            *aqn_problems(self, steps),
            *cache_problems(self, has_ended=steps_done is None),
            *fault_problems(self),
        ]

    def __str__(self) -> str:
        """Return the request, a line per phase, and the verdict."""
        noises = [noise for noise in (self.operator_noise, self.module_noise) if noise is not None]
        lines = [
            f"requested     {noise.error.kind} {requested_size(noise.error):g} in {', '.join(noise.phases)}"
            for noise in noises
        ]
        cache = self.kv_cache
        lines += [f"requested     {cache.format} cache in {', '.join(cache.phases)}"] if cache else []
        lines += [f"requested     AQN on {self.aqn.targets}"] if self.aqn else []
        lines += [f"requested     fault {fault.type} in layer {fault.layer}" for fault in self.faults]
        for row in self.phases:
            size, elements = self.measured_scale(row.phase)
            noised = (
                f"{row.calls:,} calls with an error of size {size:.4g}" if elements else "no operator with an error"
            )
            audited = f"{row.recomputed:,} values recomputed, {row.wrong:,} wrong"
            lines.append(f"{row.phase:<14}{row.passes:,} runs, {noised}; {audited}")
        return "\n".join([*lines, *([f"INVALID       {problem}" for problem in self.problems()] or ["accepted"])])


class EvaluationPass(ReceiptModel):
    """The receipt of one pass of an evaluation over all questions."""

    noise_level: float = Field(ge=0, description="a scale below 1, or the number of a named noise")
    noise_seed: int = Field(ge=0)
    receipt: Receipt

    @property
    def where(self) -> str:
        """The pass in words."""
        return f"evaluation at level {self.noise_level:g}, noise seed {self.noise_seed}"

    def problems(self) -> list[str]:
        """Return the mismatches between the pass's noise level, the requested noise, and the measured noise."""
        return [f"{self.where}: {problem}" for problem in (*self._mismatches(), *self.receipt.problems())]

    def _mismatches(self) -> list[str]:
        requested = self.receipt.requested_scale("evaluation")
        if self.noise_level < 1:
            return [f"the receipt requested scale {requested:g}"] if requested != self.noise_level else []
        noises = (self.receipt.operator_noise, self.receipt.module_noise, self.receipt.kv_cache)
        has_noise = any(noise is not None and "evaluation" in noise.phases for noise in noises)
        return [] if has_noise else ["the receipt requested no noise"]

    def differences(self, wanted: NoiseSpec) -> list[str]:
        """Return where the noise that the receipt is about differs from `wanted`; faults are compared elsewhere."""
        return [] if self.receipt.has_noise_of(wanted) else [f"{self.where}: the receipt is of other noise"]


class EvaluationReceipts(ReceiptModel):
    """results/eval/.../step<N>.receipt.json: every pass of the table beside it, and the facts of the evaluation."""

    passes: tuple[EvaluationPass, ...] = Field(min_length=1)
    facts: EvaluationFacts

    def problems(self) -> list[str]:
        """Return the problems of all passes, and the passes that occur twice or without facts."""
        in_facts = {(facts.noise_level, facts.noise_seed) for facts in self.facts.passes}
        unknown = [each.where for each in self.passes if (each.noise_level, each.noise_seed) not in in_facts]
        return [*_of_all(self.passes), *(f"{where}: has no facts" for where in unknown), *self.facts.problems()]


class LossStudyPass(ReceiptModel):
    """The receipt of one pass: a condition, with a magnitude if it has a fault, and an order if it needs one."""

    condition: LossCondition
    magnitude: float = Field(ge=0, description="magnitude of every fault; 0 without a fault")
    order: FaultOrder | None = Field(description="null unless a faulty layer has noise")
    noise_seed: int = Field(ge=0, description="0 without noise")
    noised_layers: tuple[int, ...]
    receipt: Receipt

    @property
    def where(self) -> str:
        """The pass in words."""
        return f"{self.condition} at magnitude {self.magnitude:g}, order {self.order}, noise seed {self.noise_seed}"

    def problems(self) -> list[str]:
        """Return the mismatches between the condition, the requested noise and faults, and the measured ones."""
        receipt, problems = self.receipt, []
        magnitudes = {fault.magnitude for fault in receipt.faults} or {0.0}
        if magnitudes != {self.magnitude}:
            problems.append(f"the receipt requested magnitudes {sorted(magnitudes)}")
        orders = {fault.order for fault in receipt.faults if fault.layer in self.noised_layers}
        if orders != ({self.order} if self.order else set()):
            problems.append(f"the receipt requested orders {sorted(orders)}")
        noised = {cell.layer for cell in receipt.weight_cells}
        if noised != set(self.noised_layers):
            problems.append(f"noise was measured in layers {sorted(noised, key=str)}")
        return [f"{self.where}: {problem}" for problem in [*problems, *receipt.problems()]]


class LossStudyReceipts(ReceiptModel):
    """results/loss_study/<model>/<name>.receipt.json: every pass of the table beside it."""

    vocabulary_size: int = Field(ge=2)
    num_layers: int = Field(ge=1)
    faulty_layers: tuple[int, ...]
    gamma: float
    passes: tuple[LossStudyPass, ...] = Field(min_length=1)

    def problems(self) -> list[str]:
        """Return the problems of all passes, and the passes that occur twice."""
        return _of_all(self.passes)


def _of_all(passes: Sequence[EvaluationPass | LossStudyPass]) -> list[str]:
    """Return the passes that occur twice, and the problems of all passes."""
    places = Counter(each.where for each in passes)
    twice = [f"{where}: recorded twice" for where, number in places.items() if number > 1]
    return twice + [problem for each in passes for problem in each.problems()]
