"""What happens between optimiser steps: checkpoints, validation, progress, and a stop when the loss breaks."""

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from aqnpipe.errors import TrainingError
from aqnpipe.generation.backend import Sampling
from aqnpipe.generation.transformers_backend import TransformersBackend
from aqnpipe.noise.injection import NoiseKey, phase_noise
from aqnpipe.noise.recorder import ReceiptRecorder
from aqnpipe.scoring import is_correct


class CheckpointCallback(TrainerCallback):
    """Saves weights and tokenizer as `<folder>/step<N>` after the declared steps."""

    def __init__(self, folder: Path, steps: Sequence[int], tokenizer: Any) -> None:
        self._folder = folder
        self._steps = frozenset(steps)
        self._tokenizer = tokenizer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save if this step is declared."""
        if state.global_step in self._steps:
            target = self._folder / f"step{state.global_step}"
            kwargs["model"].save_pretrained(target)
            self._tokenizer.save_pretrained(target)


class ValidationCallback(TrainerCallback):
    """Greedy validation with clean operators after the declared steps; `accuracy` maps step to share correct."""

    def __init__(
        self,
        steps: Sequence[int],
        prompts: Sequence[Sequence[int]],
        gold_answers: Sequence[str],
        *,
        tokenizer: Any,
        recorder: ReceiptRecorder,
        max_response_tokens: int,
        seed: int,
    ) -> None:
        self.accuracy: dict[int, float] = {}
        self._steps = frozenset(steps)
        self._prompts = prompts
        self._gold_answers = gold_answers
        self._tokenizer = tokenizer
        self._recorder = recorder
        self._sampling = Sampling(max_response_tokens=max_response_tokens)
        self._seed = seed

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Validate if this step is declared."""
        if state.global_step not in self._steps:
            return
        model = kwargs["model"]
        key = NoiseKey(seed=self._seed, step=state.global_step)
        with phase_noise(model, self._recorder, "validation", key):
            completions = TransformersBackend(model, self._tokenizer).generate(self._prompts, self._sampling)
        texts = self._tokenizer.batch_decode([c.token_ids for c in completions], skip_special_tokens=True)
        correct = [is_correct(text, gold, "strict") for text, gold in zip(texts, self._gold_answers, strict=True)]
        self.accuracy[state.global_step] = sum(correct) / len(correct)


class ProgressCallback(TrainerCallback):
    """Tells where the run stands about `reports` times; stops it when loss, gradient or weights are no numbers."""

    def __init__(self, label: str, num_steps: int, say: Callable[[str], None], reports: int = 10) -> None:
        self._label = label
        self._num_steps = num_steps
        self._say = say
        self._interval = max(1, num_steps // reports)
        self._started = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check the updated weights. Raises TrainingError on NaN or infinity."""
        for name, parameter in kwargs["model"].named_parameters():
            if not torch.isfinite(parameter).all():
                raise TrainingError(
                    f"{self._label}: {name} is not finite after step {state.global_step}, run stopped; "
                    "a lower learning_rate or max_grad_norm may help"
                )

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """Check every logged step; print some. Raises TrainingError on NaN or infinity."""
        if not logs or "loss" not in logs:
            return
        for name in ("loss", "grad_norm"):
            if not math.isfinite(float(logs[name])):
                raise TrainingError(f"{self._label}: {name} is {logs[name]} at step {state.global_step}, run stopped")
        step = state.global_step
        if step % self._interval == 0 or step == self._num_steps:
            per_step = (time.monotonic() - self._started) / step
            kl = f" kl {logs['kl']:.4f}" if "kl" in logs else ""
            self._say(
                f"{self._label}: step {step}/{self._num_steps} reward {logs['reward']:.3f}{kl}"
                f" {per_step:.2f} s/step, {per_step * (self._num_steps - step):.0f} s left"
            )
