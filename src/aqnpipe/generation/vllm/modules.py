"""Finds the operators and sites of a transformers model in vLLM's model, which merges some of them."""

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from aqnpipe.config.noise import ModuleScope
from aqnpipe.errors import ModelError
from aqnpipe.generation.vllm.linears import Linear, Projection, Tap, head_of, linear_of, why_not_plain
from aqnpipe.generation.vllm.shares import find_shares
from aqnpipe.models.layout import decoder_layers, is_rms_norm, output_projection, select_names
from aqnpipe.models.sites import attention_of, mlp_of
from aqnpipe.noise.kernels.shards import Shard


@dataclass
class EngineLayer:
    """The modules of one decoder layer; hooks on `output` receive the sum that transformers' layer would return.

    `shards`: the columns that this worker has of a module's output, for modules of which it does not have all.
    """

    module: nn.Module
    name: str = ""
    linears: list[Linear] = field(default_factory=list)
    norms: dict[str, nn.Module] = field(default_factory=dict)
    layer_norms: list[nn.Module] = field(default_factory=list)
    attentions: list[nn.Module] = field(default_factory=list)
    activations: list[nn.Module] = field(default_factory=list)
    out_of_reach: list[str] = field(default_factory=list)
    output: Tap = field(default_factory=Tap)
    shards: dict[nn.Module, Shard] = field(default_factory=dict)

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
        self.head = head_of(head)
        self.logits = [module for module in model.modules() if isinstance(module, LogitsProcessor)]
        self.out_of_reach = [
            f"{name} of layer {index}" for index, layer in enumerate(self.layers) for name in layer.out_of_reach
        ]
        if len(self.logits) != 1:
            self.out_of_reach.append(f"{len(self.logits)} logits processors")
        reason = why_not_plain(head)
        self.head_is_plain = not reason
        if reason:
            self.out_of_reach.append(f"lm_head ({reason})")

        self.shards = {module: shard for layer in self.layers for module, shard in layer.shards.items()}
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

    def select(self, modules: ModuleScope | tuple[str, ...], exclude: tuple[str, ...] = ()) -> list[str]:
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
        return select_names(names, projections.keys(), self.norm_inputs.keys(), modules, model_name, exclude)

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
            reason = why_not_plain(module, len(packed.get(path.rsplit(".", 1)[-1], [path])))
            if reason:
                found.out_of_reach.append(f"{path} ({reason})")
            else:
                found.linears.append(linear_of(path, module, packed))
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
    find_shares(found)
    return found
