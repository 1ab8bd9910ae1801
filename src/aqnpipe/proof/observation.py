"""Observations that an audit makes of one pass, and of the backward pass through its graph."""

import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from aqnpipe.models.parts import hooks_around
from aqnpipe.proof.operations import MatrixParameters
from aqnpipe.proof.quantized import Weights
from aqnpipe.proof.recompute import Shards

VISIT = 2**20
"""Numbers of the operators of a visit of a part."""


class Start(NamedTuple):
    """Where the forward pass was from a node on."""

    node: int
    passed: int
    part: int
    visit: int


@dataclass(slots=True)
class Visit:
    """A visit of a part; `calls` counts its operators, `others` products of no linear module.

    What follows an unknown operator in it is lost.
    """

    passed: int
    part: int
    calls: int
    is_again: bool
    is_lost: bool = False
    others: int = 0


@dataclass(slots=True)
class ResultCall:
    """A call of a module whose result has an error: `before` such results had been seen; `own`: what it computed."""

    before: int
    own: Any = None


@dataclass(slots=True)
class OutputCall:
    """Output of a module before its hooks, its version and the thresholds of its faults then; and `errors` on it since.

    An error is the place of it, and the values before and behind it.
    """

    own: Tensor
    version: int
    thresholds: dict[int, Tensor | None]
    errors: list[tuple[int, Tensor, Tensor]]


def is_same(one: Any, other: Any) -> bool:
    """Return whether two tensors have the same memory."""
    are_tensors = isinstance(one, Tensor) and isinstance(other, Tensor)
    return are_tensors and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def first_of(output: Any) -> Any:
    """Return the first of the outputs of a module."""
    return output[0] if isinstance(output, tuple) and output else output


class Observation:
    """Observations of one pass, and of the backward pass through its graph.

    `kind` is that of a pass observed as a whole, None if single parts are observed.
    """

    def __init__(self, observe: "Observe", kind: str | None, passed: int, outside: int) -> None:
        self.mode = Mode(observe)
        self.thread = threading.get_ident()
        self.kind = kind
        self.passed = passed
        self.is_on = False
        self.stack = [Visit(passed, outside, 0, False)]
        self.visits: Counter[int] = Counter()
        # By the number of the first node; None for nodes of other passes.
        self.starts: list[tuple[int, Start | None]] = []
        self.calls: dict[int, tuple[int, int, int]] = {}
        self.handles: list[Any] = []
        self.node = -1
        self.nth = 0
        self.weights = Weights()
        # Modules whose result has an error: results and gradients seen, calls that run, gradients to be seen.
        self.results = self.norm_gradients = self.expected_gradients = 0
        self.around_results: list[ResultCall] = []
        self.uncalled_norms: dict[nn.Module, str] = {}
        # Modules that run and compute one operator as a whole.
        self.inside_results = 0
        # Of the modules that run: the columns of results that a tensor-parallel worker has, and measured names.
        self.shards: list[Shards] = []
        self.names: list[str] = []
        # The latest such value before and after its error, and the latest value that got an error on a module.
        self.latest_result: tuple[Tensor, Tensor] | None = None
        self.with_module_error: Tensor | None = None
        self.operations = self.noised_operations = 0
        # Of the product that was observed last, and in inference mode, where nobody counts changes, values of it.
        self.latest: Tensor | None = None
        self.latest_values: Tensor | None = None
        self.module_results: dict[int, Tensor] = {}
        self.module_calls: Counter[tuple[int, int, bool]] = Counter()
        # The output whose hooks run at present, and the modules whose outputs were computed again.
        self.at_output: OutputCall | None = None
        self.compared_outputs: set[nn.Module] = set()

    def watch(self, module: nn.Module, *hooks: Callable[..., Any] | None, is_first: bool = True) -> None:
        """Register hooks on a module until the observation ends; see `hooks_around`."""
        self.handles += hooks_around(module, *hooks, is_first=is_first)

    def module_call(self, place: int) -> tuple[int | None, int]:
        """Return the pass of this call of a place with an error on a module, and its number in the pass from 0.

        The pass is None if a backward pass computes a layer of a pass again that was not observed.
        """
        node = torch._C._current_autograd_node()
        start = None if node is None else self.start_of(node._sequence_nr())
        passed = self.passed if node is None else start and start.passed
        key = -1 if passed is None else passed, place, node is not None
        self.module_calls[key] += 1
        return passed, self.module_calls[key] - 1

    def calls_of(self, place: int) -> int:
        """Return how often a place with an error on a module was called."""
        return sum(calls for (_, called, _), calls in self.module_calls.items() if called == place)

    def start_of(self, node: int) -> Start | None:
        """Return where the forward pass was when it made a node; None for nodes of other passes."""
        index = bisect_right(self.starts, node, key=itemgetter(0)) - 1
        return self.starts[index][1] if index >= 0 else None

    def note_start(self, passed: int | None, part: int, visit: int) -> None:
        """Note that the next nodes of the backward graph belong to a part."""
        if torch.is_grad_enabled():
            node = torch.autograd._get_sequence_nr()
            self.starts.append((node, None if passed is None else Start(node, passed, part, visit)))

    def next_visit(self, part: int) -> int:
        """Return the number of this visit of a part."""
        self.visits[part] += 1
        return self.visits[part] - 1

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
        self.latest = self.latest_values = None
        self.module_results.clear()
        self.latest_result = self.with_module_error = self.at_output = None


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


class AuditThread(threading.local):
    """Passes and observations of one thread."""

    def __init__(self) -> None:
        self.running: list[nn.Module] = []
        self.passes = -1
        self.current: Observation | None = None
        self.pending: Observation | None = None
        self.unobserved: list[Any] = []

    def close(self, *names: str) -> None:
        """End observations, by the names of their fields."""
        for name in names:
            if (observation := getattr(self, name)) is not None:
                observation.close()
                setattr(self, name, None)

    def forget_unobserved(self) -> None:
        """Remove the hook on a module of a pass that is not observed."""
        while self.unobserved:
            self.unobserved.pop().remove()


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
