"""Results of modules that no operator of torch returns: of norms, and of what an inference engine computes whole.

An RMSNorm is several operators (pow, mean, rsqrt) of which none is the norm, so no kernel has its result. Hooks pass
the result of each norm through `aqnpipe::norm`, and the gradient of its input through `aqnpipe::norm_gradient`. Both
are operators of torch's dispatcher like any other: a machine replaces their kernels, and an audit sees them. The same
for attention as an engine computes it, in kernels of its own over its cache, and for a product that tensor-parallel
workers add up: its error belongs to the sum, which all of them have.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from aqnpipe.models.parts import PlaceHook

NORM, NORM_GRADIENT, ATTENTION, SUM = "norm", "norm_gradient", "attention", "sum"
_OPERATOR = {SUM: "mm"}
"""Names of operators in receipts where they differ: a sum over workers is the product of one."""

_DEFINED = torch.library.Library("aqnpipe", "FRAGMENT")
for _name in (NORM, NORM_GRADIENT, ATTENTION, SUM):
    _DEFINED.define(f"{_name}(Tensor exact) -> Tensor")
    _DEFINED.impl(_name, torch.library.fallthrough_kernel, "Autograd")


class NormKernels:
    """The kernels of these operators; `on_result` gets a copy of every exact value by the name of the operator."""

    def __init__(self, on_result: Callable[[str, Tensor], Tensor]) -> None:
        self._library = torch.library.Library("aqnpipe", "IMPL")
        for name in (NORM, NORM_GRADIENT, ATTENTION, SUM):
            kernel = partial(_on_a_copy, on_result, _OPERATOR.get(name, name))
            self._library.impl(name, kernel, "CompositeExplicitAutograd")
        self.is_open = True

    def close(self) -> None:
        """Remove the kernels. What a backward pass computes later is exact."""
        self.is_open = False
        self._library._destroy()

    def hooks(self, norms: Iterable[nn.Module], *, backward: bool) -> list[Any]:
        """Register the hooks of norms and return their handles."""
        handles: list[Any] = []
        for norm in norms:
            if backward:
                handles.append(norm.register_forward_pre_hook(PlaceHook(self._before), with_kwargs=True))
            handles.append(norm.register_forward_hook(PlaceHook(self._after)))
        return handles

    def result_hooks(self, modules: Mapping[nn.Module, str]) -> list[Any]:
        """Register the hooks of modules that compute one operator as a whole, by its name, and return their handles."""
        return [
            module.register_forward_hook(PlaceHook(partial(_with_error, getattr(torch.ops.aqnpipe, name))))
            for module, name in modules.items()
        ]

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if not torch.is_grad_enabled():
            return None
        if args:
            return ((_Input.apply(args[0], self), *args[1:]), kwargs) if args[0].requires_grad else None
        wrapped = {
            name: _Input.apply(value, self) if isinstance(value, Tensor) and value.requires_grad else value
            for name, value in kwargs.items()
        }
        return args, wrapped

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        return _with_error(_Result.apply, module, args, output)


def _with_error(operator: Callable[[Tensor], Tensor], module: nn.Module, args: Any, output: Any) -> Any:
    """Pass the output through an operator; a norm of an engine returns the sum of its inputs beside it."""
    return (operator(output[0]), *output[1:]) if isinstance(output, tuple) else operator(output)


def _on_a_copy(on_result: Callable[[str, Tensor], Tensor], name: str, exact: Tensor) -> Tensor:
    return on_result(name, exact.detach().clone())


class _Result(torch.autograd.Function):
    """The result of a norm; its gradient passes straight through."""

    @staticmethod
    def forward(ctx: Any, exact: Tensor) -> Tensor:
        found: Tensor = torch.ops.aqnpipe.norm(exact)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class _Input(torch.autograd.Function):
    """The input of a norm, unchanged; the gradient that the norm has computed of it is a result of the machine."""

    @staticmethod
    def forward(ctx: Any, exact: Tensor, kernels: NormKernels) -> Tensor:
        ctx.kernels = kernels
        return exact.view_as(exact)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        exact = gradients[0]
        return (torch.ops.aqnpipe.norm_gradient(exact) if ctx.kernels.is_open else exact), None
