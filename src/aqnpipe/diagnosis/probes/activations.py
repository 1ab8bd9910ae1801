"""The activation of a layer on every 16-bit number, against float64 on the host.

The activation is run by itself, on all 65,536 bit patterns of bfloat16 or float16 (in float32 on the patterns of
bfloat16, completed to full mantissas), and within a gated MLP whose projections select: there the gate takes the finite
patterns and the up projection full mantissas, so that the product of the two is checked as well. The reference follows
the name in the model's configuration, so a wrong activation module is a difference.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from aqnpipe.diagnosis.capture import hooked
from aqnpipe.diagnosis.checks import Check, compare
from aqnpipe.diagnosis.probes.patterns import Selection, selection
from aqnpipe.diagnosis.probes.reference import (
    FEW_ROWS,
    FLOAT32_EPS,
    PRODUCT_BITS,
    full_mantissas,
    gradients_of,
    mantissa_bits,
    substituted,
    zero_bias,
)
from aqnpipe.error_bounds import TWO_ROUNDINGS
from aqnpipe.models.layout import LayerSites

SITE = "mlp_core"
MODULE_SITE = "activation"
_CONFIG_NAMES = ("hidden_act", "hidden_activation", "activation_function", "hidden_activation_function")
_MODULE_NAMES = ("act_fn", "activation_fn", "act")
_NUM_FACTORS = 8
"""Channels of the MLP's input with full mantissas, which the rows of the up projection copy."""
_WIDTH = 256
_GRADIENT_RANGE = (2.0**-8, 16.0)
_ROUNDINGS = {"exact": 0.0, "one kernel": TWO_ROUNDINGS, "composed": 4.0}
"""Roundings of a result to the dtype, in epsilon: of the sigmoid and the product with it; up to eight, half an epsilon
each, where every operation rounds."""
_FLOAT32_ULPS = 4.0
_SMALLEST = {torch.float16: 2.0**-14}
_WIDE_SMALLEST = 2.0**-100
"""Results below this are not compared: healthy devices flush them to zero, or an exponential has overflowed."""


def _silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def _gelu_tanh(x: Tensor) -> Tensor:
    return x * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))


Accuracy = Literal["exact", "one kernel", "composed"]
"""Of a healthy activation: every bit; computed in float32 and rounded once; rounded to the dtype by each operation."""

REFERENCES: dict[str, tuple[Callable[[Tensor], Tensor], Accuracy]] = {
    "silu": (_silu, "one kernel"),
    "swish": (_silu, "one kernel"),
    "gelu": (lambda x: x * torch.erfc(-x * 0.5**0.5) / 2, "one kernel"),
    "gelu_pytorch_tanh": (_gelu_tanh, "one kernel"),
    "gelu_new": (_gelu_tanh, "composed"),
    "gelu_fast": (_gelu_tanh, "composed"),
    "quick_gelu": (lambda x: x * torch.sigmoid(1.702 * x), "composed"),
    "relu": (torch.relu, "exact"),
}
"""Reference of each activation in float64."""


def activation_of(layer: nn.Module) -> nn.Module | None:
    """Return the activation module of a decoder layer, None if it has none of a known name."""
    for path, module in layer.named_modules():
        if path.rsplit(".", 1)[-1] in _MODULE_NAMES and not list(module.parameters()):
            return module
    return None


def activation_name(config: Any) -> str | None:
    """Return the name of the activation in the model's configuration, None if it has none or no reference is known."""
    name = next((value for key in _CONFIG_NAMES if (value := getattr(config, key, None)) is not None), None)
    return name if name in REFERENCES else None


def activation_sweep(
    module: nn.Module, name: str, layer: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> list[Check]:
    """Return the checks of the activation `name` on all finite numbers of 16 bits, and on a few rows of them."""
    x = _in_rows(_shuffled(finite_numbers(dtype, generator), generator), _WIDTH)
    expected, allowed = _reference(name, x)
    checks = []
    for rows in (len(x), *FEW_ROWS):
        observed = module(x[:rows].to(device).unsqueeze(1))
        flat = [part.reshape(-1, 1) for part in (expected[:rows], observed, allowed[:rows])]  # of no channel
        checks.append(compare("activation", layer, MODULE_SITE, flat[0], flat[1], allowed=flat[2]))
    return checks


def activation_gradient(
    module: nn.Module, name: str, layer: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> list[Check]:
    """Return the check of the derivative of the activation `name`, from numbers far below 1 to ones where it is 0 or 1.

    The reference is differentiated in float64. No check where the module has no gradient.
    """
    numbers = finite_numbers(dtype, generator)
    x = _in_rows(numbers[(numbers.abs() > _GRADIENT_RANGE[0]) & (numbers.abs() < _GRADIENT_RANGE[1])], _WIDTH)
    gradient = full_mantissas(tuple(x.shape), mantissa_bits(dtype), generator).to(dtype)
    leaf = x.to(device).unsqueeze(1).requires_grad_(True)
    (observed,) = gradients_of(lambda: module(leaf), [leaf], gradient.unsqueeze(1))
    if observed is None:
        return []
    function, accuracy = REFERENCES[name]
    exact = x.double().requires_grad_(True)
    with torch.enable_grad():
        (expected,) = torch.autograd.grad(function(exact).sum(), exact)
    if accuracy == "exact":
        allowed = torch.zeros_like(expected)
    else:
        inner = torch.finfo(dtype).eps if accuracy == "composed" else FLOAT32_EPS
        allowed = TWO_ROUNDINGS * torch.finfo(dtype).eps * expected.abs()
        allowed += 4 * _FLOAT32_ULPS * inner * (1 + x.double().abs())
    allowed = allowed * gradient.double().abs() + _smallest(dtype)
    flat = [tensor.reshape(-1, 1) for tensor in (expected * gradient.double(), observed, allowed)]
    return [compare("backward", layer, f"{MODULE_SITE}.input_gradient", flat[0], flat[1], allowed=flat[2])]


def gated_sweep(
    sites: LayerSites, name: str, layer: int, dtype: torch.dtype, generator: torch.Generator
) -> list[Check]:
    """Return the checks of activation times up projection at the input of down_proj: all 16-bit numbers, and few rows.

    Gate and up projection may be two linears or the halves of one. A layer without them has no check.
    """
    found = _gate_and_up(sites)
    if found is None:
        return []
    replaced, width, rows, down, block = found
    numbers = _in_rows(_shuffled(finite_numbers(dtype, None), generator), width - _NUM_FACTORS)
    bits = min(mantissa_bits(dtype), PRODUCT_BITS)
    factors = full_mantissas((len(numbers), _NUM_FACTORS), bits, generator).to(dtype) / 2
    x = torch.cat([factors, numbers], dim=1)
    chosen = [selection(rows, width, skip=_NUM_FACTORS).chosen, torch.arange(rows) % _NUM_FACTORS]
    halves = chosen if len(replaced) == 2 else [torch.cat(chosen)]
    weights = [
        (module.weight, Selection(columns, torch.ones(len(columns))).weight(module.weight))
        for module, columns in zip(replaced, halves, strict=True)
    ]
    weights += [pair for module in replaced for pair in zero_bias(module)]
    fed: list[Tensor] = []
    checks = []
    projected: dict[nn.Module, Tensor] = {}
    handles = [module.register_forward_hook(lambda own, args, out: projected.update({own: out})) for module in replaced]
    handles.append(down.register_forward_pre_hook(lambda _module, args: fed.append(args[0])))
    with hooked(handles), substituted(weights):
        for rows in (len(x), *FEW_ROWS):
            block(x[:rows].to(down.weight.device).unsqueeze(1))
            # A fault of a projection is not one of what follows it: the answer is that for its observed output.
            outputs = [projected[module] for module in replaced]
            checks.append(_gated_check(name, layer, outputs, fed[-1].squeeze(1)))
    return checks


def _gated_check(name: str, layer: int, projected: list[Tensor], seen: Tensor) -> Check:
    """Compare what down_proj got with the activation of the gate times the up projection."""
    gates, ups = projected if len(projected) == 2 else projected[0].chunk(2, -1)
    activated, allowed = _reference(name, gates.squeeze(1).cpu())
    times, eps = ups.squeeze(1).cpu().double(), torch.finfo(seen.dtype).eps
    bound = (allowed + TWO_ROUNDINGS / 2 * eps * activated.abs()) * times.abs() + _smallest(seen.dtype)
    return compare("activation", layer, SITE, activated * times, seen, allowed=bound)


def _shuffled(numbers: Tensor, generator: torch.Generator) -> Tensor:
    """Return the numbers in random order, so that a few of them are of every magnitude."""
    return numbers[torch.randperm(len(numbers), generator=generator)]


def _gate_and_up(sites: LayerSites) -> tuple[list[nn.Linear], int, int, nn.Linear, nn.Module] | None:
    """Return the linears of gate and up projection, their width, rows of each, down_proj, and the module of all."""
    linears = sites.linears
    names = ["gate_proj", "up_proj"] if {"gate_proj", "up_proj"} <= linears.keys() else ["gate_up_proj"]
    if not {*names, "down_proj"} <= linears.keys():
        return None
    replaced, down = [linears[name] for name in names], linears["down_proj"]
    block = next(module for module in sites.layer.modules() if down in module.children())
    width = replaced[0].in_features
    if width <= 2 * _NUM_FACTORS:
        return None
    return replaced, width, down.in_features, down, block


def finite_numbers(dtype: torch.dtype, generator: torch.Generator | None) -> Tensor:
    """Return the numbers of 16 bits up to a quarter of the largest: of `dtype`, in float32 of bfloat16.

    In float32 `generator` draws the lower bits. Without it they are 0, so that rounding to TF32 changes none.
    """
    patterns = torch.arange(2**16)
    if dtype != torch.float32:
        numbers = patterns.to(torch.uint16).view(dtype)
    else:
        lower = 0 if generator is None else torch.randint(0, 2**16, (2**16,), generator=generator)
        numbers = ((patterns << 16) + lower).to(torch.uint32).view(torch.float32)
    return numbers[numbers.double().abs() <= torch.finfo(dtype).max / 4]


def _in_rows(numbers: Tensor, width: int) -> Tensor:
    """Return rows of `width` numbers; the last row is completed with the first numbers."""
    return numbers[torch.arange(-(-len(numbers) // width) * width) % len(numbers)].reshape(-1, width)


def _reference(name: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the activation of `x` in float64, and the rounding allowed for each value."""
    function, accuracy = REFERENCES[name]
    expected = function(x.double())
    eps = torch.finfo(x.dtype).eps
    inner = {"exact": 0.0, "one kernel": FLOAT32_EPS, "composed": eps}[accuracy]
    outer = _ROUNDINGS[accuracy] * eps + (0.0 if accuracy == "exact" else _FLOAT32_ULPS * FLOAT32_EPS)
    allowed = outer * expected.abs() + _FLOAT32_ULPS * inner * x.double().abs() * (expected != x.double())
    return expected, allowed + _smallest(x.dtype)


def _smallest(dtype: torch.dtype) -> float:
    return _SMALLEST.get(dtype, _WIDE_SMALLEST)
