"""The facts of a training run: what the trainer really used, observed at the point of use, judged against the study.

`aqnpipe.training.audit` collects them while the run trains. The run is refused if `fact_problems` finds anything, and
the comparison of a study judges the facts of every run again.
"""

from collections.abc import Mapping

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
SETTINGS = "settings of trainer, optimiser and adapters"
RATES = "learning rates"


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


_NONE = Recomputed(compared=0, worst=0.0)


class TrainingFacts(Artifact):
    """Facts about what a training run used, up to `steps`; of several workers together."""

    num_workers: int
    steps: int  # updates that the optimiser made
    audited_steps: tuple[int, ...]  # steps whose numbers were recomputed
    verified_steps: tuple[int, ...] = ()  # steps of which a micro-batch was computed twice
    completions: int
    correct: tuple[int, ...]  # completions of each rollout whose reward, graded again from the texts, is above 0
    validated: dict[int, int]  # correct answers of each validation, graded again, by step
    checkpoints: dict[int, dict[str, str]]
    """SHA-256 of the weights files that were equal to the weights in memory, by step"""
    recomputed: dict[str, Recomputed]
    not_checked: tuple[str, ...] = ()  # recomputations that the rollout backend prevents
    distance_growth: DistanceGrowth | None = None
    """of sampler and policy over the run; null for one with too few rollouts"""
    problems: tuple[str, ...] = ()  # differences that were found while the run trained


def audited_at_start(spec: TrainingSpec) -> list[int]:
    """Return the steps that are always audited: the first three, and the first with ratios other than 1.

    That is the first step on a rollout whose weights an earlier step on the same rollout has changed.
    """
    first = range(1, min(3, spec.num_steps) + 1)
    size = spec.training.steps_per_rollout
    moved = (
        step
        for step in range(1, spec.num_steps + 1)
        if any(expected_learning_rate(spec, earlier) > 0 for earlier in range((step - 1) // size * size + 1, step))
    )
    return sorted({*first, next(moved, 1)})


def expected_learning_rate(spec: TrainingSpec, step: int) -> float:
    """Return the learning rate of optimiser step `step`, counted from 1: the schedule after `step - 1` steps."""
    training, done = spec.training, step - 1
    if done < training.warmup_steps:
        return training.learning_rate * done / training.warmup_steps
    if training.learning_rate_schedule == "constant":
        return training.learning_rate
    left, whole = spec.num_steps - done, max(1, spec.num_steps - training.warmup_steps)
    return training.learning_rate * max(0.0, left / whole)


def fact_problems(facts: TrainingFacts, spec: TrainingSpec) -> list[str]:
    """Return what a complete run used that `spec` does not ask for; an empty list if the facts are those of the study.

    The first problem is the cause where one difference shows in several facts.
    """
    differences = [
        f"{name}: differs from its recomputation by {entry.worst:.3g} of what rounding allows"
        for name, entry in facts.recomputed.items()
        if not entry.worst <= 1
    ]
    return [*facts.problems, *differences, *_completeness_problems(facts, spec)]


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


def _completeness_problems(facts: TrainingFacts, spec: TrainingSpec) -> list[str]:
    training, problems = spec.training, []
    rollouts = -(-spec.num_steps // training.steps_per_rollout)
    counts = {
        "optimiser updates": (facts.steps, spec.num_steps),
        "learning rates": (facts.recomputed.get(RATES, _NONE).compared, spec.num_steps),
        "rollouts": (len(facts.correct), rollouts),
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
    names: tuple[str, ...] = (DRAWS, LOSS_GRADIENT, STEP_GRADIENT, CLIPPING, CONTINUITY, VALIDATION_DRAWS)
    names += (INITIAL, SETTINGS, RATES)
    names += (EXPERTS, REPLAYED) if spec.arm.routing_replay else ()
    return (*names, REFERENCE) if spec.training.kl_coefficient > 0 else names


def fifth_of(num_rollouts: int) -> int:
    """Return the number of rollouts in a fifth of them, rounded down."""
    return num_rollouts // 5
