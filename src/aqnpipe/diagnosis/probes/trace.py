"""Inputs and outputs of every site of a decoder layer in one call, recorded by hooks."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from aqnpipe.diagnosis.capture import hooked
from aqnpipe.models.layout import LayerSites


@dataclass
class Trace:
    """Inputs and outputs of the last call of each module by site name, and the keyword arguments of attention."""

    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    branches: list[Tensor] = field(default_factory=list)
    attention_kwargs: dict[str, Any] = field(default_factory=dict)


@contextmanager
def tracing(sites: LayerSites) -> Iterator[Trace]:
    """Record every site of a layer while the body runs the layer once.

    Hooks run in the order of registration, so the recorded outputs include faults simulated by earlier hooks.
    """
    trace = Trace()
    handles = [
        module.register_forward_hook(_recorder(trace, name), with_kwargs=True) for name, module in sites.modules.items()
    ]
    handles += [end.register_forward_hook(_branch_recorder(trace)) for end in sites.branch_ends]
    with hooked(handles):
        yield trace


def first_tensor(output: Any) -> Tensor:
    """Return the output tensor of a module, which may be the first element of a tuple."""
    tensor: Tensor = output[0] if isinstance(output, tuple) else output
    return tensor


def first_input(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Return the hidden states that a module is called with, which may be an argument by name."""
    tensor: Tensor = args[0] if args else kwargs["hidden_states"]
    return tensor


def _recorder(trace: Trace, name: str) -> Any:
    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        rest = dict(kwargs)
        trace.inputs[name] = args[0] if args else rest.pop("hidden_states")
        trace.outputs[name] = first_tensor(output)
        if name == "attention_output":
            trace.attention_kwargs = rest

    return record


def _branch_recorder(trace: Trace) -> Any:
    def record(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        trace.branches.append(first_tensor(output))

    return record


@dataclass(frozen=True)
class Step:
    """A step in the computation of a layer: the output of a site, and its source tensors (weights excluded)."""

    site: str
    sources: tuple[Tensor, ...]
    output: Tensor


def steps(trace: Trace) -> list[Step]:
    """Return the steps of a traced call of a layer, in order. A faulty step has a wrong output for its sources.

    Besides the sites there are two more steps: attention_core, from the projections to the input of o_proj, and
    mlp_core, from gate and up to the input of down_proj. On a healthy machine the outputs of attention and o_proj are
    the same tensor; a difference is a fault of the former.
    """
    found = [
        Step(name, (trace.inputs[name],), output)
        for name, output in trace.outputs.items()
        if name not in ("layer_output", "attention_output", "mlp_output")
    ]
    outputs, inputs = trace.outputs, trace.inputs
    for core, names, end in (
        ("attention_core", ("q_proj", "k_proj", "q_norm", "k_norm", "v_proj", "qkv_proj"), "o_proj"),
        ("mlp_core", ("gate_proj", "up_proj", "gate_up_proj"), "down_proj"),
    ):
        sources = tuple(outputs[name] for name in names if name in outputs)
        if sources and end in inputs:
            found.append(Step(core, sources, inputs[end]))
    for site, end in (("attention_output", "o_proj"), ("mlp_output", "down_proj")):
        source = outputs[end] if end in outputs else inputs[site]
        found.append(Step(site, (source,), outputs[site]))
    found.append(Step("layer_output", (inputs["layer_output"], *trace.branches), outputs["layer_output"]))
    return found
