"""Cost estimate of a study from its configuration and the shapes of its models, before anything runs.

Floating-point operations: 2 per weight and token in a forward pass, twice that in a backward pass (gradients of weights
and of activations; Kaplan et al. 2020, section 2.1), one more forward pass with gradient checkpointing, and the
products of attention. Device time is operations / (peak rate * assumed utilization).
"""

import re
from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import Literal

from pydantic import Field

from aqnpipe.config.base import FrozenModel
from aqnpipe.config.dataset import GeneratedDataset
from aqnpipe.config.model import BUILTIN_MODELS
from aqnpipe.config.plan import StudyPlan
from aqnpipe.config.training import LoraConfig
from aqnpipe.errors import ConfigError
from aqnpipe.models.shapes import ModelShape, ParameterCount, shape_of

StudyPhase = Literal["rollout", "old_policy", "reference", "actor_forward", "backward", "validation", "evaluation"]
Size = ModelShape | ParameterCount

_GENERATING: frozenset[StudyPhase] = frozenset({"rollout", "validation", "evaluation"})
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_SECONDS_PER_HOUR = 3600.0
_ADAM_MOMENTS = 2
# A run keeps two resume points while it writes the next one.
_RESUME_POINTS = 3
# A GSM8K question with a chat template and an instruction. The estimate states it, and --prompt-tokens changes it.
_USUAL_PROMPT_TOKENS = 150.0
# A GSM8K question and its worked answer, with 235 and 287 characters on average.
_USUAL_EXAMPLE_TOKENS = 180.0


class Rates(FrozenModel):
    """Assumed rates of a device: its peak, and the shares of it reached in training passes and in generation."""

    device: str
    tflops: float = Field(gt=0)
    training_utilization: float = Field(gt=0, le=1)
    generation_utilization: float = Field(gt=0, le=1)
    seconds_per_job: float = Field(default=0.0, ge=0, description="time until a job starts to compute")

    def hours(self, phase: StudyPhase, flops: float) -> float:
        """Return the device hours of `flops` operations in a phase."""
        used = self.generation_utilization if phase in _GENERATING else self.training_utilization
        return flops / (self.tflops * 1e12 * used) / _SECONDS_PER_HOUR


# The peak for dense bfloat16 products is from the vendor's data sheet. The utilizations are orders of magnitude for
# eager training and for batched generation without a serving engine.
A100 = Rates(device="A100", tflops=312.0, training_utilization=0.35, generation_utilization=0.05)
# Measured with the tiny models on one thread of a shared virtual core (docs/cost-estimate.md). The peak is nominal.
CPU_CORE = Rates(
    device="CPU core", tflops=0.1, training_utilization=0.45, generation_utilization=0.2, seconds_per_job=8.0
)


class Assumptions(FrozenModel):
    """Values that the configuration does not determine. None: usual prompts, responses at the limit, default rates."""

    prompt_tokens: float | None = Field(default=None, gt=0)
    response_tokens: float | None = Field(default=None, gt=0)
    parameters: dict[str, float] = Field(default={}, description="number of parameters of roles whose size is unknown")
    rates: Rates | None = None


class PhaseCost(FrozenModel):
    """Cost of one phase, summed over all runs or evaluations."""

    phase: StudyPhase
    tokens: float
    generated_tokens: float
    flops: float
    device_hours: float


class Estimate(FrozenModel):
    """An estimate and the assumptions behind it."""

    phases: tuple[PhaseCost, ...]
    generated_tokens: float
    flops: float
    device_hours: float
    checkpoint_gigabytes: float = Field(description="saved checkpoints of all runs")
    working_gigabytes: float = Field(description="resume points of the largest run during training, without adapters")
    parameters: dict[str, float]
    rates: Rates
    assumed: tuple[str, ...]
    not_counted: tuple[str, ...]


class _Work(FrozenModel):
    """Sequences of one role in one phase; `passes` is the cost of the phase in forward passes."""

    role: str
    phase: StudyPhase
    sequences: float
    prompt: float
    response: float
    passes: float = 1.0

    def cost(self, size: Size, rates: Rates) -> PhaseCost:
        length = self.prompt + self.response
        # A token attends to the previous ones, which are half of the sequence on average.
        flops = self.passes * size.forward_flops(self.sequences * length, self.sequences * self.response, length / 2)
        return PhaseCost(
            phase=self.phase,
            tokens=self.sequences * length,
            generated_tokens=self.sequences * self.response if self.phase in _GENERATING else 0.0,
            flops=flops,
            device_hours=rates.hours(self.phase, flops),
        )


def estimate_study(plan: StudyPlan, assumptions: Assumptions) -> Estimate:
    """Estimate the cost of training and evaluation; ConfigError naming the option or key that is missing."""
    prompt, prompt_source = _prompt_tokens(plan, assumptions)
    rates = assumptions.rates or default_rates(plan)
    sizes = {role: _size_of(plan, role, assumptions) for role in plan.study.model_roles()}
    work = [*_training(plan, prompt, assumptions), *_evaluation(plan, prompt, assumptions)]
    phases = _summed([part.cost(sizes[part.role], rates) for part in work])
    num_jobs = len(plan.runs()) + plan.num_evaluations
    hours = sum(phase.device_hours for phase in phases) + num_jobs * rates.seconds_per_job / _SECONDS_PER_HOUR
    return Estimate(
        phases=phases,
        generated_tokens=sum(phase.generated_tokens for phase in phases),
        flops=sum(phase.flops for phase in phases),
        device_hours=hours,
        checkpoint_gigabytes=_checkpoint_bytes(plan, sizes) / 1e9,
        working_gigabytes=max(_working_bytes(plan, *item) for item in sizes.items()) / 1e9,
        parameters={role: float(size.num_parameters) for role, size in sizes.items()},
        rates=rates,
        assumed=(prompt_source, _response_source(assumptions)),
        not_counted=("noise", "diagnoses", "loss studies", "statistics and report"),
    )


def default_rates(plan: StudyPlan) -> Rates:
    """Return the rates of a CPU core or of an A100. `auto` is a core for built-in models and an A100 for others.

    Raises ConfigError for NPUs, whose peak is unknown.
    """
    config = plan.study.config
    if config.device == "npu":
        raise ConfigError("the peak rate of the study's NPUs is unknown: give it as --tflops PEAK, for bfloat16")
    builtin = all(config.models[role].source in BUILTIN_MODELS for role in plan.study.model_roles())
    return CPU_CORE if config.device == "cpu" or (config.device == "auto" and builtin) else A100


def _size_of(plan: StudyPlan, role: str, assumptions: Assumptions) -> Size:
    if role in assumptions.parameters:
        return ParameterCount(num_parameters=assumptions.parameters[role])
    shape = shape_of(plan.study.config.models[role])
    if shape is None:
        source = plan.study.config.models[role].source
        raise ConfigError(f"the size of {source} is unknown before the download: give it as --parameters {role}=N")
    return shape


def _prompt_tokens(plan: StudyPlan, assumptions: Assumptions) -> tuple[float, str]:
    """Return the mean length of a prompt and the source of this number."""
    if assumptions.prompt_tokens is not None:
        return assumptions.prompt_tokens, f"prompts of {assumptions.prompt_tokens:g} tokens, as given"
    dataset, examples = plan.study.config.dataset, plan.study.config.prompt.num_examples
    if isinstance(dataset, GeneratedDataset):
        from aqnpipe.data.generated import generate_problems  # imports numpy, which is slow

        problems = generate_problems(dataset, "train")
        length = fmean(_count_words(problem.question) for problem in problems)
        length += examples * fmean(_count_words(f"{problem.question} {problem.answer}") for problem in problems)
        return length, f"prompts of {length:.0f} tokens, counted in the generated questions"
    length = _USUAL_PROMPT_TOKENS + examples * _USUAL_EXAMPLE_TOKENS
    return length, f"prompts of {length:g} tokens, assumed (--prompt-tokens)"


def _count_words(text: str) -> int:
    """Return the number of tokens of the tiny models: whole words, single digits and single punctuation marks."""
    return len(re.findall(r"[A-Za-z]+|\S", text))


def _response_source(assumptions: Assumptions) -> str:
    if assumptions.response_tokens is not None:
        return f"responses of {assumptions.response_tokens:g} tokens, as given"
    return "responses at their limit, an upper bound (--response-tokens)"


def _training(plan: StudyPlan, prompt: float, assumptions: Assumptions) -> Iterator[_Work]:
    training = plan.study.config.training
    response = assumptions.response_tokens or training.max_response_tokens
    validated = training.validation_questions * len(training.validation_steps(plan.num_steps))
    for role, _, _ in plan.runs():
        for phase, passes in _passes(plan):
            sequences = plan.num_steps * training.sequences_per_step
            yield _Work(role=role, phase=phase, sequences=sequences, prompt=prompt, response=response, passes=passes)
        yield _Work(role=role, phase="validation", sequences=validated, prompt=prompt, response=response)


def _passes(plan: StudyPlan) -> Iterator[tuple[StudyPhase, float]]:
    """Yield the phases of every rolled-out sequence and their cost in forward passes."""
    training = plan.study.config.training
    yield "rollout", 1.0
    if training.steps_per_rollout > 1:  # with one step, the forward pass of the actor is that of the old policy
        yield "old_policy", 1.0
    if training.kl_coefficient > 0:
        yield "reference", 1.0
    yield "actor_forward", 1.0
    # Frozen weights need only the gradients of activations.
    gradients = 2.0 if training.lora is None else 1.0
    yield "backward", gradients + (1.0 if training.gradient_checkpointing else 0.0)


def _evaluation(plan: StudyPlan, prompt: float, assumptions: Assumptions) -> Iterator[_Work]:
    config = plan.study.config
    questions = config.evaluation.num_questions or config.dataset.num_test
    if questions is None:
        raise ConfigError("the number of evaluated questions is unknown: set dataset.num_test")
    sequences = questions * len(config.evaluation.passes()) * config.evaluation.num_samples
    response = assumptions.response_tokens or config.evaluation.max_response_tokens
    for role, _, _, _ in plan.evaluations():
        yield _Work(role=role, phase="evaluation", sequences=sequences, prompt=prompt, response=response)


def _summed(costs: list[PhaseCost]) -> tuple[PhaseCost, ...]:
    """Return the total cost of each phase, in order of first appearance."""
    names = dict.fromkeys(cost.phase for cost in costs)
    quantities = ("tokens", "generated_tokens", "flops", "device_hours")
    return tuple(
        PhaseCost(
            phase=name, **{key: sum(getattr(cost, key) for cost in costs if cost.phase == name) for key in quantities}
        )
        for name in names
    )


def _checkpoint_bytes(plan: StudyPlan, sizes: Mapping[str, Size]) -> float:
    """Return the size of all checkpoints: of whole weights, or of adapters, which are stored in float32."""
    kept, lora = len(plan.checkpoint_steps), plan.study.config.training.lora
    stored = {
        role: size.num_parameters * _bytes_per_weight(plan) if lora is None else _adapter_bytes(size, lora)
        for role, size in sizes.items()
    }
    return sum(kept * stored[role] for role, _, _ in plan.runs())


def _adapter_bytes(size: Size, lora: LoraConfig) -> float:
    """Return the bytes of the adapters of a model; 0 if its shape is not known."""
    if not isinstance(size, ModelShape):
        return 0.0
    return _BYTES["float32"] * size.adapter_parameters(lora.rank, lora.target_modules)


def _working_bytes(plan: StudyPlan, role: str, size: Size) -> float:
    """Return the size of the resume points of a run: trained weights and both moments of Adam."""
    if plan.study.config.training.lora:
        return 0.0
    return _RESUME_POINTS * (1 + _ADAM_MOMENTS) * size.num_parameters * _bytes_per_weight(plan)


def _bytes_per_weight(plan: StudyPlan) -> int:
    return _BYTES[plan.study.config.training.weights_dtype]
