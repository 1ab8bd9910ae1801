"""Runs the shards of an evaluation in this process, one after the other."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from aqnpipe.config.run import EvaluationSpec
from aqnpipe.device import resolve_device
from aqnpipe.evaluation.shards import ShardRunner, run_shard
from aqnpipe.generation.backend_choice import open_generator
from aqnpipe.generation.noisy_passes import NoisyGenerator
from aqnpipe.models.loading import load_tokenizer


def load_generator(spec: EvaluationSpec, model_dir: Path, max_tokens: int) -> NoisyGenerator:
    """Load the checkpoint on the first visible device; `max_tokens`: limit of a prompt and its response together."""
    torch.set_num_threads(spec.evaluation.threads)
    requested = spec.generation
    if requested.backend == "auto" and not spec.evaluation.fits_vllm:
        # All passes on one backend: levels are compared with each other.
        requested = requested.model_copy(update={"backend": "transformers"})
    return open_generator(
        requested,
        model_dir,
        load_tokenizer(model_dir),
        dtype=spec.dtype,
        attention=spec.attention,
        device=resolve_device(spec.device),
        max_tokens=max_tokens,
        batch_size=spec.evaluation.batch_size,
        threads=spec.evaluation.threads,
    )


@contextmanager
def local_shard_runner(spec: EvaluationSpec, model_dir: Path, max_tokens: int) -> Iterator[ShardRunner]:
    """Yield a runner with one generation backend in this process; close the backend afterwards."""
    generator = load_generator(spec, model_dir, max_tokens)
    try:
        yield ShardRunner(generator.description, lambda shards: (run_shard(generator, spec, shard) for shard in shards))
    finally:
        generator.close()
