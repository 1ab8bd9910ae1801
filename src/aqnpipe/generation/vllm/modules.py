"""Finds the operators and sites of a transformers model in vLLM's model, which merges some of them."""

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from aqnpipe.config.noise import ModuleScope
from aqnpipe.errors import ModelError
from aqnpipe.models.layout import decoder_layers, is_rms_norm, output_projection, select_names
from aqnpipe.models.sites import attention_of, mlp_of


class Tap(nn.Module):
    """Identity module: a place for hooks on tensors that have no module of their own in vLLM."""

    def forward(self, tensor: Tensor) -> Tensor:
        """Return `tensor`."""
        return tensor


@dataclass
class Projection:
    """One projection of a linear module, by its name in transformers.

    Hooks on `input` receive its input, hooks on `output` its output, including the bias.
    """

    name: str
    width: int
    input: Tap = field(default_factory=Tap)
    output: Tap = field(default_factory=Tap)


@dataclass
class Linear:
    """A linear module of vLLM and the projections that it computes, in the order of its output columns.

    Columns after those of the projections pad a vocabulary.
    """

    module: Any
    projections: list[Projection]

    @property
    def is_merged(self) -> bool:
        """Whether the module computes several projections."""
        return len(self.projections) > 1

    @cached_property
    def widths(self) -> list[int]:
        """Number of columns of each projection."""
        return [projection.width for projection in self.projections]

    @cached_property
    def width(self) -> int:
        """Number of columns of all projections."""
        return sum(self.widths)

    def views(self, output: Tensor) -> Sequence[Tensor]:
        """Return the columns of each projection as views of `output`, without padding columns."""
        used = output if output.shape[-1] == self.width else output[..., : self.width]
        return used.split_with_sizes(self.widths, -1) if self.is_merged else (used,)

    def split(self, output: Tensor) -> list[Tensor]:
        """Return the output of each projection, contiguous; padding columns, if any, are one more item at the end."""
        padding = output.shape[-1] - self.width
        outputs = output.split([*self.widths, padding] if padding else self.widths, dim=-1)
        return [projected.contiguous() for projected in outputs]


@dataclass
class EngineLayer:
    """The modules of one decoder layer; hooks on `output` receive the sum that transformers' layer would return."""

    module: nn.Module
    name: str = ""
    linears: list[Linear] = field(default_factory=list)
    norms: dict[str, nn.Module] = field(default_factory=dict)
    layer_norms: list[nn.Module] = field(default_factory=list)
    attentions: list[nn.Module] = field(default_factory=list)
    activations: list[nn.Module] = field(default_factory=list)
    out_of_reach: list[str] = field(default_factory=list)
    output: Tap = field(default_factory=Tap)

    @property
    def sites(self) -> dict[str, nn.Module]:
        """The modules whose output is a site for faults, by site name; names that occur twice are not sites."""
        named: list[tuple[str, nn.Module]] = [
            ("layer_output", self.output),
            ("attention_output", attention_of(self.module)),
            ("mlp_output", mlp_of(self.module)),
        ]
        for linear in self.linears:
            named += [
                (projection.name, projection.output if linear.is_merged else linear.module)
                for projection in linear.projections
            ]
        named += [(path.rsplit(".", 1)[-1], norm) for path, norm in self.norms.items()]
        names = [name for name, _ in named]
        return {name: module for name, module in named if names.count(name) == 1}


class EngineModel:
    """The parts of a vLLM model on one worker that noise and faults act on."""

    def __init__(self, model: nn.Module) -> None:
        from vllm.model_executor.layers.logits_processor import LogitsProcessor

        self.model = model
        packed: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
        names = {module: name for name, module in model.named_modules()}
        self.layers = [_engine_layer(layer, names[layer], packed) for layer in decoder_layers(model)]
        head: Any = output_projection(model)
        self.head = Linear(head, [Projection("lm_head", head.org_vocab_size)])
        self.logits = [module for module in model.modules() if isinstance(module, LogitsProcessor)]
        self.out_of_reach = [
            f"{name} of layer {index}" for index, layer in enumerate(self.layers) for name in layer.out_of_reach
        ]
        if len(self.logits) != 1:
            self.out_of_reach.append(f"{len(self.logits)} logits processors")
        self.head_is_plain = not _why_not_plain(head)
        if not self.head_is_plain:
            self.out_of_reach.append(f"lm_head ({_why_not_plain(head)})")

        self.norm_inputs = {name: Tap() for name, module in model.named_modules() if is_rms_norm(module)}

    def projections(self) -> dict[str, Projection]:
        """Return every projection by its qualified name in transformers, in module order."""
        linears = {id(linear.module): linear for layer in self.layers for linear in layer.linears}
        linears[id(self.head.module)] = self.head
        found = {}
        for name, module in self.model.named_modules():
            if id(module) in linears:
                prefix = name.rpartition(".")[0]
                for projection in linears[id(module)].projections:
                    found[f"{prefix}.{projection.name}" if prefix else projection.name] = projection
        return found

    def weights(self) -> dict[str, Tensor]:
        """Return every parameter by its name in transformers; merged modules have one per projection.

        The tensors are views of the parameters, without the rows that pad a vocabulary. A parameter that several
        modules share (tied embeddings) has the name of the first.
        """
        merged = {id(linear.module): linear for layer in self.layers for linear in layer.linears if linear.is_merged}
        found: dict[str, Tensor] = {}
        seen: set[int] = set()
        for name, module in self.model.named_modules():
            linear = merged.get(id(module))
            for key, parameter in module.named_parameters(recurse=False):
                if parameter.data_ptr() in seen:
                    continue
                seen.add(parameter.data_ptr())
                if linear is None:
                    found[f"{name}.{key}"] = parameter[: getattr(module, "org_vocab_size", None)]
                else:
                    prefix = name.rpartition(".")[0]
                    views = zip(linear.projections, parameter.split(linear.widths), strict=True)
                    found |= {f"{prefix}.{projection.name}.{key}": view for projection, view in views}
        return found

    def select(self, modules: ModuleScope | tuple[str, ...]) -> list[str]:
        """Return the names of the projections and norms that module noise selects.

        Raises ModelError if it selects nothing, or a vLLM module that is neither a projection nor a norm.
        """
        projections, model_name = self.projections(), f"vLLM's {type(self.model).__name__}"
        names = [*projections, *self.norm_inputs]
        linears = {id(linear.module) for layer in self.layers for linear in layer.linears} | {id(self.head.module)}
        others = [
            name
            for name, module in self.model.named_modules()
            if name not in self.norm_inputs and id(module) not in linears
        ]
        for pattern in modules if isinstance(modules, tuple) else ():
            for name in fnmatch.filter(others, pattern):
                raise ModelError(f"{model_name}: pattern {pattern!r} matches {name}, which is no linear module or norm")
        return select_names(names, projections.keys(), self.norm_inputs.keys(), modules, model_name)

    def site_module(self, _: nn.Module, layer_index: int, site: str) -> nn.Module:
        """Return the module whose output is `site` of a decoder layer; ModelError if layer or site is unknown."""
        if layer_index >= len(self.layers):
            raise ModelError(f"fault.layer is {layer_index}, expected 0 to {len(self.layers) - 1} (vLLM)")
        sites = self.layers[layer_index].sites
        if site not in sites:
            raise ModelError(f"fault.site is {site!r}, vLLM's {type(self.model).__name__} has {', '.join(sites)}")
        return sites[site]


def _engine_layer(layer: nn.Module, name: str, packed: Mapping[str, list[str]]) -> EngineLayer:
    """Sort the modules of a decoder layer; other modules with parameters are out of reach of noise."""
    from vllm.model_executor.layers.attention.attention import Attention
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.layers.layernorm import LayerNorm
    from vllm.model_executor.layers.linear import LinearBase

    found = EngineLayer(layer, name)
    for path, module in layer.named_modules():
        if isinstance(module, LinearBase):
            reason = _why_not_plain(module)
            if reason:
                found.out_of_reach.append(f"{path} ({reason})")
            else:
                found.linears.append(_linear(path, module, packed))
        elif is_rms_norm(module):
            found.norms[path] = module
        elif isinstance(module, LayerNorm | nn.LayerNorm):
            found.layer_norms.append(module)
        elif type(module) is Attention:
            found.attentions.append(module)
        elif isinstance(module, AttentionLayerBase) or list(module.parameters(recurse=False)):
            found.out_of_reach.append(f"{path} ({type(module).__name__})")
        elif path.rsplit(".", 1)[-1] in ("act_fn", "act") or type(module).__name__.endswith("AndMul"):
            found.activations.append(module)
    return found


def _linear(path: str, module: Any, packed: Mapping[str, list[str]]) -> Linear:
    name = path.rsplit(".", 1)[-1]
    names = packed.get(name, [name])
    sizes = module.output_sizes if len(names) > 1 else [module.output_size]
    if len(sizes) != len(names):
        raise ModelError(f"vLLM's {path} has {len(sizes)} outputs, its model names {', '.join(names)}")
    return Linear(module, [Projection(name, size) for name, size in zip(names, sizes, strict=True)])


def _why_not_plain(module: Any) -> str:
    """Return why a linear module is not a plain product with its weight; "" if it is one."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    if not isinstance(module.quant_method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod):
        return type(module.quant_method).__name__
    if module.tp_size > 1:
        return f"{module.tp_size} tensor-parallel shares"
    if not isinstance(module.weight, torch.Tensor) or module.weight.dim() != 2:
        return "packed weights"
    return ""
