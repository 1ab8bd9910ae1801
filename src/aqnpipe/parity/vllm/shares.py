"""Makes whole values of what tensor-parallel workers have of them, so that a capture does not depend on their number.

A column-parallel module has some columns of its output on every worker. They are gathered in the order of the whole. A
row-parallel one multiplies some columns of its input; what is recorded of it is the sum over the workers. All workers
record the same, and take part in the same exchanges in the same order.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from aqnpipe.generation.vllm.linears import head_of
from aqnpipe.generation.vllm.modules import EngineModel
from aqnpipe.noise.kernels.shards import Shard
from aqnpipe.parity.forms import EmbeddingForm, LinearForm
from aqnpipe.parity.identity import Share


def gather(own: Tensor) -> Tensor:
    """Return the columns [rows, width] of all workers behind each other, in the order of their ranks."""
    from vllm.distributed import tensor_model_parallel_all_gather

    found: Tensor = tensor_model_parallel_all_gather(own.contiguous())
    return found


@dataclass(frozen=True)
class SharedLinearForm(LinearForm):
    """A product of whose weight [out, in] a worker has some rows, some columns, or all."""

    output_shard: Shard | None = None
    input_shard: Shard | None = None

    def rows(self, channels: Tensor) -> tuple[Tensor, Tensor | None]:
        """See `LinearForm`; every worker must call this with the same channels."""
        if self.output_shard is not None:
            bias = None if self.bias is None else _rows(self.bias[:, None], channels, self.output_shard)[:, 0]
            return _rows(self.weight, channels, self.output_shard), bias
        weight, bias = super().rows(channels)
        return weight if self.input_shard is None else self.input_shard.whole(gather(weight)), bias


@dataclass(frozen=True)
class SharedEmbeddingForm(EmbeddingForm):
    """Rows of an embedding of which every worker has some."""

    shard: Shard | None = None

    def rows(self, ids: Tensor) -> Tensor:
        """See `EmbeddingForm`; every worker must call this with the same ids."""
        return super().rows(ids) if self.shard is None else _rows(self.weight, ids, self.shard)


def embedding_form(module: torch.nn.Module) -> EmbeddingForm:
    """Return the form of vLLM's embedding."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    if getattr(module, "tp_size", 1) == 1:
        return EmbeddingForm(weight)
    return SharedEmbeddingForm(weight, shard=head_of(module).projections[0].output_shard)


def shares_of_weights(engine: EngineModel) -> dict[str, Share]:
    """Return by parameter, as in `EngineModel.weights`, which part of it this worker has; none for those it has all."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    found: dict[str, Share] = {}
    for name, projection in engine.projections().items():
        if projection.output_shard is not None:
            found |= {f"{name}.{key}": Share(0, projection.output_shard) for key in ("weight", "bias")}
        elif projection.input_shard is not None:
            found[f"{name}.weight"] = Share(1, projection.input_shard)
    for name, module in engine.model.named_modules():
        if isinstance(module, VocabParallelEmbedding):
            shard = head_of(module).projections[0].output_shard
            if shard is not None:
                found[f"{name}.weight"] = Share(0, shard)
    return found


def _rows(own: Tensor, rows: Tensor, shard: Shard) -> Tensor:
    """Return some rows of a matrix of which this worker has `own`, the rows of `shard`."""
    from vllm.distributed import get_tp_group, tensor_model_parallel_all_reduce

    group = get_tp_group()
    # Of several workers with the same rows only the first contributes.
    copies = max(1, group.world_size * shard.size // shard.width)
    chosen = rows.to(own.device) - shard.start
    is_own = (chosen >= 0) & (chosen < shard.size) & (group.rank_in_group % copies == 0)
    found = own.detach().new_zeros(len(rows), *own.shape[1:])
    found[is_own] = own.detach()[chosen[is_own]]
    return tensor_model_parallel_all_reduce(found)
