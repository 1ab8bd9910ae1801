"""The parts of any model: its layers and output projection, and the modules whose call is a pass of the whole model."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn


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
