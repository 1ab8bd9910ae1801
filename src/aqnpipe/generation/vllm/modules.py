"""The operators and sites of a transformers model in vLLM's model, which merges some of them, whole or as a share.

With tensor parallelism every worker computes some columns of the output of a column-parallel module. A row-parallel
module multiplies some columns of its input, and the products of all workers are added.
"""

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aqnpipe.config.noise import ModuleScope
from aqnpipe.errors import ModelError
from aqnpipe.models.layout import (
    attention_of,
    decoder_layers,
    is_rms_norm,
    mlp_of,
    output_projection,
    select_names,
)
from aqnpipe.noise.kernels.shards import Shard


class Tap(nn.Module):
    """Identity module: a place for hooks on tensors that have no module of their own in vLLM."""

    def forward(self, tensor: Tensor) -> Tensor:
        """Return `tensor`."""
        return tensor


class Product(nn.Module):
    """Product with the rows of a merged weight that belong to one projection: a place for hooks."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return `x @ weight.T + bias`."""
        return F.linear(x, weight, bias)


@dataclass
class Projection:
    """One projection of a linear module, by its name in transformers.

    Hooks on `input` receive its input, hooks on `output` its output, including the bias; `product` computes it if it is
    computed by itself. `width` counts the columns on this worker. `input_shard`, `output_shard`: which columns this
    worker has of the whole; None if it has all.
    """

    name: str
    width: int
    input_shard: Shard | None = None
    output_shard: Shard | None = None
    input: Tap = field(default_factory=Tap)
    output: Tap = field(default_factory=Tap)
    product: Product = field(default_factory=Product)


@dataclass
class Linear:
    """A linear module of vLLM and the projections that it computes, in the order of its output columns.

    Columns after those of the projections pad a vocabulary. `is_summed`: the module is row-parallel.
    """

    module: Any
    projections: list[Projection]
    is_summed: bool = False

    @property
    def is_merged(self) -> bool:
        """Return whether the module computes several projections."""
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


def linear_of(path: str, module: Any, packed: Mapping[str, list[str]]) -> Linear:
    """Return the projections of a plain linear module at `path`; `packed` names those of merged modules.

    Raises ModelError if the module has another number of outputs than names.
    """
    name = path.rsplit(".", 1)[-1]
    names = packed.get(name, [name])
    sizes = module.output_sizes if len(names) > 1 else [module.output_size]
    if len(sizes) != len(names):
        raise ModelError(f"vLLM's {path} has {len(sizes)} outputs, its model names {', '.join(names)}")
    if module.tp_size == 1:
        return Linear(module, [Projection(name, size) for name, size in zip(names, sizes, strict=True)])
    if _is_row_parallel(module):
        shard = share(module.tp_rank, module.tp_size, module.input_size_per_partition)
        return Linear(module, [Projection(name, module.output_size, input_shard=shard)], is_summed=True)
    # Few heads of keys and values are copied to several workers, and vLLM counts the copies as columns.
    copies = [1] + [getattr(module, "num_kv_head_replicas", 1)] * (len(names) - 1)
    sizes = module.output_partition_sizes
    shards = [share(module.tp_rank, module.tp_size, *each) for each in zip(sizes, copies, strict=False)]
    projections = [Projection(name, shard.size, output_shard=shard) for name, shard in zip(names, shards, strict=True)]
    return Linear(module, projections)


def head_of(module: Any) -> Linear:
    """Return the output projection; of a share of the vocabulary, without the rows that pad it."""
    if module.tp_size == 1:
        return Linear(module, [Projection("lm_head", module.org_vocab_size)])
    part = module.shard_indices
    shard = Shard(part.org_vocab_start_index, part.num_org_elements, module.org_vocab_size)
    return Linear(module, [Projection("lm_head", shard.size, output_shard=shard)])


def share(rank: int, num_workers: int, size: int, copies: int = 1) -> Shard:
    """Return the columns of worker `rank` if each has `size` of them and `copies` consecutive workers have the same."""
    return Shard(rank // copies * size, size, num_workers // copies * size)


def _why_not_plain(module: Any, num_projections: int = 1) -> str:
    """Return why a linear module is not a plain product with its weight, or with a known share of it; "" if it is one.

    `num_projections`: as many as the model names; a merged module may have one name.
    """
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    if not isinstance(module.quant_method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod):
        return type(module.quant_method).__name__
    if module.tp_size > 1 and not _is_known_share(module, num_projections):
        return f"{module.tp_size} tensor-parallel shares of {type(module).__name__}"
    if not isinstance(module.weight, torch.Tensor) or module.weight.dim() != 2:
        return "packed weights"
    return ""


def _is_known_share(module: Any, num_projections: int) -> bool:
    """Return whether the columns of a share are known: those of subclasses may be others."""
    from vllm.model_executor.layers.linear import (
        ColumnParallelLinear,
        MergedColumnParallelLinear,
        QKVParallelLinear,
    )
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    if type(module) in (ParallelLMHead, VocabParallelEmbedding):
        # A worker without any part of a small vocabulary, only rows that pad it, has no logits to put noise on.
        last = int(module.num_embeddings_per_partition) * (int(module.tp_size) - 1)
        return not module.num_added_embeddings and last < int(module.org_vocab_size)
    if _is_row_parallel(module):
        # Where a model adds up the products itself, the sum has those of other modules too.
        return bool(module.reduce_results)
    is_known = type(module) in (ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear)
    return is_known and not module.gather_output and len(module.output_partition_sizes) == num_projections


def _is_row_parallel(module: Any) -> bool:
    from vllm.model_executor.layers.linear import RowParallelLinear

    return type(module) is RowParallelLinear


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
        reason = _why_not_plain(head)
        self.head_is_plain = not reason
        if reason:
            self.out_of_reach.append(f"lm_head ({reason})")
        self.shards = {module: shard for layer in self.layers for module, shard in layer.shards.items()}
        self.norm_inputs = {name: Tap() for name, module in model.named_modules() if is_rms_norm(module)}

    def projections(self) -> dict[str, Projection]:
        """Return every projection by its qualified name in transformers, in module order."""
        linears = {id(linear.module): linear for layer in self.layers for linear in layer.linears}
        linears[id(self.head.module)] = self.head
        return {
            _beside(name, projection.name): projection
            for name, module in self.model.named_modules()
            if id(module) in linears
            for projection in linears[id(module)].projections
        }

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
                    views = zip(linear.projections, parameter.split(linear.widths), strict=True)
                    found |= {f"{_beside(name, projection.name)}.{key}": view for projection, view in views}
        return found

    def weight_shares(self) -> dict[str, tuple[int, Shard]]:
        """Return which rows (0) or columns (1) this worker has of a parameter, by the names of `weights`.

        Without those of which it has all.
        """
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        found: dict[str, tuple[int, Shard]] = {}
        for name, projection in self.projections().items():
            if projection.output_shard is not None:
                found |= {f"{name}.{key}": (0, projection.output_shard) for key in ("weight", "bias")}
            elif projection.input_shard is not None:
                found[f"{name}.weight"] = (1, projection.input_shard)
        for name, module in self.model.named_modules():
            if isinstance(module, VocabParallelEmbedding):
                shard = head_of(module).projections[0].output_shard
                found |= {} if shard is None else {f"{name}.weight": (0, shard)}
        return found

    def select(self, modules: ModuleScope | tuple[str, ...], exclude: tuple[str, ...] = ()) -> list[str]:
        """Return the names of the projections and norms that module noise selects.

        Raises ModelError if it selects nothing, or a vLLM module that is neither a projection nor a norm.
        """
        projections, model_name = self.projections(), f"vLLM's {type(self.model).__name__}"
        linears = {id(linear.module) for layer in self.layers for linear in layer.linears} | {id(self.head.module)}
        others = [
            name
            for name, module in self.model.named_modules()
            if name not in self.norm_inputs and id(module) not in linears
        ]
        for pattern in modules if isinstance(modules, tuple) else ():
            for name in fnmatch.filter(others, pattern):
                raise ModelError(f"{model_name}: pattern {pattern!r} matches {name}, which is no linear module or norm")
        names = [*projections, *self.norm_inputs]
        return select_names(names, projections.keys(), self.norm_inputs.keys(), modules, model_name, exclude)

    def site_module(self, _: nn.Module, layer_index: int, site: str) -> nn.Module:
        """Return the module whose output is `site` of a decoder layer; ModelError if layer or site is unknown."""
        if layer_index >= len(self.layers):
            raise ModelError(f"fault.layer is {layer_index}, expected 0 to {len(self.layers) - 1} (vLLM)")
        sites = self.layers[layer_index].sites
        if site not in sites:
            raise ModelError(f"fault.site is {site!r}, vLLM's {type(self.model).__name__} has {', '.join(sites)}")
        return sites[site]

    def on_share(self, module: nn.Module, function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Return `function`, a fault on the whole output of `module`, as a function of this worker's share of it."""
        shard = self.shards.get(module)
        if shard is None:
            return function
        from vllm.distributed import tensor_model_parallel_all_gather

        def of_own(own: Tensor) -> Tensor:
            # Rows may consist of heads, whose elements are then the channels.
            whole = shard.whole(tensor_model_parallel_all_gather(own.flatten(1).contiguous()))
            changed = function(whole.unflatten(1, (-1, *own.shape[2:])) if own.dim() > 2 else whole)
            return shard.of(changed.flatten(1)).reshape(own.shape)

        return of_own


def _beside(path: str, name: str) -> str:
    """Return the path of `name` in the place of the last part of another path."""
    prefix = path.rpartition(".")[0]
    return f"{prefix}.{name}" if prefix else name


def _engine_layer(layer: nn.Module, name: str, packed: Mapping[str, list[str]]) -> EngineLayer:
    """Sort the modules of a decoder layer; other modules with parameters are out of reach of noise."""
    from vllm.model_executor.layers.attention.attention import Attention
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.layers.layernorm import LayerNorm
    from vllm.model_executor.layers.linear import LinearBase

    found = EngineLayer(layer, name)
    for path, module in layer.named_modules():
        last = path.rsplit(".", 1)[-1]
        if isinstance(module, LinearBase):
            reason = _why_not_plain(module, len(packed.get(last, [path])))
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
        elif last in ("act_fn", "act") or type(module).__name__.endswith("AndMul"):
            found.activations.append(module)
    find_shares(found)
    return found


def find_shares(layer: EngineLayer) -> None:
    """Fill `layer.shards`, and add modules whose share is unknown to `layer.out_of_reach`.

    Attention and activations lie between a column-parallel and a row-parallel module: they compute the columns that the
    latter multiplies. Norms of queries and keys compute the heads of their projection. Every worker computes all other
    norms, such as those of the hidden states.
    """
    for linear in layer.linears:
        for each in linear.projections:
            if each.output_shard is not None:
                layer.shards[each.output if linear.is_merged else linear.module] = each.output_shard
    if not layer.shards and not any(linear.is_summed for linear in layer.linears):
        return
    paths = {module: path for path, module in layer.module.named_modules()}

    def folder(module: nn.Module) -> str:
        return paths[module].rpartition(".")[0]

    def place(module: nn.Module, shares: list[Shard]) -> None:
        if shares:
            layer.shards[module] = shares[0]
        else:
            layer.out_of_reach.append(f"{paths[module]} (unknown tensor-parallel share)")

    for module in (*layer.attentions, *layer.activations, *layer.norms.values(), *layer.layer_norms):
        beside = [
            each for linear in layer.linears if folder(linear.module) == folder(module) for each in linear.projections
        ]
        computed = {each.name: each.output_shard for each in beside if each.output_shard is not None}
        multiplied = [each.input_shard for each in beside if each.input_shard is not None]
        attentions: list[Any] = [other for other in layer.attentions if folder(other) == folder(module)]
        if module in attentions:
            width = int(module.num_heads) * int(module.head_size_v)  # type: ignore[arg-type] # vLLM's Attention
            place(module, [shard for shard in multiplied if shard.size == width])
        elif module in layer.activations:
            if computed or multiplied:
                place(module, [shard for shard in multiplied if shard in computed.values()])
        elif attentions:
            width = sum(parameter.numel() for name, parameter in module.named_parameters() if name == "weight")
            letter = paths[module].rpartition(".")[2][:1]
            if width == attentions[0].head_size and module in layer.norms.values():
                place(module, [shard for name, shard in computed.items() if name.startswith(letter)])
            elif width not in {shard.width for shard in computed.values()}:
                place(module, [])
            # Else it normalises queries or keys of all workers, which the model gathers for it.
