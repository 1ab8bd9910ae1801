"""Rewards of responses: scorers and functions of a user's own, each with a weight.

A function gets the response, up to the stop text of the prompt format, and the gold answer, and returns a number.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache

from aqnpipe.config.custom_code import load_function, planned_function, unusable_result
from aqnpipe.config.training import Reward
from aqnpipe.data.scoring import is_correct


def weighted_rewards(rewards: Sequence[Reward], responses: Sequence[str], gold_answers: Sequence[str]) -> list[float]:
    """Return the weighted sum of all rewards of every response.

    Raises ConfigError if a function is not there, is not the one whose digest the settings have, raises, or returns
    anything but a finite number.
    """
    of_all = [_function_of(reward) for reward in rewards]
    return [
        math.fsum(reward.weight * value(response, gold) for reward, value in zip(rewards, of_all, strict=True))
        for response, gold in zip(responses, gold_answers, strict=True)
    ]


def refuse_unusable(reward: Reward) -> None:
    """Raise ConfigError if a reward's function cannot be imported, or its source has another digest than is given."""
    if reward.function is not None:
        reward.planned()
        load_function(reward.function)


def _function_of(reward: Reward) -> Callable[[str, str], float]:
    scorer, function = reward.scorer, reward.function
    if scorer is not None:
        return lambda response, gold: float(is_correct(response, gold, scorer))
    if function is None or reward.source_sha256 is None:
        raise RuntimeError("a reward without a scorer, or without the digest of its function; this is a bug")
    return _checked(function, reward.source_sha256)


@cache
def _checked(function: str, digest: str) -> Callable[[str, str], float]:
    """Return a function of a user's own with its result checked."""
    call = planned_function(function, digest)

    def value(response: str, gold: str) -> float:
        found = call(response, gold)
        if not isinstance(found, int | float) or not math.isfinite(found):
            raise unusable_result(function, found, response, "a finite number")
        return float(found)

    return value
