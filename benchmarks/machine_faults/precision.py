"""Faults of precision: accumulation in 16 bits, TF32 that nobody asked for, norms and softmax in 16 bits."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from machine_faults.base import INSIDE_ATTENTION, NORMS, RESIDUAL, Change, MachineFault, result
from machine_faults.bits import keep_mantissa
from machine_faults.device import Call
from machine_faults.models import Place

GROUP = "accumulation and precision"
_SIXTEEN = ("bfloat16", "float16")
_ANY_LINEAR = "_proj|dense|c_fc|qkv|query|linear|matmul|accumul"


def accumulated(x: Tensor, weight: Tensor, dtype: torch.dtype, step: int) -> Tensor:
    """Return x @ weight.T with a running sum that is rounded to `dtype` after every `step` products."""
    total = torch.zeros(*x.shape[:-1], weight.shape[0])
    for start in range(0, x.shape[-1], step):
        part = x[..., start : start + step].float() @ weight[:, start : start + step].float().T
        total = (total + part).to(dtype).float()
    return total.to(x.dtype)


def _narrow(dtype: torch.dtype, step: int) -> Any:
    def run(call: Call, place: Place) -> Tensor:
        bias = call.argument(2, "bias")
        total = accumulated(call.tensor(0), call.tensor(1), dtype, step)
        return total if bias is None else total + bias

    return run


def _cut(bits: int, both: bool = True) -> Any:
    def run(call: Call, place: Place) -> Tensor:
        bias = call.argument(2, "bias")
        x, weight = call.tensor(0), call.tensor(1)
        return F.linear(keep_mantissa(x, bits), keep_mantissa(weight, bits) if both else weight, bias)

    return run


def _fault(name: str, change: Change, sites: str = "", **more: Any) -> MachineFault:
    return MachineFault(name, GROUP, (change,), sites, **more)


def _half(x: Tensor) -> Tensor:
    return x.bfloat16().to(x.dtype)


def _softmax_16(call: Call, place: Place) -> Tensor:
    x = call.tensor(0)
    e = (x - x.amax(-1, keepdim=True)).bfloat16().exp()
    return (e / e.sum(-1, keepdim=True).bfloat16()).to(call.compute().dtype)


def _mean_16(call: Call, place: Place) -> Tensor:
    x = call.tensor(0).bfloat16()
    total = torch.zeros_like(x[..., :1])
    for channel in range(x.shape[-1]):
        total = total + x[..., channel : channel + 1]
    return (total / x.shape[-1]).to(call.tensor(0).dtype)


FAULTS = (
    _fault("down accumulates in bfloat16", Change("down", "linear", _narrow(torch.bfloat16, 1)), dtypes=("bfloat16",)),
    _fault("q accumulates in bfloat16", Change("q", "linear", _narrow(torch.bfloat16, 1)), dtypes=("bfloat16",)),
    _fault("down accumulates in float16", Change("down", "linear", _narrow(torch.float16, 1)), dtypes=("float16",)),
    _fault(
        "o accumulates in float16 per 4 products", Change("o", "linear", _narrow(torch.float16, 4)), dtypes=("float16",)
    ),
    _fault(
        "up accumulates in bfloat16 per 8 products",
        Change("up", "linear", _narrow(torch.bfloat16, 8)),
        dtypes=("bfloat16",),
    ),
    _fault(
        "gate accumulates in bfloat16 in a float32 model",
        Change("gate", "linear", _narrow(torch.bfloat16, 8)),
        dtypes=("float32",),
    ),
    _fault(
        "v accumulates in bfloat16 in a float16 model",
        Change("v", "linear", _narrow(torch.bfloat16, 4)),
        dtypes=("float16",),
    ),
    _fault(
        "every linear accumulates in 16 bits",
        Change("*", "linear", _narrow(torch.bfloat16, 1)),
        _ANY_LINEAR,
        where="device",
        dtypes=("bfloat16",),
    ),
    _fault(
        "every linear accumulates in float16",
        Change("*", "linear", _narrow(torch.float16, 1)),
        _ANY_LINEAR,
        where="device",
        dtypes=("float16",),
    ),
    _fault("q in TF32", Change("q", "linear", _cut(10)), dtypes=("float32",)),
    _fault("down in TF32", Change("down", "linear", _cut(10)), dtypes=("float32",)),
    _fault("every linear in TF32", Change("*", "linear", _cut(10)), _ANY_LINEAR, where="device", dtypes=("float32",)),
    _fault(
        "every linear in bfloat16 products",
        Change("*", "linear", _cut(7)),
        _ANY_LINEAR,
        where="device",
        dtypes=("float32",),
    ),
    _fault("up with 4-bit mantissas", Change("up", "linear", _cut(4))),
    _fault("k with inputs of 5 mantissa bits", Change("k", "linear", _cut(5, both=False))),
    _fault("norm1 adds squares in bfloat16", Change("norm1", "mean", _mean_16), NORMS, needs=("rms",)),
    _fault("norm2 takes the root in bfloat16", result("norm2", "rsqrt", _half), NORMS, needs=("rms",)),
    _fault("every norm takes the root in bfloat16", result("*", "rsqrt", _half), NORMS, needs=("rms",), where="device"),
    _fault("norm1 squares in bfloat16", result("norm1", "pow", _half), NORMS, needs=("rms",)),
    _fault("softmax in bfloat16", Change("attention", "softmax", _softmax_16), INSIDE_ATTENTION),
    _fault("residual in bfloat16", result("layer", "add", _half), RESIDUAL, dtypes=("float32", "float16")),
    _fault(
        "scores in bfloat16",
        result("attention", "matmul", _half, when=lambda call: call.number == 0),
        INSIDE_ATTENTION,
        dtypes=("float32", "float16"),
    ),
)
