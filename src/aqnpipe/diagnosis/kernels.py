"""The kernels behind a fault: operators whose results are wrong for the operands that they read, and one such call.

Exact probes decide whether there is a fault, and name layers and sites. A chip has neither, so when there is one, every
operator of ordinary passes is computed again on the host in float64. A module whose output is not what its last
operator returned (a hook, a patched forward, a simulated fault) counts as if that operator had returned it.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from aqnpipe.artifacts.diagnoses import KernelFault
from aqnpipe.diagnosis.capture import inference, values_on_host
from aqnpipe.diagnosis.classify import tile_place
from aqnpipe.error_bounds import sum_bound

_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "linear")
_OTHERS = (
    *("add", "mul", "silu", "gelu", "relu", "rsqrt", "mean", "pow", "_softmax", "embedding", "cos", "sin"),
    *("silu_backward", "gelu_backward"),
)
_ROUNDINGS = 16
"""Deviation that other operators may have, in roundings of the largest value of a row; probes find finer faults."""
_TOKENS = 64


@dataclass
class _Kernel:
    """Calls of one operator with one shape and number format; `example`: function, arguments, exact result, bound."""

    shape: tuple[int, ...]
    calls: int = 0
    wrong: int = 0
    columns: set[int] = field(default_factory=set)
    rows: set[int] = field(default_factory=set)
    example: tuple[Any, Any, Tensor, Tensor, Tensor] | None = None


class Kernels(TorchDispatchMode):
    """Computes the operators of this thread again. `found`: what was seen by operator, shape and number format."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[tuple[str, str, str], _Kernel] = {}
        self._last: tuple[Any, Any, Tensor] | None = None
        self._ends: dict[nn.Module, tuple[Any, Any, Tensor] | None] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator and compare its result with that of the host."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "overloadpacket", func).__name__
        is_known = name in _PRODUCTS + _OTHERS and isinstance(result, Tensor) and result.is_floating_point()
        if is_known:
            self._judge(func, (args, kwargs), result, result)
        if is_known or "view" not in name:
            self._last = (func, (args, kwargs), result) if is_known else None
        return result

    def begin(self, *_: Any) -> None:
        """Forget what was computed before a module."""
        self._last = None

    def end(self, module: nn.Module, *_: Any) -> None:
        """Note the last operator of a module, before hooks compute; None if it is not known here."""
        self._ends[module] = self._last

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Judge the output of a module instead of the result of its last operator, if it is another."""
        last = self._ends.pop(module, None)
        if last is None or not isinstance(output, Tensor) or last[2].numel() != output.numel():
            return
        func, arguments, result = last
        with _disable_current_modes():
            changed = output.detach().reshape(result.shape)
            differs = bool((changed != result).any())
        if differs:
            self._judge(func, arguments, result, changed, again=True)

    def _judge(self, func: Any, arguments: Any, result: Tensor, shown: Tensor, *, again: bool = False) -> None:
        with _disable_current_modes(), torch.no_grad():
            exact, allowed = _on_host(func, arguments, result)
            wrong = ~((shown.detach().cpu().double() - exact).abs() <= allowed)
            wrong &= ~(shown.detach().cpu().isnan() & exact.isnan())
        name, shape = func.overloadpacket.__name__, tuple(result.shape)
        inner = (arguments[0][-2].shape[-1],) if name in _PRODUCTS and name != "linear" else ()
        key = (name, "x".join(map(str, shape + inner)), str(result.dtype).removeprefix("torch."))
        kernel = self.found.setdefault(key, _Kernel(shape))
        kernel.calls += not again
        if not wrong.any():
            return
        kernel.wrong += 1
        flat = wrong.reshape(-1, shape[-1])
        kernel.columns |= set(flat.any(0).nonzero().flatten().tolist())
        kernel.rows |= set(flat.any(1).nonzero().flatten().tolist())
        if kernel.example is None:
            kernel.example = func, tree_map(_copied, arguments), exact, allowed, _copied(shown)


def _on_host(func: Any, arguments: Any, result: Tensor) -> tuple[Tensor, Tensor]:
    """Return the exact result of an operator, and how far a correct one may be from it; both float64."""
    args, kwargs = values_on_host(arguments, torch.float64)
    exact = func(*args, **kwargs)
    name, dtype = func.overloadpacket.__name__, result.dtype
    if name not in _PRODUCTS:
        largest = exact.abs().amax(-1, keepdim=True) if exact.dim() else exact.abs()
        return exact, _ROUNDINGS * torch.finfo(dtype).eps * (exact.abs() + largest) + torch.finfo(dtype).tiny
    sizes = func(*tree_map(lambda value: value.abs() if isinstance(value, Tensor) else value, args), **kwargs)
    bound = sum_bound(sizes, args[-1].shape[-2] + 1, dtype)
    is_coarse = dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    return exact, bound + sizes * 2.0**-9 if is_coarse else bound


def _copied(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def observe_kernels(model: nn.Module, prompt: Tensor) -> Kernels:
    """Return what the operators of passes of `model` did: a prompt [tokens] with its backward pass, and one token.

    The verdict stands without them, so a pass that torch cannot compute ends the observation alone.
    """
    kernels, before, ids = Kernels(), {weight: weight.grad for weight in model.parameters()}, prompt[None, :_TOKENS]
    leaves = [module for module in model.modules() if next(module.children(), None) is None]
    handles = [module.register_forward_pre_hook(kernels.begin) for module in leaves]
    handles += [module.register_forward_hook(kernels.end, prepend=True) for module in leaves]
    handles += [module.register_forward_hook(kernels.leave) for module in leaves]
    with suppress(RuntimeError), inference(model), kernels:
        model(input_ids=ids[:, :1], use_cache=False)
        with torch.enable_grad():
            model(input_ids=ids, use_cache=False).logits.float().logsumexp(-1).sum().backward()
    for handle in handles:
        handle.remove()
    for weight, gradient in before.items():
        weight.grad = gradient
    return kernels


def kernel_faults(kernels: Kernels) -> tuple[KernelFault, ...]:
    """Return the kernels with wrong results; those of one operator whose wrong lanes are the same are one."""
    found: list[KernelFault] = []
    wrong = [(key, kernel) for key, kernel in kernels.found.items() if kernel.wrong]
    for (operator, shape, dtype), kernel in sorted(wrong, key=lambda item: -item[1].shape[-1]):
        width, columns, height = kernel.shape[-1], tuple(sorted(kernel.columns)), torch.Size(kernel.shape[:-1]).numel()
        one = KernelFault(
            operator=operator,
            shapes=(shape,),
            dtype=dtype,
            columns=columns,
            num_columns=width,
            column_tile=tile_place(columns, width),
            row_tile=tile_place(sorted(kernel.rows), height),
            wrong_calls=kernel.wrong,
            calls=kernel.calls,
        )
        same = next((n for n, other in enumerate(found) if other.explains(one)), None)
        if same is None:
            found.append(one)
        else:
            found[same] = found[same].with_calls_of(one)
    return tuple(sorted(found, key=lambda fault: -fault.wrong_calls))


_SCRIPT = '''"""{what}

Computes the operator on a device and compares with the host's float64. Exit code 3: the device errs.
{simulated}Needs torch and safetensors: python reproduce.py cuda:0
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

device = sys.argv[1] if len(sys.argv) > 1 else "{device}"
kept = load_file(Path(__file__).with_name("operands.safetensors"))
wrong, columns = 0, set()
for _ in range(100):
    result = torch.ops.{operator}({arguments})
    bad = ~((result.cpu().double() - kept["exact"]).abs() <= kept["allowed"])
    wrong += bool(bad.any())
    columns |= set(bad.reshape(-1, bad.shape[-1]).any(0).nonzero().flatten().tolist())
print(f"{{device}}: {{wrong}} of 100 calls are wrong, in output columns {{sorted(columns)}}")
sys.exit(3 if wrong else 0)
'''


def write_reproducer(
    kernels: Kernels, faults: Sequence[KernelFault], device: str, folder: Path, *, simulated: bool
) -> None:
    """Write reproduce.py and operands.safetensors for the first kernel, which has most wrong calls, if there is one.

    `shown` in the file is the wrong result. `simulated`: the fault is, so the script finds nothing, and says so.
    """
    first = next(iter(faults), None)
    example = kernels.found[first.operator, first.shapes[0], first.dtype].example if first else None
    if first is None or example is None:
        return
    func, (args, kwargs), exact, allowed, shown = example
    folder.mkdir(exist_ok=True)
    tensors: dict[str, Tensor] = {"exact": exact, "allowed": allowed, "shown": shown}

    def written(value: Any) -> str:
        if not isinstance(value, Tensor):
            return repr(value)
        name = f"operand{len(tensors) - 3}"
        tensors[name] = value
        return f'kept["{name}"].to(device)'

    arguments = [*map(written, args), *(f"{name}={written(value)}" for name, value in kwargs.items())]
    save_file({name: value.contiguous().clone() for name, value in tensors.items()}, folder / "operands.safetensors")
    note = "The fault was simulated by aqnpipe, behind the operator: without it the device computes right.\n"
    text = _SCRIPT.format(
        what=first.in_words,
        simulated=note if simulated else "",
        device=device,
        operator=str(func),
        arguments=", ".join(arguments),
    )
    (folder / "reproduce.py").write_text(text, encoding="utf-8")
