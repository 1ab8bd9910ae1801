"""Healthy arithmetic that CPUs, GPUs and NPUs are known to do, emulated: none of it is a fault.

Products: other summation orders (split-K, stream-K, atomics), wider or truncating accumulators, TF32 where torch's
setting allows it. Functions: exp, rsqrt, reciprocal, sine off by 1 or 2 units in the last place. Settings: threads,
oneDNN, denormals.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from machine_faults.bits import forward_only, ulps
from machine_faults.device import Behaviour, Call, emulated
from machine_faults.flash import attention_scores
from machine_faults.models import ARCHITECTURES, DTYPES
from machine_faults.products import (
    atomics,
    pairwise,
    products,
    reduced_partials,
    running_sums,
    split_by_rows,
    split_k,
    stream_k,
    tf32,
    truncating,
    wide,
)


@dataclass(frozen=True)
class HealthyDevice:
    """Arithmetic of a healthy device: behaviours of all its operations, and settings of the process."""

    name: str
    behaviours: tuple[Behaviour, ...] = ()
    dtypes: tuple[str, ...] = DTYPES
    architectures: tuple[str, ...] = tuple(ARCHITECTURES)
    attention: str = "eager"
    emulated: bool = True
    settings: Callable[[], AbstractContextManager[Any]] = nullcontext

    def fits(self, name: str, dtype: str) -> bool:
        """Whether this arithmetic occurs with an architecture and dtype."""
        return name in self.architectures and dtype in self.dtypes

    @contextmanager
    def put_in(self, model: nn.Module) -> Iterator[None]:
        """Run `model` on this device."""
        with self.settings(), emulated(model, self.behaviours):
            yield


@contextmanager
def _tf32_allowed() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _without_onednn() -> AbstractContextManager[Any]:
    return torch.backends.mkldnn.flags(enabled=False)


@contextmanager
def _no_denormals() -> Iterator[None]:
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def _flushed(call: Call) -> Tensor:
    """Values below the smallest normal float32 become zero, in operands and results."""
    args = tuple(_no_subnormals(value) if isinstance(value, Tensor) else value for value in call.args)
    return _no_subnormals(call.compute(*args))


def _no_subnormals(x: Tensor) -> Tensor:
    if not x.is_floating_point() or x.dtype == torch.float16:
        return x
    return forward_only(x, torch.where(x.abs() < torch.finfo(torch.float32).tiny, torch.zeros_like(x), x))


_POINTWISE = frozenset({"linear", "matmul", "mul", "add", "silu", "gelu", "softmax", "pow", "mean"})


def _fast(largest: int) -> tuple[Behaviour, ...]:
    """Return behaviours of exp, reciprocal, rsqrt, tanh, sine and cosine off by up to `largest` ulp in float32."""

    def unary(function: Callable[[Tensor], Tensor]) -> Callable[[Call], Tensor]:
        return lambda call: function(call.tensor(0).float()).to(call.tensor(0).dtype)

    def sigmoid(x: Tensor) -> Tensor:
        return ulps(1 / (1 + ulps(torch.exp(-x), largest)), largest)

    def gelu(call: Call) -> Tensor:
        x = call.tensor(0).float()
        if call.kwargs.get("approximate") == "tanh":
            inner = 0.7978845608028654 * (x + 0.044715 * x**3)
            return (0.5 * x * (1 + ulps(torch.tanh(inner), largest))).to(call.tensor(0).dtype)
        return (0.5 * x * (1 + ulps(torch.erf(x * 0.7071067811865476), largest))).to(call.tensor(0).dtype)

    def softmax(call: Call) -> Tensor:
        x = call.tensor(0).float()
        e = ulps(torch.exp(x - x.amax(-1, keepdim=True)), largest)
        return (e * ulps(1 / e.flip(-1).sum(-1, keepdim=True), largest)).to(
            call.kwargs.get("dtype") or call.tensor(0).dtype
        )

    changes: dict[str, Callable[[Call], Tensor]] = {
        "silu": unary(lambda x: x * sigmoid(x)),
        "sigmoid": unary(sigmoid),
        "rsqrt": unary(lambda x: ulps(x.rsqrt(), largest)),
        "tanh": unary(lambda x: ulps(x.tanh(), largest)),
        "sin": unary(lambda x: ulps(x.sin(), largest)),
        "cos": unary(lambda x: ulps(x.cos(), largest)),
        "gelu": gelu,
        "softmax": softmax,
    }
    return tuple(Behaviour(frozenset({op}), change) for op, change in changes.items())


def _other_means() -> tuple[Behaviour, ...]:
    """Return behaviours of means and norms summed by 8 lanes and of softmax summed backwards."""

    def mean(call: Call) -> Tensor:
        x = call.tensor(0)
        lanes = x.unflatten(-1, (8, -1)).sum(-2) if x.shape[-1] % 8 == 0 else x
        return lanes.flip(-1).sum(-1, keepdim=True) / x.shape[-1]

    def layer_norm(call: Call) -> Tensor:
        x, eps = call.tensor(0).float(), call.argument(4, "eps")
        weight, bias = call.argument(2, "weight"), call.argument(3, "bias")
        mean_of = x.flip(-1).sum(-1, keepdim=True) / x.shape[-1]
        centred = x - mean_of
        y = centred * torch.rsqrt(centred.square().flip(-1).sum(-1, keepdim=True) / x.shape[-1] + eps)
        y = y * weight.float() if weight is not None else y
        return (y + bias.float() if bias is not None else y).to(call.tensor(0).dtype)

    return (Behaviour(frozenset({"mean"}), mean), Behaviour(frozenset({"layer_norm"}), layer_norm))


def _flash(block: int) -> tuple[Behaviour, ...]:
    """Return flash attention: blocks of keys with a running maximum, probabilities in the model's dtype.

    The maximum is a constant of the backward pass, as in every kernel: the result does not depend on it. Differentiated
    all the same, the roundings of a whole block would add up in the gradient of its maximum.
    """

    def run(call: Call) -> Tensor:
        scores, value = attention_scores(call)
        dtype = call.tensor(0).dtype
        top = torch.full_like(scores[..., :1], -1e30)
        total, result = torch.zeros_like(top), torch.zeros(1)
        for start in range(0, scores.shape[-1], block):
            part = scores[..., start : start + block]
            new = torch.maximum(top, part.amax(-1, keepdim=True)).detach()
            shrink, e = torch.exp(top - new), torch.exp(part - new)
            total = total * shrink + e.sum(-1, keepdim=True)
            result = result * shrink + e.to(dtype).float() @ value[..., start : start + block, :]
            top = new
        return (result / total).to(dtype)

    return (Behaviour(frozenset({"scaled_dot_product_attention"}), run),)


_SIXTEEN = ("bfloat16", "float16")
_SINGLE = ("float32",)

DEVICES: dict[str, HealthyDevice] = {
    device.name: device
    for device in (
        HealthyDevice("this CPU", emulated=False),
        HealthyDevice("this CPU, 2 threads", emulated=False, settings=lambda: _threads(2)),
        HealthyDevice(
            "this CPU without oneDNN", emulated=False, settings=lambda: torch.backends.mkldnn.flags(enabled=False)
        ),
        HealthyDevice("this CPU without denormals", emulated=False, settings=_no_denormals),
        HealthyDevice("this CPU, sdpa", emulated=False, attention="sdpa"),
        HealthyDevice("split-K of 2", products(split_k(2))),
        HealthyDevice("split-K of 4", products(split_k(4))),
        HealthyDevice("split-K of 8, backwards", products(split_k(8, backwards=True))),
        HealthyDevice("split-K of 5, uneven", products(split_k(5))),
        HealthyDevice("split-K by the number of rows", products(split_by_rows)),
        HealthyDevice("atomics of 4", products(atomics(4, obeys=False))),
        HealthyDevice("atomics of 8", products(atomics(8, obeys=False))),
        HealthyDevice("atomics of 4, deterministic on demand", products(atomics(4, obeys=True))),
        HealthyDevice("stream-K, tiles of 16", products(stream_k(16))),
        HealthyDevice("stream-K, tiles of 8", products(stream_k(8))),
        HealthyDevice("running sums of 4 products", products(running_sums(4))),
        HealthyDevice("running sums of 16 products", products(running_sums(16))),
        HealthyDevice("pairwise sums", products(pairwise)),
        HealthyDevice("wide accumulator", products(wide)),
        HealthyDevice("tensor core, truncating, 8 products", products(truncating(8))),
        HealthyDevice("tensor core, truncating, 16 products", products(truncating(16))),
        HealthyDevice("bias added after rounding", products(split_k(2), round_bias=True)),
        HealthyDevice("split-K with partial sums in 16 bits", products(reduced_partials), dtypes=_SIXTEEN),
        HealthyDevice("TF32, allowed by the setting", products(tf32), dtypes=_SINGLE, settings=_tf32_allowed),
        HealthyDevice("functions off by 1 ulp", _fast(1)),
        HealthyDevice("functions off by 2 ulp", _fast(2)),
        HealthyDevice("means in another order", _other_means()),
        HealthyDevice("flush to zero", (Behaviour(_POINTWISE, _flushed),)),
        HealthyDevice("GPU: stream-K, fast functions, means", (*products(stream_k(16)), *_fast(2), *_other_means())),
        HealthyDevice("NPU: atomics, fast functions", (*products(atomics(4, obeys=False)), *_fast(1))),
        HealthyDevice("flash attention, blocks of 16", _flash(16), attention="sdpa"),
        HealthyDevice("flash attention, blocks of 64, fast functions", (*_flash(64), *_fast(1)), attention="sdpa"),
    )
}

DIFFERENTIABLE = ("split-K of 4", "stream-K, tiles of 16", "running sums of 4 products")
REORDERINGS = (
    *DIFFERENTIABLE,
    "tensor core, truncating, 8 products",
    "functions off by 1 ulp",
    "means in another order",
)
"""Devices whose spread around this CPU is what the effect of a fault is compared with."""
