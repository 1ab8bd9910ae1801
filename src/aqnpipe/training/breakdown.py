"""Stops a run whose loss, gradient or weights break down, if possible before weights or checkpoints are affected."""

import math
from typing import Any

import torch
from transformers import TrainerCallback

from aqnpipe.config.training import TrainingConfig
from aqnpipe.errors import TrainingError
from aqnpipe.models.sharding import local

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
