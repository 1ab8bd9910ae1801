"""Splits an evaluation into shards, runs a shard, and assembles the results into passes.

Any worker can run any shard. The split depends only on the questions and the settings. The result of a shard depends
only on the shard: noise and draws are keyed by the numbers of its batches, and each shard has its own measurements. So
the results are the same bytes, whichever worker runs which shard.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from pydantic import ConfigDict, TypeAdapter

from aqnpipe.config.run import EvaluationSpec
from aqnpipe.device import resolve_device
from aqnpipe.errors import ReceiptError, WorkerError
from aqnpipe.evaluation.audit import BatchFacts, observed
from aqnpipe.generation.backend import Completion, Sampling
from aqnpipe.generation.backend_choice import open_generator
from aqnpipe.generation.noisy_passes import NoisyGenerator, PassMeasurements, PassNoise, pass_receipt
from aqnpipe.machine.machine import NoiseKey
from aqnpipe.models.loading import load_tokenizer
from aqnpipe.noise.receipts.receipt import Receipt, RecorderState
from aqnpipe.seeding import derive_seed

_PLAIN = ConfigDict(extra="forbid", ser_json_inf_nan="constants")


@dataclass(frozen=True)
class Batch:
    """The prompts (token ids) of one generation call, and the indices of their questions.

    `number` counts the batches of a sample; `step` counts the batches of the pass, over all its samples.
    """

    sample: int
    number: int
    step: int
    questions: tuple[int, ...]
    prompts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Shard:
    """Batches of one pass (noise level and noise seed); `number` counts the shards of the evaluation."""

    __pydantic_config__: ClassVar[ConfigDict] = _PLAIN

    number: int
    noise_level: float
    noise_seed: int
    batches: tuple[Batch, ...]


@dataclass(frozen=True)
class ShardResult:
    """The result of a shard: the completions of every batch, in order, and the measurements of their noise.

    `facts`: what was observed of every batch; empty if the backend cannot be observed.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _PLAIN

    number: int
    completions: tuple[tuple[Completion, ...], ...]
    measurements: PassMeasurements
    facts: tuple[BatchFacts, ...] = ()


SHARD_JSON = TypeAdapter(Shard)
SHARD_RESULT_JSON = TypeAdapter(ShardResult)
"""Write and read what workers send each other; floats keep every bit."""


@dataclass(frozen=True)
class PassResult:
    """One pass: the completions of each sample, in the order of the questions, and the receipt.

    `batches` with the `facts` observed of each; no facts if the backend cannot be observed.
    """

    noise_level: float
    noise_seed: int
    samples: list[list[Completion]]
    receipt: Receipt
    batches: tuple[Batch, ...]
    facts: tuple[BatchFacts, ...]

    @property
    def batch_of_question(self) -> dict[int, int]:
        """Number of the batch of each question by its index; all samples are split alike."""
        return {question: batch.number for batch in self.batches for question in batch.questions}


@dataclass(frozen=True)
class ShardRunner:
    """Workers with a loaded checkpoint.

    `description` describes their backend for run.json. `run` yields the results of shards, in any order.
    """

    description: dict[str, str | int | bool]
    run: Callable[[Sequence[Shard]], Iterator[ShardResult]]


OpenShardRunner = Callable[[EvaluationSpec, Path, int], AbstractContextManager[ShardRunner]]
"""Opens a runner for (spec, checkpoint folder, limit of the tokens of a prompt and its response together)."""


def shards_of(spec: EvaluationSpec, prompts: Sequence[Sequence[int]]) -> list[Shard]:
    """Return the shards of an evaluation, pass by pass.

    Batches contain prompts of similar length, which need less padding. A shard is one batch, or the whole pass if a
    fault caches its threshold in the first call of the pass.
    """
    config = spec.evaluation
    order = sorted(range(len(prompts)), key=lambda index: (len(prompts[index]), index))
    groups = [tuple(order[start : start + config.batch_size]) for start in range(0, len(order), config.batch_size)]
    batches = [
        Batch(
            sample=sample,
            number=number,
            step=sample * len(groups) + number,
            questions=questions,
            prompts=tuple(tuple(prompts[index]) for index in questions),
        )
        for sample in range(config.num_samples)
        for number, questions in enumerate(groups)
    ]
    indivisible = any(fault.threshold == "cached" for fault in spec.faults)
    parts = [tuple(batches)] if indivisible else [(batch,) for batch in batches]
    contents = [(level, seed, part) for level, seed in config.passes() for part in parts]
    return [Shard(number, level, seed, part) for number, (level, seed, part) in enumerate(contents)]


def run_shard(generator: NoisyGenerator, spec: EvaluationSpec, shard: Shard) -> ShardResult:
    """Generate every response of a shard.

    The noise of a batch is keyed by noise seed and step, its draws by noise seed, sample and number. So all models
    share noise and draws on the same questions, and all noise levels share the draws. The spec's faults are active in
    the whole shard; a threshold computed in each call depends on the prompts of the batch.
    """
    generator.begin_pass(noise_of(spec, shard.noise_level, shard.noise_seed))
    completions, facts = [], []
    for batch in shard.batches:
        sampling = sampling_of(spec, shard.noise_seed, batch.sample, batch.number)
        key = NoiseKey(seed=shard.noise_seed, step=batch.step)
        with observed(generator, spec, shard, batch) as observation:
            completions.append(tuple(generator.generate(batch.prompts, sampling, key)))
        if observation is not None:
            facts.append(observation.facts(completions[-1]))
    return ShardResult(shard.number, tuple(completions), generator.end_pass(), tuple(facts))


def assembled_passes(
    spec: EvaluationSpec, shards: Sequence[Shard], results: Iterable[ShardResult]
) -> Iterator[PassResult]:
    """Assemble results, which may arrive in any order; yield the passes in order, each as soon as it is complete.

    Receipts are not checked here. Raises WorkerError if a shard was run twice, not at all, or in part.
    """
    due = _by_pass(shards)
    known = {shard.number: shard for shard in shards}
    done: dict[int, ShardResult] = {}
    for result in results:
        shard = known.get(result.number)
        if shard is None or result.number in done:
            raise WorkerError(f"shard {result.number} of {len(shards)} of the evaluation was run twice")
        if [len(batch.prompts) for batch in shard.batches] != [len(batch) for batch in result.completions]:
            raise WorkerError(f"shard {result.number} of {len(shards)} of the evaluation is incomplete")
        done[result.number] = result
        while due and all(shard.number in done for shard in due[0]):
            whole = due.pop(0)
            yield _joined(spec, whole, [done[shard.number] for shard in whole])
    if due:
        missing = [str(shard.number) for group in due for shard in group if shard.number not in done]
        raise WorkerError(f"shards {', '.join(missing)} of {len(shards)} of the evaluation were not run")


def noise_of(spec: EvaluationSpec, noise_level: float, noise_seed: int) -> PassNoise:
    """Return the noise of a pass; noise on attention follows the model's attention implementation."""
    noise = spec.evaluation.noise_at(noise_level, spec.attention)
    return PassNoise(**{**dict(noise), "faults": spec.faults}, noise_seed=noise_seed)


def sampling_of(spec: EvaluationSpec, noise_seed: int, sample: int, batch: int) -> Sampling:
    """Return the sampling of one sample of a batch; greedy if the spec has no `sampling`."""
    config, stop_text = spec.evaluation, spec.prompt.stop_text
    if config.sampling is None:
        return Sampling(max_response_tokens=config.max_response_tokens, stop_text=stop_text)
    return Sampling(
        max_response_tokens=config.max_response_tokens,
        stop_text=stop_text,
        temperature=config.sampling.temperature,
        seed=derive_seed(config.sampling.seed, "evaluation_sampling", noise_seed, sample, batch),
    )


def _by_pass(shards: Sequence[Shard]) -> list[list[Shard]]:
    groups: dict[tuple[float, int], list[Shard]] = {}
    for shard in shards:
        groups.setdefault((shard.noise_level, shard.noise_seed), []).append(shard)
    return list(groups.values())


def _joined(spec: EvaluationSpec, shards: Sequence[Shard], results: Sequence[ShardResult]) -> PassResult:
    first = shards[0]
    for shard, result in zip(shards, results, strict=True):
        _refuse_other_keys(shard, result.measurements.state)
    found: dict[int, dict[int, Completion]] = {}
    for shard, result in zip(shards, results, strict=True):
        for batch, completions in zip(shard.batches, result.completions, strict=True):
            found.setdefault(batch.sample, {}).update(zip(batch.questions, completions, strict=True))
    samples = [[responses[question] for question in range(len(responses))] for _, responses in sorted(found.items())]
    receipt = pass_receipt(
        noise_of(spec, first.noise_level, first.noise_seed), [result.measurements for result in results]
    )
    batches = tuple(batch for shard in shards for batch in shard.batches)
    facts = tuple(observed for result in results for observed in result.facts)
    return PassResult(first.noise_level, first.noise_seed, samples, receipt, batches, facts)


def _refuse_other_keys(shard: Shard, state: RecorderState) -> None:
    """Raise ReceiptError if the noise of a shard has other keys than its noise seed and the steps of its batches."""
    due = {f"seed {shard.noise_seed}, step {batch.step}": 1 for batch in shard.batches}
    for row in state.phases:
        if row.keys and row.keys != due:
            found, expected = min(row.keys.keys() - due.keys() or row.keys), min(due.keys() - row.keys.keys() or due)
            raise ReceiptError(
                f"evaluation invalid: evaluation at level {shard.noise_level:g}, noise seed {shard.noise_seed}: its "
                f"noise is keyed by noise {found}, expected noise {expected}"
            )


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
