"""Errors on the input or the output of whole modules, and AQN's noise on hidden states.

They belong to modules and not to operators of torch, so hooks pass the tensor through an operator of this package,
`aqnpipe::module_error`, whose kernel puts the error on a copy. An audit sees it like any other operator.

Definition of the keys, which the audit derives a second time: the error at a numbered place has the seed of (stream,
step, micro_step, rank, pass, place), call n for the n-th call of the place in the pass from 0, stream 8. Passes are
those of `machine/places.py`. A layer that a backward pass computes again begins to count again.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aqnpipe.config.custom_code import CustomError
from aqnpipe.config.noise import TensorError
from aqnpipe.machine.machine import Noised, NoiseKey
from aqnpipe.noise.kernels.error_models import apply_error_
from aqnpipe.noise.kernels.gaussian import NoiseStream
from aqnpipe.noise.kernels.shards import apply_error_to_shards_

_STREAM = 8
_KEPT_PASSES = 256
"""Passes whose calls are counted: threads compute passes at the same time, and backward passes earlier ones."""

_DEFINED = torch.library.Library("aqnpipe", "FRAGMENT")
_DEFINED.define("module_error(Tensor exact, int place) -> Tensor")
_DEFINED.impl("module_error", torch.library.fallthrough_kernel, "Autograd")


class ModuleError(NamedTuple):
    """The error at one place: `operator` names it in receipts, `stream` its random numbers.

    `shards`: the columns that a tensor-parallel worker has of the tensor; None if it has all.
    """

    operator: str
    error: TensorError
    stream: str
    shards: Any = None


@dataclass
class ModuleErrors:
    """The errors of modules by the number of their place. `note` gets every tensor that has one, its pass and its call.

    `passed` returns the number of the pass that this thread computes, or computes again. `exactly`: a noisy machine
    computes exactly in its body.
    """

    errors: Mapping[int, ModuleError]
    key: NoiseKey
    passed: Callable[[], int]
    note: Callable[[int, Noised, Tensor, int, int], None]
    exactly: Callable[[], AbstractContextManager[None]] = nullcontext
    _calls: dict[int, Counter[tuple[int, bool]]] = field(default_factory=dict)
    _library: torch.library.Library | None = None

    def start(self) -> None:
        """Register the kernel."""
        self._library = torch.library.Library("aqnpipe", "IMPL")
        self._library.impl("module_error", self._kernel, "CompositeExplicitAutograd")

    def put(self, place: int, exact: Tensor) -> Tensor:
        """Return `exact` with the error of a place; gradients pass straight through."""
        found: Tensor = _WithError.apply(exact, place)
        return found

    def close(self) -> None:
        """Remove the kernel."""
        if self._library is not None:
            self._library._destroy()
            self._library = None

    def _kernel(self, exact: Tensor, place: int) -> Tensor:
        with self.exactly():
            values = exact.detach().clone()
            is_again = torch._C._current_autograd_node() is not None
            passed = self.passed()
            calls = self._calls.setdefault(passed, Counter())
            if len(self._calls) > _KEPT_PASSES:
                del self._calls[next(iter(self._calls))]
            call = calls[place, is_again]
            calls[place, is_again] += 1
            operator, error, stream, shards = self.errors[place]
            source = NoiseStream(self.key.derived(stream, passed, place), call, _STREAM)
            if shards is None:
                apply_error_(values, error, source)
            else:
                apply_error_to_shards_(values, shards, error, source)
            changed = None
            if type(error) is CustomError:
                changed = ((values != exact) & (exact == exact)).sum()
            noised = Noised("", operator, place, error, values, is_again, changed, shards)
            self.note(place, noised, exact, passed, call)
        return values


class _WithError(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exact: Tensor, place: int) -> Tensor:
        found: Tensor = torch.ops.aqnpipe.module_error(exact, place)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
