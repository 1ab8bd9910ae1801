"""Modules whose result has an error, seen by hooks of the audit's own, beside the operators that have these errors.

A machine passes the result of an RMSNorm, which is no operator, through an operator of its own. That its values are
right is seen there like any other; that it was called at all is seen here. The same for modules that compute one
operator as a whole: attention of an inference engine, and products that tensor-parallel workers add up. What is
computed inside of those has no error of its own.
"""

from collections.abc import Callable, Container, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from aqnpipe.models.parts import PlaceHook
from aqnpipe.proof.observation import NormCall, Observation, first_of, is_same

NORM, NORM_GRADIENT, ATTENTION, SUM = "norm", "norm_gradient", "attention", "sum"
RESULTS = (NORM, ATTENTION, SUM)
"""Operators of the package `aqnpipe`: those of `RESULTS` put errors on results of modules."""

Wrong = Callable[[str, str | None], None]
"""Called with the module in words and what is wrong with its error; None if it has none."""


def watch_norms(
    observation: Observation,
    norms: Mapping[nn.Module, str],
    backward: bool,
    wrong: Wrong,
    followed: Container[nn.Module] = (),
    *,
    are_whole: bool = False,
) -> list[Any]:
    """Register the hooks of norms, with each in words, and return their handles.

    `followed`: norms of which the operator must get what they compute, and its result be what they return.
    `are_whole`: modules that compute one operator as a whole, instead of norms.
    """
    handles: list[Any] = []
    for norm, where in norms.items():
        enter = partial(_enter, observation, backward, are_whole)
        leave = partial(_leave, observation, wrong, where, norm in followed)
        handles.append(norm.register_forward_pre_hook(PlaceHook(enter), with_kwargs=True))
        handles.append(norm.register_forward_hook(PlaceHook(partial(_computed, observation, are_whole)), prepend=True))
        handles.append(norm.register_forward_hook(PlaceHook(leave), always_call=True))
    return handles


def _enter(
    observation: Observation,
    backward: bool,
    is_whole: bool,
    module: nn.Module,
    args: Any,
    kwargs: Mapping[str, Any],
) -> None:
    if not observation.is_on:
        return
    observation.inside_results += is_whole
    observation.around_norms.append(NormCall(observation.norms))
    observation.uncalled_norms.pop(module, None)
    if backward and torch.is_grad_enabled():
        inputs = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.requires_grad]
        for value in inputs[:1]:
            value.register_hook(partial(_note_gradient, observation))


def _note_gradient(observation: Observation, gradient: Tensor) -> None:
    observation.expected_gradients += observation.is_on


def _computed(observation: Observation, is_whole: bool, module: nn.Module, args: Any, output: Any) -> None:
    if observation.around_norms:
        observation.inside_results -= is_whole
        observation.around_norms[-1].own = first_of(output)


def _leave(
    observation: Observation, wrong: Wrong, where: str, is_followed: bool, module: nn.Module, args: Any, output: Any
) -> None:
    if not observation.around_norms:
        return
    call = observation.around_norms.pop()
    if output is None:
        return
    calls, latest = observation.norms - call.before, observation.latest_norm
    if observation.around_norms:
        observation.around_norms[-1].before += calls
    if calls != 1:
        wrong(where, f"has its error {calls} times" if calls else None)
    elif is_followed and latest is not None:
        exact, result = latest
        # Noise on a module comes behind, and gets the result.
        is_used = is_same(result, first_of(output)) or is_same(result, observation.with_module_error)
        if not is_same(exact, call.own) or not is_used:
            wrong(where, "has an error that is not on its result, or that the program does not use")
