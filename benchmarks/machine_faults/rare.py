"""Faults of single calls, and NaN and infinity."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from machine_faults.base import INSIDE_ATTENTION, INSIDE_MLP, NORMS, Change, MachineFault, output, result
from machine_faults.bits import exponent_bit, mantissa_bit, on_channels
from machine_faults.device import OUTPUT, Call
from machine_faults.models import Place

INTERMITTENT = "intermittent"
NOT_FINITE = "NaN and infinity"


def _once_in(every: int, role: str, name: str, change: Callable[[Tensor], Tensor], sites: str = "") -> MachineFault:
    def run(call: Call, place: Place) -> Tensor:
        x = call.compute()
        draws = call.memory.setdefault("draws", torch.Generator().manual_seed(every))
        hit = int(torch.randint(every, (1,), generator=draws)) == 0
        return change(x) if hit else x

    title = f"{role}: {name} in one call of {every}"
    return MachineFault(title, INTERMITTENT, (Change(role, OUTPUT, run),), sites, permanent=False)


_INTERMITTENT = tuple(
    _once_in(every, role, name, change)
    for every in (5, 50, 1000)
    for role, name, change in (
        ("q", "one value's top exponent bits", lambda x: _one_value(x, lambda v: exponent_bit(v, 1, 1))),
        ("down", "tile dead", lambda x: on_channels(x, 8, 16, 0.0)),
        ("norm1", "one value's mantissa", lambda x: _one_value(x, lambda v: mantissa_bit(v, 1, 0) * 1.01)),
        ("o", "NaN", lambda x: _one_value(x, lambda v: v * math.nan)),
    )
)


def _one_value(x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    changed = x.clone()
    flat = changed.view(-1)
    flat[flat.shape[0] // 2 : flat.shape[0] // 2 + 1] = change(flat[flat.shape[0] // 2 : flat.shape[0] // 2 + 1])
    return changed


def _bad(name: str, role: str, value: float, sites: str = "", **more: Any) -> MachineFault:
    change = output(role, lambda x, place: on_channels(x, place.start + 3, place.start + 4, value))
    return MachineFault(f"{role}: {name}", NOT_FINITE, (change,), sites, **more)


def _bad_softmax(call: Call, place: Place) -> Tensor:
    p = call.compute().clone()
    if p.shape[-1] > 8:
        p[..., -1, 3] = math.nan
    return p


_NOT_FINITE = (
    _bad("NaN channel", "q", math.nan),
    _bad("NaN channel", "down", math.nan),
    _bad("NaN channel", "norm1", math.nan),
    _bad("infinite channel", "up", math.inf),
    _bad("infinite channel", "k", -math.inf),
    _bad("NaN channel", "lm_head", math.nan, where="ends"),
    _bad("NaN channel", "embedding", math.nan, where="ends"),
    _bad("infinite channel", "final_norm", math.inf, where="ends"),
    MachineFault(
        "softmax: NaN at the fourth of more than 8 keys",
        NOT_FINITE,
        (Change("attention", "softmax", _bad_softmax),),
        INSIDE_ATTENTION,
    ),
    MachineFault(
        "silu: NaN below -2",
        NOT_FINITE,
        (result("act", "silu", lambda y: torch.where((y < -0.2) & (y > -0.24), y * math.nan, y)),),
        INSIDE_MLP,
        needs=("silu",),
    ),
    MachineFault(
        "norm2: rsqrt gives infinity above 4",
        NOT_FINITE,
        (
            Change(
                "norm2",
                "rsqrt",
                lambda call, place: torch.where(call.tensor(0) > 4, call.compute() * math.inf, call.compute()),
            ),
        ),
        NORMS,
        needs=("rms",),
    ),
)


FAULTS = (*_INTERMITTENT, *_NOT_FINITE)
