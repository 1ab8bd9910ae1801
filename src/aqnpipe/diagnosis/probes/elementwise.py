"""Norms and activations by themselves, over the whole range of what they take, against float64 on the host.

The exact norm probe has a mean square of 1024 and gains that are powers of two, where neither the reciprocal root nor
the mantissas of a product can be wrong. The sweep of a norm has one mean square per row, from the smallest that epsilon
leaves to the largest that float32 squares, and full mantissas in input, gain and bias.

An activation is run by itself, on all 65,536 bit patterns of bfloat16 or float16 (in float32 on the patterns of
bfloat16, completed to full mantissas), and within a gated MLP whose projections select: there the gate takes the finite
patterns and the up projection full mantissas, so that the product of the two is checked as well. The reference follows
the name in the model's configuration, so a wrong activation module is a difference.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from aqnpipe.diagnosis.capture import gradients_of, host_copy, on_host, substituted, tracing
from aqnpipe.diagnosis.checks import Bench, Check, compare
from aqnpipe.diagnosis.probes import patterns
from aqnpipe.diagnosis.probes.patterns import FLOAT32_EPS, NORM_INPUT_SCALE, full_mantissas, mantissa_bits, selection
from aqnpipe.error_bounds import TWO_ROUNDINGS, few_roundings
from aqnpipe.models.layout import LayerSites, weight_of

_EXPONENTS = {torch.float16: (-12, 10)}
_WIDE_EXPONENTS = (-12, 48)
"""Exponents of the inputs of norms: sums of squares stay finite in float32 with up to 2^28 channels."""

_ROWS_OF_GRADIENT = 32
_SHARE_OF_MEAN = 0.25
_EPSILON_NAMES = ("variance_epsilon", "eps", "epsilon")

CORE_SITE = "mlp_core"
ACTIVATION_SITE = "activation"
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


@dataclass(frozen=True)
class Norm:
    """A norm: `unit` is 1 if it multiplies by 1 + weight (Gemma), `is_centred` if it subtracts the mean (LayerNorm).

    One whose `epsilon` is not known has no answer but at a large mean square.
    """

    module: nn.Module
    epsilon: float | None
    unit: float
    is_centred: bool

    @classmethod
    def of(cls, module: nn.Module) -> "Norm":
        """Return a norm as its class name, its attributes and a copy on the host say."""
        found = (getattr(module, name, None) for name in _EPSILON_NAMES)
        epsilon = next((float(value) for value in found if value is not None), None)
        name = type(module).__name__.lower()
        is_centred = "layernorm" in name and "rms" not in name
        return cls(module, epsilon, 0.0 if is_centred else _unit(module), is_centred)

    def exact(self, site: str, layer: int, inputs: patterns.ProbeInputs) -> list[Check]:
        """Run it with three turns of gains, so that every channel has the largest and the smallest output."""
        weight = weight_of(self.module)
        x = patterns.norm_input(inputs.num_tokens, weight.numel())
        expected, outputs = [], []
        for turn in range(3):
            gains = patterns.norm_gains(weight.numel(), turn).clamp(max=inputs.top_gain)
            shown = (gains - self.unit).to(weight.device, weight.dtype)
            with substituted([(weight, shown.reshape(weight.shape))]):
                outputs.append(self.module(x.unsqueeze(1).to(inputs.device, inputs.dtype)))
            expected.append(x / NORM_INPUT_SCALE * gains)
        answer, output = torch.cat(expected), torch.cat(outputs)
        return [compare("norm", layer, site, answer, output, 3, allowed=few_roundings(answer, inputs.dtype))]

    def sweep(self, site: str, bench: Bench) -> list[Check]:
        """Compare rows of every exponent, each channel with random full mantissas, with float64."""
        if self.epsilon is None:
            return []
        weight, bias = weight_of(self.module), getattr(self.module, "bias", None)
        x = _norm_inputs(tuple(weight.shape), bench.dtype, bench.generator)
        gain = _full(weight, bench)
        shown, shift = [(weight, gain)], torch.zeros_like(gain)
        if isinstance(bias, nn.Parameter):
            shift = _full(bias, bench)
            shown.append((bias, shift))
        with substituted(shown):
            observed = self.module(x.to(bench.device, bench.dtype))
        expected, allowed = self._answer(x, gain, shift, bench.dtype)
        return [bench.compare("norm_range", site, expected, observed, allowed)]

    def in_model(self, layer: int, site: str, x: Tensor, observed: Tensor) -> Check:
        """Return the check of one call within the model, with the own gain, against float64.

        Rows that no healthy device squares in float32 are left out.
        """
        rows, weight, bias = _precise(x), weight_of(self.module), getattr(self.module, "bias", None)
        shift = bias if isinstance(bias, Tensor) else torch.zeros_like(weight)
        expected, allowed = self._answer(rows, weight, shift, observed.dtype)
        if self.is_centred:  # a mean far above the scatter costs the variance its digits
            square, scatter = rows.square().mean(-1, keepdim=True), rows.var(-1, correction=0, keepdim=True)
            allowed = allowed * (1 + square / (scatter + (self.epsilon or 0.0)))
        if observed.dtype != torch.float32:  # a third rounding: fused kernels read a sum before it is rounded
            allowed = 1.5 * allowed
        seen = observed.detach().cpu()
        plain = rows.abs().amax(-1, keepdim=True) < 2.0 ** _WIDE_EXPONENTS[1]  # not so where NaN
        answers = torch.where(plain, expected, seen.double())
        return compare("norm_in_model", layer, site, answers, seen, allowed=torch.where(plain, allowed, 0.0))

    def gradient(self, site: str, bench: Bench) -> list[Check]:
        """Compare the gradient of the input, at a mean square of about 1; no check without epsilon or graph.

        Healthy devices round the gradient times the gain, the normalised value, and the result to the dtype, and a sum
        over the channels is in float32; all of it in proportion to the terms of the gradient.
        """
        if self.epsilon is None:
            return []
        weight = weight_of(self.module)
        shape = (_ROWS_OF_GRADIENT, 1, *weight.shape)
        x, given = (full_mantissas(shape, mantissa_bits(bench.dtype), bench.generator) for _ in range(2))
        gain, leaf = _full(weight, bench), x.to(bench.device, bench.dtype).requires_grad_(True)
        with substituted([(weight, gain)]):
            (observed,) = gradients_of(lambda: self.module(leaf), [leaf], given)
        if observed is None:
            return []
        through = given * (_precise(gain) + self.unit)
        normal, _, root = self._normalised(x)
        expected = root * (through - normal * (through * normal).mean(-1, keepdim=True))
        terms = through.abs() + normal.abs() * (through * normal).abs().mean(-1, keepdim=True)
        if self.is_centred:
            expected = expected - root * through.mean(-1, keepdim=True)
            terms = terms + through.abs().mean(-1, keepdim=True)
        share = 2 * TWO_ROUNDINGS * torch.finfo(bench.dtype).eps + (16 + x.shape[-1] ** 0.5 / 4) * FLOAT32_EPS
        allowed = share * root * terms + torch.finfo(bench.dtype).tiny
        return [bench.compare("backward", f"{site}.input_gradient", expected, observed, allowed)]

    def _answer(self, x: Tensor, gain: Tensor, shift: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the output in float64, and the error that healthy devices make.

        The normalised value and its product with the gain are rounded to the dtype.
        """
        factors, shift = _precise(gain) + self.unit, _precise(shift)
        normal, magnitude, _ = self._normalised(x)
        share = TWO_ROUNDINGS * torch.finfo(dtype).eps + (8 + x.shape[-1] ** 0.5 / 4) * FLOAT32_EPS
        allowed = share * (magnitude * factors.abs() + shift.abs()) + torch.finfo(dtype).tiny
        return normal * factors + shift, allowed

    def _normalised(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return x over its root mean square, the magnitude of the terms added for it, and 1 over the root."""
        mean = x.mean(-1, keepdim=True) if self.is_centred else torch.zeros_like(x[..., :1])
        root = ((x - mean).square().mean(-1, keepdim=True) + (self.epsilon or 0.0)).rsqrt()
        of_mean = x.abs().mean(-1, keepdim=True) if self.is_centred else mean
        return (x - mean) * root, (x.abs() + of_mean) * root, root


def _unit(module: nn.Module) -> float:
    """Return what a norm adds to its weight, judged by the output of a copy at weight 0."""
    with on_host():
        copied = host_copy(module, torch.float32)
        weight = weight_of(copied)
        x = patterns.norm_input(1, weight.numel()).float()
        with substituted([(weight, torch.zeros_like(weight))]):
            return 1.0 if (copied(x) / (x / NORM_INPUT_SCALE)).median() > 0.5 else 0.0


def _full(like: Tensor, bench: Bench) -> Tensor:
    """Return random numbers with full mantissas in the form of a weight."""
    return full_mantissas(tuple(like.shape), mantissa_bits(bench.dtype), bench.generator).to(like.device, like.dtype)


def _precise(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().double()


def _norm_inputs(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return [rows, 1, *shape]: full mantissas of one exponent per row, within three powers of two of each other."""
    low, high = _EXPONENTS.get(dtype, _WIDE_EXPONENTS)
    scales = 2.0 ** torch.arange(low, high + 1, dtype=torch.float64)
    scales = scales.repeat(-(-patterns.LEAST_ROWS // len(scales)))
    values = full_mantissas((len(scales), 1, *shape), mantissa_bits(dtype), generator)
    values *= 2.0 ** torch.randint(-2, 1, values.shape, generator=generator).double()
    values += _SHARE_OF_MEAN
    values *= scales.reshape(-1, 1, *[1] * len(shape))
    return values.to(dtype).double()


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


def activation_sweep(module: nn.Module, name: str, bench: Bench) -> list[Check]:
    """Return the checks of the activation `name` on all finite numbers of 16 bits, and on a few rows of them."""
    x = _in_rows(_shuffled(finite_numbers(bench.dtype, bench.generator), bench.generator), _WIDTH)
    expected, allowed = _reference(name, x)
    checks = []
    for rows in (len(x), *patterns.FEW_ROWS):
        observed = module(x[:rows].to(bench.device).unsqueeze(1))
        flat = [part.reshape(-1, 1) for part in (expected[:rows], observed, allowed[:rows])]  # of no channel
        checks.append(bench.compare("activation", ACTIVATION_SITE, *flat))
    return checks


def activation_gradient(module: nn.Module, name: str, bench: Bench) -> list[Check]:
    """Return the check of the derivative of the activation `name`, from numbers far below 1 to ones where it is 0 or 1.

    The reference is differentiated in float64. No check where the module has no gradient.
    """
    numbers, dtype = finite_numbers(bench.dtype, bench.generator), bench.dtype
    x = _in_rows(numbers[(numbers.abs() > _GRADIENT_RANGE[0]) & (numbers.abs() < _GRADIENT_RANGE[1])], _WIDTH)
    gradient = full_mantissas(tuple(x.shape), mantissa_bits(dtype), bench.generator).to(dtype)
    leaf = x.to(bench.device).unsqueeze(1).requires_grad_(True)
    (observed,) = gradients_of(lambda: module(leaf), [leaf], gradient.unsqueeze(1))
    if observed is None:
        return []
    function, accuracy = REFERENCES[name]
    exact = x.double().requires_grad_(True)
    with torch.enable_grad():
        (expected,) = torch.autograd.grad(function(exact).sum(), exact)
    allowed = torch.zeros_like(expected)
    if accuracy != "exact":
        inner = torch.finfo(dtype).eps if accuracy == "composed" else FLOAT32_EPS
        allowed = TWO_ROUNDINGS * torch.finfo(dtype).eps * expected.abs()
        allowed += 4 * _FLOAT32_ULPS * inner * (1 + x.double().abs())
    allowed = allowed * gradient.double().abs() + _smallest(dtype)
    flat = [tensor.reshape(-1, 1) for tensor in (expected * gradient.double(), observed, allowed)]
    return [bench.compare("backward", f"{ACTIVATION_SITE}.input_gradient", *flat)]


def gated_sweep(sites: LayerSites, name: str, bench: Bench) -> list[Check]:
    """Return the checks of activation times up projection at the input of down_proj: all 16-bit numbers, and few rows.

    Gate and up projection may be two linears or the halves of one. A layer without them has no check.
    """
    linears, dtype = sites.linears, bench.dtype
    names = ["gate_proj", "up_proj"] if {"gate_proj", "up_proj"} <= linears.keys() else ["gate_up_proj"]
    if not {*names, "down_proj"} <= linears.keys() or linears[names[0]].in_features <= 2 * _NUM_FACTORS:
        return []
    replaced, down = [linears[own] for own in names], linears["down_proj"]
    width, outputs = replaced[0].in_features, down.in_features
    numbers = _in_rows(_shuffled(finite_numbers(dtype, None), bench.generator), width - _NUM_FACTORS)
    bits = min(mantissa_bits(dtype), patterns.PRODUCT_BITS)
    factors = full_mantissas((len(numbers), _NUM_FACTORS), bits, bench.generator).to(dtype) / 2
    x = torch.cat([factors, numbers], dim=1)
    chosen = [selection(outputs, width, skip=_NUM_FACTORS).chosen, torch.arange(outputs) % _NUM_FACTORS]
    weights = [
        pair
        for module, columns in zip(replaced, chosen if len(replaced) == 2 else [torch.cat(chosen)], strict=True)
        for pair in patterns.selecting_weights(module, patterns.Selection(columns, torch.ones(len(columns))))
    ]
    block = next(module for module in sites.layer.modules() if down in module.children())
    checks = []
    with tracing(sites) as trace, substituted(weights):
        for rows in (len(x), *patterns.FEW_ROWS):
            block(x[:rows].to(down.weight.device).unsqueeze(1))
            # A fault of a projection is not one of what follows it: the answer is that for its observed output.
            checks.append(_gated_check(name, bench, [trace.outputs[own] for own in names], trace.inputs["down_proj"]))
    return checks


def _gated_check(name: str, bench: Bench, projected: list[Tensor], fed: Tensor) -> Check:
    """Compare what down_proj got with the activation of the gate times the up projection."""
    gates, ups = projected if len(projected) == 2 else projected[0].chunk(2, -1)
    activated, allowed = _reference(name, gates.cpu())
    times, eps = _precise(ups), torch.finfo(fed.dtype).eps
    bound = (allowed + TWO_ROUNDINGS / 2 * eps * activated.abs()) * times.abs() + _smallest(fed.dtype)
    return bench.compare("activation", CORE_SITE, activated * times, fed, bound)


def _shuffled(numbers: Tensor, generator: torch.Generator) -> Tensor:
    """Return the numbers in random order, so that a few of them are of every magnitude."""
    return numbers[torch.randperm(len(numbers), generator=generator)]


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
