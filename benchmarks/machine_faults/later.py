"""Faults that were invented after the probes, with own hooks, to see what the diagnosis had not been built for.

Of the 42 that were tried (five architectures), eight were missed at first: keys in whole tiles, the fifth sequence of a
batch, 64 to 127 rows, the sum over experts (twice), one head of a norm, and logits behind a cap. Probes of their
classes were added then, so the rows here say what is found now and not how often a new fault is missed.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from machine_faults.attention import attention_fault, scores, softmax, weighted_values
from machine_faults.base import INSIDE_ATTENTION, RESIDUAL, Change, MachineFault, output
from machine_faults.bits import exponent_bit, on_channels
from machine_faults.device import Call
from machine_faults.models import HEAD, Place

GROUP = "invented later"
_FIVE = ("llama", "qwen3", "gemma2", "qwen2_moe", "gpt_neox")
_MOE = ("mixtral", "qwen2_moe")
_FULL = 16


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _linear(name: str, role: str, change: Any, **more: Any) -> MachineFault:
    """Return a fault of a linear: change(x, y, call) of the input, the healthy output and the call."""

    def run(call: Call, place: Place) -> Tensor:
        y = call.compute()
        return change(call.tensor(0), y.clone(), call).view_as(y)

    more = {"architectures": _FIVE, **more}
    return MachineFault(f"{role}: {name}", GROUP, (Change(role, "linear", run),), **more)


def _negative(x: Tensor, y: Tensor, call: Call) -> Tensor:
    return y + 0.1 * F.linear(x.clamp(max=0), call.tensor(1))


def _odd_rows(x: Tensor, y: Tensor, call: Call) -> Tensor:
    _rows(y)[1::2, 5::16] += 0.05
    return y


def _last_row(x: Tensor, y: Tensor, call: Call) -> Tensor:
    _rows(y)[-1] *= 1.15
    return y


def _toward_zero(x: Tensor, y: Tensor, call: Call) -> Tensor:
    bias = call.argument(2, "bias")
    exact = F.linear(x.double(), call.tensor(1).double(), None if bias is None else bias.double())
    below = (y.view(torch.int16) - 1).view(y.dtype)
    return torch.where(y.double().abs() > exact.abs(), below, y)


def _transposed(x: Tensor, y: Tensor, call: Call) -> Tensor:
    rows = _rows(y)
    whole = len(rows) // 4 * 4
    if whole:
        rows[:whole, :4] = rows[:whole, :4].reshape(-1, 4, 4).transpose(1, 2).reshape(-1, 4)
    return y


def _stale_row(x: Tensor, y: Tensor, call: Call) -> Tensor:
    row = call.memory.setdefault(("stale row", call.layer, call.path), call.tensor(1)[9].detach().clone())
    y[..., 9] = x @ row.to(x.dtype)
    return y


def _two_inputs(x: Tensor, y: Tensor, call: Call) -> Tensor:
    near = ((x[..., 2:4].abs() > 0.3) & (x[..., 2:4].abs() < 1.2)).all(-1)
    y[..., 5] = torch.where(near, y[..., 5] * 1.3, y[..., 5])
    return y


def _many_large(x: Tensor, y: Tensor, call: Call) -> Tensor:
    many = (x.abs() > 0.2).double().mean(-1) > 0.6
    y[..., 20:24] = torch.where(many.unsqueeze(-1), y[..., 20:24] * 1.1, y[..., 20:24])
    return y


def _heads_swapped(call: Call, place: Place) -> Tensor:
    parts = list(call.tensor(0).split(HEAD, -1))
    parts[0], parts[1] = parts[1], parts[0]
    return call.compute(torch.cat(parts, -1), *call.args[1:])


def _last_value_lost(multiple: int) -> Any:
    def run(p: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if p.shape[-1] % multiple:
            return p, v
        lost = v.clone()
        lost[..., -1, :] = 0
        return p, lost

    return run


def _fifth_sequence(s: Tensor) -> Tensor:
    if s.shape[0] <= 4 or s.shape[-1] < 2:
        return s
    return torch.cat([s[:4], s[4:] * 1.2])


def _one_head(p: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    if p.shape[-2] != 1 or p.shape[-1] < 2:
        return p, v
    return torch.cat([p[:, :1], p[:, 1:2] * 0.9, p[:, 2:]], 1), v


def _without_maximum(call: Call, place: Place) -> Tensor:
    like = call.compute()
    powers = call.tensor(0).to(like.dtype).exp()
    return powers / powers.sum(-1, keepdim=True)


def _small_shares(call: Call, place: Place) -> Any:
    x, share = call.args[0], call.args[1]
    if not isinstance(share, Tensor) or share.shape[-1] != 1:
        return call.compute()
    return call.compute(x, torch.where(share < 0.4, 0.0, share))


def _one_head_of_norm(x: Tensor, place: Place) -> Tensor:
    if x.dim() != 4 or x.shape[-2] < 2:
        return x
    return torch.cat([x[..., :1, :], x[..., 1:2, :] * 1.06, x[..., 2:, :]], -2)


def _attention(name: str, *changes: Change) -> MachineFault:
    return attention_fault(
        name, *changes, group=GROUP, sites=f"{INSIDE_ATTENTION}|cache", architectures=_FIVE, needs=()
    )


FAULTS = (
    _linear("products of negative inputs 10 % off", "q", _negative),
    _linear("values above 2 are 7 % small", "gate", lambda x, y, call: torch.where(y.abs() > 2, y * 0.93, y)),
    _linear("one lane of 16 off in odd rows", "o", _odd_rows),
    _linear("last row of a batch 15 % off", "up", _last_row),
    _linear("values saturate at 3", "o", lambda x, y, call: y.clamp(-3, 3)),
    _linear(
        "lowest exponent bit stuck at 1, one channel",
        "down",
        lambda x, y, call: on_channels(y, 11, 12, exponent_bit(y[..., 11:12], 0, 1)),
    ),
    _linear("rounding toward zero", "up", _toward_zero, dtypes=("bfloat16", "float16")),
    _linear("lanes of 4 x 4 tiles transposed", "k", _transposed),
    _linear("stale row of the weight", "down", _stale_row, architectures=("llama", "qwen3", "gemma2")),
    _linear("one channel off if two inputs are near 1", "up", _two_inputs),
    _linear("channels 10 % off if most inputs are not small", "q", _many_large),
    _linear(
        "64 to 127 rows: channels 10 % off",
        "down",
        lambda x, y, call: on_channels(y, 4, 12, y[..., 4:12] * 1.1) if 64 <= call.rows < 128 else y,
    ),
    _linear(
        "values in [0.5, 0.53) 25 % off",
        "o",
        lambda x, y, call: torch.where((y.abs() >= 0.5) & (y.abs() < 0.53), y * 1.25, y),
    ),
    MachineFault(
        "o: order of two heads swapped",
        GROUP,
        (Change("o", "linear", _heads_swapped),),
        f"{INSIDE_ATTENTION}|o_proj|dense$",
        architectures=_FIVE,
    ),
    MachineFault(
        "residual sum in bfloat16",
        GROUP,
        (output("layer", lambda y, place: y.bfloat16().to(y.dtype)),),
        RESIDUAL,
        dtypes=("float32", "float16"),
        architectures=_FIVE,
    ),
    MachineFault(
        "norm1: epsilon too large",
        GROUP,
        (Change("norm1", "rsqrt", lambda call, place: call.compute(call.tensor(0) + 1e-2)),),
        needs=("rms",),
        architectures=_FIVE,
    ),
    MachineFault(
        "q_norm: one head 6 % off", GROUP, (output("q_norm", _one_head_of_norm),), architectures=("qwen3", "gemma3")
    ),
    MachineFault(
        "act: zero below -2",
        GROUP,
        (Change("act", "silu", lambda call, place: torch.where(call.tensor(0) < -2, 0.0, call.compute())),),
        "act|mlp_core|experts",
        needs=("silu",),
        architectures=_FIVE,
    ),
    MachineFault(
        "experts: shares below 0.4 are lost",
        GROUP,
        (Change("experts", "mul __mul__", _small_shares),),
        "experts|mlp",
        architectures=_MOE,
    ),
    MachineFault(
        "lm_head: channels 10 % off with one token",
        GROUP,
        (output("lm_head", lambda y, place: on_channels(y, 32, 40, y[..., 32:40] * 1.1) if y.shape[-2] == 1 else y),),
        where="ends",
        architectures=_FIVE,
    ),
    MachineFault(
        "logits behind the cap 2 % off",
        GROUP,
        (Change("*", "tanh", lambda call, place: call.compute() * 1.02, when=lambda call: not call.path),),
        "lm_head|logits",
        where="ends",
        architectures=("gemma2",),
    ),
    _attention("decoding: one head 10 % small", weighted_values(_one_head)),
    _attention("multiples of 16 keys: last value lost", weighted_values(_last_value_lost(_FULL))),
    _attention("multiples of 64 keys: last value lost", weighted_values(_last_value_lost(4 * _FULL))),
    _attention("sequences from the fifth on: scores 20 % large", scores(_fifth_sequence)),
    _attention("softmax without the largest score", Change("attention", "softmax", _without_maximum)),
    _attention("probabilities below 2 % are lost", softmax(lambda p: torch.where(p < 0.02, 0.0, p))),
)
