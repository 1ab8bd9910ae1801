"""Small things that every part of an injection does with module hooks."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from aqnpipe.errors import ModelError


def keep(stack: ExitStack, handle: Any) -> None:
    """Let `stack` remove the hook behind `handle`."""
    stack.callback(handle.remove)


def on_input(changed: Callable[[Tensor], Tensor], module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Pass a module's first argument through `changed`; ModelError if that is not a tensor."""
    if not args or not isinstance(args[0], Tensor):
        raise ModelError(
            f"{type(module).__name__} was called without a tensor as first argument; its input has no noise"
        )
    return (changed(args[0]), *args[1:])


def on_output(changed: Callable[[Tensor], Tensor], module: nn.Module, args: Any, output: Any) -> Any:
    """Pass a module's output through `changed`, or the first part of an output of several."""
    return (changed(output[0]), *output[1:]) if isinstance(output, tuple) else changed(output)
