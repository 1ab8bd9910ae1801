"""Exact probes of a decoder layer: inputs and weights for which every output has a single correct value.

A probe replaces weights of the layer for one call, for example by selections and powers of two, so that the correct
output is known bit for bit without trusting the device. Any difference is then a fault or rounding of the device.

| probe | what runs | expected output | |---|---|---| | identity | the layer with o_proj = down_proj = 0 | its input
  plus the observed (zero) branches | | linear | a single linear; each row of the weight selects one input with a sign |
  the selected inputs | | norm | a single norm on inputs of mean square 1024, with powers of two as gains | input / 32 *
  gain | | attention | attention over one token (softmax of one score is 1); v and o select | the selected inputs | |
  mlp | the MLP with a constant gate at which the activation is the identity; up and down select | the selected inputs |
  | integer | a single linear on small integers | sums that are exact in any order | | monomial | a single linear with
  rows permuted and scaled by signed powers of two | its own outputs, permuted and scaled | | repeat | the layer several
  times on one input | the same output at every site |

The output of a site is compared with what it was computed from: that of attention with the output of o_proj in the same
call, that of the layer with the outputs of its branches. This separates the sites. Modules are called with their hooks,
as in the model.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from aqnpipe.diagnosis.checks import Check, compare, differs
from aqnpipe.diagnosis.patterns import (
    NORM_INPUT_SCALE,
    exponent_ladder,
    integer_operands,
    latin_square,
    norm_gains,
    norm_input,
    selection,
    selection_weight,
)
from aqnpipe.diagnosis.substitute import substituted
from aqnpipe.diagnosis.trace import Step, Trace, steps, tracing
from aqnpipe.models.layout import weight_of
from aqnpipe.models.sites import LayerSites
from aqnpipe.seeding import keyed_generator

_GATE = {torch.float16: 16.0}
_WIDE_GATE = 128.0
"""Gate value at which silu and gelu return their input exactly, because the sigmoid rounds to 1 in the dtype."""


Replacement = tuple[Tensor, Tensor]


class ProbeInputs:
    """Latin squares of a diagnosis, created once per width. Another `ladder` is used to refine a fault."""

    def __init__(self, num_tokens: int, dtype: torch.dtype, device: torch.device, ladder: Tensor | None = None) -> None:
        self.num_tokens = num_tokens
        self.dtype = dtype
        self.device = device
        self.ladder = exponent_ladder(dtype) if ladder is None else ladder
        self.top_gain = 2.0**8
        self._squares: dict[int, Tensor] = {}

    def square(self, num_channels: int) -> Tensor:
        """Return a Latin square as one-token sequences [tokens, 1, channels]."""
        if num_channels not in self._squares:
            values = latin_square(self.num_tokens, num_channels, self.ladder)
            self._squares[num_channels] = values.unsqueeze(1).to(self.device, self.dtype)
        return self._squares[num_channels]


@dataclass
class LayerProber:
    """A layer under test: its sites, and its keyword arguments for sequences of one token."""

    index: int
    sites: LayerSites
    one_token_kwargs: dict[str, Any]
    norm_offsets: dict[str, float]
    seed: int
    attention_kwargs: dict[str, Any] = field(default_factory=dict)

    def identity(self, inputs: ProbeInputs) -> list[Check]:
        """Run the layer with zero branches; this also records the keyword arguments of attention."""
        linears = self.sites.linears
        hidden = inputs.square(self._hidden_size)
        with substituted(_zeroed(linears["o_proj"], linears["down_proj"])), tracing(self.sites) as trace:
            output = _call(self.sites.layer, hidden, self.one_token_kwargs)
        self.attention_kwargs = trace.attention_kwargs
        attention, mlp = trace.branches
        return [self._check("identity", "layer_output", (hidden + attention) + mlp, output)]

    def linear(self, name: str, inputs: ProbeInputs) -> list[Check]:
        """Run one linear whose outputs each copy one input with a sign."""
        module = self.sites.linears[name]
        x = inputs.square(module.in_features)
        chosen, signs = selection(module.out_features, module.in_features)
        with substituted(_selecting(module, chosen, signs)):
            return [self._check("linear", name, _selected(x, chosen, signs), module(x))]

    def norm(self, name: str, inputs: ProbeInputs) -> list[Check]:
        """Run one norm with three turns of gains, so that every channel has the largest and the smallest output."""
        module = self.sites.norms[name]
        weight = weight_of(module)
        x = norm_input(inputs.num_tokens, weight.numel())
        expected, outputs = [], []
        for turn in range(3):
            gains = norm_gains(weight.numel(), turn).clamp(max=inputs.top_gain)
            shown = (gains - self.norm_offsets[name]).to(weight.device, weight.dtype)
            with substituted([(weight, shown.reshape(weight.shape))]):
                outputs.append(module(x.unsqueeze(1).to(inputs.device, inputs.dtype)))
            expected.append(x / NORM_INPUT_SCALE * gains)
        return [compare("norm", self.index, name, torch.cat(expected), torch.cat(outputs), calls=len(outputs))]

    def attention(self, inputs: ProbeInputs) -> list[Check]:
        """Run attention over single tokens, with selecting value and output projections."""
        linears = self.sites.linears
        value, output = linears["v_proj"], linears["o_proj"]
        x = inputs.square(value.in_features)
        v_chosen, v_signs = selection(value.out_features, value.in_features)
        o_chosen, o_signs = selection(output.out_features, output.in_features)
        queries = [linears[name] for name in ("q_proj", "k_proj") if name in linears]
        weights = [*_zeroed(*queries), *_selecting(value, v_chosen, v_signs), *_selecting(output, o_chosen, o_signs)]
        with substituted(weights), tracing(self.sites) as trace:
            result = _call(self.sites.attention, x, self.attention_kwargs)
        values, fed = trace.outputs["v_proj"], trace.inputs["o_proj"]
        heads = self._head_of(fed.shape[-1], values.shape[-1])
        return [
            self._check("attention", "v_proj", _selected(x, v_chosen, v_signs), values),
            self._check("attention", "attention_core", values[..., heads], fed),
            self._check("attention", "o_proj", _selected(fed, o_chosen, o_signs), trace.outputs["o_proj"]),
            self._check("attention", "attention_output", trace.outputs["o_proj"], result),
        ]

    def mlp(self, inputs: ProbeInputs) -> list[Check]:
        """Run the MLP with a constant gate at which the activation is the identity; up and down projections select."""
        linears = self.sites.linears
        gate, up, down = (linears[name] for name in ("gate_proj", "up_proj", "down_proj"))
        x = inputs.square(up.in_features).clone()
        x[..., 0] = 1.0
        opening = _GATE.get(inputs.dtype, _WIDE_GATE)
        first = torch.zeros(gate.out_features, dtype=torch.long)
        openings = torch.full((gate.out_features,), opening, dtype=torch.float64)
        u_chosen, u_signs = selection(up.out_features, up.in_features, skip=1)
        u_signs = u_signs / opening
        d_chosen, d_signs = selection(down.out_features, down.in_features)
        weights = [
            *_selecting(gate, first, openings),
            *_selecting(up, u_chosen, u_signs),
            *_selecting(down, d_chosen, d_signs),
        ]
        with substituted(weights), tracing(self.sites) as trace:
            result = self.sites.mlp(x)
        gates, ups, fed = trace.outputs["gate_proj"], trace.outputs["up_proj"], trace.inputs["down_proj"]
        return [
            self._check("mlp", "gate_proj", _selected(x, first, openings), gates),
            self._check("mlp", "up_proj", _selected(x, u_chosen, u_signs), ups),
            self._check("mlp", "mlp_core", self._activated(gates, opening) * ups, fed),
            self._check("mlp", "down_proj", _selected(fed, d_chosen, d_signs), trace.outputs["down_proj"]),
            self._check("mlp", "mlp_output", trace.outputs["down_proj"], result),
        ]

    def integer(self, name: str, inputs: ProbeInputs) -> list[Check]:
        """Run one linear in its real shape on small integers."""
        module = self.sites.linears[name]
        generator = keyed_generator("cpu", self.seed, "diagnosis.integer", self.index, *name.encode())
        x, weight, product = integer_operands(
            inputs.num_tokens, module.out_features, module.in_features, inputs.dtype, generator
        )
        own = module.weight
        with substituted([(own, weight.to(own.device, own.dtype)), *_zero_bias(module)]):
            output = module(x.unsqueeze(1).to(inputs.device, inputs.dtype))
        return [self._check("integer", name, product, output)]

    def monomial(self, name: str, trace: Trace) -> list[Check]:
        """Run one linear on its real input with its rows shifted by a third and scaled by +-1, +-2 or +-1/2."""
        module = self.sites.linears[name]
        num_rows = module.out_features
        moved = torch.arange(num_rows).roll(num_rows // 3)
        scale = 1.0 - 2 * (torch.arange(num_rows) % 2)
        if module.weight.dtype != torch.float16:  # halving would lose bits of small float16 numbers
            scale = scale * 2.0 ** (torch.arange(num_rows) % 3 - 1)
        weight, bias = module.weight, module.bias
        factors = scale.to(weight.device, weight.dtype)
        rows = moved.to(weight.device)
        shown: list[Replacement] = [(weight, weight.data[rows] * factors.unsqueeze(1))]
        if bias is not None:
            shown.append((bias, bias.data[rows] * factors))
        with substituted(shown):
            output = module(trace.inputs[name])
        return [self._check("monomial", name, trace.outputs[name][..., rows] * factors, output)]

    def repeat(self, hidden: Tensor, kwargs: dict[str, Any], num_runs: int) -> tuple[list[Check], Trace]:
        """Run the layer `num_runs` times on one input; steps with equal sources must have equal outputs.

        The expected output is the element-wise median of the runs. Returns the checks of all sites and the first trace.
        """
        traces = []
        for _ in range(num_runs):
            with tracing(self.sites) as trace:
                _call(self.sites.layer, hidden, kwargs)
            traces.append(trace)
        runs = [steps(trace) for trace in traces]
        return [self._repeated([run[i] for run in runs]) for i in range(len(runs[0]))], traces[0]

    def _repeated(self, runs: list[Step]) -> Check:
        site, first = runs[0].site, runs[0].output
        if all(torch.equal(first, run.output) for run in runs[1:]):
            return Check("repeat", self.index, site, first.shape[-1], len(runs) * first[..., 0].numel(), None)
        usual_sources = [_median([run.sources[i] for run in runs]) for i in range(len(runs[0].sources))]
        comparable = [
            run.output
            for run in runs
            if all(not differs(usual, own).any() for usual, own in zip(usual_sources, run.sources, strict=True))
        ]
        if len(comparable) < 2:
            return Check("repeat", self.index, site, first.shape[-1], 0, None)
        usual = _median(comparable)
        num_calls = len(comparable)
        return compare("repeat", self.index, site, torch.cat([usual] * num_calls), torch.cat(comparable), num_calls)

    @property
    def _hidden_size(self) -> int:
        return self.sites.linears["o_proj"].out_features

    def _check(self, probe: Any, site: str, expected: Tensor, observed: Tensor) -> Check:
        return compare(probe, self.index, site, expected, observed)

    def _activated(self, gates: Tensor, opening: float) -> Tensor:
        """Return the activation of the observed gates, which a fault may have moved from their constant."""
        activation: Callable[[Tensor], Tensor] | None = getattr(self.sites.mlp, "act_fn", None)
        return gates if activation is None else activation(gates)

    def _head_of(self, fed_width: int, value_width: int) -> Tensor:
        """Return, for each input channel of o_proj, the value channel it comes from; grouped heads share channels."""
        head_dim = int(getattr(self.sites.attention, "head_dim", value_width))
        channel = torch.arange(fed_width)
        group = fed_width // value_width
        return (channel // head_dim // group) * head_dim + channel % head_dim


def norm_offset(module: nn.Module, dtype: torch.dtype, device: torch.device) -> float:
    """Return 0 if a norm multiplies by its weight, 1 if by 1 + weight (Gemma), judged by its output at weight 0."""
    weight = weight_of(module)
    x = norm_input(1, weight.numel()).to(device, dtype)
    with substituted([(weight, torch.zeros_like(weight))]):
        share = (module(x).double() / (x.double() / NORM_INPUT_SCALE)).median()
    return 1.0 if share > 0.5 else 0.0


def _call(module: nn.Module, hidden: Tensor, kwargs: dict[str, Any]) -> Tensor:
    output = module(hidden_states=hidden, **kwargs)
    tensor: Tensor = output[0] if isinstance(output, tuple) else output
    return tensor


def _selecting(module: nn.Linear, chosen: Tensor, factors: Tensor) -> Iterator[Replacement]:
    yield module.weight, selection_weight(chosen, factors, module.weight)
    yield from _zero_bias(module)


def _zeroed(*modules: nn.Linear) -> Iterator[Replacement]:
    for module in modules:
        yield module.weight, torch.zeros_like(module.weight)
        yield from _zero_bias(module)


def _zero_bias(module: nn.Linear) -> Iterator[Replacement]:
    if module.bias is not None:
        yield module.bias, torch.zeros_like(module.bias)


def _selected(x: Tensor, chosen: Tensor, factors: Tensor) -> Tensor:
    return x[..., chosen.to(x.device)] * factors.to(x.device, x.dtype)


def _median(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).median(0).values if len(tensors) > 1 else tensors[0]
