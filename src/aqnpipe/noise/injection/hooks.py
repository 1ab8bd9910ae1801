"""Helpers for module hooks, used by all parts of an injection."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from aqnpipe.errors import ModelError


def keep(stack: ExitStack, handle: Any) -> None:
    """Remove the hook of `handle` when `stack` closes."""
    stack.callback(handle.remove)


def on_input(change: Callable[[Tensor], Tensor], module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Apply `change` to a module's first argument; ModelError if that is not a tensor."""
    if not args or not isinstance(args[0], Tensor):
        raise ModelError(
            f"{type(module).__name__} was called without a tensor as first argument; its input has no noise"
        )
    return (change(args[0]), *args[1:])


def on_output(change: Callable[[Tensor], Tensor], module: nn.Module, args: Any, output: Any) -> Any:
    """Apply `change` to a module's output, or to the first element of an output tuple."""
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)
