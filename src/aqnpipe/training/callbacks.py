"""Callbacks between optimiser steps: a guard against breakdown, checkpoints, validation and progress messages."""

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from aqnpipe.config.run import TrainingSpec
from aqnpipe.config.training import TrainingConfig
from aqnpipe.data.graders import grader
from aqnpipe.data.prompts import end_of_response
from aqnpipe.errors import TrainingError
from aqnpipe.generation.backend import Sampling
from aqnpipe.generation.transformers_backend import TransformersBackend
from aqnpipe.machine.machine import NoiseKey
from aqnpipe.models.sharding import gathered_weights, is_sharded, local
from aqnpipe.noise.injection.phase import phase_noise
from aqnpipe.noise.receipts.recorder import ReceiptRecorder
from aqnpipe.training.audit.auditor import TrainingAudit
from aqnpipe.training.noise_plan import NoisePlan
from aqnpipe.training.policy import CheckpointWriter
from aqnpipe.training.ranks import gathered, rank_and_size

_SETTINGS = "learning_rate or max_grad_norm"


class BreakdownGuard(TrainerCallback):
    """Stops a run with one line that names the run, the step and the quantity.

    The trainer calls `check` with loss and gradient norm before the optimiser uses them. As the first callback of the
    run the guard checks the weights after every step, before another callback saves them.
    """

    def __init__(self, label: str, training: TrainingConfig, loss_scale: int = 1) -> None:
        self._label = label
        self._loss_scale = loss_scale
        self._bounds = {"loss": training.stop_loss, "grad_norm": training.stop_grad_norm}

    def check(self, quantity: str, value: float, step: int) -> None:
        """Raise TrainingError if loss or grad_norm of optimiser step `step` is not finite or exceeds its bound."""
        bound = self._bounds[quantity]
        if not math.isfinite(value):
            overflow = quantity == "grad_norm" and self._loss_scale > 1
            self._stop(f"{quantity} is {value}", f"at step {step}", "training.loss_scale" if overflow else _SETTINGS)
        if abs(value) > bound:
            self._stop(f"{quantity} is {value:.4g}, beyond stop_{quantity} {bound:g},", f"at step {step}")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check the updated weights. Raises TrainingError on NaN or infinity."""
        # The norm of a parameter is finite only if all its elements are; one transfer fetches all norms.
        trained = {name: weight for name, weight in kwargs["model"].named_parameters() if weight.requires_grad}
        with torch.no_grad():
            # An empty share has no norm.
            held = [share if share.numel() else share.new_zeros(1) for share in map(local, trained.values())]
            norms = torch._foreach_norm(held, ord=math.inf)
            finite = torch.stack([norm.float() for norm in norms]).isfinite().tolist()
        for name, is_finite in zip(trained, finite, strict=True):
            if not is_finite:
                self._stop(f"{name} is not finite", f"after step {state.global_step}")

    def _stop(self, what: str, when: str, settings: str = _SETTINGS) -> None:
        raise TrainingError(
            f"{self._label}: {what} {when}, run stopped before this step was saved; a lower {settings} may help"
        )


_SECONDS_BETWEEN_REPORTS = 60.0


class CleanWeightsCallback(TrainerCallback):
    """Records the norm weights after each optimiser step; AQN may change them in the rollout and nowhere else.

    Also records the number of the step, which the keys of its noise must have.
    """

    def __init__(self, recorder: ReceiptRecorder) -> None:
        self._recorder = recorder

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the weights at the start of training, or where it resumes."""
        self._recorder.note_clean_norms(kwargs["model"])

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the number of steps done."""
        self._recorder.begin_step(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the weights after this step."""
        self._recorder.note_clean_norms(kwargs["model"])


class CheckpointCallback(TrainerCallback):
    """Saves the model as `<folder>/step<N>` after the declared steps; `label` names the run in its record.

    The first worker saves them. Those of a sharded model are gathered for it by all.
    """

    def __init__(self, folder: Path, steps: Sequence[int], writer: CheckpointWriter, label: str) -> None:
        self._folder = folder
        self._label = label
        self._steps = frozenset(steps)
        self._writer = writer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save if this step is declared."""
        if state.global_step not in self._steps:
            return
        model = kwargs["model"]
        with gathered_weights(model):
            if state.is_world_process_zero:
                target = self._folder / f"step{state.global_step}"
                self._writer.write(model, target, f"{self._label} step {state.global_step}")
        if is_sharded(model):
            # Every worker compares its share with the file.
            gathered(None)


class ValidationCallback(TrainerCallback):
    """Greedy validation without operator noise after the declared steps; `accuracy` maps step to the fraction correct.

    Worker r of n answers the questions r, r + n, r + 2n, ..., so there must be at least as many questions as workers.
    """

    def __init__(
        self,
        spec: TrainingSpec,
        prompts: Sequence[Sequence[int]],
        gold_answers: Sequence[str],
        *,
        tokenizer: Any,
        noise: NoisePlan,
        audit: TrainingAudit,
    ) -> None:
        self.accuracy: dict[int, float] = {}
        self._spec, self._prompts, self._gold_answers = spec, prompts, gold_answers
        self._tokenizer, self._noise, self._audit = tokenizer, noise, audit
        self._steps = frozenset(spec.training.validation_steps(spec.num_steps))
        self._grade = grader(spec.scorer, spec.scorer_sha256)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Validate if this step is declared."""
        if state.global_step not in self._steps:
            return
        model = kwargs["model"]
        rank, num_workers = rank_and_size()
        share = slice(rank, None, num_workers)
        noise, stop_text = self._noise, self._spec.prompt.stop_text
        sampling = Sampling(max_response_tokens=self._spec.training.max_response_tokens, stop_text=stop_text)
        key = NoiseKey(seed=self._spec.random_seed, step=state.global_step, rank=rank)
        self._audit.begin_validation(self._prompts[share])
        with (
            gathered_weights(model),
            phase_noise(model, noise.spec, "validation", key, noise.recorder, faults=noise.faults),
        ):
            completions = TransformersBackend(model, self._tokenizer).generate(self._prompts[share], sampling)
        whole = self._tokenizer.batch_decode([c.token_ids for c in completions], skip_special_tokens=True)
        texts = [end_of_response(text, stop_text) for text in whole]
        golds = self._gold_answers[share]
        correct = sum(self._grade(text, gold).correct for text, gold in zip(texts, golds, strict=True))
        self.accuracy[state.global_step] = sum(gathered(correct)) / len(self._prompts)
        self._audit.end_validation(completions)


class ProgressCallback(TrainerCallback):
    """Prints the progress of a run: about `reports` times, and at least once a minute if steps are long.

    The speed is generated tokens per second of wall time, all phases of training included.
    """

    def __init__(self, label: str, num_steps: int, say: Callable[[str], None], reports: int = 10) -> None:
        self._label = label
        self._num_steps = num_steps
        self._say = say
        self._interval = max(1, num_steps // reports)
        self._first_step = 0
        self._started = self._reported = time.monotonic()
        self._tokens = 0.0
        self._rollout: dict[str, float] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock; a resumed run is timed from its resume point."""
        self._first_step = state.global_step
        self._started = self._reported = time.monotonic()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """Count the tokens of every logged step; print a line for some steps."""
        if not logs or "loss" not in logs:
            return
        if "reward" in logs:
            self._tokens += logs["completions/mean_length"] * args.generation_batch_size
            self._rollout = logs
        now, step = time.monotonic(), state.global_step
        due = step % self._interval == 0 or step == self._num_steps
        if not due and now - self._reported < _SECONDS_BETWEEN_REPORTS:
            return
        per_step = (now - self._started) / (step - self._first_step)
        tokens_per_second = self._tokens / (now - self._started)
        self._reported = now
        # Several steps may learn from one rollout; only the log of the first one contains its figures.
        known = {**self._rollout, **logs}
        shown = {"reward": ("reward", ".3f"), "kl": ("kl", ".4f"), "sigma": ("sigma_measured", ".4f")}
        numbers = "".join(f" {name} {known[key]:{form}}" for name, (key, form) in shown.items() if key in known)
        self._say(
            f"{self._label}: step {step}/{self._num_steps}{numbers} {tokens_per_second:.0f} tokens/s"
            f" {per_step:.2f} s/step, {_duration(per_step * (self._num_steps - step))} left"
        )


def _duration(seconds: float) -> str:
    """Return a duration as text: `42 s`, `12 min`, `3 h 05 min`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min"
