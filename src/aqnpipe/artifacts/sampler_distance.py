"""Growth of the distance between sampler and trained policy over a run.

For a drawn token the distance is d = log p(policy) - log p(sampler), in nats.
"""

from aqnpipe.artifacts.base import Artifact


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
