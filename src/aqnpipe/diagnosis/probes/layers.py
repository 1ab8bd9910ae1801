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

The repeat probe runs a layer several times on one input. A device may add in another order in
every call (atomics, stream-K), so repeats of a sum agree within the forward error bound. Where two runs of a layer got
different inputs at a site, their outputs there are not compared.

The probes that showed a fault that looks random run once more, too, on the same operands. Values that are wrong by
changing amounts look like noise, and few wrong values like spikes, also where the cause is a narrow accumulator or one
entry of a table. Only a second run with the same operands tells them apart.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from aqnpipe.artifacts.diagnoses import LocatedFault
from aqnpipe.diagnosis.capture import Step, Trace, call_layer, substituted, tracing
from aqnpipe.diagnosis.checks import Check, compare, differs
from aqnpipe.diagnosis.probes import patterns
from aqnpipe.diagnosis.probes.elementwise import Norm
from aqnpipe.diagnosis.probes.linears import zeroed
from aqnpipe.diagnosis.probes.patterns import ProbeInputs, Selection, selecting_weights, selection, selection_of
from aqnpipe.error_bounds import few_roundings, gamma, linear_bound
from aqnpipe.models.layout import LayerSites


@dataclass
class LayerProber:
    """A layer under test: its sites, and its keyword arguments for sequences of one token."""

    index: int
    sites: LayerSites
    one_token_kwargs: dict[str, Any]
    attention_kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def structural(self) -> dict[str, Callable[[ProbeInputs], list[Check]]]:
        """The probes of the layer, attention, MLP and norms that fit the modules of the layer, by their last site."""
        names = self.sites.linears.keys()
        found: dict[str, Callable[[ProbeInputs], list[Check]]] = {}
        if {"o_proj", "down_proj"} <= names:
            found["layer_output"] = self.identity
            if "v_proj" in names:
                found["attention_output"] = self.attention
        if {"gate_proj", "up_proj", "down_proj"} <= names:
            found["mlp_output"] = self.mlp
        norms = {name: Norm.of(module) for name, module in self.sites.norms.items()}
        return found | {
            name: partial(norm.exact, name, self.index) for name, norm in norms.items() if not norm.is_centred
        }

    def identity(self, inputs: ProbeInputs) -> list[Check]:
        """Run the layer with zero branches; this also records the keyword arguments of attention."""
        own = self.sites.linears
        hidden = inputs.square(own["o_proj"].out_features)
        with substituted(zeroed(own["o_proj"], own["down_proj"])), tracing(self.sites) as trace:
            output = call_layer(self.sites.layer, hidden, self.one_token_kwargs)
        self.attention_kwargs = trace.attention_kwargs
        attention, mlp = trace.branches
        return [compare("identity", self.index, "layer_output", (hidden + attention) + mlp, output)]

    def attention(self, inputs: ProbeInputs) -> list[Check]:
        """Run attention over single tokens, with selecting value and output projections."""
        own = self.sites.linears
        value, output = own["v_proj"], own["o_proj"]
        x = inputs.square(value.in_features)
        queries = [own[name] for name in ("q_proj", "k_proj") if name in own]
        weights = [*zeroed(*queries), *selecting_weights(value), *selecting_weights(output)]
        with substituted(weights), tracing(self.sites) as trace:
            result = call_layer(self.sites.attention, x, self.attention_kwargs)
        values, fed = trace.outputs["v_proj"], trace.inputs["o_proj"]
        core = values[..., self._head_of(fed.shape[-1], values.shape[-1])]
        chosen = {"v_proj": selection_of(value).product(x), "o_proj": selection_of(output).product(fed)}
        return self._checks("attention", trace, chosen, core, "o_proj", "attention_output", result)

    def mlp(self, inputs: ProbeInputs) -> list[Check]:
        """Run the MLP with a constant gate at which the activation is the identity; up and down projections select.

        In a mixture with a shared expert this is the shared expert, whose output is a site of its own name.
        """
        gate, up, down = (self.sites.linears[name] for name in ("gate_proj", "up_proj", "down_proj"))
        x = inputs.square(up.in_features).clone()
        x[..., 0] = 1.0
        opening = torch.tensor(patterns.opening_of(inputs.dtype))
        of_gate = Selection(torch.zeros(gate.out_features, dtype=torch.long), opening.expand(gate.out_features))
        of_up = selection(up.out_features, up.in_features, skip=1).times(1 / opening)
        weights = [*selecting_weights(gate, of_gate), *selecting_weights(up, of_up), *selecting_weights(down)]
        layer = self.sites.layer
        own_name, block = next((path, part) for path, part in layer.named_modules() if down in part.children())
        with substituted(weights), tracing(self.sites) as trace:
            result = block(x)
        gates, ups, fed = trace.outputs["gate_proj"], trace.outputs["up_proj"], trace.inputs["down_proj"]
        chosen = {
            "gate_proj": of_gate.product(x),
            "up_proj": of_up.product(x),
            "down_proj": selection_of(down).product(fed),
        }
        site = "mlp_output" if block is self.sites.mlp else own_name.rsplit(".", 1)[-1]
        core = _activated(block, gates) * ups.cpu().double()
        return self._checks("mlp", trace, chosen, core, "down_proj", site, result)

    def _checks(
        self, probe: str, trace: Trace, chosen: dict[str, Tensor], core: Tensor, end: str, site: str, result: Tensor
    ) -> list[Check]:
        """Compare linears that select, what the last of them was fed by the core, and what its output became."""
        fed = trace.inputs[end]
        checks = [compare(probe, self.index, name, answer, trace.outputs[name]) for name, answer in chosen.items()]
        allowed = few_roundings(core, fed.dtype)
        checks.insert(-1, compare(probe, self.index, f"{probe}_core", core, fed, allowed=allowed))
        return [*checks, compare(probe, self.index, site, trace.outputs[end], result)]

    def _head_of(self, fed_width: int, value_width: int) -> Tensor:
        """Return, for each input channel of o_proj, the value channel it comes from; grouped heads share channels."""
        head_dim = int(getattr(self.sites.attention, "head_dim", value_width))
        channel = torch.arange(fed_width)
        group = fed_width // value_width
        return (channel // head_dim // group) * head_dim + channel % head_dim


def _activated(block: nn.Module, gates: Tensor) -> Tensor:
    """Return the activation of the observed gates, which a fault may have moved, in float64 on the host, unhooked."""
    activation = getattr(block, "act_fn", None)
    gates = gates.cpu().double()
    if activation is None:
        return gates
    activated: Tensor = activation.forward(gates) if isinstance(activation, nn.Module) else activation(gates)
    return activated


_RANDOM = ("noise", "spike")


@dataclass
class Repeats:
    """Checks of repeated runs and the trace of the first; `reordered` sites differed within the bound of their sum."""

    checks: list[Check]
    trace: Trace
    reordered: list[str] = field(default_factory=list)


def repeat(layer: int, sites: LayerSites, hidden: Tensor, kwargs: dict[str, Any], num_runs: int) -> Repeats:
    """Run the layer `num_runs` times on one input; steps with equal sources must have equal outputs.

    The expected output is the element-wise median of the runs. Every output must be finite where its sources are.
    """
    traces = []
    for _ in range(num_runs):
        with tracing(sites) as trace:
            call_layer(sites.layer, hidden, kwargs)
        traces.append(trace)
    runs = [trace.steps() for trace in traces]
    repeats = Repeats([], traces[0])
    opaque: list[Check] = []
    for i in range(len(runs[0])):
        of_site = [run[i] for run in runs]
        differing = [run for run in of_site[1:] if not torch.equal(run.output, of_site[0].output)]
        repeats.checks += _not_finite(layer, sites, [of_site[0], *differing])
        check = _repeated(layer, sites, of_site, repeats.reordered)
        (opaque if _is_opaque(sites, of_site[0].site) else repeats.checks).append(check)
    # What happens inside a mixture or an adapted linear is not seen, so its sums have no bound of their own.
    repeats.checks += [
        Check("repeat", layer, c.site, c.num_channels, 0, None) if repeats.reordered else c for c in opaque
    ]
    return repeats


def _repeated(layer: int, sites: LayerSites, runs: Sequence[Step], reordered: list[str]) -> Check:
    site, first = runs[0].site, runs[0].output
    num_channels, calls = first.shape[-1], len(runs)
    if all(torch.equal(first, run.output) for run in runs[1:]):
        return Check("repeat", layer, site, num_channels, calls * first[..., 0].numel(), None, calls)
    usual_sources = [_median([run.sources[i] for run in runs]) for i in range(len(runs[0].sources))]
    comparable = [
        run.output
        for run in runs
        if all(not differs(usual, own).any() for usual, own in zip(usual_sources, run.sources, strict=True))
    ]
    calls = len(comparable)
    if calls < 2:
        return Check("repeat", layer, site, num_channels, 0, None, 0)
    usual = _median(comparable)
    allowed = _allowed(sites, runs[0], usual)
    bound = None if allowed is None else torch.cat([allowed.expand(usual.shape)] * calls)
    check = compare("repeat", layer, site, torch.cat([usual] * calls), torch.cat(comparable), calls, allowed=bound)
    if check.mismatch is None and any(differs(usual, output).any() for output in comparable):
        reordered.append(site)
    return check


def _allowed(sites: LayerSites, step: Step, usual: Tensor) -> Tensor | None:
    """Return how far two runs of a step may be apart: twice the error bound of its sum; None if it sums nothing."""
    if step.site in sites.linears:
        module = sites.linears[step.site]
        return 2 * linear_bound(step.sources[0], module.weight, module.bias)
    if step.site in sites.norms:
        return 2 * few_roundings(usual, usual.dtype)
    return 2 * _attention_bound(sites, step) if step.site == "attention_core" else None


def _attention_bound(sites: LayerSites, step: Step) -> Tensor:
    """Return the bound of attention: scores off by d change a softmax by a factor up to exp(2*d) - 1.

    Scores are rounded to the dtype and no larger than the norms of queries and keys, here of all heads together.
    """
    largest = max(float(source.double().abs().max()) for source in step.sources)
    norms = sorted(float(source.double().norm(dim=-1).max()) for source in step.sources)
    scale = float(getattr(sites.attention, "scaling", 1.0) or 1.0)
    eps = torch.finfo(step.output.dtype).eps
    off = min(scale * norms[-1] * norms[-1] * (eps + gamma(step.sources[0].shape[-1])), 1.0)
    share = torch.expm1(torch.tensor(2 * off, dtype=torch.float64)) + gamma(step.output.shape[1]) + 4 * eps
    return largest * share


def _is_opaque(sites: LayerSites, site: str) -> bool:
    """Return whether the site has sums inside that are no sites themselves: experts, or linears with an adapter."""
    if site == "attention_output":
        return "o_proj" not in sites.linears
    if site == "mlp_output":
        return "down_proj" not in dict(sites.mlp.named_children())
    return site in sites.adapted


def _not_finite(layer: int, sites: LayerSites, runs: Sequence[Step]) -> list[Check]:
    """Return a check for the first run whose output has NaN or infinity although its sources have none."""
    for run in runs:
        finite = run.output.isfinite()
        if finite.all() or not all(bool(source.isfinite().all()) for source in run.sources):
            continue
        if not _may_overflow(sites, run):
            expected = torch.where(finite, run.output, 0)
            return [compare("finite", layer, run.site, expected, run.output)]
    return []


def _may_overflow(sites: LayerSites, step: Step) -> bool:
    """Return whether a correct result can exceed the largest number of the dtype, as in float16 with outliers."""
    largest = torch.finfo(step.output.dtype).max
    if step.site in sites.linears:
        module = sites.linears[step.site]
        return bool(linear_bound(step.sources[0], module.weight, module.bias).max() > largest * 2.0**-12)
    tops = [float(source.double().abs().max()) for source in step.sources]
    return max(tops) ** 2 > largest or sum(tops) > largest


def _median(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).median(0).values if len(tensors) > 1 else tensors[0]


@dataclass
class Part:
    """A part of a diagnosis that has run, and can run again with the same operands, which it does once at most."""

    run: Callable[[], list[Check]]
    checks: list[Check] = field(init=False)

    def __post_init__(self) -> None:
        """Run the probes."""
        self.checks = self.run()

    @cached_property
    def second_run(self) -> list[Check]:
        """The checks of a second run."""
        return self.run()


def without_false_noise(fault: LocatedFault, layer: int, parts: Sequence[Part]) -> LocatedFault:
    """Return a noise or a spike in `layer` as of type other if the first part that showed it shows the same again.

    One part is enough, because random numbers do not repeat, and the later parts are dear.
    """
    showing = next((part for part in parts if _wrong(part.checks, layer, fault.site)), None)
    if fault.type not in _RANDOM or showing is None:
        return fault
    first, second = (_wrong(checks, layer, fault.site) for checks in (showing.checks, showing.second_run))
    return as_repeated(fault, "the same in a second run") if _are_equal(first, second) else fault


def as_repeated(fault: LocatedFault, words: str) -> LocatedFault:
    """Return a fault that was taken for a random one as one that is not."""
    unclassified = {"type": "other", "magnitude": None, "magnitude_low": None, "magnitude_high": None}
    return fault.model_copy(update={**unclassified, "evidence": f"{fault.evidence}; {words}"})


def _wrong(checks: Sequence[Check], layer: int, site: str) -> list[Check]:
    return [check for check in checks if check.mismatch and (check.layer, check.site) == (layer, site)]


def _are_equal(first: Sequence[Check], second: Sequence[Check]) -> bool:
    """Return whether two runs have the same wrong values at the same places."""
    if len(first) != len(second):
        return False
    pairs = [(own.mismatch, other.mismatch) for own, other in zip(first, second, strict=True)]
    return all(
        a is not None
        and b is not None
        and torch.equal(a.channels, b.channels)
        and torch.equal(a.observed.nan_to_num(nan=torch.inf), b.observed.nan_to_num(nan=torch.inf))
        for a, b in pairs
    )
