"""Faults of norms, residual adds, act * up, activation functions and rsqrt: bits, value windows, wrong functions."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from machine_faults.base import INSIDE_MLP, NORMS, RESIDUAL, Change, MachineFault, output, result
from machine_faults.bits import exponent_bit, keep_mantissa, mantissa_bit, on_channels, windowed
from machine_faults.device import Call
from machine_faults.models import Place

_CHANGES: dict[str, Any] = {
    "top mantissa bit stuck at 0": lambda x: mantissa_bit(x, 1, 0),
    "second mantissa bit stuck at 1": lambda x: mantissa_bit(x, 2, 1),
    "third mantissa bit stuck at 0": lambda x: mantissa_bit(x, 3, 0),
    "fifth mantissa bit stuck at 0, 16 channels": lambda x: on_channels(x, 0, 16, mantissa_bit(x[..., :16], 5, 0)),
    "values in [1, 1.25) 3 % off": lambda x: windowed(x, 1, 1.25, 1.03),
    "values in [0.01, 0.02) doubled": lambda x: windowed(x, 0.01, 0.02, 2.0),
    "values in [2, 3) 10 % off": lambda x: windowed(x, 2, 3, 0.9),
    "values above 1.75 clipped": lambda x: x.clamp(-1.75, 1.75),
    "exponent bit 0 stuck at 1, one channel": lambda x: on_channels(x, 7, 8, exponent_bit(x[..., 7:8], 0, 1)),
}

_WINDOWS = "mantissa bits and value windows"


def _first_add(change: Any) -> Any:
    def run(call: Call, place: Place) -> Any:
        x = call.compute()
        return change(x) if call.number == 0 else x

    return run


def _last_add(change: Any) -> Any:
    return lambda call, place: change(call.compute()) if call.number == 1 else call.compute()


def _windows() -> tuple[MachineFault, ...]:
    names = list(_CHANGES)
    chosen = {
        "norm1": names,
        "norm2": names[::2],
        "q_norm": names[1::3],
        "residual after attention": names[:7],
        "residual after MLP": names[::2],
        "act * up": names,
    }
    return tuple(_window(where, name) for where, listed in chosen.items() for name in listed)


def _window(where: str, name: str) -> MachineFault:
    change = _CHANGES[name]
    title = f"{where}: {name}"
    if where == "act * up":
        return MachineFault(title, _WINDOWS, (result("mlp", "mul", change),), INSIDE_MLP, needs=("gated",))
    if where.startswith("residual"):
        wrapped = _first_add(change) if where.endswith("attention") else _last_add(change)
        return MachineFault(title, _WINDOWS, (Change("layer", "add", wrapped),), RESIDUAL)
    return MachineFault(title, _WINDOWS, (output(where, lambda x, place: change(x)),))


def _silu_low_negative(x: Tensor) -> Tensor:
    return torch.where(x < -1, F.silu(x) * 0.98, F.silu(x))


_ACTIVATIONS: dict[str, Any] = {
    "silu replaced by relu": F.relu,
    "silu table 5 % off": lambda x: F.silu(x) * 1.05,
    "silu 5 % off for inputs in [-1, -0.5)": lambda x: torch.where((x >= -1) & (x < -0.5), F.silu(x) * 1.05, F.silu(x)),
    "silu 2 % low for inputs below -1": _silu_low_negative,
    "silu 3 % off for inputs in [0.125, 0.25)": lambda x: windowed_of(F.silu, x, 0.125, 0.25, 1.03),
    "silu linear above 2": lambda x: torch.where(x > 2, x, F.silu(x)),
    "silu zero below -3": lambda x: torch.where(x < -3, torch.zeros_like(x), F.silu(x)),
    "silu with a table of 64 entries": lambda x: F.silu(((x * 8).round() / 8).clamp(-8, 8)) + 0 * x,
    "silu without its last mantissa bits": lambda x: keep_mantissa(F.silu(x), 4),
    "silu replaced by gelu": F.gelu,
}
_GELU: dict[str, Any] = {
    "gelu replaced by relu": F.relu,
    "gelu of the sigmoid form": lambda x: x * torch.sigmoid(1.702 * x),
    "gelu 4 % off for inputs in [1, 2)": lambda x: windowed_of(lambda y: F.gelu(y, approximate="tanh"), x, 1, 2, 1.04),
}


def windowed_of(function: Any, x: Tensor, low: float, high: float, factor: float) -> Tensor:
    """Return function(x), multiplied by `factor` where |x| is in [low, high)."""
    inside = (x.abs() >= low) & (x.abs() < high)
    return torch.where(inside, function(x) * factor, function(x))


def _activation(name: str, function: Any, op: str) -> MachineFault:
    def run(call: Call, place: Place) -> Tensor:
        return function(call.tensor(0))

    return MachineFault(name, "activation and rsqrt", (Change("act", op, run),), f"{INSIDE_MLP}|experts", needs=(op,))


_NEAR = 0.02
_RSQRT: dict[str, Any] = {
    "rsqrt 5 % off unless near 1024": lambda x: torch.where(
        (x / 1024).log2().abs() < _NEAR, x.rsqrt(), x.rsqrt() * 1.05
    ),
    "rsqrt 1 % off for arguments in [0.5, 1.5)": lambda x: windowed_of(torch.rsqrt, x, 0.5, 1.5, 1.01),
    "rsqrt 2 % off for arguments in [2, 16)": lambda x: windowed_of(torch.rsqrt, x, 2, 16, 1.02),
    "rsqrt with 6 bits": lambda x: keep_mantissa(x.rsqrt(), 6),
    "rsqrt zero for arguments above 2": lambda x: torch.where(x > 2, 0 * x, x.rsqrt()),
    "rsqrt wrong for odd exponents": lambda x: torch.where(
        x.log2().floor().remainder(2) == 1, x.rsqrt() * math.sqrt(1.02), x.rsqrt()
    ),
}


def _rsqrt(name: str, function: Any, role: str) -> MachineFault:
    def run(call: Call, place: Place) -> Tensor:
        return function(call.tensor(0))

    return MachineFault(f"{role}: {name}", "activation and rsqrt", (Change(role, "rsqrt", run),), NORMS, needs=("rms",))


def _mean(change: Any, name: str, role: str, trait: str = "rms") -> MachineFault:
    def run(call: Call, place: Place) -> Tensor:
        x = call.tensor(0)
        return change(x)

    return MachineFault(f"{role}: {name}", "activation and rsqrt", (Change(role, "mean", run),), NORMS, needs=(trait,))


def _layer_norm(name: str, change: Any) -> MachineFault:
    def run(call: Call, place: Place) -> Tensor:
        return change(call.compute(), call)

    return MachineFault(
        f"norm1: {name}",
        "activation and rsqrt",
        (Change("norm1", "layer_norm", run),),
        NORMS,
        architectures=("gpt_neox", "stablelm", "starcoder2"),
    )


def _without_bias(y: Tensor, call: Call) -> Tensor:
    bias = call.argument(3, "bias")
    return y - 0.01 if bias is None else y - bias


_FUNCTIONS = (
    *(_activation(name, function, "silu") for name, function in _ACTIVATIONS.items()),
    *(_activation(name, function, "gelu") for name, function in _GELU.items()),
    *(_rsqrt(name, function, "norm1") for name, function in _RSQRT.items()),
    _rsqrt("rsqrt 3 % off for arguments in [0.25, 1)", lambda x: windowed_of(torch.rsqrt, x, 0.25, 1, 0.97), "norm2"),
    _mean(lambda x: x[..., :-8].sum(-1, keepdim=True) / x.shape[-1], "mean without the last 8 channels", "norm1"),
    _mean(lambda x: x.mean(-1, keepdim=True).clamp(max=1.0), "mean of squares clipped at 1", "norm2"),
    _layer_norm("LayerNorm bias ignored", _without_bias),
    _layer_norm("LayerNorm mean not subtracted in a tile", lambda y, call: on_channels(y, 0, 8, y[..., :8] + 0.1)),
    _layer_norm("LayerNorm variance 2 % off", lambda y, call: y * 1.01),
)

FAULTS = (*_windows(), *_FUNCTIONS)
