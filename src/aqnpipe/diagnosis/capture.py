"""Modules under observation: what they are called with and return, with test weights, on the device or on the host."""

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from aqnpipe.errors import ModelError
from aqnpipe.models.layout import LayerSites, decoder_layers


class NonFiniteOutputError(ModelError):
    """A decoder layer outputs NaN or infinity. `layer` is its index, None for what stands before the first one."""

    def __init__(self, layer: int | None, model: nn.Module) -> None:
        place = "the embedding" if layer is None else f"decoder layer {layer}"
        super().__init__(f"{place} of {type(model).__name__} outputs NaN or infinity, expected finite numbers")
        self.layer = layer


@dataclass(frozen=True)
class LayerInput:
    """Arguments of a decoder layer: hidden states [sequences, tokens, hidden] and all others by name."""

    hidden: Tensor
    kwargs: dict[str, Any]


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Remove the hooks behind the body."""
    kept = list(handles)
    try:
        yield
    finally:
        for handle in kept:
            handle.remove()


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode without gradients for the body, and restore its mode afterwards."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def capture_layer_inputs(model: nn.Module, prompt_ids: Tensor) -> list[LayerInput]:
    """Run the decoder once on `prompt_ids` [sequences, tokens] and return the inputs of its layers in order.

    There is no KV cache, because a layer that is run again must not attend to keys of its first run. The output
    projection is not run. Raises ModelError if hidden states are not [sequences, tokens, hidden].
    """
    layers = decoder_layers(model)
    names = [list(inspect.signature(type(layer).forward).parameters)[1:] for layer in layers]
    inputs: dict[int, LayerInput] = {}

    def keep(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Some families pass masks and positions without names.
        rest = {**dict(zip(names[index], args, strict=False)), **kwargs}
        hidden = rest.pop(names[index][0])
        if hidden.ndim != 3:
            raise ModelError(
                f"decoder layer {index} of {type(model).__name__} takes hidden states of shape {tuple(hidden.shape)}, "
                "expected [sequences, tokens, channels]; use another model family"
            )
        inputs[index] = LayerInput(hidden, rest)

    decoder = getattr(model, "base_model", model)
    with hooked(
        layer.register_forward_pre_hook(
            lambda _module, args, kwargs, index=index: keep(index, args, kwargs), with_kwargs=True
        )
        for index, layer in enumerate(layers)
    ):
        decoder(input_ids=prompt_ids, attention_mask=torch.ones_like(prompt_ids), use_cache=False)
    return [inputs[index] for index in range(len(layers))]


def run_layer(model: nn.Module, index: int, hidden: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """Run only decoder layer `index`, with its hooks, and return its output as float32 on the CPU.

    Raises NonFiniteOutputError if the output has NaN or infinite values, because no statistic of it would be
    meaningful.
    """
    result = first_tensor(decoder_layers(model)[index](hidden, **kwargs)).float().cpu()
    if not torch.isfinite(result).all():
        raise NonFiniteOutputError(index, model)
    return result


def call_layer(module: nn.Module, hidden: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """Call a layer or attention and return its hidden states, which may be the first element of a tuple."""
    return first_tensor(module(hidden_states=hidden, **kwargs))


def host_copy(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a copy on the CPU without hooks and patched forwards, which a fault may be in."""
    # A patched forward, such as a closure, computes with the modules and on the device of the original.
    patched = [own for part in module.modules() if (own := part.__dict__.get("forward")) is not None]
    found = copy.deepcopy(module, {id(forward): None for forward in patched})
    for part in found.modules():
        part.__dict__.pop("forward", None)
        part._forward_hooks.clear()
        part._forward_pre_hooks.clear()
    return found.to("cpu", dtype)


@contextmanager
def on_host() -> Iterator[None]:
    """Run the body without function modes of torch, for references within the forward of a module.

    A default device (`torch.set_default_device`) is such a mode and would take a reference to the device under test.
    """
    with torch._C.DisableTorchFunction():
        yield


def values_on_host(values: Any, dtype: torch.dtype) -> Any:
    """Return `values` with the tensors in them on the CPU, those of floating point and names of formats as `dtype`."""

    def moved(value: Any) -> Any:
        if isinstance(value, torch.dtype) and value.is_floating_point:
            return dtype
        if not isinstance(value, Tensor):
            return value
        return value.detach().to("cpu", dtype) if value.is_floating_point() else value.cpu()

    return tree_map(moved, values)


def gradients_of(run: Callable[[], Tensor], leaves: Sequence[Tensor], given: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of `leaves` for the gradient `given` of the output of `run`; None where a graph is cut.

    The graph is kept, because a hook that keeps earlier outputs may have made it a part of a later one.
    """
    with torch.enable_grad():
        output = run()
        if not output.requires_grad:
            return (None,) * len(leaves)
        return torch.autograd.grad(output, leaves, given.to(output), retain_graph=True, allow_unused=True)


@contextmanager
def substituted(replacements: Iterable[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Replace the data of each parameter by its tensor while the body runs.

    Only the reference to the storage is exchanged. The original values are never written, so no exception or interrupt
    can leave them changed, and the only extra memory is that of the test tensors.
    """
    pairs = list(replacements)
    own = [(parameter, parameter.data) for parameter, _ in pairs]
    try:
        for parameter, tensor in pairs:
            parameter.data = tensor
        yield
    finally:
        for parameter, tensor in own:
            parameter.data = tensor


@dataclass
class Trace:
    """Inputs and outputs of the last call of each module by site name, and the keyword arguments of attention."""

    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    branches: list[Tensor] = field(default_factory=list)
    attention_kwargs: dict[str, Any] = field(default_factory=dict)

    def record(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Record a call of a module."""
        self.inputs[name], self.outputs[name] = first_input(args, kwargs), first_tensor(output)
        if name == "attention_output":
            self.attention_kwargs = {key: value for key, value in kwargs.items() if args or key != "hidden_states"}

    def steps(self) -> "list[Step]":
        """Return the steps of the call, in order. A faulty step has a wrong output for its sources.

        Besides the sites there are two more steps: attention_core, from the projections to the input of o_proj, and
        mlp_core, from gate and up to the input of down_proj. On a healthy machine the outputs of attention and o_proj
        are the same tensor; a difference is a fault of the former.
        """
        outputs, inputs = self.outputs, self.inputs
        found = [
            Step(name, (inputs[name],), output)
            for name, output in outputs.items()
            if name not in ("layer_output", "attention_output", "mlp_output")
        ]
        for core, names, end in (
            ("attention_core", ("q_proj", "k_proj", "q_norm", "k_norm", "v_proj", "qkv_proj"), "o_proj"),
            ("mlp_core", ("gate_proj", "up_proj", "gate_up_proj"), "down_proj"),
        ):
            sources = tuple(outputs[name] for name in names if name in outputs)
            if sources and end in inputs:
                found.append(Step(core, sources, inputs[end]))
        for site, end in (("attention_output", "o_proj"), ("mlp_output", "down_proj")):
            found.append(Step(site, (outputs[end] if end in outputs else inputs[site],), outputs[site]))
        return [*found, Step("layer_output", (inputs["layer_output"], *self.branches), outputs["layer_output"])]


@dataclass(frozen=True)
class Step:
    """A step in the computation of a layer: the output of a site, and its source tensors (weights excluded)."""

    site: str
    sources: tuple[Tensor, ...]
    output: Tensor


@contextmanager
def tracing(sites: LayerSites) -> Iterator[Trace]:
    """Record every site of a layer while the body runs the layer once.

    Hooks run in the order of registration, so the recorded outputs include faults simulated by earlier hooks.
    """
    trace = Trace()
    handles = [
        module.register_forward_hook(
            lambda _, args, kw, out, own=name: trace.record(own, args, kw, out), with_kwargs=True
        )
        for name, module in sites.modules.items()
    ]
    for end in sites.branch_ends:
        handles.append(end.register_forward_hook(lambda _, args, out: trace.branches.append(first_tensor(out))))
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
