"""What a study would cost, counted from its declaration and the shapes of its models before anything runs.

Floating-point operations: 2 per weight and token in a forward pass, twice that for the backward pass (gradients of
weights and of activations; Kaplan et al. 2020, section 2.1), one more forward pass where activations are computed
again, and the products of attention. Device time is operations / (peak rate * share of it that is assumed to be used).
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
from aqnpipe.errors import ConfigError
from aqnpipe.models.shapes import ModelShape, ParameterCount, shape_of

Phase = Literal["rollout", "old_policy", "reference", "actor_forward", "backward", "validation", "evaluation"]
Size = ModelShape | ParameterCount

_GENERATING: frozenset[Phase] = frozenset({"rollout", "validation", "evaluation"})
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_SECONDS_PER_HOUR = 3600.0
_ADAM_MOMENTS = 2
# Resume points of a run: two are kept while the next one is written.
_RESUME_POINTS = 3
# A GSM8K question with a chat template and an instruction; stated with the estimate, and an option sets another.
_USUAL_PROMPT_TOKENS = 150.0
# A GSM8K question with its worked answer: 235 and 287 characters in the mean.
_USUAL_EXAMPLE_TOKENS = 180.0


class Rates(FrozenModel):
    """What a device is assumed to do: its peak, and the shares of it that training passes and generation reach."""

    device: str
    tflops: float = Field(gt=0)
    training_utilization: float = Field(gt=0, le=1)
    generation_utilization: float = Field(gt=0, le=1)
    seconds_per_job: float = Field(default=0.0, ge=0, description="until a job begins to compute")

    def hours(self, phase: Phase, flops: float) -> float:
        """Device hours of `flops` operations in a phase."""
        used = self.generation_utilization if phase in _GENERATING else self.training_utilization
        return flops / (self.tflops * 1e12 * used) / _SECONDS_PER_HOUR


# Peak of dense bfloat16 products: the vendor's data sheet. The shares are orders of magnitude for eager training and
# for batched generation without a serving engine.
A100 = Rates(device="A100", tflops=312.0, training_utilization=0.35, generation_utilization=0.05)
# Measured with the tiny models on one thread of a shared virtual core (docs/cost-estimate.md); the peak is nominal.
CPU_CORE = Rates(
    device="CPU core", tflops=0.1, training_utilization=0.45, generation_utilization=0.2, seconds_per_job=8.0
)


class Assumptions(FrozenModel):
    """What the declaration does not say. None: responses as long as allowed, usual prompts and rates."""

    prompt_tokens: float | None = Field(default=None, gt=0)
    response_tokens: float | None = Field(default=None, gt=0)
    parameters: dict[str, float] = Field(default={}, description="number of parameters per role, where not known")
    rates: Rates | None = None


class PhaseCost(FrozenModel):
    """Work of all runs, or of all evaluations, in one phase."""

    phase: Phase
    tokens: float
    generated_tokens: float
    flops: float
    device_hours: float


class Estimate(FrozenModel):
    """An estimate and what it was made from."""

    phases: tuple[PhaseCost, ...]
    generated_tokens: float
    flops: float
    device_hours: float
    checkpoint_gigabytes: float = Field(description="weights that are kept, of all runs")
    working_gigabytes: float = Field(description="resume points of the largest run while it is trained, adapters aside")
    parameters: dict[str, float]
    rates: Rates
    assumed: tuple[str, ...]
    not_counted: tuple[str, ...]


class _Work(FrozenModel):
    """Sequences of one role that pass through one phase; `passes` in forward passes."""

    role: str
    phase: Phase
    sequences: float
    prompt: float
    response: float
    passes: float = 1.0

    def cost(self, size: Size, rates: Rates) -> PhaseCost:
        length = self.prompt + self.response
        # A token attends to those before it: half of the sequence on average.
        flops = self.passes * size.forward_flops(self.sequences * length, self.sequences * self.response, length / 2)
        return PhaseCost(
            phase=self.phase,
            tokens=self.sequences * length,
            generated_tokens=self.sequences * self.response if self.phase in _GENERATING else 0.0,
            flops=flops,
            device_hours=rates.hours(self.phase, flops),
        )


def estimate_study(plan: StudyPlan, assumptions: Assumptions) -> Estimate:
    """Estimate training and evaluation. Raises ConfigError that names what has to be stated first."""
    prompt, prompt_source = _prompt_tokens(plan, assumptions)
    rates = assumptions.rates or default_rates(plan)
    sizes = {role: _size_of(plan, role, assumptions) for role in plan.study.model_roles()}
    work = [*_training(plan, prompt, assumptions), *_evaluation(plan, prompt, assumptions)]
    phases = _summed([one.cost(sizes[one.role], rates) for one in work])
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
    """Return the rates of a CPU core or of an A100; `auto` counts as a core for built-in models, as an A100 for others.

    Raises ConfigError for NPUs, whose peak is not known here.
    """
    config = plan.study.config
    if config.device == "npu":
        raise ConfigError("the peak of the study's NPUs is not known: state it as --tflops PEAK, in bfloat16")
    builtin = all(config.models[role].source in BUILTIN_MODELS for role in plan.study.model_roles())
    return CPU_CORE if config.device == "cpu" or (config.device == "auto" and builtin) else A100


def _size_of(plan: StudyPlan, role: str, assumptions: Assumptions) -> Size:
    if role in assumptions.parameters:
        return ParameterCount(num_parameters=assumptions.parameters[role])
    shape = shape_of(plan.study.config.models[role])
    if shape is None:
        source = plan.study.config.models[role].source
        raise ConfigError(f"the size of {source} is not known before it is fetched: state it as --parameters {role}=N")
    return shape


def _prompt_tokens(plan: StudyPlan, assumptions: Assumptions) -> tuple[float, str]:
    """Return the mean length of a prompt and where it is from."""
    if assumptions.prompt_tokens is not None:
        return assumptions.prompt_tokens, f"prompts of {assumptions.prompt_tokens:g} tokens, as given"
    dataset, examples = plan.study.config.dataset, plan.study.config.prompt.num_examples
    if isinstance(dataset, GeneratedDataset):
        from aqnpipe.data.generated import generate_problems  # numpy takes its time, and only this needs it

        problems = generate_problems(dataset, "train")
        length = fmean(_count_words(one.question) for one in problems)
        length += examples * fmean(_count_words(f"{one.question} {one.answer}") for one in problems)
        return length, f"prompts of {length:.0f} tokens, counted in the generated questions"
    length = _USUAL_PROMPT_TOKENS + examples * _USUAL_EXAMPLE_TOKENS
    return length, f"prompts of {length:g} tokens, assumed (--prompt-tokens)"


def _count_words(text: str) -> int:
    """Tokens of the tiny models, which have words whole, and digits and punctuation marks one by one."""
    return len(re.findall(r"[A-Za-z]+|\S", text))


def _response_source(assumptions: Assumptions) -> str:
    if assumptions.response_tokens is not None:
        return f"responses of {assumptions.response_tokens:g} tokens, as given"
    return "responses as long as allowed, an upper bound (--response-tokens)"


def _training(plan: StudyPlan, prompt: float, assumptions: Assumptions) -> Iterator[_Work]:
    training = plan.study.config.training
    response = assumptions.response_tokens or training.max_response_tokens
    validated = training.validation_questions * len(training.validation_steps(plan.num_steps))
    for role, _, _ in plan.runs():
        for phase, passes in _passes(plan):
            sequences = plan.num_steps * training.sequences_per_step
            yield _Work(role=role, phase=phase, sequences=sequences, prompt=prompt, response=response, passes=passes)
        yield _Work(role=role, phase="validation", sequences=validated, prompt=prompt, response=response)


def _passes(plan: StudyPlan) -> Iterator[tuple[Phase, float]]:
    """Yield the phases that every rolled-out sequence goes through, in forward passes."""
    training = plan.study.config.training
    yield "rollout", 1.0
    if training.steps_per_rollout > 1:  # else the actor's own forward pass is the old policy's
        yield "old_policy", 1.0
    if training.kl_coefficient > 0:
        yield "reference", 1.0
    yield "actor_forward", 1.0
    # Frozen weights need no gradients of their own, only those of activations.
    gradients = 2.0 if training.lora is None else 1.0
    yield "backward", gradients + (1.0 if training.gradient_checkpointing else 0.0)


def _evaluation(plan: StudyPlan, prompt: float, assumptions: Assumptions) -> Iterator[_Work]:
    config = plan.study.config
    questions = config.evaluation.num_questions or config.dataset.num_test
    if questions is None:
        raise ConfigError("how many questions are evaluated is not stated: set dataset.num_test")
    sequences = questions * len(config.evaluation.passes()) * config.evaluation.num_samples
    response = assumptions.response_tokens or config.evaluation.max_response_tokens
    for role, _, _, _ in plan.evaluations():
        yield _Work(role=role, phase="evaluation", sequences=sequences, prompt=prompt, response=response)


def _summed(costs: list[PhaseCost]) -> tuple[PhaseCost, ...]:
    """Return one cost per phase, in the order of their first."""
    names = dict.fromkeys(cost.phase for cost in costs)
    quantities = ("tokens", "generated_tokens", "flops", "device_hours")
    return tuple(
        PhaseCost(
            phase=name, **{key: sum(getattr(cost, key) for cost in costs if cost.phase == name) for key in quantities}
        )
        for name in names
    )


def _checkpoint_bytes(plan: StudyPlan, sizes: Mapping[str, Size]) -> float:
    kept = len(plan.checkpoint_steps)
    return sum(kept * sizes[role].num_parameters * _bytes_per_weight(plan, role) for role, _, _ in plan.runs())


def _working_bytes(plan: StudyPlan, role: str, size: Size) -> float:
    """What the resume points of a run take: what is trained, and both moments of Adam."""
    if plan.study.config.training.lora:
        return 0.0
    return _RESUME_POINTS * (1 + _ADAM_MOMENTS) * size.num_parameters * _bytes_per_weight(plan, role)


def _bytes_per_weight(plan: StudyPlan, role: str) -> int:
    training = plan.study.config.training
    return _BYTES[plan.study.config.models[role].dtype if training.lora else training.weights_dtype]
