"""Kernels of Triton that are launched without an operator of torch, which no dispatch mode sees."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any


class _Watched:
    """A handle: `remove` ends it."""

    def __init__(self, remove: Callable[[], None]) -> None:
        self.remove = remove


def watch_launches(note: Callable[[str], None]) -> list[Any]:
    """Call `note` with the name of every Triton kernel that others launch in this process; return the handles.

    aqnpipe's own kernels compute noise.
    """
    # Before Triton is imported, no kernel of it can have been defined.
    jit = sys.modules.get("triton.runtime.jit")
    if jit is None:
        return []
    function: Any = jit.JITFunction
    run = function.run

    @wraps(run)
    def noted(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        if not kernel.__module__.startswith(f"{__package__.partition('.')[0]}."):
            note(kernel.__name__)
        return run(kernel, *args, **kwargs)

    function.run = noted

    def restore() -> None:
        function.run = run

    return [_Watched(restore)]
