"""Exact probes of a decoder layer: inputs and weights for which every output has a single correct value.

A probe replaces weights of the layer for one call, for example by selections and powers of two, so that the correct
output is known without trusting the device. Any difference is then a fault: known answers have no tolerance, except
where the device takes roots, exponentials or reciprocals (norms and the cores between the linears).

- identity: the layer with o_proj = down_proj = 0 returns its input plus the observed (zero) branches.
- linear: a linear of which each row of the weight selects one input with a sign.
- mantissa: the same with weights of all mantissa bits.
- integer: a linear on small integers, whose sums are exact in any order.
- accumulator: a linear on large numbers that cancel, at once or at the end, whose sums are exact in float32 in any
  order.
- bias: a linear whose bias has all mantissa bits, on products of -1, 0 and 1.
- attention: attention over one token (the softmax of one score is 1), in which v_proj and o_proj select.
- mlp: the MLP with a constant gate at which the activation is the identity, in which up_proj and down_proj select.
- norm: a norm on inputs of mean square 1024, with powers of two as gains.
- monomial: a linear with rows permuted and scaled by signed powers of two gives its own outputs, permuted and scaled,
  within the error bound of their sums.
- repeat: the layer several times on one input gives the same output at every site, within the same bound.

The output of a site is compared with what it was computed from: that of attention with the output of o_proj in the same
call, that of the layer with the outputs of its branches. This separates the sites. Modules are called with their hooks,
as in the model.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from aqnpipe.diagnosis.checks import Check, compare
from aqnpipe.diagnosis.probes.linears import Replacement, selecting_weights, zeroed
from aqnpipe.diagnosis.probes.patterns import (
    NORM_INPUT_SCALE,
    ProbeInputs,
    Selection,
    norm_gains,
    norm_input,
    selection,
)
from aqnpipe.diagnosis.probes.reference import opening_of, substituted
from aqnpipe.diagnosis.probes.repeats import call_layer
from aqnpipe.diagnosis.probes.trace import tracing
from aqnpipe.error_bounds import few_roundings
from aqnpipe.models.layout import LayerSites, weight_of


@dataclass
class LayerProber:
    """A layer under test: its sites, and its keyword arguments for sequences of one token."""

    index: int
    sites: LayerSites
    one_token_kwargs: dict[str, Any]
    norm_offsets: dict[str, float]
    attention_kwargs: dict[str, Any] = field(default_factory=dict)

    def identity(self, inputs: ProbeInputs) -> list[Check]:
        """Run the layer with zero branches; this also records the keyword arguments of attention."""
        own = self.sites.linears
        hidden = inputs.square(own["o_proj"].out_features)
        with substituted(zeroed(own["o_proj"], own["down_proj"])), tracing(self.sites) as trace:
            output = call_layer(self.sites.layer, hidden, self.one_token_kwargs)
        self.attention_kwargs = trace.attention_kwargs
        attention, mlp = trace.branches
        return [self._check("identity", "layer_output", (hidden + attention) + mlp, output)]

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
        answer, output = torch.cat(expected), torch.cat(outputs)
        return [compare("norm", self.index, name, answer, output, 3, allowed=few_roundings(answer, inputs.dtype))]

    def attention(self, inputs: ProbeInputs) -> list[Check]:
        """Run attention over single tokens, with selecting value and output projections."""
        own = self.sites.linears
        value, output = own["v_proj"], own["o_proj"]
        x = inputs.square(value.in_features)
        of_value, of_output = (selection(module.out_features, module.in_features) for module in (value, output))
        queries = [own[name] for name in ("q_proj", "k_proj") if name in own]
        weights = [
            *zeroed(*queries),
            *selecting_weights(value, of_value),
            *selecting_weights(output, of_output),
        ]
        with substituted(weights), tracing(self.sites) as trace:
            result = call_layer(self.sites.attention, x, self.attention_kwargs)
        values, fed = trace.outputs["v_proj"], trace.inputs["o_proj"]
        heads = self._head_of(fed.shape[-1], values.shape[-1])
        return [
            self._check("attention", "v_proj", of_value.product(x), values),
            self._core("attention", "attention_core", values[..., heads], fed),
            self._check("attention", "o_proj", of_output.product(fed), trace.outputs["o_proj"]),
            self._check("attention", "attention_output", trace.outputs["o_proj"], result),
        ]

    def mlp(self, inputs: ProbeInputs) -> list[Check]:
        """Run the MLP with a constant gate at which the activation is the identity; up and down projections select.

        In a mixture with a shared expert this is the shared expert, whose output is a site of its own name.
        """
        own = self.sites.linears
        gate, up, down = (own[name] for name in ("gate_proj", "up_proj", "down_proj"))
        x = inputs.square(up.in_features).clone()
        x[..., 0] = 1.0
        opening = opening_of(inputs.dtype)
        of_gate = Selection(torch.zeros(gate.out_features, dtype=torch.long), torch.full((gate.out_features,), opening))
        of_up = selection(up.out_features, up.in_features, skip=1).times(torch.tensor(1 / opening))
        of_down = selection(down.out_features, down.in_features)
        weights: list[Replacement] = [
            *selecting_weights(gate, of_gate),
            *selecting_weights(up, of_up),
            *selecting_weights(down, of_down),
        ]
        block = self.gated_block
        with substituted(weights), tracing(self.sites) as trace:
            result = block(x)
        gates, ups, fed = trace.outputs["gate_proj"], trace.outputs["up_proj"], trace.inputs["down_proj"]
        checks = [
            self._check("mlp", "gate_proj", of_gate.product(x), gates),
            self._check("mlp", "up_proj", of_up.product(x), ups),
            self._core("mlp", "mlp_core", _activated(block, gates) * ups.cpu().double(), fed),
            self._check("mlp", "down_proj", of_down.product(fed), trace.outputs["down_proj"]),
        ]
        own_name = next(path for path, module in self.sites.layer.named_modules() if module is block)
        site = "mlp_output" if block is self.sites.mlp else own_name.rsplit(".", 1)[-1]
        return [*checks, self._check("mlp", site, trace.outputs["down_proj"], result)]

    @property
    def gated_block(self) -> nn.Module:
        """The module of which the gate, up and down projections are parts: the MLP, or a shared expert in it."""
        down = self.sites.linears["down_proj"]
        owners = [module for module in self.sites.layer.modules() if down in module.children()]
        return owners[0]

    def _check(self, probe: str, site: str, expected: Tensor, observed: Tensor) -> Check:
        return compare(probe, self.index, site, expected, observed)

    def _core(self, probe: str, site: str, expected: Tensor, observed: Tensor) -> Check:
        return compare(probe, self.index, site, expected, observed, allowed=few_roundings(expected, observed.dtype))

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


def subtracts_mean(module: nn.Module) -> bool:
    """Return whether a norm is a LayerNorm, by the name of its class; its answer is not that of the norm probe."""
    name = type(module).__name__.lower()
    return "layernorm" in name and "rms" not in name


def _activated(block: nn.Module, gates: Tensor) -> Tensor:
    """Return the activation of the observed gates, which a fault may have moved, in float64 on the host, unhooked."""
    activation = getattr(block, "act_fn", None)
    gates = gates.cpu().double()
    if activation is None:
        return gates
    activated: Tensor = activation.forward(gates) if isinstance(activation, nn.Module) else activation(gates)
    return activated
