"""A copy of an attention module's own code in which `torch.matmul` is another function.

Nothing of the module, its class or its Python module is changed, so other threads and other models see nothing of it.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn

_EAGER = "eager_attention_forward"
"""The function that multiplies for eager attention, by its name in the Python module of each model of transformers."""


class _TorchWithMatmul:
    """The module torch, but for `matmul`."""

    def __init__(self, matmul: Callable[..., Any]) -> None:
        self.matmul = matmul

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def attention_with(matmul: Callable[..., Any], module: nn.Module) -> Callable[..., Any] | None:
    """Return `module`'s forward with `matmul` for `torch.matmul` in eager attention; None if it is no such attention.

    It is one if its class has a plain forward that names transformers' eager function, and that names `torch.matmul`.
    """
    forward = type(module).forward
    if not isinstance(forward, FunctionType) or _EAGER not in forward.__code__.co_names:
        return None
    eager = forward.__globals__.get(_EAGER)
    if not isinstance(eager, FunctionType) or not {"torch", "matmul"} <= set(eager.__code__.co_names):
        return None
    multiplying = _rebound(eager, {"torch": _TorchWithMatmul(matmul)})
    return partial(_rebound(forward, {_EAGER: multiplying}), module)


def _rebound(function: FunctionType, names: Mapping[str, Any]) -> FunctionType:
    """Return a function of the same code in which global `names` mean something else."""
    copy = FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
