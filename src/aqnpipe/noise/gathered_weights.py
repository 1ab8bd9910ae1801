"""Models under torch's `fully_shard`: their weights are gathered before anything looks at a layer.

`fully_shard` gathers the weights of a module in a forward pre-hook and frees them in a forward hook. The hooks of the
noise and of its audit are prepended, so they would run before the gathering: the audit would take the operations that
gather for operations of the layer, and would not know its gathered weights.
"""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_FULLY_SHARD = "torch.distributed.fsdp."


@contextmanager
def gathered_first(model: nn.Module) -> Iterator[None]:
    """Keep the hooks that gather weights before all other forward pre-hooks while the body runs."""
    kept = [(module, module._forward_pre_hooks) for module in model.modules() if _gathering(module._forward_pre_hooks)]
    for module, hooks in kept:
        module._forward_pre_hooks = _GatheringFirst(hooks)
    try:
        yield
    finally:
        for module, hooks in kept:
            now = dict(module._forward_pre_hooks)
            # The original object again, because handles of earlier hooks refer to it.
            hooks.clear()
            hooks.update(now)
            module._forward_pre_hooks = hooks


class _GatheringFirst(OrderedDict[int, Any]):
    """Hooks of a module; whatever is prepended comes behind those that gather."""

    def move_to_end(self, key: int, last: bool = True) -> None:
        """Move a hook to an end, and then those that gather to the start."""
        super().move_to_end(key, last)
        for gathering in reversed(_gathering(self)):
            super().move_to_end(gathering, last=False)


def _gathering(hooks: dict[int, Any]) -> list[int]:
    return [key for key, hook in hooks.items() if (getattr(hook, "__module__", None) or "").startswith(_FULLY_SHARD)]
