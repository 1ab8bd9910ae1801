"""The way of keys and values from an attention module into a cache and back to its attention.

Attention of transformers gives the new keys and values to `cache.update` and reads what that returns. A layer here is
put in front of the cache, for one call of one attention module, and sees both.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import DynamicCache

from aqnpipe.errors import ModelError
from aqnpipe.models.parts import PlaceHook

Update = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Stores new keys and values [rows, heads, tokens, channels]; returns all that attention is to read."""

Replace = Callable[[int, Tensor, Tensor, Update], tuple[Tensor, Tensor]]
"""`replace(layer, keys, values, update)`: what is done in place of `update` in a layer."""

_NAMES = ("past_key_values", "layer_past")
"""Arguments of attention modules that are a cache."""


class _InFront:
    """What an attention module gets in place of a cache. Everything but `update` is the cache's own."""

    def __init__(self, cache: Any, replace: Callable[[Tensor, Tensor, Update], tuple[Tensor, Tensor]]) -> None:
        self._cache, self._replace = cache, replace

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store keys and values; return those to read."""
        return self._replace(keys, values, lambda keys, values: self._cache.update(keys, values, *args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def put_in_front(layers: Sequence[nn.Module], replace: Replace) -> list[Any]:
    """Call `replace(layer, keys, values, update)` in place of `update` of every cache; return the handles of hooks.

    Who comes later is nearer to attention. A pass without a cache has an empty one for each call. Raises ModelError for
    a layer without attention that takes a cache, and for one that stores other things than keys and values.
    """
    attentions = [_with_cache(layer, number) for number, layer in enumerate(layers)]
    return [
        attention.register_forward_pre_hook(
            PlaceHook(partial(_replaced, signature, name, partial(replace, number))), with_kwargs=True
        )
        for number, (attention, signature, name) in enumerate(attentions)
    ]


def _replaced(
    signature: inspect.Signature, name: str, replace: Any, module: nn.Module, args: Any, kwargs: Any
) -> tuple[Any, Any]:
    bound = signature.bind(*args, **kwargs)
    cache = bound.arguments.get(name)
    bound.arguments[name] = _InFront(DynamicCache() if cache is None else cache, replace)
    return bound.args, bound.kwargs


def _with_cache(layer: nn.Module, number: int) -> tuple[nn.Module, inspect.Signature, str]:
    """Return the attention of a layer, its signature, and the name of the cache in it: the last module that takes one.

    Modules around it, as the layer itself, hand the cache on and come before it.
    """
    found = [
        (module, signature, name)
        for module in layer.modules()
        for signature in [inspect.signature(module.forward)]
        for name in _NAMES
        if name in signature.parameters and module is not layer
    ]
    if not found:
        raise ModelError(f"kv_cache: layer {number} ({type(layer).__name__}) has no attention with a cache")
    if hasattr(attention := found[-1][0], "kv_lora_rank"):
        what = f"layer {number} ({type(attention).__name__}) stores compressed keys and values (MLA)"
        raise ModelError(f"kv_cache: {what}, expected attention that stores them whole")
    return found[-1]
