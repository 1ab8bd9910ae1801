"""Which columns a tensor-parallel worker has of the outputs of a decoder layer's other modules.

The columns of linear modules are known from vLLM (`linears`). Attention and activations lie between a column-parallel
and a row-parallel module: they compute the columns that the latter multiplies. Norms of queries and keys compute the
heads of their projection. What fits neither is out of reach of noise.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from aqnpipe.generation.vllm.linears import Linear, Projection
from aqnpipe.noise.kernels.shards import Shard

if TYPE_CHECKING:
    from aqnpipe.generation.vllm.modules import EngineLayer


def find_shares(layer: "EngineLayer") -> None:
    """Fill `layer.shards`, and add modules whose share is unknown to `layer.out_of_reach`."""
    layer.shards.update(_shares_of_projections(layer.linears))
    if not layer.shards and not any(linear.is_summed for linear in layer.linears):
        return
    paths = {module: path for path, module in layer.module.named_modules()}
    for attention in layer.attentions:
        width = int(attention.num_heads) * int(attention.head_size_v)  # type: ignore[arg-type] # vLLM's Attention
        _place(
            layer, attention, paths, [share for share in _multiplied(layer, paths, attention) if share.size == width]
        )
    for activation in layer.activations:
        computed = [projection.output_shard for projection in _projections_beside(layer, paths, activation)]
        if any(computed) or _multiplied(layer, paths, activation):
            shares = [share for share in _multiplied(layer, paths, activation) if share in computed]
            _place(layer, activation, paths, shares)
    for norm in [*layer.norms.values(), *layer.layer_norms]:
        _place_norm(layer, norm, paths)


def _shares_of_projections(linears: list[Linear]) -> Iterator[tuple[nn.Module, Shard]]:
    for linear in linears:
        for projection in linear.projections:
            if projection.output_shard is not None:
                yield (projection.output if linear.is_merged else linear.module), projection.output_shard


def _place(layer: "EngineLayer", module: nn.Module, paths: dict[nn.Module, str], shares: list[Shard]) -> None:
    if shares:
        layer.shards[module] = shares[0]
    else:
        layer.out_of_reach.append(f"{paths[module]} (unknown tensor-parallel share)")


def _place_norm(layer: "EngineLayer", norm: nn.Module, paths: dict[nn.Module, str]) -> None:
    """Norms of heads are shares; every worker computes all others, such as those of the hidden states."""
    attentions: list[Any] = [other for other in layer.attentions if _folder(paths[other]) == _folder(paths[norm])]
    if not attentions:
        return
    width = sum(parameter.numel() for name, parameter in norm.named_parameters() if name == "weight")
    beside = _named(_projections_beside(layer, paths, norm))
    if width == attentions[0].head_size and norm in layer.norms.values():
        first_letter = paths[norm].rpartition(".")[2][:1]
        _place(layer, norm, paths, [share for name, share in beside if name.startswith(first_letter)])
    elif width not in {share.width for _, share in beside}:
        _place(layer, norm, paths, [])
    # Else it normalises queries or keys of all workers, which the model gathers for it.


def _named(projections: list[Projection]) -> list[tuple[str, Shard]]:
    return [(each.name, each.output_shard) for each in projections if each.output_shard is not None]


def _projections_beside(layer: "EngineLayer", paths: dict[nn.Module, str], module: nn.Module) -> list[Projection]:
    return [projection for linear in _beside(layer, paths, module) for projection in linear.projections]


def _multiplied(layer: "EngineLayer", paths: dict[nn.Module, str], module: nn.Module) -> list[Shard]:
    """Return the columns that row-parallel modules beside `module` multiply."""
    found = (linear.projections[0].input_shard for linear in _beside(layer, paths, module) if linear.is_summed)
    return [share for share in found if share is not None]


def _beside(layer: "EngineLayer", paths: dict[nn.Module, str], module: nn.Module) -> list[Linear]:
    return [linear for linear in layer.linears if _folder(paths[linear.module]) == _folder(paths[module])]


def _folder(path: str) -> str:
    return path.rpartition(".")[0]
