"""Faults of the KV cache, of decoding, of many rows and of many keys."""

from typing import Any

import torch
from torch import Tensor

from machine_faults.attention import (
    ROTARY,
    attention_fault,
    hidden_keys,
    on_keys,
    rotary,
    scores,
    softmax,
    softmax_input,
    weighted_values,
)
from machine_faults.base import INSIDE_CACHE, Change, MachineFault, output
from machine_faults.bits import keep_mantissa, mantissa_bit, on_channels
from machine_faults.device import Call
from machine_faults.models import Place

CACHE = "KV cache, decoding, shapes"


def _cached(change: Any) -> Change:
    """Return a change of keys (number 0) or values (number 1) read from the cache, [..., tokens, width]."""

    def run(call: Call, place: Place) -> Tensor:
        whole = call.compute()
        parts = call.args[0]
        is_cache = call.kwargs.get("dim", call.args[1] if len(call.args) > 1 else 0) == -2 and whole.dim() == 4
        if not is_cache or not parts[0].numel():
            return whole
        return change(whole, parts[0].shape[-2], call)

    return Change("attention", "cat", run)


def _decoding(call: Call) -> bool:
    """One query and several keys."""
    x = call.tensor(0)
    return x.dim() == 4 and x.shape[-2] == 1


def _lanes(x: Tensor, step: int, value: float) -> Tensor:
    changed = x.clone()
    changed[..., step - 1 :: step, :] *= value
    return changed


def _single_row(change: Any) -> Any:
    return lambda x, place: on_channels(
        x, place.start + 2, place.start + 6, change(x[..., place.start + 2 : place.start + 6])
    )


def _row_tile(change: Any, start: int) -> Any:
    def run(x: Tensor, place: Place) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).clone()
        rows[start:, place.start : place.start + 8] = change(rows[start:, place.start : place.start + 8])
        return rows.view_as(x)

    return run


def _many(call: Call) -> bool:
    return call.rows >= 512


def _long(call: Call) -> bool:
    return call.tensor(0).dim() == 4 and call.tensor(0).shape[-1] > 64


def _swapped_keys(x: Tensor, past: int, call: Call) -> Tensor:
    """Two keys change places and their values do not; keys come before values."""
    is_key = call.frame.setdefault("first cache", call.number) == call.number
    if past < 3 or not is_key:
        return x
    changed = x.clone()
    changed[..., 1, :], changed[..., 2, :] = x[..., 2, :], x[..., 1, :]
    return changed


FAULTS = (
    attention_fault(
        "cache: the last position of the past is lost",
        _cached(lambda w, past, call: _zero_at(w, past - 1)),
        group=CACHE,
        sites=INSIDE_CACHE,
    ),
    attention_fault(
        "cache: every 8th position is zero",
        _cached(lambda w, past, call: torch.cat([_lanes(w[..., :past, :], 8, 0.0), w[..., past:, :]], -2)),
        group=CACHE,
        sites=INSIDE_CACHE,
    ),
    attention_fault(
        "cache: values in 3 mantissa bits",
        _cached(lambda w, past, call: torch.cat([keep_mantissa(w[..., :past, :], 3), w[..., past:, :]], -2)),
        group=CACHE,
        sites=INSIDE_CACHE,
    ),
    attention_fault("cache: two keys swapped", _cached(_swapped_keys), group=CACHE, sites=INSIDE_CACHE),
    attention_fault(
        "cache: positions from the 64th on read one earlier",
        _cached(lambda w, past, call: torch.cat([w[..., :64, :], w[..., 63:-1, :]], -2) if past > 64 else w),
        group=CACHE,
        sites=INSIDE_CACHE,
    ),
    attention_fault(
        "cache: one channel of one head dead",
        _cached(lambda w, past, call: torch.cat([on_channels(w[..., :past, :], 3, 4, 0.0), w[..., past:, :]], -2)),
        group=CACHE,
        sites=INSIDE_CACHE,
    ),
    attention_fault(
        "decoding: softmax 3 % off with one query",
        softmax(lambda p: p * 1.03 if p.shape[-1] > 1 else p, when=_decoding),
        group=CACHE,
        sites=INSIDE_CACHE,
    ),
    attention_fault(
        "decoding: scores of the first 8 keys zero with one query",
        scores(lambda s: on_keys(s, slice(0, 8), 0.0) if s.shape[-2] == 1 and s.shape[-1] > 8 else s),
        group=CACHE,
        sites=INSIDE_CACHE,
    ),
    *(
        MachineFault(
            f"decoding: {role}, {name}, one row only",
            CACHE,
            (output(role, _single_row(change), when=lambda call: call.rows == 1),),
        )
        for role, name, change in (
            ("q", "dead channels", lambda x: x * 0),
            ("down", "channels halved", lambda x: x * 0.5),
            ("o", "top mantissa bit stuck at 0", lambda x: mantissa_bit(x, 1, 0)),
            ("v", "channels shifted", lambda x: x.roll(1, -1)),
            ("norm1", "channels 6 % off", lambda x: x * 1.06),
        )
    ),
    MachineFault(
        "decoding: up, channels dead with 2 to 8 rows",
        CACHE,
        (output("up", _single_row(lambda x: x * 0), when=lambda call: 2 <= call.rows <= 8),),
    ),
    *(
        MachineFault(
            f"rows from the 512th on: {role}, {name}", CACHE, (output(role, _row_tile(change, 512), when=_many),)
        )
        for role, name, change in (
            ("q", "tile dead", lambda x: x * 0),
            ("down", "tile 12 % off", lambda x: x * 1.12),
            ("o", "tile shifted", lambda x: x.roll(1, -1)),
            ("norm2", "tile 5 % off", lambda x: x * 1.05),
        )
    ),
    MachineFault(
        "512 rows and more: up, last row lost", CACHE, (output("up", _row_tile(lambda x: x * 0, -1), when=_many),)
    ),
    MachineFault(
        "512 rows and more: k, one channel halved", CACHE, (output("k", _single_row(lambda x: x * 0.5), when=_many),)
    ),
    attention_fault(
        "more than 64 keys: scores of later keys 10 % off",
        scores(lambda s: on_keys(s, slice(64, None), lambda c: c * 0.9) if s.shape[-1] > 64 else s),
        group=CACHE,
        sites=INSIDE_CACHE,
    ),
    attention_fault(
        "more than 64 keys: later keys hidden", softmax_input(hidden_keys(64, 1)), group=CACHE, sites=INSIDE_CACHE
    ),
    attention_fault(
        "more than 64 keys: softmax sums only 64",
        softmax(lambda p: p / p[..., :64].sum(-1, keepdim=True).clamp(min=0.2), when=_long),
        group=CACHE,
        sites=INSIDE_CACHE,
    ),
    attention_fault(
        "more than 64 keys: values of later keys zero",
        weighted_values(lambda p, v: (on_keys(p, slice(64, None), 0.0) if p.shape[-1] > 64 else p, v)),
        group=CACHE,
        sites=INSIDE_CACHE,
    ),
    attention_fault(
        "rotary: positions beyond 64 wrap around",
        rotary(
            lambda a: (
                torch.cat([a[..., :64, :], a[..., : a.shape[-2] - 64, :]], -2)
                if a.shape[-2] > 64 and a.shape[-2] <= 128
                else a
            )
        ),
        group=CACHE,
        sites=INSIDE_CACHE,
        **ROTARY,
    ),
)


def _zero_at(x: Tensor, position: int) -> Tensor:
    changed = x.clone()
    changed[..., position, :] = 0
    return changed
