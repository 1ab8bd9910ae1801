"""Watches the operators of a transformers model: hooks on modules, additions, and attention."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from aqnpipe.errors import ModelError
from aqnpipe.parity.expected import AttentionFacts
from aqnpipe.parity.forms import Operator
from aqnpipe.parity.mapping import LayerMap, ModelMap
from aqnpipe.parity.recorder import Recorder

_ADDITIONS = frozenset({"add", "__add__", "__radd__", "add_", "__iadd__"})
_UNKNOWN_ATTENTION = ("s_aux", "position_bias", "cache", "sinks")
"""Arguments of attention functions that change what they compute, in ways that are not known here."""


def watch(mapped: ModelMap, recorder: Recorder) -> ExitStack:
    """Let `recorder` see every operator of the model; closing the returned stack ends it."""
    stack = ExitStack()

    def after(module: nn.Module, hook: Callable[..., Any]) -> None:
        stack.callback(module.register_forward_hook(hook).remove)

    def whole(operator: Operator) -> Callable[..., Any]:
        return lambda module, args, output: recorder.see(operator, [recorder.rows_of(args[0])], output)

    def heads(operator: Operator) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
            # Some families normalise heads after they were put before the tokens.
            columns = None if recorder.is_idle else recorder.num_columns
            if output.dim() == 4 and output.shape[1] != columns:
                edited = recorder.see(operator, [recorder.rows_of(args[0].transpose(1, 2))], output.transpose(1, 2))
                return None if edited is None else edited.transpose(1, 2)
            return recorder.see(operator, [recorder.rows_of(args[0])], output)

        return _unless_idle(recorder, hook)

    def before_down(layer: LayerMap) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any) -> Any:
            inputs = [recorder.last(name) for name in layer.activated]
            edited = recorder.see(layer.activation, inputs, args[0])
            return None if edited is None else (edited, *args[1:])

        return _unless_idle(recorder, hook)

    after(
        mapped.embedding,
        lambda _, args, output: recorder.see(mapped.embed, [recorder.rows_of(args[0][..., None])], output),
    )
    module: nn.Module
    for layer in mapped.layers:
        stack.callback(layer.down.register_forward_pre_hook(before_down(layer)).remove)
        for module, operator in layer.linears.items():
            after(module, _unless_idle(recorder, whole(operator)))
        for module, operator in layer.norms.items():
            after(module, heads(operator))
    for module, operator in mapped.norms.items():
        after(module, _unless_idle(recorder, whole(operator)))
    after(mapped.head, _unless_idle(recorder, whole(mapped.lm_head)))
    stack.enter_context(_watched_attention(mapped, recorder))
    stack.enter_context(_Additions(mapped, recorder, stack))
    return stack


def _unless_idle(recorder: Recorder, hook: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        if recorder.is_idle:
            return None
        with torch._C.DisableTorchFunction():
            return hook(*args)

    return run


class _Additions(TorchFunctionMode):
    """Sees the additions that decoder layers make themselves, outside of their modules: the residual stream."""

    def __init__(self, mapped: ModelMap, recorder: Recorder, stack: ExitStack) -> None:
        super().__init__()
        self._recorder = recorder
        self._layer: LayerMap | None = None
        self._depth = self._number = 0
        for layer in mapped.layers:
            for hook in (
                layer.layer.register_forward_pre_hook(self._entering(layer)),
                layer.layer.register_forward_hook(self._leave_layer),
            ):
                stack.callback(hook.remove)
            for child in layer.layer.children():
                stack.callback(child.register_forward_pre_hook(self._enter_child).remove)
                stack.callback(child.register_forward_hook(self._leave_child).remove)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`; record it if it is an addition of the layer that is running."""
        output = func(*args, **(kwargs or {}))
        layer = self._layer
        if layer is None or self._depth or self._recorder.is_idle or func.__name__ not in _ADDITIONS:
            return output
        if len(args) < 2 or not all(isinstance(part, Tensor) and part.shape == output.shape for part in args[:2]):
            return output
        if self._number == len(layer.residuals):
            raise ModelError(
                f"parity: a layer of this model adds more than {self._number} times, expected two branches"
            )
        operator = layer.residuals[self._number]
        self._number += 1
        if func.__name__ in ("add_", "__iadd__"):
            raise ModelError("parity: the layers of this model add in place, so the inputs of the sum are lost")
        edited = self._recorder.see(operator, [self._recorder.rows_of(part) for part in args[:2]], output)
        return output if edited is None else edited

    def _entering(self, layer: LayerMap) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            self._layer, self._depth, self._number = layer, 0, 0

        return enter

    def _leave_layer(self, *_: Any) -> None:
        self._layer = None

    def _enter_child(self, *_: Any) -> None:
        self._depth += 1

    def _leave_child(self, *_: Any) -> None:
        self._depth -= 1


@contextmanager
def _watched_attention(mapped: ModelMap, recorder: Recorder) -> Iterator[None]:
    """Watch the function to which every attention module of transformers hands queries, keys and values."""
    layers = {layer.attention: layer for layer in mapped.layers}
    original = ALL_ATTENTION_FUNCTIONS.get_interface

    def get_interface(name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        attend = original(name, default)

        def watched(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
            layer = layers.get(module)
            if layer is None or recorder.is_idle:
                return attend(module, query, key, value, mask, **kwargs)
            with torch._C.DisableTorchFunction():
                query, key = _see_rotations(layer, recorder, query, key, value)
            output, *rest = attend(module, query, key, value, mask, **kwargs)
            with torch._C.DisableTorchFunction():
                inputs = tuple(_tokens(part, recorder) for part in (query, key, value))
                facts = _attention_facts(module, query, kwargs)
                edited = recorder.see_attention(layer.core, inputs, facts, output)  # type: ignore[arg-type]
            return (output if edited is None else edited, *rest)

        return watched

    ALL_ATTENTION_FUNCTIONS.get_interface = get_interface
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS.get_interface


def _see_rotations(
    layer: LayerMap, recorder: Recorder, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor]:
    if layer.rotary is None:
        return query, key
    before = []
    for number, names in enumerate(layer.projections()):
        name = next((name for name in names if recorder.has(name)), None)
        before.append(recorder.last(name) if name else _part_of_merged(layer, recorder, query, key, number))
    seen_query = recorder.see(layer.rotations[0], [before[0]], query.transpose(1, 2))
    seen_key = recorder.see_keys(layer.rotations[1], [before[1]], key.transpose(1, 2))
    return (
        query if seen_query is None else seen_query.transpose(1, 2),
        key if seen_key is None else seen_key.transpose(1, 2),
    )


def _part_of_merged(layer: LayerMap, recorder: Recorder, query: Tensor, key: Tensor, number: int) -> Tensor:
    if not recorder.has(layer.merged()):
        raise ModelError("parity: no linear that makes queries and keys was found by name in this model's attention")
    queries, keys = (part.shape[1] * part.shape[3] for part in (query, key))
    start = 0 if number == 0 else queries
    return recorder.last(layer.merged())[:, start : start + (queries if number == 0 else keys)]


def _tokens(part: Tensor, recorder: Recorder) -> Tensor:
    """Return the rows [rows, heads, dim] of queries, keys or values [batch, heads, tokens, dim] of this call."""
    heads, dim = part.shape[1], part.shape[3]
    tokens = part[:, :, -recorder.num_columns :].transpose(1, 2)
    return recorder.rows_of(tokens).reshape(-1, heads, dim)


def _attention_facts(module: nn.Module, query: Tensor, kwargs: dict[str, Any]) -> AttentionFacts:
    for name in _UNKNOWN_ATTENTION:
        if kwargs.get(name) is not None:
            raise ModelError(
                f"parity: attention of {type(module).__name__} takes {name}, whose effect is not known here"
            )
    scaling = kwargs.get("scaling")
    return AttentionFacts(
        scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=kwargs.get("sliding_window"),
        soft_cap=kwargs.get("softcap"),
    )
