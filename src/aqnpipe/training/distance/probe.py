"""Measures where the distance between sampler and policy comes from, at the first and the last optimiser step.

The sequences are those of the first micro-batch of the step. What needs the weights of the rollout is computed before
the first update on that rollout, the rest before the step's own pass. The run does not change by it: see `passes`. It
does not end by it either: a step that cannot be measured is left out, and the record says why.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import polars as pl
import torch
from torch import Tensor

from aqnpipe.artifacts.sampler_distance import Cause, DistanceParts, DistanceProgress, SamplerDistance
from aqnpipe.config.noise import Phase
from aqnpipe.config.run import TrainingSpec
from aqnpipe.training.distance.growth import growth_line, growth_of
from aqnpipe.training.distance.memory import end_forward, free_memory, whole_weights
from aqnpipe.training.distance.parts import parts_of, rms
from aqnpipe.training.distance.passes import Drawn, NotMeasurableError, Passes, masked, sequences_of
from aqnpipe.training.noise_plan import NoisePlan
from aqnpipe.training.ranks import rank_and_size

MAX_SEQUENCES = 4
"""Sequences that are measured. They cost a rollout and two forward passes of as few rows, twice a run."""

_OUT_OF_MEMORY = "the device has too little free memory"

Batch = Mapping[str, Tensor]


@dataclass
class _Step:
    """A step that is being measured: `place` is that of its first micro-batch among those of the rollout."""

    step: int
    rollout_step: int
    place: int
    batch: Batch
    sequences: list[Drawn]
    passes: Passes
    seconds: float = 0.0
    chain: dict[Cause, Tensor] = field(default_factory=dict)


class DistanceProbe:
    """Measures the distance of one run, on its first worker; the others only gather shared weights with it."""

    def __init__(
        self,
        spec: TrainingSpec,
        plan: NoisePlan,
        tokenizer: Any,
        *,
        samples_in_process: bool,
        label: str,
        say: Callable[[str], None],
    ) -> None:
        """`samples_in_process`: the policy itself draws the rollouts, in this process."""
        self._spec, self._plan, self._tokenizer = spec, plan, tokenizer
        self._samples_in_process = samples_in_process
        self._label, self._say = label, say
        self._wanted = {1, spec.num_steps}
        self._open: dict[int, _Step] = {}
        self._found: tuple[DistanceParts, ...] = ()
        self._missed: dict[int, str] = {}

    def state(self) -> DistanceProgress:
        """Return what was measured so far, for a resume point."""
        return DistanceProgress(steps=self._found, missed=dict(self._missed))

    def restore(self, progress: DistanceProgress) -> None:
        """Continue from a resume point."""
        self._found, self._missed = progress.steps, dict(progress.missed)

    def result(self, metrics: pl.DataFrame) -> SamplerDistance:
        """Return the parts and the growth of a complete run with these `metrics`; log a warning if it has grown."""
        growth = growth_of(metrics, self._spec.training.steps_per_rollout)
        if growth is not None and growth.has_grown:
            self._say(f"{self._label}: {growth_line(growth)}")
        return SamplerDistance(steps=self._found, why_not=self._why_not(), growth=growth)

    def _why_not(self) -> str | None:
        if not self._spec.training.explain_sampler_distance:
            return "training.explain_sampler_distance is false"
        reasons = (
            f"at step {' and '.join(str(step) for step, _ in missed)}: {reason}"
            for reason, missed in groupby(sorted(self._missed.items()), key=lambda entry: entry[1])
        )
        return "; ".join(reasons) or None

    def before_pass(self, network: Any, batches: Sequence[Batch], place: int, steps_done: int) -> None:
        """Call on every worker before the trained pass of micro-batch `place` of a rollout.

        `batches`: the micro-batches of the rollout; `steps_done`: optimiser steps before this pass.
        """
        per_step = len(batches) // self._spec.training.steps_per_rollout
        rollout_step = steps_done - place // per_step
        places = self._places(rollout_step, per_step)
        is_first_worker = rank_and_size()[0] == 0
        if place == 0:
            begun = (self._begun(network, batches, step, rollout_step, at) for at, step in places.items())
            self._open = {step.place: step for step in begun} if is_first_worker else {}
        # The same on all workers: whether the first one still measures a step is exchanged in `whole_weights`.
        if places and (place == 0 or place in places):
            with whole_weights(network, is_needed=bool(self._open)) as has_memory:
                self._measure_before(place, has_memory)

    def _places(self, rollout_step: int, per_step: int) -> dict[int, int]:
        """Return the wanted steps that learn from this rollout, by the place of their first micro-batch."""
        training = self._spec.training
        offsets = {step - 1 - rollout_step: step for step in sorted(self._wanted)}
        is_wanted = training.explain_sampler_distance
        return {
            offset * per_step: step
            for offset, step in offsets.items()
            if is_wanted and offset in range(training.steps_per_rollout)
        }

    def _measure_before(self, place: int, has_memory: bool) -> None:
        for step in tuple(self._open.values()):
            if not has_memory:
                self._give_up(step, "a worker lacks the memory to gather the weights")
            elif place == 0:
                self._compute(step, self._measure_rollout)
        if (current := self._open.get(place)) is not None:
            self._compute(current, self._measure_now)

    def _compute(self, step: _Step, measurement: Callable[[_Step], None]) -> None:
        """Run a measurement that computes forward passes."""
        self._measure(step, measurement)
        if self._missed.get(step.step) == _OUT_OF_MEMORY:
            end_forward(step.passes.network)

    def after_pass(self, place: int, log_probabilities: Tensor) -> None:
        """Call with the log-probabilities [rows, tokens] of the trained pass of micro-batch `place`."""
        if (current := self._open.get(place)) is not None:
            self._measure(current, partial(self._complete, log_probabilities=log_probabilities))
            self._open.pop(place, None)

    def _measure(self, step: _Step, measurement: Callable[[_Step], None]) -> None:
        """Time one measurement of a step; give the step up if it cannot be measured.

        The run goes on: whether it is sound is decided by its `BreakdownGuard` and by its audit, from its own numbers.
        Out of memory, it can still train, because the measurement needs memory that training does not.
        """
        started = time.monotonic()
        reason = None
        try:
            measurement(step)
        except NotMeasurableError as error:
            reason = str(error)
        except torch.OutOfMemoryError:
            # Freed below: up to the end of this clause the exception refers to the tensors of the pass.
            reason = _OUT_OF_MEMORY
        if reason is not None:
            self._give_up(step, reason)
        if reason == _OUT_OF_MEMORY:
            free_memory()
        step.seconds += time.monotonic() - started

    def _give_up(self, step: _Step, reason: str) -> None:
        self._missed[step.step] = reason
        self._say(f"{self._label}: distance to the sampler at step {step.step} not explained: {reason}")
        del self._open[step.place]

    def _begun(self, network: Any, batches: Sequence[Batch], step: int, rollout_step: int, place: int) -> _Step:
        sequences = sequences_of(batches[place], MAX_SEQUENCES)
        return _Step(step, rollout_step, place, batches[place], sequences, self._passes(network))

    def _passes(self, network: Any) -> Passes:
        return Passes(
            network,
            self._spec.training.temperature,
            end_token=self._tokenizer.eos_token_id,
            padding_token=self._tokenizer.pad_token_id,
            limit=self._spec.training.max_response_tokens,
        )

    def _measure_rollout(self, step: _Step) -> None:
        is_noised = self._is_noised("rollout", step.rollout_step)
        whole = step.passes.in_one_pass(step.sequences)
        if self._samples_in_process:
            step.chain["rollout_noise" if is_noised else "rollout_batch"] = step.passes.decoded(step.sequences)
            step.chain["decoding"] = whole
        else:
            step.chain["noise_and_engine" if is_noised else "engine"] = whole

    def _measure_now(self, step: _Step) -> None:
        if step.step - 1 > step.rollout_step:
            step.chain["staleness"] = step.passes.in_one_pass(step.sequences)
        step.chain["batch"] = step.passes.micro_batch(step.batch, MAX_SEQUENCES)

    def _complete(self, step: _Step, log_probabilities: Tensor) -> None:
        cause: Cause = "actor_noise" if self._is_noised("actor_forward") else "rest"
        step.chain[cause] = masked(log_probabilities, step.batch, MAX_SEQUENCES)
        parts = _parts(step)
        self._found = (*self._found, parts)
        self._say(f"{self._label}: {_line(parts)} (measured in {step.seconds:.1f} s)")

    def _is_noised(self, phase: Phase, step: int | None = None) -> bool:
        """Whether a phase has noise or faults; `step` is that of a rollout, which may have AQN too."""
        spec = self._plan.spec
        noise = spec.operator_noise_in(phase) or spec.module_noise_in(phase)
        if phase == "actor_forward" and spec.aqn is not None and spec.aqn.actor_forward:
            return True
        return noise is not None or bool(spec.faults) or (step is not None and self._plan.sigma(step) > 0)


def _parts(step: _Step) -> DistanceParts:
    sampled = masked(step.batch["sampling_per_token_logps"], step.batch, MAX_SEQUENCES)
    *_, policy = step.chain.values()
    return DistanceParts(
        step=step.step,
        rollout_step=step.rollout_step,
        num_sequences=len(step.sequences),
        num_tokens=len(sampled),
        mean_absolute=float((policy - sampled).abs().mean()),
        rms=rms(policy - sampled),
        parts=parts_of(sampled, step.chain),
        forwards=step.passes.forwards,
    )


def _line(found: DistanceParts) -> str:
    sentence = f"distance to the sampler at step {found.step}: {found.mean_absolute:.2g} nats per token"
    largest = max(found.parts, key=lambda part: part.rms)
    return f"{sentence}, mostly {largest.cause.replace('_', ' ')}" if largest.rms else sentence
