"""A schedule with warm restarts."""

import math


def cosine_restarts(step: int, num_steps: int, num_epochs: int, *, sigma_start: float, periods: int) -> float:
    """Return a sigma that falls from `sigma_start` to 0 along a cosine, several times."""
    share = step * periods / num_steps % 1
    return sigma_start * (1 + math.cos(math.pi * share)) / 2
