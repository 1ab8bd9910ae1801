"""Calls of norms in an observed pass, seen by hooks of the audit's own, beside the operators that have their errors.

A machine passes the result of an RMSNorm, which is no operator, through an operator of its own. That its values are
right is seen there like any other; that it was called at all is seen here.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from aqnpipe.models.layout import is_rms_norm
from aqnpipe.models.parts import PlaceHook
from aqnpipe.proof.observation import Observation


def watch_norms(
    observation: Observation, modules: Mapping[int, nn.Module], backward: bool, missed: Callable[[int], None]
) -> list[Any]:
    """Register the hooks and return their handles; `missed` gets the part of every call without the operator."""
    handles: list[Any] = []
    for part, module in modules.items():
        for norm in module.modules():
            if is_rms_norm(norm):
                enter, leave = partial(_enter, observation, backward), partial(_leave, observation, missed, part)
                handles.append(norm.register_forward_pre_hook(PlaceHook(enter), with_kwargs=True))
                handles.append(norm.register_forward_hook(PlaceHook(leave), always_call=True))
    return handles


def _enter(observation: Observation, backward: bool, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
    if not observation.is_on:
        return
    observation.around_norms.append(observation.norms)
    if backward and torch.is_grad_enabled():
        inputs = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.requires_grad]
        for value in inputs[:1]:
            value.register_hook(partial(_note_gradient, observation))


def _note_gradient(observation: Observation, gradient: Tensor) -> None:
    observation.expected_gradients += observation.is_on


def _leave(
    observation: Observation, missed: Callable[[int], None], part: int, module: nn.Module, args: Any, output: Any
) -> None:
    if observation.around_norms and observation.around_norms.pop() == observation.norms and output is not None:
        missed(part)
