"""The names of operators with measured errors, by hooks of the audit's own."""

from functools import partial
from typing import Any

from torch import nn

from aqnpipe.config.measured_noise import ATTENTION, LM_HEAD, SCORES, LayerErrors, OperatorError
from aqnpipe.models.layout import is_norm, norms_outside_layers, output_projection
from aqnpipe.models.parts import PlaceHook
from aqnpipe.proof.observation import Observation, Visit


def watch_names(observation: Observation, model: nn.Module) -> list[Any]:
    """Register hooks that note which linear module or norm of a decoder computes, and return their handles."""
    outside, head = {norm: name for name, norm in norms_outside_layers(model).items()}, output_projection(model)
    handles: list[Any] = []
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) or is_norm(module):
            name = LM_HEAD if module is head else outside.get(module, path.rpartition(".")[2])
            enter = PlaceHook(partial(_enter, observation, name))
            handles.append(module.register_forward_pre_hook(enter, prepend=True))
            handles.append(module.register_forward_hook(PlaceHook(partial(_leave, observation)), always_call=True))
    return handles


def operator_name(
    operator: str, errors: LayerErrors, observation: Observation, here: Visit, is_outside: bool
) -> tuple[str, OperatorError]:
    """Return the name of the operator that computes, and its error; one without a parity has an error of zero."""
    if observation.names:
        name = observation.names[-1]
    elif is_outside or "attention" in operator:
        name = ATTENTION
    else:
        name = SCORES if here.others == 0 else ATTENTION
        here.others += 1
    return name, errors.operators[name]


def _enter(observation: Observation, name: str, *_: Any) -> None:
    observation.names.append(name)


def _leave(observation: Observation, *_: Any) -> None:
    if observation.names:
        observation.names.pop()
