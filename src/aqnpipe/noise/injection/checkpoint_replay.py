"""Gradient checkpointing under noise: a layer that is computed again gets the same noise and the same faults again."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import nn

from aqnpipe.noise.injection.phase_state import PhaseState

ACTIVE_MARK = "_aqnpipe_injection"
"""Attribute of a model that holds the state of the phase which has its noise on it."""

InstallOnLayer = Callable[[int, nn.Module, str, ExitStack], None]
"""Registers every hook of one decoder layer (its index, the layer, its qualified name), for the stack to remove."""


def install_on_checkpoints(state: PhaseState, stack: ExitStack, install_on_layer: InstallOnLayer) -> None:
    """Let checkpointed layers bring their hooks back when the backward pass computes them again."""
    names = {module: name for name, module in state.model.named_modules()}
    for index, layer in enumerate(state.layers):
        checkpoint = getattr(layer, "_gradient_checkpointing_func", None)
        if checkpoint is None or not getattr(layer, "gradient_checkpointing", False) or not layer.training:
            continue
        install = partial(install_on_layer, index, layer, names[layer])
        layer._gradient_checkpointing_func = partial(_checkpointed, state, checkpoint, install)  # type: ignore[assignment]
        stack.callback(setattr, layer, "_gradient_checkpointing_func", checkpoint)


def _checkpointed(
    state: PhaseState,
    checkpoint: Callable[..., Any],
    install: Callable[[ExitStack], None],
    run: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Checkpoint `run`, which calls the layer: the first call has the hooks, the recomputation brings them back."""
    forward_index, computed_before = state.forward_index, False

    def run_noised(*inputs: Any, **keywords: Any) -> Any:
        nonlocal computed_before
        if not computed_before:
            computed_before = True
            return run(*inputs, **keywords)
        with ExitStack() as stack:
            active = getattr(state.model, ACTIVE_MARK, None)
            if active not in (None, state):
                raise RuntimeError(
                    "a checkpointed layer is computed again while another phase has its noise on this model"
                )
            # Inside the context (backward before its end) the hooks are still there.
            if active is None:
                install(stack)
            stack.callback(setattr, state, "recomputing", state.recomputing)
            stack.callback(setattr, state, "forward_index", state.forward_index)
            state.recomputing, state.forward_index = True, forward_index
            return run(*inputs, **keywords)

    return checkpoint(run_noised, *args, **kwargs)
