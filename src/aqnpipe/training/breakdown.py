"""The end of a run whose numbers break down, before they get into weights or checkpoints where that is possible."""

import math
from typing import Any

import torch
from transformers import TrainerCallback

from aqnpipe.config.training import TrainingConfig
from aqnpipe.errors import TrainingError


class BreakdownGuard(TrainerCallback):
    """Stops a run with one line that names run, step and quantity.

    The trainer asks about loss and gradient before the optimiser uses them; as a callback it looks at the weights after
    every step, ahead of all that would keep them.
    """

    def __init__(self, label: str, training: TrainingConfig) -> None:
        self._label = label
        self._bounds = {"loss": training.stop_loss, "grad_norm": training.stop_grad_norm}

    def check(self, quantity: str, value: float, step: int) -> None:
        """Raise TrainingError if loss or grad_norm of optimiser step `step` is no number or beyond its bound."""
        bound = self._bounds[quantity]
        if not math.isfinite(value):
            self._stop(f"{quantity} is {value}", f"at step {step}")
        if abs(value) > bound:
            self._stop(f"{quantity} is {value:.4g}, beyond stop_{quantity} {bound:g},", f"at step {step}")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check the updated weights. Raises TrainingError on NaN or infinity."""
        # A parameter's norm is not finite if any of it is not; all norms are fetched at once.
        trained = {name: weight for name, weight in kwargs["model"].named_parameters() if weight.requires_grad}
        with torch.no_grad():
            norms = torch._foreach_norm(list(trained.values()), ord=math.inf)
            finite = torch.stack([norm.float() for norm in norms]).isfinite().tolist()
        for name, is_finite in zip(trained, finite, strict=True):
            if not is_finite:
                self._stop(f"{name} is not finite", f"after step {state.global_step}")

    def _stop(self, what: str, when: str) -> None:
        raise TrainingError(
            f"{self._label}: {what} {when}, run stopped before it was kept; a lower learning_rate or max_grad_norm may "
            "help"
        )
