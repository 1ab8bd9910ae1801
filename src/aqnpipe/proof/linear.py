"""Linear modules, as the audit sees them by hooks.

In an observed pass the output of a linear module must be the result of the product that was observed in it: code in the
place of `torch.nn.functional.linear` may compute anything besides, of operators that are no products.

An observed pass can be told from others, because a dispatch mode is active. So in drawn passes that are not observed,
one linear module has a hook, and its output is recomputed like any other result. The number of its product among the
operators of its part is not known there, and may be any.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from aqnpipe.config.noise import FakeQuantization, MeasuredError
from aqnpipe.device import is_being_captured
from aqnpipe.models.parts import hooks_around
from aqnpipe.proof.observation import Observation, first_of, is_same
from aqnpipe.proof.request import AuditRequest

PLAIN = frozenset((Tensor, nn.Parameter))
"""Kinds of tensors whose operators are seen; subclasses compute with others."""

_KEPT_ROWS = 4

_VIEWS = ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0")


def linears_of(
    request: AuditRequest, modules: Mapping[int, nn.Module], names: Mapping[int, str]
) -> dict[nn.Module, tuple[int, str]]:
    """Return the linear modules of parts with their part and path; those of adapters and quantised ones are others."""
    if isinstance(request.error, MeasuredError | FakeQuantization):
        # Measured errors depend on the name of the operator, and those of operands on both factors.
        return {}
    if request.linears is not None:
        return {linear: place for linear, place in request.linears.items() if place[0] in modules}
    return {
        linear: (part, f"{names[part]}.{path}" if path else names[part])
        for part, module in modules.items()
        for path, linear in module.named_modules()
        if type(linear) is nn.Linear and type(linear.weight) in PLAIN
    }


def output_problem(observation: Observation, module: nn.Module, output: Any, is_first: bool) -> str | None:
    """Return what is wrong with the output of a linear module, ahead of its hooks if `is_first`, else behind them."""
    if type(output) not in PLAIN or not output.numel() or observation.stack[-1].is_lost:
        return None
    latest = observation.latest
    if is_same(latest, output):
        is_changed = bool(output._version) if not output.is_inference() else _has_changed(observation)
        return "was changed in place behind its product" if is_changed else None
    if is_first and not _is_sum(latest, getattr(module, "bias", None), output):
        return "is not the result of its product, so other code computes in its place"
    return None


def values_of(product: Tensor) -> Tensor:
    """Return a copy of some values of a product."""
    return product.detach()[:: max(len(product) // _KEPT_ROWS, 1)].clone()


def _has_changed(observation: Observation) -> bool:
    latest, before = observation.latest, observation.latest_values
    if latest is None or before is None:
        return False
    with _disable_current_modes():
        return not torch.equal(values_of(latest).nan_to_num(), before.nan_to_num())


def _is_sum(product: Tensor | None, bias: Any, output: Tensor) -> bool:
    """Return whether an output is a product and a bias: torch adds it apart where the input is not contiguous."""
    if product is None or not isinstance(bias, Tensor) or product.numel() != output.numel():
        return False
    with _disable_current_modes(), torch.no_grad():
        return torch.equal(product.reshape(output.shape) + bias.to(product.dtype), output)


def watch_unobserved(linear: nn.Module, part: nn.Module, compare: Callable[..., None]) -> list[Any]:
    """Register hooks for a call of a linear module within the next call of its part, and return their handles."""
    thread = threading.get_ident()
    inside: list[Any] = []

    def enter(*_: Any) -> None:
        if threading.get_ident() == thread and torch._C._current_autograd_node() is None:
            inside.extend(hooks_around(linear, own=leave_linear))

    def leave_linear(*call: Any) -> None:
        if threading.get_ident() == thread and inside:
            leave()
            compare(*call)

    def leave(*_: Any) -> None:
        if threading.get_ident() == thread:
            for handle in (*inside, *handles):
                handle.remove()
            inside.clear()

    handles = hooks_around(part, enter, None, leave, is_first=False)
    return handles


def product_node(output: Tensor) -> Any:
    """Return the node of the product that made the output of a linear module; None where there is none.

    Its hooks get the gradients of both factors, whatever else the program does with them.
    """
    node: Any = output.grad_fn
    while node is not None and node.name() in _VIEWS:
        node = node.next_functions[0][0]
    return node if node is not None and node.name() in ("MmBackward0", "AddmmBackward0") else None


def factors_of(module: nn.Module, args: tuple[Any, ...], output: Any) -> tuple[str, dict[str, Tensor], Tensor] | None:
    """Return the operator of a linear module, its arguments and its result as matrices.

    None if the product may have had other ones: of another number format, of one row, or weights that are elsewhere by
    now. None also for a result that a CUDA graph captures, which has no values yet.
    """
    weight: Any = getattr(module, "weight", None)
    bias: Any = None if getattr(module, "skip_bias_add", False) else getattr(module, "bias", None)
    inputs, output = args[0] if args else None, first_of(output)
    if (
        not isinstance(inputs, Tensor)
        or not isinstance(weight, Tensor)
        or not isinstance(output, Tensor)
        or inputs.dim() < 2
        or not inputs.dtype == weight.dtype == output.dtype
    ):
        return None
    if type(weight) not in PLAIN or weight.device != output.device or is_being_captured(output):
        return None
    with torch.no_grad():
        matrix = inputs.detach().reshape(-1, inputs.shape[-1])
        result = output.detach().reshape(-1, output.shape[-1])
        factors = {"first": matrix, "second": weight.detach().t()}
        return ("mm", factors, result) if bias is None else ("addmm", {"self": bias.detach(), **factors}, result)
