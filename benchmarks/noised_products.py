"""Counts products and the part of them that has noise, independently of aqnpipe: from shapes, and from values.

Every product that reaches torch's dispatcher is kept with a copy of its output. Later the output, or a copy or sum that
was made of it, is compared with the copy: relative noise changed nearly all values by a few percent. Nothing is
taken from the code that puts the noise there, and no list of its functions is used.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Formula = Callable[..., int]


def _matrix(a: Tensor, b: Tensor, *rest: Any, **named: Any) -> int:
    return 2 * a.numel() * b.shape[-1]


def _sum_and_matrix(added: Tensor, a: Tensor, b: Tensor, *rest: Any, **named: Any) -> int:
    return _matrix(a, b)


def _vector(a: Tensor, b: Tensor, *rest: Any, **named: Any) -> int:
    return 2 * max(a.numel(), b.numel())


def _groups(a: Tensor, b: Tensor, *rest: Any, **named: Any) -> int:
    rows = prod(a.shape[:-1])
    return 2 * rows * a.shape[-1] * b.shape[-1]


def _convolution(x: Tensor, weight: Tensor, *rest: Any, **named: Any) -> int:
    return 2 * x.shape[0] * prod(x.shape[2:]) * weight.numel()


def _attention(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any) -> int:
    return 2 * prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _attention_backward(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any) -> int:
    # Scores once more; then gradients of values, probabilities, queries and keys.
    return 2 * prod(query.shape[:-1]) * key.shape[-2] * (3 * query.shape[-1] + 2 * value.shape[-1])


FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(("mm", "bmm", "_int_mm"), _matrix),
    **dict.fromkeys(("addmm", "baddbmm", "addbmm"), _sum_and_matrix),
    **dict.fromkeys(("mv", "dot", "vdot"), _vector),
    "_grouped_mm": _groups,
    "convolution": _convolution,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
}
"""Floating-point operations by operator of `torch.ops.aten`: a multiplication and an addition count as two."""

_PASSES_ON = frozenset({"clone", "_to_copy", "sum", "_unsafe_view"})
"""Operators whose output may get the noise in place of the product that it was made of."""


@dataclass
class _Product:
    flops: int
    outputs: list[list[tuple[Tensor, Tensor]]] = field(default_factory=list)
    noised: list[bool] = field(default_factory=list)

    def look(self) -> None:
        """Note which outputs, or tensors made of them, have changed as by noise."""
        for number, versions in enumerate(self.outputs):
            self.noised[number] = self.noised[number] or any(_has_noise(now, before) for now, before in versions)

    @property
    def is_noised(self) -> bool:
        return all(self.noised)


def _has_noise(now: Tensor, before: Tensor) -> bool:
    known = before != 0
    if not bool(known.any()):
        return True  # an output of zeros has no relative error
    errors = (now.detach()[known].double() / before[known].double()) - 1
    return float((errors != 0).double().mean()) > 0.9 and float(errors.square().mean().sqrt()) < 0.3


class ProductCount(TorchDispatchMode):
    """Counts products while it is active, into the section of that time (`sections`: name to products)."""

    def __init__(self) -> None:
        super().__init__()
        self.section = "other"
        self._products: dict[str, list[_Product]] = {}
        self._of_storage: dict[int, list[tuple[_Product, int]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`; keep its output if it is a product, or made of one."""
        inputs = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
        if func._schema.is_mutable:
            for product, _ in [made for tensor in inputs for made in self._made_of(tensor)]:
                product.look()
        output = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.namespace == "aten" and name in FORMULAS:
            self._keep(FORMULAS[name](*args, **(kwargs or {})), output, FORMULAS[name] is _attention)
        elif name in _PASSES_ON and isinstance(output, Tensor):
            made = [origin for tensor in inputs for origin in self._made_of(tensor)]
            for product, number in made:
                product.outputs[number].append((output, output.detach().clone()))
            self._of_storage.setdefault(_storage(output), []).extend(made)
        return output

    def _made_of(self, tensor: Tensor) -> list[tuple[_Product, int]]:
        return self._of_storage.get(_storage(tensor), [])

    def _keep(self, flops: int, output: Any, is_attention: bool) -> None:
        """Keep a product with all its outputs; an attention has sums for its backward pass beside its result."""
        product = _Product(flops)
        self._products.setdefault(self.section, []).append(product)
        results = tree_leaves(output)
        for tensor in results[:1] if is_attention else results:
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.ndim > 1:
                self._of_storage.setdefault(_storage(tensor), []).append((product, len(product.outputs)))
                product.outputs.append([(tensor, tensor.detach().clone())])
                product.noised.append(False)

    def share(self, section: str) -> float:
        """Return the share of the operations of a section that belong to products with noise."""
        products = self._products[section]
        for product in products:
            product.look()
        return sum(product.flops for product in products if product.is_noised) / sum(p.flops for p in products)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else 0
