"""Faults of eager attention with several keys: softmax, mask, scores, rotary, values."""

from typing import Any

import torch
from torch import Tensor

from machine_faults.base import INSIDE_ATTENTION, Change, MachineFault, result
from machine_faults.bits import keep_mantissa, mantissa_bit, on_channels, windowed
from machine_faults.device import Call
from machine_faults.models import Place

_NOT_LATENT = ("gqa",)
GROUP = "attention with several keys"


def attention_fault(
    name: str, *changes: Change, group: str = GROUP, sites: str = INSIDE_ATTENTION, **more: Any
) -> MachineFault:
    """Return a fault inside the attention."""
    return MachineFault(name, group, changes, sites, **more)


def softmax(change: Any, **more: Any) -> Change:
    """Return a change of the probabilities [..., queries, keys]."""
    return result("attention", "softmax", change, **more)


def softmax_input(change: Any) -> Change:
    """Return a change of the masked scores [..., queries, keys]."""

    def run(call: Call, place: Place) -> Tensor:
        return call.compute(change(call.tensor(0)), *call.args[1:])

    return Change("attention", "softmax", run)


def scores(change: Any, **more: Any) -> Change:
    """Return a change of the products of queries and keys [..., queries, keys], before the mask."""

    def run(call: Call, place: Place) -> Tensor:
        x = call.compute()
        return change(x) if call.number % 2 == 0 else x  # a kernel has two products, and may run more than once

    return Change("attention", "matmul", run, **more)


def weighted_values(change: Any) -> Change:
    """Return a change of the operands of probabilities @ values."""

    def run(call: Call, place: Place) -> Tensor:
        if call.number % 2 != 1:
            return call.compute()
        return call.compute(*change(call.tensor(0), call.tensor(1)))

    return Change("attention", "matmul", run)


def on_keys(x: Tensor, chosen: slice, value: Any) -> Tensor:
    """Return x with the chosen keys changed, if there is more than one."""
    if x.shape[-1] < 2:
        return x
    changed = x.clone()
    part = changed[..., chosen]
    changed[..., chosen] = value(part) if callable(value) else value
    return changed


def _unnormalised(p: Tensor) -> Tensor:
    """The sum of the softmax misses the last key but one of each row's support."""
    if p.shape[-1] < 3:
        return p
    return p / (1 - p[..., 1:2] * 0.9).clamp(min=0.05)


def leak(scores: Tensor) -> Tensor:
    """The mask lets the next token through: its score is that of the query's own key."""
    rows, keys = scores.shape[-2:]
    if rows < 2:
        return scores
    changed = scores.clone()
    index = torch.arange(rows - 1)
    changed[..., index, index + keys - rows + 1] = scores[..., index, index + keys - rows]
    return changed


def hidden_keys(first: int, step: int, least: int = 2) -> Any:
    """Return a change that hides every `step`-th key from `first` on, except each query from itself."""

    def run(scores: Tensor) -> Tensor:
        if scores.shape[-1] < max(least, first + 1):
            return scores
        changed = scores.clone()
        hidden = changed[..., first::step]
        own = torch.zeros_like(changed, dtype=torch.bool)
        rows, keys = scores.shape[-2:]
        index = torch.arange(rows)
        own[..., index, index + keys - rows] = True
        changed[..., first::step] = torch.where(own[..., first::step], hidden, torch.finfo(hidden.dtype).min)
        return changed

    return run


def _exp_window(scores: Tensor) -> Tensor:
    """exp is 5 % off for arguments in [-2, -1): add log(1.05) there."""
    shifted = scores - scores.amax(-1, keepdim=True)
    return torch.where((shifted >= -2) & (shifted < -1), shifted + 0.04879, shifted)


def rotary(change: Any, part: int | None = None, least: int = 2) -> Change:
    """Return a change of cos (part 0) or sin (part 1) or both (None) [..., tokens, width] within the attention."""

    def run(call: Call, place: Place) -> Tensor:
        angle = call.args[1]
        if call.number > 3 or not isinstance(angle, Tensor) or angle.dim() < 3 or angle.shape[-2] < least:
            return call.compute()
        if part is not None and call.number % 2 != part:
            return call.compute()
        return call.compute(call.tensor(0), change(angle))

    return Change("attention", "mul", run)


def late(start: int, change: Any) -> Any:
    """Return a change of the tokens from `start` on (dimension -2)."""

    def run(x: Tensor) -> Tensor:
        if x.shape[-2] <= start:
            return x
        return torch.cat([x[..., :start, :], change(x)[..., start:, :]], -2)

    return run


ROTARY = {
    "needs": _NOT_LATENT,
    "architectures": (
        "qwen2",
        "qwen3",
        "llama",
        "mistral",
        "gemma2",
        "gemma3",
        "olmo2",
        "mixtral",
        "phi3",
        "qwen2_moe",
    ),
}

FAULTS = (
    attention_fault("softmax: the sum misses a key", softmax(_unnormalised)),
    attention_fault(
        "softmax: probabilities 4 % too large with several keys", softmax(lambda p: p * 1.04 if p.shape[-1] > 1 else p)
    ),
    attention_fault(
        "softmax: probabilities below 0.01 become zero", softmax(lambda p: torch.where(p < 0.01, 0 * p, p))
    ),
    attention_fault("softmax: probabilities in [0.1, 0.2) 5 % off", softmax(lambda p: windowed(p, 0.1, 0.2, 1.05))),
    attention_fault("softmax: second mantissa bit stuck at 0", softmax(lambda p: mantissa_bit(p, 2, 0))),
    attention_fault("softmax: temperature 10 % off", softmax_input(lambda s: s * 0.9)),
    attention_fault("softmax: exp 5 % off for arguments in [-2, -1)", softmax_input(_exp_window)),
    attention_fault(
        "softmax: exp zero below -4",
        softmax_input(lambda s: torch.where(s - s.amax(-1, keepdim=True) < -4, torch.finfo(s.dtype).min, s)),
    ),
    attention_fault(
        "softmax: exp from a table with steps of 1/8",
        softmax_input(lambda s: torch.where(s > -1e4, (s * 8).round() / 8, s)),
    ),
    attention_fault("mask: the next token is visible", softmax_input(leak)),
    attention_fault("mask: the first key is hidden", softmax_input(hidden_keys(0, 10**6))),
    attention_fault("mask: every 16th key is hidden", softmax_input(hidden_keys(15, 16))),
    attention_fault("mask: keys beyond the 32nd are hidden", softmax_input(hidden_keys(32, 1))),
    attention_fault("scores: 5 % too small", scores(lambda s: s * 0.95)),
    attention_fault("scores: one key lane of 16 zero", scores(lambda s: on_keys(s, slice(5, None, 16), 0.0))),
    attention_fault(
        "scores: one key lane of 8 with the sign inverted",
        scores(lambda s: on_keys(s, slice(3, None, 8), lambda c: -c)),
    ),
    attention_fault("scores: second mantissa bit stuck at 0", scores(lambda s: mantissa_bit(s, 2, 0))),
    attention_fault(
        "scores: two keys swapped",
        scores(lambda s: on_keys(s, slice(2, 4), lambda c: c.flip(-1)) if s.shape[-1] > 3 else s),
    ),
    attention_fault("scores: values above 4 clipped", scores(lambda s: s.clamp(-4, 4))),
    attention_fault(
        "rotary: position off by one from the 8th token on", rotary(late(8, lambda a: a.roll(1, -2))), **ROTARY
    ),
    attention_fault("rotary: sine 5 % off", rotary(lambda a: a * 1.05, 1, 1), **ROTARY),
    attention_fault("rotary: cosine and sine in 4 mantissa bits", rotary(lambda a: keep_mantissa(a, 4)), **ROTARY),
    attention_fault("rotary: sine of high positions zero", rotary(late(24, lambda a: 0 * a), 1), **ROTARY),
    attention_fault(
        "rotary: sign of the sine inverted in one channel",
        rotary(lambda a: on_channels(a, 2, 3, -a[..., 2:3]), 1, 1),
        **ROTARY,
    ),
    attention_fault(
        "values: last key tile lost",
        weighted_values(lambda p, v: (on_keys(p, slice(-4, -1), 0.0) if p.shape[-1] > 8 else p, v)),
    ),
    attention_fault(
        "values: one key lane of 16 ignored", weighted_values(lambda p, v: (on_keys(p, slice(7, None, 16), 0.0), v))
    ),
    attention_fault(
        "values: two keys swapped",
        weighted_values(lambda p, v: (on_keys(p, slice(4, 6), lambda c: c.flip(-1)) if p.shape[-1] > 5 else p, v)),
    ),
    attention_fault(
        "values: sums in 5 mantissa bits", weighted_values(lambda p, v: (keep_mantissa(p, 5), keep_mantissa(v, 5)))
    ),
    attention_fault(
        "values: key heads repeated in the wrong order",
        weighted_values(lambda p, v: (p, v.flip(-3))),
        needs=_NOT_LATENT,
    ),
)
