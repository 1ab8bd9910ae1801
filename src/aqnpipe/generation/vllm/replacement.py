"""Replaces attributes of vLLM's modules for as long as noise is installed."""

from contextlib import ExitStack
from typing import Any


def replace(stack: ExitStack, owner: Any, name: str, value: object) -> None:
    """Set an attribute of `owner`; `stack` restores what the instance had, or removes what it had only of its class."""
    own = vars(owner)
    if name in own:
        stack.callback(setattr, owner, name, own[name])
    else:
        stack.callback(delattr, owner, name)
    setattr(owner, name, value)
