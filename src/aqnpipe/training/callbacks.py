"""Callbacks between optimiser steps: checkpoints, validation and progress messages."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from aqnpipe.data.graders import Grader
from aqnpipe.data.prompts import end_of_response
from aqnpipe.generation.backend import Sampling
from aqnpipe.generation.transformers_backend import TransformersBackend
from aqnpipe.machine.machine import NoiseKey
from aqnpipe.models.sharding import gathered_weights, is_sharded
from aqnpipe.noise.injection.phase import phase_noise
from aqnpipe.noise.receipts.recorder import ReceiptRecorder
from aqnpipe.training.audit.auditor import TrainingAudit
from aqnpipe.training.checkpoints import CheckpointWriter
from aqnpipe.training.noise_plan import NoisePlan
from aqnpipe.training.ranks import gathered, rank_and_size

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
        steps: Sequence[int],
        prompts: Sequence[Sequence[int]],
        gold_answers: Sequence[str],
        *,
        tokenizer: Any,
        noise: NoisePlan,
        audit: TrainingAudit,
        grade: Grader,
        max_response_tokens: int,
        seed: int,
        stop_text: str | None = None,
    ) -> None:
        self.accuracy: dict[int, float] = {}
        self._steps = frozenset(steps)
        self._prompts = prompts
        self._gold_answers = gold_answers
        self._tokenizer = tokenizer
        self._noise = noise
        self._audit = audit
        self._grade = grade
        self._sampling = Sampling(max_response_tokens=max_response_tokens, stop_text=stop_text)
        self._seed = seed
        self._stop_text = stop_text

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Validate if this step is declared."""
        if state.global_step not in self._steps:
            return
        model = kwargs["model"]
        rank, num_workers = rank_and_size()
        share = slice(rank, None, num_workers)
        key = NoiseKey(seed=self._seed, step=state.global_step, rank=rank)
        noise = self._noise
        self._audit.begin_validation(self._prompts[share])
        with (
            gathered_weights(model),
            phase_noise(model, noise.spec, "validation", key, noise.recorder, faults=noise.faults),
        ):
            completions = TransformersBackend(model, self._tokenizer).generate(self._prompts[share], self._sampling)
        whole = self._tokenizer.batch_decode([c.token_ids for c in completions], skip_special_tokens=True)
        texts = [end_of_response(text, self._stop_text) for text in whole]
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
