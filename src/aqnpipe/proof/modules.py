"""Errors on the input or output of modules, and AQN's noise on hidden states, as the audit sees and expects them.

A hook passes the tensor through the operator `aqnpipe::module_error`. That its values are right is seen there; that a
module that was called had it at all is seen by hooks of the audit's own.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from aqnpipe.config.noise import AppliedError, TensorError
from aqnpipe.models.parts import PlaceHook
from aqnpipe.noise.audit.random_numbers import Draws
from aqnpipe.proof.comparison import Columns, compare
from aqnpipe.proof.observation import Observation, is_same
from aqnpipe.proof.recompute import Sampled, Shards, at, drawn, in_whole

MODULE_ERROR = "module_error"

MODULE_STREAM = 8
"""Stream of the random numbers of all errors on modules."""


class RequestedModule(NamedTuple):
    """An error that was requested of a module: `operator` and `where` name it, `stream` its random numbers.

    `part` is the part of the model that contains it. `is_last`: the module returns what has the error.
    `shards`: the columns that a tensor-parallel worker has of the tensor; None if it has all.
    """

    module: nn.Module
    part: int
    operator: str
    where: str
    error: TensorError
    stream: str
    is_last: bool = False
    shards: Shards | None = None


def compare_module(
    error: AppliedError,
    shards: Shards | None,
    exact: Tensor,
    result: Tensor,
    draws: Draws,
    rng: np.random.Generator,
    count: int,
) -> tuple[Sampled, Columns]:
    """Compare sampled elements of a tensor with an error; the operand of the operator is exact."""
    place = drawn(result, rng, count)
    values = at(exact, place)
    sampled = Sampled.of(result, place, values, np.zeros(len(values)))
    if shards is not None:
        sampled = in_whole(sampled, result, shards)
    return sampled, compare(sampled, error, draws, result.dtype)


def watch_modules(
    observation: Observation,
    requested: Mapping[int, RequestedModule],
    parts: Mapping[int, nn.Module],
    only_in_parts: bool,
    note: Callable[[str], None],
) -> list[Any]:
    """Register the hooks and return their handles; `note` gets a line for every call of a module without its error."""
    handles: list[Any] = []
    for place, one in requested.items():
        if only_in_parts and one.part not in parts:
            continue
        before: list[int] = []
        enter, leave = (
            partial(_enter, observation, place, before),
            partial(_leave, observation, place, before, note, one),
        )
        handles.append(one.module.register_forward_pre_hook(PlaceHook(enter), prepend=True))
        handles.append(one.module.register_forward_hook(PlaceHook(leave), always_call=True))
    return handles


def _enter(observation: Observation, place: int, before: list[int], *_: Any) -> None:
    before.append(observation.calls_of(place))


def _leave(
    observation: Observation,
    place: int,
    before: list[int],
    note: Callable[[str], None],
    one: RequestedModule,
    module: nn.Module,
    args: Any,
    output: Any,
) -> None:
    if not before or output is None:
        return
    calls = observation.calls_of(place) - before.pop()
    if not observation.is_on:
        return
    if calls != 1:
        note(f"{one.where}: {one.operator} has {'no noise' if not calls else f'noise {calls} times'}")
    elif one.is_last and not _is_in(output, observation.module_results.get(place)):
        note(f"{one.where}: {one.operator} has noise, and the program goes on with other values")


def _is_in(output: Any, result: Tensor | None) -> bool:
    """Return whether a tensor is among the outputs of a module."""
    return result is None or any(is_same(value, result) for value in tree_leaves(output))
