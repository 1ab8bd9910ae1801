"""Where hooks of a simulated machine are in any model: its parts, where its passes begin and end, and its caches.

`peft_model(ids)` calls the wrapper, and `peft_model.generate()` calls the model inside it. Both are one forward pass of
the model. So the hooks are on every module that has the decoder layers and the output projection within, and of nested
calls only the outermost counts.

Attention of transformers gives new keys and values to `cache.update` and reads what that returns. A layer here is put
in front of the cache, for one call of one attention module, and sees both.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from threading import get_ident
from typing import Any, NamedTuple

from torch import Tensor, nn

from aqnpipe.errors import ModelError
from aqnpipe.models.layout import output_projection, path_of_layers

Enter = Callable[[nn.Module, Any, Mapping[str, Any]], None]
Leave = Callable[[nn.Module, Any, Any], None]

Update = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Stores new keys and values [rows, heads, tokens, channels]; returns all that attention is to read."""

Replace = Callable[[int, Tensor, Tensor, Update], tuple[Tensor, Tensor]]
"""`replace(layer, keys, values, update)`: what is done in place of `update` in a layer."""

_NAMES = ("past_key_values", "layer_past")
"""Arguments of attention modules that are a cache."""


class Parts(NamedTuple):
    """`roots` contain layers, outermost first; `modules` are the layers and the output projection, by path."""

    roots: tuple[nn.Module, ...]
    modules: dict[str, nn.Module]


def parts_of(model: nn.Module) -> Parts:
    """Return the parts of `model`.

    Layers are the elements of its outermost lists of modules, whatever computes in them. A model without a list of
    modules has no layers.
    """
    lists: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in lists)
        if isinstance(module, nn.ModuleList) and len(module) and not inside:
            lists[name] = module
    # A layer that several places share is one part that is called several times.
    paths_of: dict[nn.Module, str] = {}
    for name, layers in lists.items():
        for index, layer in enumerate(layers):
            paths_of.setdefault(layer, f"{name}.{index}".lstrip("."))
    modules = {path: layer for layer, path in paths_of.items()}
    getter: Callable[[], object] | None = getattr(model, "get_output_embeddings", None)
    head = getter() if getter is not None else getattr(model, "lm_head", None)
    if isinstance(head, nn.Module) and head not in paths_of and head not in {*lists.values()}:
        paths = {module: name for name, module in model.named_modules()}
        if head in paths:
            modules[paths[head]] = head
    around = {".".join(name.split(".")[:depth]) for name in lists for depth in range(len(name.split(".")))}
    roots = [model, *(module for name, module in model.named_modules() if name and name in around)]
    return Parts(tuple(root for root in roots if not isinstance(root, nn.ModuleList)), modules)


class PlaceHook:
    """A hook of a simulated machine. A copy of its module, by `deepcopy` or pickle, gets a hook that does nothing."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        """Run the hook."""
        return self._call(*args)

    def __deepcopy__(self, memo: Any) -> "PlaceHook":
        return PlaceHook(_nothing)

    def __reduce__(self) -> Any:
        return PlaceHook, (_nothing,)


def hooks_around(
    module: nn.Module,
    before: Callable[..., Any] | None = None,
    own: Callable[..., Any] | None = None,
    behind: Callable[..., Any] | None = None,
    *,
    is_first: bool = True,
) -> list[Any]:
    """Register hooks around calls of a module and return their handles.

    `before` a call, with (module, args, kwargs): ahead of all other hooks if `is_first`. With (module, args, output):
    `own` ahead of all other hooks behind the call, and `behind` them. Both get the output None after an exception.
    """
    handles: list[Any] = []
    if before is not None:
        handles.append(module.register_forward_pre_hook(PlaceHook(before), with_kwargs=True, prepend=is_first))
    if own is not None:
        handles.append(module.register_forward_hook(PlaceHook(own), prepend=True, always_call=True))
    if behind is not None:
        handles.append(module.register_forward_hook(PlaceHook(behind), always_call=True))
    return handles


def _nothing(*_: Any) -> None:
    pass


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
    from transformers import DynamicCache  # Only models of transformers have a cache.

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
