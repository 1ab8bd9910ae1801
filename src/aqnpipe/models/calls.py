"""Finds where a forward pass of a model begins and ends, also behind wrappers such as PEFT's.

`peft_model(ids)` calls the wrapper, and `peft_model.generate()` calls the model inside it. Both are one forward pass of
the model. So the hooks are on every module that has the decoder layers and the output projection within, and of nested
calls only the outermost counts.
"""

from collections.abc import Callable, Iterator, Mapping
from threading import get_ident
from typing import Any

from torch import Tensor, nn

from aqnpipe.errors import ModelError
from aqnpipe.models.layout import output_projection, path_of_layers
from aqnpipe.models.parts import PlaceHook

Enter = Callable[[nn.Module, Any, Mapping[str, Any]], None]
Leave = Callable[[nn.Module, Any, Any], None]


class ForwardPasses:
    """Calls `enter` before and `leave` after every forward pass of `model`; `leave` also after an exception."""

    def __init__(self, model: nn.Module, enter: Enter, leave: Leave) -> None:
        self._model = model
        self._enter = enter
        self._leave = leave
        self._depths = {module: depth for depth, module in enumerate(_whole_models(model))}
        # Depth of the outermost module that computes, and the thread that called it.
        self._running: tuple[int, int] | None = None

    def hooks(self) -> list[Any]:
        """Register the hooks and return their handles."""
        handles = []
        for module in self._depths:
            before, after = PlaceHook(self._before), PlaceHook(self._after)
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(after, always_call=True))
        return handles

    def _before(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        depth, thread = self._depths[module], get_ident()
        if self._running is not None:
            outer, running_thread = self._running
            if running_thread != thread:
                raise ModelError(
                    f"{type(self._model).__name__}: two threads call the model at the same time under noise, expected "
                    "one call after the other"
                )
            # A pass that an interrupt ended did not leave; a call from as far outside is a new one.
            if depth > outer:
                return
        self._running = depth, thread
        self._enter(module, args, kwargs)

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._running == (self._depths.get(module), get_ident()):
            self._running = None
            self._leave(module, args, output)


def _whole_models(model: nn.Module) -> list[nn.Module]:
    """Return the modules with all decoder layers and the output projection within, `model` first, inwards."""
    head, parts = output_projection(model), path_of_layers(model).split(".")
    outer = [model.get_submodule(".".join(parts[:count])) for count in range(1, len(parts))]
    return [model, *(module for module in outer if head in set(module.modules()))]


def num_tokens(args: Any, kwargs: Mapping[str, Any]) -> int | None:
    """Return the number of tokens per row of a forward pass; ids [tokens] are one row. None if there is no tensor."""
    tensor = first_tensor(args, kwargs)
    if tensor is None or not tensor.ndim:
        return None
    return tensor.shape[1] if tensor.ndim > 1 else tensor.shape[0]


def first_tensor(args: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the ids or embeddings [rows, tokens, ...] of a forward pass.

    Arguments with other names and dictionaries of tensors are searched too, in their order.
    """
    return next(_tensors([kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args, *kwargs.values()]), None)


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping):
            yield from _tensors([value.get("input_ids"), value.get("inputs_embeds"), *value.values()])
