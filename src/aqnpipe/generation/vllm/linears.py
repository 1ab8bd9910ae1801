"""vLLM's linear modules and the projections of transformers that they compute, whole or a tensor-parallel share.

Of a column-parallel module every worker computes some columns of the output. A row-parallel module multiplies some
columns of its input, and the products of all workers are added.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aqnpipe.errors import ModelError
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
    computed by itself. `width` counts the columns on
    this worker. `input_shard`, `output_shard`: which columns this worker has of the whole; None if it has all.
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
    shards = [_columns(module, part) for part in range(len(names))]
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


def why_not_plain(module: Any, num_projections: int = 1) -> str:
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
        # A worker without any part of a small vocabulary has no logits to put noise on.
        return not module.num_added_embeddings and _all_have_rows(module)
    if _is_row_parallel(module):
        # Where a model adds up the products itself, the sum has those of other modules too.
        return bool(module.reduce_results)
    is_known = type(module) in (ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear)
    return is_known and not module.gather_output and len(module.output_partition_sizes) == num_projections


def _all_have_rows(module: Any) -> bool:
    """Return whether no worker has only rows that pad the vocabulary; all have as many rows with padding."""
    return int(module.num_embeddings_per_partition) * (int(module.tp_size) - 1) < int(module.org_vocab_size)


def _is_row_parallel(module: Any) -> bool:
    from vllm.model_executor.layers.linear import RowParallelLinear

    return type(module) is RowParallelLinear


def _columns(module: Any, part: int) -> Shard:
    """Return this worker's columns of one projection of a column-parallel module."""
    # Few heads of keys and values are copied to several workers, and vLLM counts the copies as columns.
    copies = getattr(module, "num_kv_head_replicas", 1) if part else 1
    return share(module.tp_rank, module.tp_size, module.output_partition_sizes[part], copies)
