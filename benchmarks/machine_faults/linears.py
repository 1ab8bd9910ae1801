"""Faults of linears: stuck bits, channels, tiles, multipliers, biases; and fused kernels, heads, several at once."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from machine_faults.base import INSIDE_ATTENTION, INSIDE_MLP, RESIDUAL, Change, MachineFault, output, result
from machine_faults.bits import (
    exponent_bit,
    keep_mantissa,
    mantissa_bit,
    on_channels,
    top_mantissa_bits,
    windowed,
)
from machine_faults.device import Call
from machine_faults.models import HEAD, Place

GROUP = "linears"


def _on_place(change: Any, width: int | None = None, offset: int = 0) -> Any:
    """Return a change of the first `width` channels of the place, starting at `offset`."""

    def run(x: Tensor, place: Place) -> Tensor:
        start = place.start + offset
        stop = start + (place.width if width is None else width)
        return on_channels(x, start, stop, change(x[..., start:stop]))

    return run


def _linear(change: Any) -> Any:
    """Return a change of operands: change(x, weight, bias) -> the arguments of the linear."""

    def run(call: Call, place: Place) -> Any:
        bias = call.argument(2, "bias")
        return F.linear(*change(call.tensor(0), call.tensor(1), bias))

    return run


def _channel(name: str, role: str, change: Any, width: int | None = 1, offset: int = 3) -> MachineFault:
    return MachineFault(f"{role}: {name}", GROUP, (output(role, _on_place(change, width, offset)),))


def _operands(name: str, role: str, change: Any, **more: Any) -> MachineFault:
    return MachineFault(f"{role}: {name}", GROUP, (Change(role, "linear", _linear(change)),), **more)


def _pattern_multiplier(pattern: int, factor: float) -> Any:
    def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        hit = top_mantissa_bits(weight, 3) == pattern
        return x, torch.where(hit, weight * factor, weight), bias

    return run


def _input_pattern(pattern: int, factor: float) -> Any:
    def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        hit = top_mantissa_bits(x, 3) == pattern
        return torch.where(hit, x * factor, x), weight, bias

    return run


def _dead_inputs(start: int, stop: int) -> Any:
    return lambda x, weight, bias: (on_channels(x, start, stop, 0.0), weight, bias)


def _every_row(step: int, change: Any, width: int) -> Any:
    def run(x: Tensor, place: Place) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).clone()
        rows[step - 1 :: step, place.start : place.start + width] = change(
            rows[step - 1 :: step, place.start : place.start + width]
        )
        return rows.view_as(x)

    return run


def _stale(call: Call, place: Place) -> Tensor:
    """One tile keeps what it held after the call before."""
    fresh = call.compute()
    key = ("stale", call.path, call.layer)
    tile = fresh[..., place.start + 4 : place.start + 12]
    old = call.memory.get(key)
    call.memory[key] = tile.detach().clone()
    if old is None or not old.numel() or not tile.numel():
        return fresh
    flat = old.flatten()
    count = -(-tile.numel() // flat.numel())
    return on_channels(fresh, place.start + 4, place.start + 12, flat.repeat(count)[: tile.numel()].view_as(tile))


_LINEARS = (
    _channel("exponent bit 1 stuck at 1, one channel", "q", lambda x: exponent_bit(x, 1, 1)),
    _channel("exponent bit 0 stuck at 0, one channel", "o", lambda x: exponent_bit(x, 0, 0)),
    _channel("exponent bit 0 stuck at 1, 8 channels", "down", lambda x: exponent_bit(x, 0, 1), 8),
    _channel("top mantissa bit stuck at 0, one channel", "k", lambda x: mantissa_bit(x, 1, 0)),
    _channel("top mantissa bit stuck at 1, one channel", "down", lambda x: mantissa_bit(x, 1, 1)),
    _channel("third mantissa bit stuck at 0, all channels of the head", "v", lambda x: mantissa_bit(x, 3, 0), 16, 0),
    _channel("second mantissa bit stuck at 1, 16 channels", "gate", lambda x: mantissa_bit(x, 2, 1), 16, 0),
    _channel("dead channel", "q", lambda x: x * 0),
    _channel("dead channel", "down", lambda x: x * 0),
    _channel("two dead channels", "up", lambda x: x * 0, 2, 5),
    _channel("channel stuck at a value", "v", lambda x: torch.full_like(x, 0.37)),
    _channel("sign of one channel inverted", "o", lambda x: -x),
    _channel("sign of one channel lost", "k", lambda x: x.abs()),
    _channel("two channels swapped", "q", lambda x: x.flip(-1), 2),
    _channel("two channels swapped", "down", lambda x: x.flip(-1), 2),
    _channel("8 channels shifted by one", "o", lambda x: x.roll(1, -1), 8, 0),
    _channel("tile of 16 reversed", "up", lambda x: x.flip(-1), 16, 0),
    _channel("channels of one head shifted by two", "k", lambda x: x.roll(2, -1), 16, 0),
    _channel("one head's channels halved", "q", lambda x: x * 0.5, 16, 0),
    _channel("one head's channels dead", "v", lambda x: x * 0, 16, 0),
    _channel("channel 1 % too large", "down", lambda x: x * 1.01),
    _channel("channel 25 % too large", "o", lambda x: x * 1.25),
    _channel("channel 10 % too small", "k", lambda x: x * 0.9),
    _channel("values above 1.5 clipped", "down", lambda x: x.clamp(-1.5, 1.5), 16, 0),
    _channel("values below 1/64 flushed to zero", "o", lambda x: torch.where(x.abs() < 1 / 64, 0 * x, x), 16, 0),
    _channel("values in [0.5, 1) 3 % off", "q", lambda x: windowed(x, 0.5, 1, 1.03), 16, 0),
    _channel("values in [2, 4) 6 % off", "gate", lambda x: windowed(x, 2, 4, 1.06), 16, 0),
    _channel("negative sums become zero", "v", lambda x: x.relu(), 1),
    _channel("constant added", "up", lambda x: x + 0.05, 4, 2),
    MachineFault(
        "down: every 8th row wrong in 4 channels", GROUP, (output("down", _every_row(8, lambda x: x * 0.5, 4)),)
    ),
    MachineFault("q: every 16th row dead in 8 channels", GROUP, (output("q", _every_row(16, lambda x: x * 0, 8)),)),
    MachineFault("o: last row of 32 shifted", GROUP, (output("o", _every_row(32, lambda x: x.roll(1, -1), 16)),)),
    MachineFault("up: tile keeps the result of the call before", GROUP, (Change("up", "linear", _stale),)),
    MachineFault("v: tile keeps the result of the call before", GROUP, (Change("v", "linear", _stale),)),
    _operands("multiplier 1/8 off for one bit pattern of the weights", "q", _pattern_multiplier(5, 1.125)),
    _operands("multiplier 1/8 off for one bit pattern of the weights", "down", _pattern_multiplier(3, 1.125)),
    _operands("multiplier 1/16 off for another pattern of the weights", "o", _pattern_multiplier(6, 0.9375)),
    _operands("multiplier 1/8 off for one bit pattern of the inputs", "v", _input_pattern(5, 1.125)),
    _operands("multiplier 1/4 off for one bit pattern of the inputs", "gate", _input_pattern(2, 0.75)),
    _operands("one input channel ignored", "down", _dead_inputs(17, 18)),
    _operands("one input channel ignored", "k", _dead_inputs(40, 41)),
    _operands("last 8 inputs ignored", "o", _dead_inputs(56, 64)),
    _operands("last 2 inputs ignored", "up", _dead_inputs(62, 64)),
    _operands("two inputs swapped", "q", lambda x, w, b: (x[..., _swapped(x.shape[-1])], w, b)),
    _operands("weights cut to 4 mantissa bits", "k", lambda x, w, b: (x, keep_mantissa(w, 4), b)),
    _operands("inputs cut to 4 mantissa bits", "up", lambda x, w, b: (keep_mantissa(x, 4), w, b)),
    _operands("bias ignored", "q", lambda x, w, b: (x, w, None), needs=("bias",)),
    _operands("bias added twice", "k", lambda x, w, b: (x, w, 2 * b), needs=("bias",)),
)


def _swapped(width: int) -> list[int]:
    order = list(range(width))
    order[10], order[11] = 11, 10
    return order


def _heads(change: Any) -> Any:
    """Return a change of the input of o_proj: what the heads give, [..., heads, head width]."""

    def run(call: Call, place: Place) -> Any:
        x = call.tensor(0)
        heads = x.view(*x.shape[:-1], -1, HEAD)
        bias = call.argument(2, "bias")
        return F.linear(change(heads, call).reshape(x.shape), call.tensor(1), bias)

    return run


def _dead_head(heads: Tensor, call: Call) -> Tensor:
    changed = heads.clone()
    changed[..., 2, :] = 0
    return changed


def _stale_head(heads: Tensor, call: Call) -> Tensor:
    old = call.memory.get("head")
    call.memory["head"] = heads[..., 1, :].detach().clone()
    if old is None:
        return heads
    changed, new = heads.clone(), heads[..., 1, :]
    flat = old.flatten()
    changed[..., 1, :] = flat.repeat(-(-new.numel() // flat.numel()))[: new.numel()].view_as(new)
    return changed


_HEAD_SITES = f"{INSIDE_ATTENTION}|o_proj|dense"
_SWAPPED_HEADS = [1, 0, 2, 3]


def _fused(name: str, *changes: Change, sites: str = "", **more: Any) -> MachineFault:
    return MachineFault(name, "fused kernels, heads, several", changes, sites, **more)


def _dead(role: str, offset: int = 3, **more: Any) -> Change:
    return output(role, _on_place(lambda x: x * 0, 1, offset), **more)


_FUSED = (
    _fused("dead head", Change("o", "linear", _heads(_dead_head)), sites=_HEAD_SITES),
    _fused("stale head", Change("o", "linear", _heads(_stale_head)), sites=_HEAD_SITES),
    _fused("heads swapped", Change("o", "linear", _heads(lambda h, c: h[..., _SWAPPED_HEADS, :])), sites=_HEAD_SITES),
    _fused("head 2 % too large", Change("o", "linear", _heads(lambda h, c: h * _scaled_head(h))), sites=_HEAD_SITES),
    _fused(
        "residual lost in one tile",
        output("layer", lambda x, place: on_channels(x, 8, 16, 0.0)),
        sites=RESIDUAL,
    ),
    _fused("one channel of the layer's output dead", _dead("layer", 11), sites=RESIDUAL),
    _fused(
        "channels of the layer's output swapped", output("layer", _on_place(lambda x: x.flip(-1), 2)), sites=RESIDUAL
    ),
    _fused(
        "gate and up swapped in one tile",
        result("mlp", "silu gelu", lambda x: x.roll(1, -1)),
        result("act", "silu gelu", lambda x: x.roll(1, -1)),
        sites=INSIDE_MLP,
    ),
    _fused("attention output channel dead", _dead("attention", 5), sites=f"attention_output|{_HEAD_SITES}"),
    _fused(
        "MLP output channel halved", output("mlp", _on_place(lambda x: x * 0.5, 1, 9)), sites="mlp|down|dense|c_proj"
    ),
    _fused("dead channels in q and down", _dead("q"), _dead("down", 7)),
    _fused("dead channels in o of this layer and k of the next", _dead("o"), _dead("k", 2, layer_offset=1)),
    _fused("first norm, v and o at once", _dead("norm1"), _dead("v", 1), _dead("o", 6)),
)


def _scaled_head(heads: Tensor) -> Tensor:
    factor = torch.ones(heads.shape[-2], 1, dtype=heads.dtype)
    factor[3] = 1.02
    return factor


FAULTS = _LINEARS + _FUSED
