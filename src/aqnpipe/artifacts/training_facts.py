"""The facts of a training run: what the trainer really used, observed at the point of use, judged against the study.

`aqnpipe.training.audit` collects them while the run trains. The run is refused if `fact_problems` finds anything, and
the comparison of a study judges the facts of every run again.
"""

from collections.abc import Iterable, Mapping

from pydantic import Field

from aqnpipe.artifacts.base import Artifact
from aqnpipe.config.run import TrainingSpec

DRAWS = "tokens sampled in rollouts"
VALIDATION_DRAWS = "tokens chosen in validation"
LOSS_GRADIENT = "gradient of the loss"
STEP_GRADIENT = "gradient that the optimiser used"
CLIPPING = "gradient clipping"
CONTINUITY = "weights and optimiser state between steps"
REFERENCE = "weights of the reference model"
INITIAL = "weights before training"
EXPERTS = "experts noted in rollouts"
REPLAYED = "experts replayed in the policy"

_LEARNING_RATE_ERROR = 1e-9
"""Relative error of a learning rate: both sides compute it in float64."""


class DistanceGrowth(Artifact):
    """The mean distance |d| per token, in nats, in the first and the last fifth of the rollouts of a run.

    `standard_error`: of the difference of the two means, over rollouts. `has_grown`: the difference is beyond what
    varies from rollout to rollout.
    """

    num_rollouts: int
    first_mean: float
    last_mean: float
    standard_error: float
    has_grown: bool

    @property
    def num_compared(self) -> int:
        """Rollouts in each of the two fifths."""
        return fifth_of(self.num_rollouts)


class Recomputed(Artifact):
    """Values of the trainer against an independent recomputation.

    `worst` is the largest difference, in units of what rounding allows; above 1 the run is refused.
    """

    compared: int
    worst: float


class ConstantRate(Artifact):
    """A learning rate and the number of consecutive optimiser steps that used it."""

    learning_rate: float
    steps: int


class TrainingFacts(Artifact):
    """Facts about what a training run used, up to `steps`; of several workers together."""

    num_workers: int
    steps: int = Field(description="updates that the optimiser made")
    audited_steps: tuple[int, ...] = Field(description="steps whose numbers were recomputed")
    verified_steps: tuple[int, ...] = Field(default=(), description="steps of which a micro-batch was computed twice")
    arguments: dict[str, str | int | float | bool | None] = Field(description="settings that the trainer held")
    optimizer: dict[str, str | float] = Field(description="kind and settings of the optimiser")
    learning_rates: tuple[ConstantRate, ...] = Field(description="learning rates that the optimiser used, in order")
    parameters: int = Field(description="tensors that were trained")
    adapters: dict[str, int | float] = Field(default_factory=dict, description="rank and scale of low-rank adapters")
    rollouts: int
    completions: int
    correct: tuple[int, ...] = Field(
        description="completions of each rollout whose reward, graded again from the texts, is above 0"
    )
    prompts_sha256: tuple[str, ...] = Field(description="digest of the order of the questions, by worker")
    validated: dict[int, int] = Field(description="correct answers of each validation, graded again, by step")
    checkpoints: dict[int, dict[str, str]] = Field(
        description="SHA-256 of the weights files that were equal to the weights in memory, by step"
    )
    recomputed: dict[str, Recomputed]
    not_checked: tuple[str, ...] = Field(default=(), description="recomputations that the rollout backend prevents")
    distance_growth: DistanceGrowth | None = Field(
        default=None, description="of sampler and policy over the run; null for one with too few rollouts"
    )
    problems: tuple[str, ...] = Field(default=(), description="differences that were found while the run trained")


def audited_at_start(spec: TrainingSpec) -> list[int]:
    """Return the steps that are always audited: the first three, and the first with ratios other than 1.

    That is the first step on a rollout whose weights an earlier step on the same rollout has changed.
    """
    first = range(1, min(3, spec.num_steps) + 1)
    moved = next((step for step in range(1, spec.num_steps + 1) if _has_ratios(spec, step)), 1)
    return sorted({*first, moved})


def _has_ratios(spec: TrainingSpec, step: int) -> bool:
    """Return whether an update since the rollout of `step` had a learning rate above 0."""
    updates = (step - 1) % spec.training.steps_per_rollout
    return any(expected_learning_rate(spec, earlier) > 0 for earlier in range(step - updates, step))


def expected_settings(spec: TrainingSpec) -> dict[str, str | int | float | bool | None]:
    """Return the settings of TRL's trainer that `spec` asks for, by the names of TRL's arguments."""
    training = spec.training
    correction = spec.arm.importance_sampling
    sequences = training.sequences_per_step // training.num_workers
    rows = training.micro_batch_size or sequences
    return {
        "max_steps": spec.num_steps,
        "learning_rate": training.learning_rate,
        "lr_scheduler_type": {"constant": "constant_with_warmup", "linear": "linear"}[training.learning_rate_schedule],
        "warmup_steps": training.warmup_steps,
        "weight_decay": training.weight_decay,
        "adam_beta1": training.adam_beta1,
        "adam_beta2": training.adam_beta2,
        "max_grad_norm": training.max_grad_norm,
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": sequences // rows,
        "steps_per_generation": sequences // rows * training.steps_per_rollout,
        "num_generations": training.rollouts_per_prompt,
        "num_iterations": 1,
        "max_completion_length": training.max_response_tokens,
        "temperature": training.temperature,
        "beta": training.kl_coefficient,
        "epsilon": training.clip_ratio,
        # Where the study sets none, the audit expects TRL's default, which is none.
        **({} if training.clip_ratio_c is None else {"delta": training.clip_ratio_c}),
        "loss_type": "dapo",
        "scale_rewards": "group",
        "importance_sampling_level": "token",
        "use_bias_correction_kl": False,
        "router_aux_loss_coef": 0.0,
        "mask_truncated_completions": False,
        "shuffle_dataset": True,
        "vllm_importance_sampling_correction": correction is not None,
        "seed": spec.random_seed,
        "bf16": spec.training.lora is None and spec.dtype not in ("float16", training.weights_dtype),
        "gradient_checkpointing": training.gradient_checkpointing,
    }


def expected_learning_rate(spec: TrainingSpec, step: int) -> float:
    """Return the learning rate of optimiser step `step`, counted from 1: the schedule after `step - 1` steps."""
    training, done = spec.training, step - 1
    if done < training.warmup_steps:
        return training.learning_rate * done / training.warmup_steps
    if training.learning_rate_schedule == "constant":
        return training.learning_rate
    left, whole = spec.num_steps - done, max(1, spec.num_steps - training.warmup_steps)
    return training.learning_rate * max(0.0, left / whole)


def learning_rate_problem(spec: TrainingSpec, step: int, found: float) -> str | None:
    """Return the difference between the learning rate of a step and the study's schedule; None if there is none."""
    expected = expected_learning_rate(spec, step)
    if abs(found - expected) <= _LEARNING_RATE_ERROR * max(abs(found), abs(expected)):
        return None
    return f"learning rate {found:.6g} at step {step}, the study's schedule gives {expected:.6g}"


def setting_problems(found: Mapping[str, object], spec: TrainingSpec) -> list[str]:
    """Return the settings that the trainer held and the study does not ask for."""
    return _differences("trainer", found, expected_settings(spec))


def optimizer_problems(found: Mapping[str, str | float], spec: TrainingSpec) -> list[str]:
    """Return the settings of the optimiser that are not the study's."""
    of_adam = {"beta1": spec.training.adam_beta1, "beta2": spec.training.adam_beta2, "epsilon": 1e-8}
    expected = {"kind": "AdamW", "weight_decay": spec.training.weight_decay, **of_adam}
    return _differences("optimiser", found, expected)


def _differences(whose: str, found: Mapping[str, object], expected: Mapping[str, object]) -> list[str]:
    return [
        f"the {whose}'s {name} is {found.get(name)!r}, the study asks for {value!r}"
        for name, value in expected.items()
        if found.get(name) != value
    ]


def fact_problems(facts: TrainingFacts, spec: TrainingSpec) -> list[str]:
    """Return what a complete run used that `spec` does not ask for; an empty list if the facts are those of the study.

    The first problem is the cause where one difference shows in several facts.
    """
    return [*facts.problems, *partial_problems(facts, spec), *_completeness_problems(facts, spec)]


def recorded_fact_problems(
    facts: TrainingFacts | None, requested: Mapping[str, object], outputs_sha256: Mapping[str, str]
) -> list[str]:
    """Return the problems of the facts in a run's record.

    `requested`: the `TrainingSpec` of the study as plain data. `outputs_sha256`: digests of the run's files, by path.
    """
    if facts is None:
        return ["the record has no facts of the training"]
    problems = fact_problems(facts, TrainingSpec.model_validate(requested))
    for step, digests in facts.checkpoints.items():
        for name, digest in digests.items():
            if outputs_sha256.get(f"checkpoints/step{step}/{name}") != digest:
                problems.append(f"the checkpoint of step {step} is not the weights that were in memory ({name})")
    return problems


def partial_problems(facts: TrainingFacts, spec: TrainingSpec) -> list[str]:
    """Return the problems of a run so far, as `fact_problems` for a run that has not ended."""
    return [
        *setting_problems(facts.arguments, spec),
        *optimizer_problems(facts.optimizer, spec),
        *_rate_problems(facts.learning_rates, spec),
        *adapter_problems(facts.adapters, spec),
        *_recomputation_problems(facts.recomputed),
    ]


def _rate_problems(rates: Iterable[ConstantRate], spec: TrainingSpec) -> list[str]:
    step = 0
    for rate in rates:
        for step in range(step + 1, step + 1 + rate.steps):  # noqa: B020 - continues behind the last rate
            problem = learning_rate_problem(spec, step, rate.learning_rate)
            if problem is not None:
                return [problem]
    return []


def adapter_problems(found: Mapping[str, int | float], spec: TrainingSpec) -> list[str]:
    """Return the difference between low-rank adapters in memory and those of the study."""
    lora = spec.training.lora
    expected = {"rank": lora.rank, "scale": lora.alpha / lora.rank} if lora else {}
    return [] if found == expected else [f"low-rank adapters {dict(found)}, the study asks for {expected}"]


def _recomputation_problems(recomputed: Mapping[str, Recomputed]) -> list[str]:
    return [
        f"{name}: differs from its recomputation by {entry.worst:.3g} of what rounding allows"
        for name, entry in recomputed.items()
        if not entry.worst <= 1
    ]


def _completeness_problems(facts: TrainingFacts, spec: TrainingSpec) -> list[str]:
    training, problems = spec.training, []
    rollouts = -(-spec.num_steps // training.steps_per_rollout)
    counts = {
        "optimiser updates": (facts.steps, spec.num_steps),
        "learning rates": (sum(rate.steps for rate in facts.learning_rates), spec.num_steps),
        "rollouts": (facts.rollouts, rollouts),
        "graded rollouts": (len(facts.correct), rollouts),
        "completions": (facts.completions, rollouts * training.steps_per_rollout * training.sequences_per_step),
        "workers": (facts.num_workers, training.num_workers),
        "checkpoints compared with memory": (
            sorted(facts.checkpoints),
            sorted(training.checkpoint_steps(spec.num_steps)),
        ),
        "verified steps": (list(facts.verified_steps), training.verified_steps(spec.num_steps)),
        "validations": (sorted(facts.validated), sorted(training.validation_steps(spec.num_steps))),
    }
    for name, (found, expected) in counts.items():
        if found != expected:
            problems.append(f"{name}: found {found}, the study asks for {expected}")
    if missing := sorted(set(audited_at_start(spec)) - set(facts.audited_steps)):
        problems.append(f"the numbers of steps {missing} were not recomputed")
    for name in required_recomputations(spec):
        entry = facts.recomputed.get(name)
        if (entry is None or not entry.compared) and name not in facts.not_checked:
            problems.append(f"{name}: never recomputed")
    return problems


def required_recomputations(spec: TrainingSpec) -> tuple[str, ...]:
    """Return the recomputations that every complete run of `spec` contains."""
    names: tuple[str, ...] = (DRAWS, LOSS_GRADIENT, STEP_GRADIENT, CLIPPING, CONTINUITY, VALIDATION_DRAWS, INITIAL)
    names += (EXPERTS, REPLAYED) if spec.arm.routing_replay else ()
    return (*names, REFERENCE) if spec.training.kl_coefficient > 0 else names


def fifth_of(num_rollouts: int) -> int:
    """Return the number of rollouts in a fifth of them, rounded down."""
    return num_rollouts // 5
