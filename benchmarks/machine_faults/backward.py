"""Faults of the backward pass alone."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from machine_faults.base import INSIDE_ATTENTION, INSIDE_MLP, NORMS, Change, MachineFault
from machine_faults.bits import mantissa_bit, on_channels
from machine_faults.device import Call
from machine_faults.models import Place

GROUP = "backward"


class _ChangedGradient(torch.autograd.Function):
    """Identity whose gradient is changed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        """Return x."""
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return the changed gradient."""
        return ctx.change(gradients[0]), None


def _gradient(
    name: str,
    role: str,
    change: Callable[[Tensor], Tensor],
    op: str = "linear",
    sites: str = "",
    operand: int = 0,
    needs: tuple[str, ...] = (),
) -> MachineFault:
    """Return a fault of the gradient with respect to an operand (0: inputs, 1: weights)."""

    def run(call: Call, place: Place) -> Any:
        args = list(call.args)
        if torch.is_grad_enabled() and args[operand].requires_grad:
            args[operand] = _ChangedGradient.apply(args[operand], change)
        return call.compute(*args)

    return MachineFault(f"{role}: {name}", GROUP, (Change(role, op, run),), sites, backward=True, needs=needs)


FAULTS = (
    _gradient("gradient of the inputs, dead channel", "q", lambda g: on_channels(g, 3, 4, 0.0)),
    _gradient("gradient of the inputs 5 % off", "down", lambda g: g * 1.05),
    _gradient("gradient of the weights, dead row", "o", lambda g: torch.cat([g[:2], 0 * g[2:3], g[3:]]), operand=1),
    _gradient("gradient of the weights, second mantissa bit", "up", lambda g: mantissa_bit(g, 2, 0), operand=1),
    _gradient("gradient of the softmax 4 % off", "attention", lambda g: g * 1.04, "softmax", INSIDE_ATTENTION),
    _gradient("gradient of silu 3 % off", "act", lambda g: g * 1.03, "silu", INSIDE_MLP, needs=("silu",)),
    _gradient("gradient of rsqrt lost", "norm1", lambda g: g * 0, "rsqrt", NORMS, needs=("rms",)),
)
