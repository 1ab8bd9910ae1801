"""What an audit observes of one pass, and of the backward pass through its graph."""

from bisect import bisect_right
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from aqnpipe.noise.audit.classification import MatrixParameters
from aqnpipe.proof.quantized import Weights


class Start(NamedTuple):
    """Where the forward pass was from a node on; `passed` is None for nodes of other passes."""

    node: int
    passed: int | None
    part: int
    visit: int


class Visit:
    """A visit of a part; `calls` counts its operators. What follows an unknown operator in it is lost."""

    __slots__ = ("calls", "is_again", "is_lost", "part", "passed")

    def __init__(self, passed: int, part: int, calls: int, is_again: bool) -> None:
        self.passed, self.part, self.calls, self.is_again = passed, part, calls, is_again
        self.is_lost = False


class Observation:
    """What is observed of one pass, and of the backward pass through its graph.

    `kind` is that of a pass observed as a whole, None if single parts are observed.
    """

    def __init__(self, observe: "Observe", kind: tuple[int, bool, bool] | None, passed: int, outside: int) -> None:
        self.mode = Mode(observe)
        self.kind = kind
        self.passed = passed
        self.is_on = False
        self.stack = [Visit(passed, outside, 0, False)]
        self.visits: dict[int, int] = {}
        self.starts: list[Start] = []
        self.calls: dict[int, tuple[int, int, int]] = {}
        self.handles: list[Any] = []
        self.node = -1
        self.nth = 0
        self.weights = Weights()
        # Norms that are modules: results and gradients seen, results seen before each that runs, gradients to be seen.
        self.norms = self.norm_gradients = self.expected_gradients = 0
        self.around_norms: list[int] = []

    def start_of(self, node: int) -> Start | None:
        """Return where the forward pass was when it made a node; None for nodes of other passes."""
        index = bisect_right([start.node for start in self.starts], node) - 1
        found = self.starts[index] if index >= 0 else None
        return None if found is None or found.passed is None else found

    def note_start(self, passed: int | None, part: int, visit: int) -> None:
        """Note that the next nodes of the backward graph belong to a part."""
        if torch.is_grad_enabled():
            self.starts.append(Start(torch.autograd._get_sequence_nr(), passed, part, visit))

    def next_visit(self, part: int) -> int:
        """Return the number of this visit of a part."""
        self.visits[part] = self.visits.get(part, -1) + 1
        return self.visits[part]

    def switch_on(self) -> None:
        """Observe this thread from now on."""
        self.mode.__enter__()
        self.is_on = True

    def switch_off(self) -> None:
        """Observe no longer."""
        if self.is_on:
            self.is_on = False
            self.mode.__exit__(None, None, None)

    def close(self) -> None:
        """Remove the hooks."""
        self.switch_off()
        for handle in self.handles:
            handle.remove()
        self.handles = []


class Mode(TorchDispatchMode):
    """Passes every operator of this thread to the audit."""

    supports_higher_order_operators = True

    def __init__(self, observe: "Observe") -> None:
        super().__init__()
        self._observe = observe
        self.parameters = MatrixParameters()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self._observe(self, func, types, args, kwargs or {})


Observe = Callable[[Mode, Any, Any, Any, Mapping[str, Any]], Any]
"""Runs an operator and looks at its result: mode, function, types, arguments, named arguments."""


def watch_backward(watched: Callable[[], AbstractContextManager[None]]) -> Callable[[], None]:
    """Run every backward pass of this process within `watched()`; return a function that ends it.

    torch runs all of them (`backward`, `autograd.grad`, those of reentrant checkpoints) through one Python function.
    """
    run = torch.autograd._engine_run_backward

    def run_watched(*args: Any, **kwargs: Any) -> Any:
        with watched():
            return run(*args, **kwargs)

    torch.autograd._engine_run_backward = run_watched

    def end() -> None:
        torch.autograd._engine_run_backward = run

    return end
