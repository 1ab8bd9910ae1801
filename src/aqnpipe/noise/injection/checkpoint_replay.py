"""Gradient checkpointing under noise: a recomputed layer gets the same noise and the same faults.

The backward pass of a checkpointed layer computes its forward again, possibly after the phase has removed its hooks.
This module registers the hooks again for that recomputation.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import noop_context_fn

from aqnpipe.errors import ModelError
from aqnpipe.noise.injection.phase_state import PhaseState

ACTIVE_MARK = "_aqnpipe_injection"
"""Attribute of a model that holds the `PhaseState` of the active injection."""

InstallOnLayer = Callable[[int, nn.Module, str, ExitStack], None]
"""Registers every hook of one decoder layer (its index, the layer, its qualified name); the stack removes them."""


def install_on_checkpoints(state: PhaseState, stack: ExitStack, install_on_layer: InstallOnLayer) -> None:
    """Make checkpointed layers register their hooks again when the backward pass recomputes them."""
    names = {module: name for name, module in state.model.named_modules()}
    for index, layer in enumerate(state.layers):
        checkpoint = getattr(layer, "_gradient_checkpointing_func", None)
        if checkpoint is None or not getattr(layer, "gradient_checkpointing", False) or not layer.training:
            continue
        _refuse_stored_products(names[layer], checkpoint)
        install = partial(install_on_layer, index, layer, names[layer])
        layer._gradient_checkpointing_func = partial(_checkpointed, state, index, checkpoint, install)  # type: ignore[assignment]
        stack.callback(setattr, layer, "_gradient_checkpointing_func", checkpoint)


def _refuse_stored_products(name: str, checkpoint: Callable[..., Any]) -> None:
    """Raise ModelError for a selective checkpoint: a product that it stores has its noise already, and got it twice."""
    context_of = getattr(checkpoint, "keywords", {}).get("context_fn", noop_context_fn)
    if context_of is not noop_context_fn:
        raise ModelError(
            f"{name}: gradient_checkpointing_kwargs has a context_fn (selective checkpoint), whose stored products "
            "would get their noise twice; expected a checkpoint that computes the whole layer again"
        )


def _checkpointed(
    state: PhaseState,
    index: int,
    checkpoint: Callable[..., Any],
    install: Callable[[ExitStack], None],
    run: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Checkpoint `run`, which calls the layer; its first call has the hooks, a recomputation registers them again."""
    forward_index, audited_forward = state.forward_index, state.audit.position.forward
    computed_before = False

    def run_noised(*inputs: Any, **keywords: Any) -> Any:
        nonlocal computed_before
        if not computed_before:
            computed_before = True
            return run(*inputs, **keywords)
        with ExitStack() as stack:
            active = getattr(state.model, ACTIVE_MARK, None)
            if active not in (None, state):
                raise RuntimeError("a checkpointed layer is recomputed while another phase is active on this model")
            # A backward pass inside the phase still has the hooks.
            if active is None:
                install(stack)
            stack.callback(setattr, state, "recomputing", state.recomputing)
            stack.callback(setattr, state, "forward_index", state.forward_index)
            state.recomputing, state.forward_index = True, forward_index
            state.audit.recompute(index, audited_forward, stack)
            return run(*inputs, **keywords)

    return checkpoint(run_noised, *args, **kwargs)
