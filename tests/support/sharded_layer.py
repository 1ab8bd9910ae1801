"""A layer with noise on every product, whole or as one of two tensor-parallel workers with gloo.

As a program: `python sharded_layer.py FOLDER RANK` computes the share of one worker and writes what it has.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import distributed

from aqnpipe.config.noise import RelativeGaussian
from aqnpipe.generation.vllm.serving import exchanged
from aqnpipe.noise.kernels.error_models import apply_error_
from aqnpipe.noise.kernels.gaussian import NoiseStream
from aqnpipe.noise.kernels.shards import Shard, apply_error_to_shards_

ERROR = RelativeGaussian(scale=0.2)
KEY = 11
TOKENS, HIDDEN, INNER, VOCABULARY = 5, 24, 300, 90
# The second share of the vocabulary is smaller: the rest of its rows are padding.
COLUMNS = {0: (Shard(0, 150, INNER), Shard(0, 64, VOCABULARY)), 1: (Shard(150, 150, INNER), Shard(64, 26, VOCABULARY))}


def tensors():
    """Return input, both weights of the MLP with biases, and the weight of the head; the same in every process."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(TOKENS, HIDDEN), (INNER, HIDDEN), (INNER,), (HIDDEN, INNER), (HIDDEN,), (VOCABULARY, HIDDEN)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def whole_layer():
    """Return the outputs of the down projection and of the head that one worker computes."""
    x, up, up_bias, down, down_bias, head = tensors()
    inner = apply_error_(x @ up.T, ERROR, NoiseStream(KEY, 1)).add_(up_bias)
    active = apply_error_(F.silu(inner), ERROR, NoiseStream(KEY, 2))
    outer = apply_error_(active @ down.T, ERROR, NoiseStream(KEY, 3)).add_(down_bias)
    return outer, apply_error_(outer @ head.T, ERROR, NoiseStream(KEY, 4))


def share_of_layer(rank):
    """Return the same of one of two workers: the whole output of the down projection, and its columns of the head."""
    x, up, up_bias, down, down_bias, head = tensors()
    columns, rows = COLUMNS[rank]
    own = slice(columns.start, columns.start + columns.size)
    inner = apply_error_to_shards_(x @ up[own].T, (columns,), ERROR, NoiseStream(KEY, 1)).add_(up_bias[own])
    active = apply_error_to_shards_(F.silu(inner), (columns,), ERROR, NoiseStream(KEY, 2))
    total = active @ down[:, own].T
    distributed.all_reduce(total)
    outer = apply_error_(total, ERROR, NoiseStream(KEY, 3)).add_(down_bias)
    logits = outer @ head[rows.start : rows.start + rows.size].T
    return outer, apply_error_to_shards_(logits, (rows,), ERROR, NoiseStream(KEY, 4))


if __name__ == "__main__":
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    texts = exchanged("worker 0" if rank == 0 else "the second worker, é", None)
    torch.save((*share_of_layer(rank), texts), folder / f"worker{rank}.pt")
    distributed.destroy_process_group()
