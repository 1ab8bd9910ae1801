"""Copies an attention module's own code, with another function in place of `torch.matmul`.

The module, its class and its Python module stay unchanged, so other threads and other models are not affected.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn

_EAGER = "eager_attention_forward"
"""Name of the function that computes eager attention, in the Python module of each transformers model."""


class _TorchWithMatmul:
    """The module torch with another `matmul`."""

    def __init__(self, matmul: Callable[..., Any]) -> None:
        self.matmul = matmul

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def attention_with(matmul: Callable[..., Any], module: nn.Module) -> Callable[..., Any] | None:
    """Return `module`'s forward with `matmul` in place of `torch.matmul`; None if it does not use eager attention.

    A module uses eager attention if its class has a plain forward that refers to transformers' eager function, and if
    that function refers to `torch.matmul`.
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
    """Return a function with the same code and other values for the global `names`."""
    copy = FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
