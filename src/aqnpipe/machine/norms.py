"""Norms that are modules: an operator for the result of a norm, and one for the gradient of its input.

An RMSNorm is several operators (pow, mean, rsqrt) of which none is the norm, so no kernel has its result. Hooks pass
the result of each norm through `aqnpipe::norm`, and the gradient of its input through `aqnpipe::norm_gradient`. Both
are operators of torch's dispatcher like any other: a machine replaces their kernels, and an audit sees them.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from aqnpipe.models.parts import PlaceHook

NORM, NORM_GRADIENT = "norm", "norm_gradient"

_DEFINED = torch.library.Library("aqnpipe", "FRAGMENT")
for _name in (NORM, NORM_GRADIENT):
    _DEFINED.define(f"{_name}(Tensor exact) -> Tensor")
    _DEFINED.impl(_name, torch.library.fallthrough_kernel, "Autograd")


class NormKernels:
    """The kernels of both operators; `on_result` gets a copy of every exact value by the name of the operator."""

    def __init__(self, on_result: Callable[[str, Tensor], Tensor]) -> None:
        self._library = torch.library.Library("aqnpipe", "IMPL")
        for name in (NORM, NORM_GRADIENT):
            kernel = partial(_on_a_copy, on_result, name)
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

    def _after(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        found: Tensor = _Result.apply(output)
        return found


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
