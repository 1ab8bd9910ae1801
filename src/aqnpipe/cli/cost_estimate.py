"""Cost estimate of a study from its configuration and the shapes of its models, before anything runs.

Floating-point operations: 2 per weight and token in a forward pass, twice that in a backward pass (gradients of weights
and of activations; Kaplan et al. 2020, section 2.1), one more forward pass with gradient checkpointing, and the
products of attention. Device time is operations / (peak rate * assumed utilization). Where transformers generates, the
host starts every kernel of a decode step one by one, which takes longer than the kernels themselves; there the time is
that of the host, if it is longer.
"""

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from math import ceil
from statistics import fmean
from typing import Annotated, Literal

from pydantic import Field

from aqnpipe.config.arm import Arm
from aqnpipe.config.base import FrozenModel
from aqnpipe.config.dataset import GeneratedDataset
from aqnpipe.config.generation import RequestedBackend
from aqnpipe.config.model import BUILTIN_MODELS, Attention, num_layers_in, source_kind
from aqnpipe.config.plan import StudyPlan
from aqnpipe.config.training import TrainingConfig
from aqnpipe.errors import ConfigError
from aqnpipe.models.shapes import ModelShape, ParameterCount, shape_of

StudyPhase = Literal["rollout", "old_policy", "reference", "actor_forward", "backward", "validation", "evaluation"]
Size = ModelShape | ParameterCount

_GENERATING: frozenset[StudyPhase] = frozenset({"rollout", "validation", "evaluation"})
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_SECONDS_PER_HOUR = 3600.0
_ADAM_MOMENTS = 2
# A run keeps two resume points while it writes the next one.
_RESUME_POINTS = 3
# A GSM8K question with a chat template and an instruction. The estimate states it, and --prompt-tokens changes it.
USUAL_PROMPT_TOKENS = 150.0
# A GSM8K question and its worked answer, with 235 and 287 characters on average.
_USUAL_EXAMPLE_TOKENS = 180.0


class Rates(FrozenModel):
    """Assumed rates of a device: its peak, and the shares of it reached in training passes and in generation."""

    device: str
    tflops: float = Field(gt=0)
    training_utilization: float = Field(gt=0, le=1)
    generation_utilization: float = Field(gt=0, le=1)
    seconds_per_job: float = Field(default=0.0, ge=0, description="time until a job starts to compute")
    host_seconds: float = Field(default=0.0, ge=0, description="host time of a layer in a decode step of transformers")
    noisy_host_seconds: float = Field(default=0.0, ge=0, description="the same with operator or module noise")


# The peak for dense bfloat16 products is from the vendor's data sheet. The utilizations are orders of magnitude for
# eager training and for batched generation without a serving engine.
# Host times: 17 ms clean and 29 ms with noise on matmul operators for 28 layers, measured with mixed precision on a CPU
# whose kernels took no time (docs/cost-estimate.md). They do not depend on the model's width.
A100 = Rates(
    device="A100",
    tflops=312.0,
    training_utilization=0.35,
    generation_utilization=0.05,
    host_seconds=0.017 / 28,
    noisy_host_seconds=0.029 / 28,
)
# Measured with the tiny models on one thread of a shared virtual core (docs/cost-estimate.md). The peak is nominal.
CPU_CORE = Rates(
    device="CPU core", tflops=0.1, training_utilization=0.45, generation_utilization=0.2, seconds_per_job=8.0
)


class Assumptions(FrozenModel):
    """Values that the configuration does not determine. None: usual prompts, responses at the limit, default rates."""

    prompt_tokens: float | None = Field(default=None, gt=0)
    response_tokens: float | None = Field(default=None, gt=0)
    parameters: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default={}, description="number of parameters by name of the model, for those whose size is unknown"
    )
    rates: Rates | None = None


class Estimate(FrozenModel):
    """An estimate and the assumptions behind it."""

    hours_by_phase: dict[StudyPhase, float] = Field(description="device hours, summed over all runs or evaluations")
    device_hours: float = Field(description="those of all phases, and the time until the jobs start to compute")
    num_devices: int = Field(description="devices that work at the same time: workers of a run, or cores of this CPU")
    model_gigabytes: float = Field(description="prepared models, in the number format they compute in")
    checkpoint_gigabytes: float = Field(
        description="checkpoints of all runs that the study keeps; where seeds are added all, until the last of them"
    )
    run_gigabytes: float = Field(
        description="what is on the disk only while a run is active: resume points, and checkpoints that are not kept"
    )
    rates: Rates
    assumed: str
    not_counted: tuple[str, ...]

    @property
    def disk_gigabytes(self) -> float:
        """The most that is on the disk while one run is active; every further active run adds `run_gigabytes`."""
        return self.model_gigabytes + self.checkpoint_gigabytes + self.run_gigabytes


def estimate_study(plan: StudyPlan, assumptions: Assumptions) -> Estimate:
    """Estimate the cost of training and evaluation; ConfigError naming the option or key that is missing."""
    prompt, prompt_source = mean_prompt_tokens(plan, assumptions)
    rates = assumptions.rates or default_rates(plan)
    sizes = {name: _size_of(plan, name, assumptions) for name in plan.study.models()}
    given = plan, sizes, rates, prompt, assumptions.response_tokens
    by_phase: defaultdict[StudyPhase, float] = defaultdict(float)
    for phase, found in (*_training(*given), *_evaluation(*given)):
        by_phase[phase] += found
    num_jobs = len(plan.runs()) + plan.num_evaluations
    hours = sum(by_phase.values()) + num_jobs * rates.seconds_per_job / _SECONDS_PER_HOUR
    config, training = plan.study.config, plan.study.config.training
    # The cores of this machine for a CPU, else the devices that a run or an evaluation takes.
    devices = config.generation.tensor_parallel if training is None else training.num_workers
    prepared = sum(size.num_parameters * BYTES[config.models[role].dtype] for role, size in sizes.items())
    stored = {role: _checkpoint_bytes(size, training) for role, size in sizes.items()} if training else {}
    points = max((_resume_bytes(size, training) for size in sizes.values()), default=0.0) if training else 0.0
    # Checkpoints that go once a run is evaluated; where seeds are added, none so early.
    removes = plan.study.adaptive_seeds is None and plan.removal_files()
    removed = len(plan.checkpoint_steps) - 1 if removes else 0
    kept = len(plan.checkpoint_steps) - removed
    length = assumptions.response_tokens
    responses = "at their limit (--response-tokens)" if length is None else f"of {length:g} tokens"
    return Estimate(
        hours_by_phase=dict(by_phase),
        device_hours=hours,
        num_devices=len(os.sched_getaffinity(0)) if rates.device == CPU_CORE.device else devices,
        checkpoint_gigabytes=sum(kept * stored[role] for role, _, _ in plan.runs()) / 1e9,
        model_gigabytes=prepared / 1e9,
        run_gigabytes=(_RESUME_POINTS * points + removed * max(stored.values(), default=0.0)) / 1e9,
        rates=rates,
        assumed=f"{prompt_source}, responses {responses}",
        not_counted=tuple(_not_counted(plan, points)),
    )


def _not_counted(plan: StudyPlan, points: float) -> Iterator[str]:
    """Yield what an estimate leaves out; `points`: bytes of a resume point."""
    training, machines = plan.study.config.training, plan.study.config.evaluation.machines
    yield "noise"
    if any(uses_vllm_for_rollouts(plan, plan.study.arms[arm]) for _, arm, _ in plan.runs()):
        yield "weight syncs"
    if training is not None and points:
        share, seconds = training.resume_share, points / training.num_workers / 1e9
        often = f"every {training.resume_interval} steps" if share is None else f"at most {share:.0%} of a run's time"
        yield f"resume points ({often}; {seconds:.2g} s each at 1 GB/s per worker)"
    yield from ("diagnoses", "loss studies")
    if machines:
        yield f"evaluations on {', '.join(machines)}"
    yield "statistics and report"


def default_rates(plan: StudyPlan) -> Rates:
    """Return the rates of a CPU core or of an A100. `auto` is a core for built-in models and an A100 for others.

    Raises ConfigError for NPUs, whose peak is unknown.
    """
    config = plan.study.config
    if config.device == "npu":
        raise ConfigError("the peak rate of the study's NPUs is unknown: give it as --tflops PEAK, for bfloat16")
    builtin = all(model.source in BUILTIN_MODELS for model in plan.study.models().values())
    return CPU_CORE if config.device == "cpu" or (config.device == "auto" and builtin) else A100


def _size_of(plan: StudyPlan, role: str, assumptions: Assumptions) -> Size:
    if role in assumptions.parameters:
        return ParameterCount(num_parameters=assumptions.parameters[role])
    model = plan.study.config.models[role]
    shape = shape_of(model)
    if shape is not None:
        return shape
    if source_kind(model.source) == "hub":
        raise ConfigError(
            f"the size of {model.source} is unknown before the download: give it as --parameters {role}=N"
        )
    # Imported here: it takes polars along, and `--help` should be quick.
    from aqnpipe.models.loading import num_parameters_in, source_folder

    folder = source_folder(model)
    return ParameterCount(num_parameters=num_parameters_in(folder), num_layers=num_layers_in(folder))


def mean_prompt_tokens(plan: StudyPlan, assumptions: Assumptions) -> tuple[float, str]:
    """Return the mean length of a prompt and the source of this number."""
    if assumptions.prompt_tokens is not None:
        return assumptions.prompt_tokens, f"prompts of {assumptions.prompt_tokens:g} tokens"
    dataset, examples = plan.study.config.dataset, plan.study.config.prompt.num_examples
    if isinstance(dataset, GeneratedDataset):
        from aqnpipe.data.generated import generate_problems  # imports numpy, which is slow

        problems = generate_problems(dataset, plan.splits()[0])
        length = fmean(_count_words(problem.question) for problem in problems)
        length += examples * fmean(_count_words(f"{problem.question} {problem.answer}") for problem in problems)
        return length, f"prompts of {length:.0f} tokens"
    length = USUAL_PROMPT_TOKENS + examples * _USUAL_EXAMPLE_TOKENS
    return length, f"prompts of {length:g} tokens (--prompt-tokens)"


def _count_words(text: str) -> int:
    """Return the number of tokens of the tiny models: whole words, single digits and single punctuation marks."""
    return len(re.findall(r"[A-Za-z]+|\S", text))


def _hours(
    size: Size,
    rates: Rates,
    phase: StudyPhase,
    sequences: float,
    prompt: float,
    response: float,
    passes: float = 1.0,
    decode_steps: float = 0.0,
    noisy_decode_steps: float = 0.0,
) -> float:
    """Return the device hours of sequences in a phase that costs so many forward passes.

    decode_steps: those that transformers makes, summed over the devices, with noise or without; a batch makes as many
    as its longest response. The host starts each of their layers, which may take longer than the operations.
    """
    length = prompt + response
    # A token attends to the previous ones, which are half of the sequence on average.
    flops = passes * size.forward_flops(sequences * length, sequences * response, length / 2)
    used = rates.generation_utilization if phase in _GENERATING else rates.training_utilization
    starting = decode_steps * rates.host_seconds + noisy_decode_steps * rates.noisy_host_seconds
    return max(flops / (rates.tflops * 1e12 * used), starting * size.num_layers) / _SECONDS_PER_HOUR


def _training(
    plan: StudyPlan, sizes: Mapping[str, Size], rates: Rates, prompt: float, response: float | None
) -> Iterator[tuple[StudyPhase, float]]:
    """Yield the phases of every run and their device hours; `response` is None at the limit."""
    training = plan.study.config.training
    if training is None:
        return
    length = response or training.max_response_tokens
    sequences, validations = (
        plan.num_steps * training.sequences_per_step,
        len(training.validation_steps(plan.num_steps)),
    )
    # Every worker answers its share as one batch; transformers generates, without operator noise.
    steps = validations * training.num_workers * training.max_response_tokens
    for role, arm, _ in plan.runs():
        for phase, passes in _passes(training):
            decoded = _rollout_steps(plan, training, arm) if phase == "rollout" else {}
            yield phase, _hours(sizes[role], rates, phase, sequences, prompt, length, passes, **decoded)
        validated = training.validation_questions * validations
        yield "validation", _hours(sizes[role], rates, "validation", validated, prompt, length, decode_steps=steps)


def _rollout_steps(plan: StudyPlan, training: TrainingConfig, arm_id: str) -> dict[str, float]:
    """Return the decode steps of a run's rollouts: each worker rolls out its share of a batch at once."""
    arm = plan.study.arms[arm_id]
    if uses_vllm_for_rollouts(plan, arm):
        return {}
    steps = plan.num_steps / training.steps_per_rollout * training.num_workers * training.max_response_tokens
    noises = (arm.operator_noise, arm.module_noise)
    is_noisy = any(noise is not None and noise.is_active and "rollout" in noise.phases for noise in noises)
    is_noisy |= arm.kv_cache is not None and "rollout" in arm.kv_cache.phases
    return {"noisy_decode_steps" if is_noisy else "decode_steps": steps}


def uses_vllm_for_rollouts(plan: StudyPlan, arm: Arm) -> bool:
    """Return whether vLLM will draw the rollouts of `arm`, if it is installed."""
    return _uses_vllm(plan.generation_in_training.requested_for_rollouts, plan.study.config.models[arm.model].attention)


def _uses_vllm(requested: RequestedBackend, attention: Attention) -> bool:
    """Return whether generation will run on vLLM; `auto` selects it for fused attention, if it is installed."""
    return requested == "vllm" or (requested == "auto" and attention == "sdpa")


def _passes(training: TrainingConfig) -> Iterator[tuple[StudyPhase, float]]:
    """Yield the phases of every rolled-out sequence and their cost in forward passes."""
    yield "rollout", 1.0
    if training.steps_per_rollout > 1:  # with one step, the forward pass of the actor is that of the old policy
        yield "old_policy", 1.0
    if training.kl_coefficient > 0:
        yield "reference", 1.0
    yield "actor_forward", 1.0
    # Frozen weights need only the gradients of activations.
    gradients = 2.0 if training.lora is None else 1.0
    yield "backward", gradients + (1.0 if training.gradient_checkpointing else 0.0)


def _evaluation(
    plan: StudyPlan, sizes: Mapping[str, Size], rates: Rates, prompt: float, response: float | None
) -> Iterator[tuple[StudyPhase, float]]:
    """Yield the device hours of every evaluation; `response` is None at the limit."""
    config, evaluation = plan.study.config, plan.study.config.evaluation
    questions = evaluation.num_questions or config.dataset.num_test
    if questions is None:
        raise ConfigError("the number of evaluated questions is unknown: set dataset.num_test")
    passes, answers = evaluation.passes(), questions * evaluation.num_samples
    noisy = sum(level > 0 for level, _ in passes)
    of_a_pass = ceil(answers / evaluation.batch_size) * evaluation.max_response_tokens
    length = response or evaluation.max_response_tokens
    for model, arm, _, _ in plan.evaluations():
        role = plan.prepared_model(model, arm) or model
        on_vllm = _uses_vllm(config.generation.backend, config.models[role].attention) and evaluation.fits_vllm
        clean, noised = (0, 0) if on_vllm else (of_a_pass * (len(passes) - noisy), of_a_pass * noisy)
        sequences = answers * len(passes)
        yield ("evaluation", _hours(sizes[role], rates, "evaluation", sequences, prompt, length, 1.0, clean, noised))


def _checkpoint_bytes(size: Size, training: TrainingConfig) -> float:
    """Return the bytes of a checkpoint: of whole weights, or of adapters in float32 (0 if the shape is not known)."""
    if training.lora is None:
        return size.num_parameters * BYTES[training.weights_dtype]
    if not isinstance(size, ModelShape):
        return 0.0
    return BYTES["float32"] * size.adapter_parameters(training.lora.rank, training.lora.target_modules)


def _resume_bytes(size: Size, training: TrainingConfig) -> float:
    """Return the bytes of a resume point: trained weights and both moments of Adam; few with adapters, not counted."""
    return 0.0 if training.lora else (1 + _ADAM_MOMENTS) * size.num_parameters * BYTES[training.weights_dtype]
