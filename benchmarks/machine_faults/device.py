"""An emulated device: every operation inside a module of the model runs on it and may be changed.

What runs inside the forward of any module is the device; what runs outside of modules, and anything in float64, is the
host. A diagnosis may therefore compute its references with plain functions or in float64.

Nothing of the project's fault simulation is used: a function mode of torch sees the operations, and global module hooks
see which module runs. Each module carries its path as an attribute, so copies of a module are on the device too.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

OUTPUT = "@output"
"""Operation name of the output of a module, for behaviours that change it."""

_PATH = "_emulated_path"
_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)(?:\.(.*))?$")
_REAL = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Call:
    """One operation on the device. `layer` is None outside of decoder layers; `path` is relative to the layer.

    `number` counts the calls of this operation within the current call of the module. `memory` lasts as long as the
    device; behaviours keep earlier values there.
    """

    op: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    layer: int | None
    path: str
    number: int
    frame: dict[str, Any]
    memory: dict[Any, Any]

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        """Return the healthy result, with other arguments if given."""
        return self.function(*(args or self.args), **{**self.kwargs, **kwargs})

    def tensor(self, index: int) -> Tensor:
        """Return a positional argument that is a tensor."""
        value = self.args[index]
        if not isinstance(value, Tensor):
            raise TypeError(f"{self.op} in {self.path}: argument {index} is {type(value).__name__}, expected a tensor")
        return value

    def argument(self, index: int, name: str) -> Any:
        """Return an argument given by position or by name; None if it is not given."""
        return self.args[index] if len(self.args) > index else self.kwargs.get(name)

    @property
    def rows(self) -> int:
        """Rows of the first argument: tokens of a linear."""
        first = self.tensor(0)
        return first.numel() // max(1, first.shape[-1])


@dataclass(frozen=True)
class Behaviour:
    """A change of the operations `ops` in modules whose path matches `where`, in `layers` (None: everywhere)."""

    ops: frozenset[str]
    change: Callable[[Call], Any]
    where: str = ".*"
    layers: frozenset[int] | None = None
    when: Callable[[Call], bool] = lambda call: True

    def fits(self, call: Call) -> bool:
        """Whether the behaviour changes this call."""
        return (
            call.op in self.ops
            and (self.layers is None or call.layer in self.layers)
            and re.fullmatch(self.where, call.path) is not None
            and self.when(call)
        )


@dataclass
class _Frame:
    layer: int | None
    path: str
    counts: Counter[str] = field(default_factory=Counter)
    values: dict[str, Any] = field(default_factory=dict)


class EmulatedDevice(TorchFunctionMode):
    """Device with behaviours, from first to last: each one's healthy computation is the next one's result."""

    def __init__(self, behaviours: Sequence[Behaviour]) -> None:
        super().__init__()
        self.behaviours = tuple(behaviours)
        self.ops = frozenset().union(*(behaviour.ops for behaviour in behaviours)) if behaviours else frozenset()
        self.frames: list[_Frame] = []
        self.memory: dict[Any, Any] = {}
        self.changed_calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation; on the device if a module is running."""
        name = getattr(func, "__name__", "")
        if not self.frames or name not in self.ops:
            return func(*args, **(kwargs or {}))
        return self.run(name, func, args, kwargs or {})

    def run(self, op: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation on the device."""
        if any(isinstance(value, Tensor) and value.dtype == torch.float64 for value in args):
            return function(*args, **kwargs)
        frame = self.frames[-1]
        number = frame.counts[op]
        frame.counts[op] += 1
        place = (frame.layer, frame.path, number, frame.values, self.memory)
        for behaviour in reversed(self.behaviours):
            call = Call(op, function, args, kwargs, *place)
            if behaviour.fits(call):
                function = _changed(behaviour, call)
                self.changed_calls += 1
        return function(*args, **kwargs)

    def enter_module(self, module: nn.Module, args: Any) -> None:
        """Hook before a module: its operations are those of its path."""
        path = getattr(module, _PATH, None)
        parent = self.frames[-1] if self.frames else _Frame(None, "")
        if path is None:
            self.frames.append(_Frame(parent.layer, parent.path))
            return
        found = _LAYER.match(path)
        self.frames.append(_Frame(int(found[1]), found[2] or "") if found else _Frame(None, path))

    def leave_module(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Hook after a module: change its output, then go back to the module that called it."""
        try:
            if OUTPUT in self.ops and output is not None and hasattr(module, _PATH):
                first = output[0] if isinstance(output, tuple) else output
                if isinstance(first, Tensor) and first.dtype in _REAL:
                    changed = self.run(OUTPUT, lambda value: value, (first,), {})
                    return (changed, *output[1:]) if isinstance(output, tuple) else changed
            return None
        finally:
            self.frames.pop()


def _changed(behaviour: Behaviour, call: Call) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        call.args, call.kwargs = args, kwargs
        return behaviour.change(call)

    return run


@contextmanager
def emulated(model: nn.Module, behaviours: Sequence[Behaviour]) -> Iterator[EmulatedDevice]:
    """Run everything inside `model` on an emulated device."""
    device = EmulatedDevice(behaviours)
    for name, module in model.named_modules():
        setattr(module, _PATH, name)
    handles = [
        register_module_forward_pre_hook(device.enter_module),
        register_module_forward_hook(device.leave_module, always_call=True),
    ]
    try:
        with device:
            yield device
    finally:
        for handle in handles:
            handle.remove()
        for module in model.modules():
            delattr(module, _PATH)
