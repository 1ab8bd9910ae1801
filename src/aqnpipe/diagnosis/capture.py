"""Capture the input of every decoder layer in one forward, and run single layers on it."""

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from aqnpipe.errors import ModelError
from aqnpipe.models.layout import decoder_layers


class NonFiniteOutputError(ModelError):
    """A decoder layer outputs NaN or infinity. `layer` is its index, None for what stands before the first one."""

    def __init__(self, layer: int | None, model: nn.Module) -> None:
        place = "the embedding" if layer is None else f"decoder layer {layer}"
        super().__init__(f"{place} of {type(model).__name__} outputs NaN or infinity, expected finite numbers")
        self.layer = layer


@dataclass(frozen=True)
class LayerInput:
    """Arguments of a decoder layer: hidden states [sequences, tokens, hidden] and all others by name."""

    hidden: Tensor
    kwargs: dict[str, Any]


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Remove the hooks behind the body."""
    kept = list(handles)
    try:
        yield
    finally:
        for handle in kept:
            handle.remove()


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode without gradients for the body, and restore its mode afterwards."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def capture_layer_inputs(model: nn.Module, prompt_ids: Tensor) -> list[LayerInput]:
    """Run the decoder once on `prompt_ids` [sequences, tokens] and return the inputs of its layers in order.

    There is no KV cache, because a layer that is run again must not attend to keys of its first run. The output
    projection is not run. Raises ModelError if hidden states are not [sequences, tokens, hidden].
    """
    layers = decoder_layers(model)
    names = [list(inspect.signature(type(layer).forward).parameters)[1:] for layer in layers]
    inputs: dict[int, LayerInput] = {}

    def keep(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Some families pass masks and positions without names.
        rest = {**dict(zip(names[index], args, strict=False)), **kwargs}
        hidden = rest.pop(names[index][0])
        if hidden.ndim != 3:
            raise ModelError(
                f"decoder layer {index} of {type(model).__name__} takes hidden states of shape {tuple(hidden.shape)}, "
                "expected [sequences, tokens, channels]; use another model family"
            )
        inputs[index] = LayerInput(hidden, rest)

    decoder = getattr(model, "base_model", model)
    with hooked(
        layer.register_forward_pre_hook(
            lambda _module, args, kwargs, index=index: keep(index, args, kwargs), with_kwargs=True
        )
        for index, layer in enumerate(layers)
    ):
        decoder(input_ids=prompt_ids, attention_mask=torch.ones_like(prompt_ids), use_cache=False)
    return [inputs[index] for index in range(len(layers))]


def run_layer(model: nn.Module, index: int, hidden: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """Run only decoder layer `index`, with its hooks, and return its output as float32 on the CPU.

    Raises NonFiniteOutputError if the output has NaN or infinite values, because no statistic of it would be
    meaningful.
    """
    output = decoder_layers(model)[index](hidden, **kwargs)
    result: Tensor = (output[0] if isinstance(output, tuple) else output).float().cpu()
    if not torch.isfinite(result).all():
        raise NonFiniteOutputError(index, model)
    return result
