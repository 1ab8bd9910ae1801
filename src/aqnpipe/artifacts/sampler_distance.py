"""Where the distance between sampler and trained policy comes from, at the first and at the last step of a run.

For a drawn token let d = log p(policy) - log p(sampler), in nats. Passes that differ in one thing each lead from the
sampler to the policy, so d is the sum of their differences, token by token.
"""

from typing import Literal

from pydantic import Field

from aqnpipe.artifacts.base import Artifact

Cause = Literal[
    "rollout_noise",
    "rollout_batch",
    "decoding",
    "engine",
    "noise_and_engine",
    "staleness",
    "batch",
    "actor_noise",
    "rest",
]
"""What two neighbouring passes differ in.

- rollout_noise: noise and faults in the rollout, against the same decoding without them, of fewer rows.
- rollout_batch: the other rows of the rollout; only where the rollout has no noise.
- decoding: one token at a time with a cache, against one pass over the same sequences, padding behind them.
- engine: vLLM and its number format, against one pass of the policy. It contains the decoding.
- noise_and_engine: the same where vLLM's rollout has noise, which cannot be told apart from the engine.
- staleness: the weights of the rollout, against those of the step.
- batch: that pass, against the micro-batch of training: more rows, and padding before the prompts, which moves them to
  other positions.
- actor_noise: the padded micro-batch without noise and faults, against the pass that was trained with.
- rest: the same where that pass has neither; it should be 0, and is the effect of dropout where the run has that.
"""


class DistancePart(Artifact):
    """The difference that one cause makes. The shares of all causes add up to 1.

    `share` is sum(part * d) / sum(d * d) over the tokens: below 0 for a part that others cancel, null if d is 0.
    """

    cause: Cause
    mean: float = Field(description="mean difference in nats, with its sign")
    rms: float = Field(ge=0, description="root mean square of the difference, in nats")
    share: float | None


class DistanceParts(Artifact):
    """The distance on a few sequences of one step, by cause.

    - rollout_step: optimiser steps done when the sequences were drawn.
    - forwards: forward passes of the measurement.
    """

    step: int
    rollout_step: int
    num_sequences: int
    num_tokens: int
    mean_absolute: float = Field(description="mean of |d| over these tokens")
    rms: float
    parts: tuple[DistancePart, ...]
    forwards: int


class DistanceProgress(Artifact):
    """What a run has measured up to a resume point: the parts, and why a step has none."""

    steps: tuple[DistanceParts, ...] = ()
    missed: dict[int, str] = Field(default_factory=dict, description="reason by step")


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


def fifth_of(num_rollouts: int) -> int:
    """Return the number of rollouts in a fifth of them, rounded down."""
    return num_rollouts // 5


class SamplerDistance(Artifact):
    """The distance between sampler and policy of a run.

    `steps`: its parts at the first and the last optimiser step; `why_not` says which of them is missing, and why.
    `growth` is null for a run with too few rollouts.
    """

    steps: tuple[DistanceParts, ...] = ()
    why_not: str | None = None
    growth: DistanceGrowth | None = None
