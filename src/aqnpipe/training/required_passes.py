"""The passes that a study requires of one training run, step by step, from its settings alone."""

from aqnpipe.config.run import TrainingSpec
from aqnpipe.noise.receipts.passes import RequiredPasses


def required_passes(spec: TrainingSpec) -> list[RequiredPasses]:
    """Return what each phase must do on each worker of a run; the backward passes are those of the actor's graphs.

    A rollout, and with a KL term the reference, read every sequence of a batch once, and so does the actor for the old
    log-probabilities, where several steps learn from one batch or a correction compares the sampler with them. In every
    step the actor is trained on the sequences of that step.
    """
    training, num_format = spec.training, spec.dtype
    every_step = range(spec.num_steps)
    batches = range(0, spec.num_steps, training.steps_per_rollout)
    of_step = training.sequences_per_step // training.num_workers
    of_batch = of_step * training.steps_per_rollout
    scores_old = training.steps_per_rollout > 1 or spec.arm.importance_sampling is not None
    actor = RequiredPasses(
        "actor_forward",
        num_format,
        steps=batches if scores_old else (),
        sequences=of_batch,
        trained_steps=every_step,
        trained_sequences=of_step,
        drops=True,
    )
    reference = RequiredPasses("reference", num_format, steps=batches, sequences=of_batch)
    return [
        RequiredPasses("rollout", num_format, steps=batches, sequences=of_batch),
        *([reference] if training.kl_coefficient else []),
        actor,
        RequiredPasses("validation", num_format, steps=training.validation_steps(spec.num_steps)),
    ]
