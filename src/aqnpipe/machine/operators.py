"""Replaces the kernels of torch's product operators by ones that pass their results to a function.

A noisy machine differs from a good one in what its operators return. torch's dispatcher holds one kernel per operator
and backend; `torch.library` replaces it for all threads of a process, below autograd and below dispatch modes. So the
forward pass, the backward pass, recomputation under checkpoints, adapters, sharded weights and `inference_mode` need
nothing of their own, and whoever looks from above (a dispatch mode) sees operands and results as a program does.

The replaced kernel calls the one that was registered before, which may itself be a replacement, such as a
batch-invariant product. A sum with a product (`addmm`) becomes the product, its error, and then the sum, because the
error belongs to the product alone. Operators that compute with other operators of this table inside (attention,
convolution) run those without an error.
"""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from aqnpipe.device import dispatch_keys
from aqnpipe.machine.quantized import mark_cast
from aqnpipe.noise.kernels.error_models import renormalise

OnResult = Callable[[str, Tensor, int, tuple[Tensor, ...]], Tensor]
"""Called with the name of an operator, its result, the number of terms of each sum, and its two factors where it is a
plain product of two; returns the result to use."""

OnOperands = Callable[[str, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Called with the name of a product and its two factors; returns the factors to use."""

Kernel = Callable[..., Any]
_aten = torch.ops.aten

PRODUCTS = ("mm", "bmm", "mv", "dot", "vdot", "_grouped_mm", "_scaled_mm", "_int_mm", "mm.dtype", "bmm.dtype")
"""Operators whose result is a product of their first two operands."""

_PLAIN = ("mm", "bmm")
"""Products whose kernels call no other operator of the table."""

SUMS = {"addmm": "mm", "baddbmm": "bmm", "addmv": "mv"}
"""Operators that add a tensor to a product, and the operator of that product."""

ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward",
    "_efficient_attention_forward",
)
"""Fused attention; the first result is a product of weights and values."""

ATTENTION_BACKWARD = (
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_cudnn_attention_backward",
    "_scaled_dot_product_fused_attention_overrideable_backward",
    "_flash_attention_backward",
    "_efficient_attention_backward",
)
"""Gradients of fused attention; the first three results are those of queries, keys and values."""

SOFTMAX = ("_softmax", "_safe_softmax")
"""Softmax; its error leaves a distribution, and its gradient is that of its exact result."""

ACTIVATIONS = ("silu", "gelu", "native_layer_norm", "silu_backward", "gelu_backward", "native_layer_norm_backward")
"""Activations and norms, and their gradients."""

INTO_ELEMENTWISE = ("silu_", "silu.out", "gelu_", "gelu.out", "_softmax.out")

INTO = (
    *("mm.out", "bmm.out", "mv.out", "dot.out", "vdot.out", "addmm.out", "baddbmm.out", "addmv.out", "addbmm.out"),
    *("addmm_", "baddbmm_", "addmv_", "addbmm_", "_addmm_activation.out", "_int_mm.out"),
    "_scaled_mm.out",
)
"""Operators that write into an existing tensor. They become the operator that returns a new one, and a copy."""


class _Inside(threading.local):
    """State of this thread: whether it computes inside an operator of the table."""

    def __init__(self) -> None:
        self.depth = 0


Build = Callable[["Registration", str, Kernel], Kernel]
"""Returns the kernel that replaces the native one of an operator."""


class Registration:
    """The replaced kernels of a process; `on_result` gets every result, from the first backend to the last `close`.

    `elementwise`: softmax, activations and norms too. `on_result` returns another tensor for a softmax that it changes.
    With `on_operands`, products have an error of their factors in place of their results. With `whole_sums`, a sum with
    a product is one operator, whose error includes what is added.
    """

    def __init__(
        self,
        on_result: OnResult,
        *,
        elementwise: bool = False,
        on_operands: OnOperands | None = None,
        whole_sums: bool = False,
    ) -> None:
        self._on_result = on_result
        self._whole_sums = whole_sums
        self._on_operands = on_operands
        self._table = {**_TABLE, **(_ELEMENTWISE_TABLE if elementwise else {}), **(_CASTS if on_operands else {})}
        self._inside = _Inside()
        self._library = torch.library.Library("aten", "IMPL")
        self._done: set[tuple[str, str]] = set()
        self._natives: dict[str, Kernel] = {}
        self.add_backends()

    def add_backends(self) -> None:
        """Replace the kernels of backends that are there now; one that is loaded later needs another call."""
        with warnings.catch_warnings():
            # torch warns of every replaced kernel, which is the purpose here.
            warnings.simplefilter("ignore")
            for backend in dispatch_keys():
                # All of them before the first is replaced: a sum with a product calls the product's.
                self._natives = {
                    name: kernel
                    for name in self._table
                    if (name, backend) not in self._done and (kernel := _kernel(name, backend)) is not None
                }
                for name, native in self._natives.items():
                    kernel = self._table[name](self, name, native)
                    self._library.impl(name, kernel, backend, with_keyset=True, allow_override=True)
                    self._done.add((name, backend))

    def close(self) -> None:
        """Restore the kernels."""
        self._library._destroy()

    @contextmanager
    def exactly(self) -> Iterator[None]:
        """Compute the body in this thread without errors, uncounted."""
        self._inside.depth += 1
        try:
            yield
        finally:
            self._inside.depth -= 1

    def _product(self, name: str, native: Kernel) -> Kernel:
        on_result, inside = self._on_result, self._inside
        operator = name.partition(".")[0]

        def product(keys: Any, first: Tensor, second: Tensor, *others: Any) -> Any:
            result = native(keys, first, second, *others)
            return result if inside.depth else on_result(operator, result, first.size(-1), (first, second))

        def composed(keys: Any, first: Tensor, *others: Any, **named: Any) -> Any:
            return self._noised(operator, self._alone(native, keys, first, *others, **named), first.shape[-1])

        def of_operands(keys: Any, first: Tensor, second: Tensor, *others: Any, **named: Any) -> Any:
            return self._alone(native, keys, *self._factors(operator, first, second), *others, **named)

        if self._on_operands is not None:
            return of_operands
        return product if operator in _PLAIN else composed

    def _apart_from_bias(self, name: str, native: Kernel, *, position: int) -> Kernel:
        """Return the kernel of a product of inputs and weight that adds the bias at this position of its operands."""

        def apart(keys: Any, *operands: Any) -> Any:
            bias = operands[position] if len(operands) > position else None
            weight = operands[1]
            result = self._alone(native, keys, *operands[:position], None, *operands[position + 1 :])
            result = self._noised(name, result, weight[0].numel())
            return result if bias is None else result.add_(bias.reshape(-1, *[1] * (weight.dim() - 2)))

        return apart

    def _sum(self, name: str, native: Kernel) -> Kernel:
        operator = SUMS[name]
        on_result, inside = self._on_result, self._inside
        product = getattr(_aten, operator).default
        # A backend may have the sum and not the product.
        multiply = self._natives.get(operator, lambda keys, first, second: product(first, second))
        if operator not in _PLAIN or operator not in self._natives:
            multiply = partial(self._alone, multiply)

        def added(keys: Any, added: Tensor, first: Tensor, second: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
            if inside.depth or not first.is_floating_point():
                return native(keys, added, first, second, beta=beta, alpha=alpha)
            if self._on_operands is not None:
                factors = self._factors(operator, first, second)
                return self._alone(native, keys, added, *factors, beta=beta, alpha=alpha)
            if self._whole_sums:
                result = self._alone(native, keys, added, first, second, beta=beta, alpha=alpha)
                return on_result(operator, result, first.size(-1), (first, second))
            result = on_result(operator, multiply(keys, first, second), first.size(-1), (first, second))
            return _plus(result, added, beta, alpha)

        return added

    def _sum_of_batch(self, name: str, native: Kernel) -> Kernel:
        def added(keys: Any, added: Tensor, first: Tensor, second: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
            return _plus(_aten.bmm.default(first, second).sum(0), added, beta, alpha)

        return added

    def _activated_sum(self, name: str, native: Kernel) -> Kernel:
        def activated(
            keys: Any, added: Tensor, first: Tensor, second: Tensor, *, beta: Any = 1, alpha: Any = 1, use_gelu: Any = 0
        ) -> Any:
            result = _aten.addmm.default(added, first, second, beta=beta, alpha=alpha)
            return torch.nn.functional.gelu(result, approximate="tanh") if use_gelu else result.relu_()

        return activated

    def _into(self, name: str, native: Kernel) -> Kernel:
        operator = getattr(_aten, name.partition(".")[0].rstrip("_")).default
        inside, writes_first = self._inside, name.endswith("_")

        def into(keys: Any, *operands: Any, out: Tensor | None = None, **named: Any) -> Any:
            if inside.depth:
                return native(keys, *operands, **named, **({} if out is None else {"out": out}))
            target = operands[0] if writes_first else out
            if name in INTO_ELEMENTWISE:
                # Elements are numbered row by row, whatever the memory of the target is like.
                operands = (operands[0].contiguous(), *operands[1:])
            result = operator(*operands, **named)
            return target if target is None else _written(target, result)

        return into

    def _several(self, name: str, native: Kernel, *, count: int) -> Kernel:
        """Return the kernel of an operator of which the first `count` results have an error, or its only one."""
        exact = _kernel(name.removesuffix("_backward"), "CPU") if name.endswith("_for_cpu_backward") else None

        def several(keys: Any, *operands: Any, **named: Any) -> Any:
            if exact is not None:
                # The gradient is of the exact attention, not of its error: the kernel's own output is made again.
                _, query, key, value, _, _, dropout, is_causal = operands[:8]
                output = self._alone(exact, keys, query, key, value, dropout, is_causal, **named)[0]
                operands = (*operands[:4], output, *operands[5:])
            results = self._alone(native, keys, *operands, **named)
            # Sums of as many terms as there are keys, for example; one alone is weighted with 1.
            if isinstance(results, Tensor):
                return self._noised(name, results, 2)
            found = (
                each if each is None or not each.numel() else self._noised(name, each, 2) for each in results[:count]
            )
            return (*found, *results[count:])

        return several

    def _softmax(self, name: str, native: Kernel) -> Kernel:
        def softmax(keys: Any, scores: Tensor, dim: int, *rest: Any) -> Tensor:
            exact: Tensor = self._alone(native, keys, scores, dim, *rest)
            noised = self._noised(name, exact, 2)
            if noised is exact:
                return exact
            noised = renormalise(noised, dim)
            if scores.requires_grad and torch.is_grad_enabled():
                # Autograd keeps the result of this kernel, which is not the one that the gradient needs.
                noised.untyped_storage()._aqnpipe_exact = exact  # type: ignore[attr-defined]
            return noised

        return softmax

    def _softmax_backward(self, name: str, native: Kernel) -> Kernel:
        def softmax_backward(keys: Any, gradient: Tensor, result: Tensor, *rest: Any) -> Tensor:
            exact = getattr(result.untyped_storage(), "_aqnpipe_exact", result)
            return self._noised(name, self._alone(native, keys, gradient, exact, *rest), 2)

        return softmax_backward

    def _cast(self, name: str, native: Kernel) -> Kernel:
        def cast(keys: Any, source: Any, *operands: Any, **named: Any) -> Tensor:
            if not isinstance(source, Tensor):
                # torch passes a tensor that stands for a Python number as that number.
                source = torch.tensor(source, dtype=torch.float64 if isinstance(source, float) else None)
            found: Tensor = native(keys, source, *operands, **named)
            mark_cast(source, found)
            return found

        return cast

    def _factors(self, operator: str, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        is_inside = self._inside.depth or self._on_operands is None or not first.is_floating_point()
        return (first, second) if is_inside else self._on_operands(operator, first, second)  # type: ignore[misc]

    def _alone(self, native: Kernel, keys: Any, *operands: Any, **named: Any) -> Any:
        """Run a kernel; operators of the table inside it have no error."""
        self._inside.depth += 1
        try:
            return native(keys, *operands, **named)
        finally:
            self._inside.depth -= 1

    def _noised(self, name: str, result: Tensor, num_terms: int) -> Tensor:
        return result if self._inside.depth else self._on_result(name, result, num_terms, ())


def _plus(product: Tensor, added: Tensor, beta: Any, alpha: Any) -> Tensor:
    """Return beta * added + alpha * product; `product` may be overwritten."""
    if alpha != 1:
        product = product.mul_(alpha)
    if not beta:
        return product
    # A bias has the last dimension alone. `torch.broadcast_shapes` would take longer than a small product.
    is_bias = added.dim() == 1 and product.dim() > 1 and added.shape[0] == product.shape[-1]
    if is_bias or added.shape == product.shape or product.shape == torch.broadcast_shapes(product.shape, added.shape):
        return product.add_(added) if beta == 1 else product.add_(added, alpha=beta)
    return product + beta * added


def _written(target: Tensor, result: Tensor) -> Tensor:
    if target.shape != result.shape:
        target.resize_(result.shape)
    return target.copy_(result)


def _kernel(name: str, backend: str) -> Kernel | None:
    """Return the kernel of a backend for an operator; None if it has none."""
    try:
        kernel: Kernel = torch.library.get_kernel(f"aten::{name}", backend).call_boxed
    except RuntimeError:
        # torch has no other way to ask.
        return None
    return kernel


_TABLE: dict[str, Build] = {
    **dict.fromkeys(PRODUCTS, Registration._product),
    "_scaled_mm": partial(Registration._apart_from_bias, position=4),
    **dict.fromkeys(SUMS, Registration._sum),
    "addbmm": Registration._sum_of_batch,
    "_addmm_activation": Registration._activated_sum,
    **dict.fromkeys(INTO, Registration._into),
    **dict.fromkeys(ATTENTION, partial(Registration._several, count=1)),
    **dict.fromkeys(ATTENTION_BACKWARD, partial(Registration._several, count=3)),
    "convolution": partial(Registration._apart_from_bias, position=2),
    "convolution_backward": partial(Registration._several, count=2),
}

_ELEMENTWISE_TABLE: dict[str, Build] = {
    **dict.fromkeys(SOFTMAX, Registration._softmax),
    "_softmax_backward_data": Registration._softmax_backward,
    **dict.fromkeys(ACTIVATIONS, partial(Registration._several, count=1)),
    "native_layer_norm_backward": partial(Registration._several, count=3),
    **dict.fromkeys(INTO_ELEMENTWISE, Registration._into),
}

ELEMENTWISE = frozenset({*SOFTMAX, "_softmax_backward_data", *ACTIVATIONS})
"""Names of softmax, activations, norms and their gradients."""

_CASTS: dict[str, Build] = {"_to_copy": Registration._cast}

NOISED = frozenset({*PRODUCTS, *ATTENTION, *ATTENTION_BACKWARD, "convolution", "convolution_backward"})
"""Names of the operators that have errors; the others of the table compute with them."""
