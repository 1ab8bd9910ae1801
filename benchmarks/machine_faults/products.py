"""Products of matrices in the summation orders and accumulators of healthy devices."""

from collections.abc import Callable
from itertools import pairwise as neighbours

import torch
from torch import Tensor

from machine_faults.bits import forward_only, keep_mantissa
from machine_faults.device import Behaviour, Call

Product = Callable[[Tensor, Tensor, Call], Tensor]
"""[..., m, k] @ [..., k, n] in float32, not yet rounded to the dtype of the model."""


def products(product: Product, *, round_bias: bool = False) -> tuple[Behaviour, ...]:
    """Return the behaviour of linear, matmul and grouped products with one way to multiply."""

    def multiply(a: Tensor, b: Tensor, call: Call) -> Tensor:
        return product(a.float(), b.float(), call)

    def run(call: Call) -> Tensor:
        x, other = call.tensor(0), call.tensor(1)
        if call.op == "matmul":
            return multiply(x, other, call).to(x.dtype)
        if call.op == "_grouped_mm":
            return _grouped(x, other, call, multiply).to(x.dtype)
        total = multiply(x, other.transpose(0, 1), call)
        bias = call.argument(2, "bias")
        if bias is None:
            return total.to(x.dtype)
        return total.to(x.dtype) + bias if round_bias else (total + bias.float()).to(x.dtype)

    return (Behaviour(frozenset({"linear", "matmul", "_grouped_mm"}), run),)


def _grouped(x: Tensor, weights: Tensor, call: Call, multiply: Product) -> Tensor:
    offsets = call.argument(2, "offs")
    ends = offsets.tolist()
    result = torch.zeros(x.shape[0], weights.shape[-1])
    for expert, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        if end > start:
            result[start:end] = multiply(x[start:end], weights[expert], call)
    return result


def _parts(a: Tensor, b: Tensor, bounds: list[int]) -> list[Tensor]:
    edges = [0, *bounds, a.shape[-1]]
    return [a[..., start:stop] @ b[..., start:stop, :] for start, stop in neighbours(edges) if stop > start]


def _even(size: int, splits: int) -> list[int]:
    step = -(-size // splits)
    return list(range(step, size, step))


def split_k(splits: int, *, backwards: bool = False) -> Product:
    """Return a product that adds `splits` partial sums in a fixed order."""

    def run(a: Tensor, b: Tensor, call: Call) -> Tensor:
        parts = _parts(a, b, _even(a.shape[-1], splits))
        return _sum(parts[::-1] if backwards else parts)

    return run


def _sum(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def atomics(splits: int, *, obeys: bool) -> Product:
    """Partial sums in a random order; in a fixed one where determinism was asked for, if the device obeys."""

    def run(a: Tensor, b: Tensor, call: Call) -> Tensor:
        parts = _parts(a, b, _even(a.shape[-1], splits))
        if obeys and torch.are_deterministic_algorithms_enabled():
            return _sum(parts)
        draws = call.memory.setdefault("atomics", torch.Generator().manual_seed(5))
        return _sum([parts[i] for i in torch.randperm(len(parts), generator=draws).tolist()])

    return run


def stream_k(tile: int) -> Product:
    """The place where the inner dimension is split depends on the tile of the output."""

    def run(a: Tensor, b: Tensor, call: Call) -> Tensor:
        size = a.shape[-1]
        results = [_sum(_parts(a, b, [cut])) for cut in (size // 4, size // 2, size // 2 + size // 3)]
        results.append(a @ b)
        rows = torch.arange(results[0].shape[-2])[:, None] // tile if results[0].dim() > 1 else torch.zeros(1, 1)
        columns = torch.arange(results[0].shape[-1])[None, :] // tile
        chosen = (rows * 3 + columns) % len(results)
        total = results[0]
        for number, other in enumerate(results[1:], start=1):
            total = torch.where(chosen == number, other, total)
        return total

    return run


def split_by_rows(a: Tensor, b: Tensor, call: Call) -> Tensor:
    """The number of splits depends on the number of rows, as kernels that are not batch invariant choose."""
    rows = a.numel() // a.shape[-1]
    return split_k(8 if rows < 16 else 4 if rows < 256 else 1)(a, b, call)


def running_sums(step: int) -> Product:
    """Return a product that adds the sums of `step` products to a running sum."""

    def run(a: Tensor, b: Tensor, call: Call) -> Tensor:
        return _sum(_parts(a, b, list(range(step, a.shape[-1], step))))

    return run


def wide(a: Tensor, b: Tensor, call: Call) -> Tensor:
    """Return the product with a float64 accumulator."""
    return (a.double() @ b.double()).float()


def truncating(step: int) -> Product:
    """Tensor cores: exact sums of `step` products, each addition to the running sum truncated to float32."""

    def run(a: Tensor, b: Tensor, call: Call) -> Tensor:
        total = torch.zeros(1)
        for part in _parts(a.double(), b.double(), list(range(step, a.shape[-1], step))):
            total = _toward_zero(total.double() + part)
        return total

    return run


def _toward_zero(exact: Tensor) -> Tensor:
    near = exact.float()
    smaller = torch.nextafter(near.detach(), torch.zeros_like(near))
    return forward_only(near, torch.where(near.double().abs() > exact.abs(), smaller, near))


def pairwise(a: Tensor, b: Tensor, call: Call) -> Tensor:
    """Return the product with 8 partial sums that are added in pairs."""
    parts = _parts(a, b, _even(a.shape[-1], 8))
    while len(parts) > 1:
        parts = [_sum(parts[i : i + 2]) for i in range(0, len(parts), 2)]
    return parts[0]


def reduced_partials(a: Tensor, b: Tensor, call: Call) -> Tensor:
    """Split-K whose partial sums are stored in the model's dtype (cuBLAS's default for 16-bit types)."""
    dtype = call.tensor(0).dtype
    return _sum([part.to(dtype).float() for part in _parts(a, b, _even(a.shape[-1], 2))])


def tf32(a: Tensor, b: Tensor, call: Call) -> Tensor:
    """Return the product of operands rounded to 10 mantissa bits."""
    return keep_mantissa(a.contiguous(), 10) @ keep_mantissa(b.contiguous(), 10)
