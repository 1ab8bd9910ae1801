"""Faults of embedding, final norm and lm_head, of experts and router."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from machine_faults.base import NORMS, Change, MachineFault, output, result
from machine_faults.bits import mantissa_bit, on_channels, windowed
from machine_faults.device import Call
from machine_faults.models import Place

ENDS = "embedding, final norm, lm_head"
EXPERTS = "experts and router"


def _end(name: str, role: str, change: Callable[[Tensor], Tensor]) -> MachineFault:
    return MachineFault(f"{role}: {name}", ENDS, (output(role, lambda x, place: change(x)),), where="ends")


def _ids(change: Callable[[Tensor], Tensor]) -> Change:
    def run(call: Call, place: Place) -> Any:
        return call.compute(change(call.tensor(0)), *call.args[1:])

    return Change("embedding", "embedding", run)


_ENDS = (
    _end("dead channel", "embedding", lambda x: on_channels(x, 9, 10, 0.0)),
    _end("third mantissa bit stuck at 0", "embedding", lambda x: mantissa_bit(x, 3, 0)),
    _end("8 channels shifted", "embedding", lambda x: on_channels(x, 0, 8, x[..., :8].roll(1, -1))),
    MachineFault(
        "embedding: ids from 200 on read the row before",
        ENDS,
        (_ids(lambda ids: torch.where(ids >= 200, ids - 1, ids)),),
        where="ends",
    ),
    MachineFault(
        "embedding: one row read for another",
        ENDS,
        (_ids(lambda ids: torch.where(ids == 77, ids + 1, ids)),),
        where="ends",
    ),
    _end("dead channel", "final_norm", lambda x: on_channels(x, 30, 31, 0.0)),
    _end("values in [1, 1.25) 3 % off", "final_norm", lambda x: windowed(x, 1, 1.25, 1.03)),
    MachineFault(
        "final norm: rsqrt 5 % off in [0.25, 4)",
        ENDS,
        (
            Change(
                "final_norm",
                "rsqrt",
                lambda call, place: torch.where(
                    (call.tensor(0) > 0.25) & (call.tensor(0) < 4), call.compute() * 1.05, call.compute()
                ),
            ),
        ),
        f"^norm$|final|{NORMS}",
        where="ends",
        needs=("rms",),
    ),
    _end("dead channel", "lm_head", lambda x: on_channels(x, 100, 101, 0.0)),
    _end("two channels swapped", "lm_head", lambda x: on_channels(x, 50, 52, x[..., 50:52].flip(-1))),
    _end(
        "second mantissa bit stuck at 0 in the last tile",
        "lm_head",
        lambda x: on_channels(x, 240, 256, mantissa_bit(x[..., 240:], 2, 0)),
    ),
    _end("last row of the vocabulary lost", "lm_head", lambda x: on_channels(x, 255, 256, -1.0)),
)


def _expert_rows(call: Call) -> list[tuple[int, slice]]:
    """Return the rows of each expert of a grouped product or of one expert's linear."""
    if call.op == "linear":
        weight = call.tensor(1)
        base = weight._base if weight._base is not None else weight
        if base.dim() != 3:
            return []
        return [((weight.storage_offset() - base.storage_offset()) // weight.numel(), slice(None))]
    offsets = call.argument(2, "offs")
    ends = offsets.tolist()
    return [(expert, slice(start, end)) for expert, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True))]


def _expert(index: int, number: int, change: Callable[[Tensor], Tensor]) -> Change:
    """Return a change of the product `number` (0: gate and up, 1: down) of one expert."""

    def run(call: Call, place: Place) -> Tensor:
        y = call.compute()
        if call.number % 2 != number or y.dim() != 2:
            return y
        for expert, rows in _expert_rows(call):
            if expert == index:
                y = y.clone()
                y[rows] = change(y[rows])
        return y

    return Change("experts", "_grouped_mm linear", run)


_ROUTER = "router|gate$|^gate|topk|softmax"
_MOE = ("mixtral", "qwen2_moe")


def _routing(name: str, op: str, change: Callable[[Tensor], Tensor]) -> MachineFault:
    return MachineFault(f"router: {name}", EXPERTS, (result("router", op, change),), _ROUTER, architectures=_MOE)


def _of_expert(name: str, index: int, number: int, change: Callable[[Tensor], Tensor]) -> MachineFault:
    return MachineFault(
        f"expert {index}: {name}",
        EXPERTS,
        (_expert(index, number, change),),
        "expert|gate_up|down_proj",
        architectures=_MOE,
    )


_EXPERTS = (
    _of_expert("dead channel of gate and up", 2, 0, lambda y: on_channels(y, 5, 6, 0.0)),
    _of_expert("dead channel of down", 1, 1, lambda y: on_channels(y, 12, 13, 0.0)),
    _of_expert("top mantissa bit of down stuck at 0", 3, 1, lambda y: mantissa_bit(y, 1, 0)),
    _of_expert("up 10 % off", 0, 0, lambda y: on_channels(y, 64, 96, y[..., 64:96] * 1.1)),
    _of_expert("output 5 % off", 3, 1, lambda y: y * 1.05),
    _of_expert("channels of down swapped", 2, 1, lambda y: on_channels(y, 4, 6, y[..., 4:6].flip(-1))),
    _routing("logit of one expert dead", "linear", lambda y: on_channels(y, 1, 2, 0.0)),
    _routing("logits of two experts swapped", "linear", lambda y: on_channels(y, 2, 4, y[..., 2:4].flip(-1))),
    _routing("probabilities 5 % off", "softmax", lambda p: windowed(p, 0.3, 0.6, 1.05)),
    _routing("logits in 3 mantissa bits", "linear", lambda y: mantissa_bit(mantissa_bit(y, 4, 0), 3, 0)),
    MachineFault(
        "shared expert: dead channel",
        EXPERTS,
        (output("shared", lambda x, place: on_channels(x, 20, 21, 0.0)),),
        "shared|mlp",
        architectures=("qwen2_moe",),
    ),
    MachineFault(
        "shared expert: gate 4 % off",
        EXPERTS,
        (output("shared_gate", lambda x, place: x * 1.04),),
        "shared|gate",
        architectures=("qwen2_moe",),
    ),
)


FAULTS = (*_ENDS, *_EXPERTS)
