"""Rewards of responses: scorers and functions of a user's own, each with a weight.

A function gets the response, up to the stop text of the prompt format, and the gold answer, and returns a number.
"""

import importlib
import math
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from aqnpipe.config.own_code import search_path, source_digest, source_of
from aqnpipe.config.training import Reward
from aqnpipe.data.scoring import is_correct
from aqnpipe.errors import ConfigError, first_line

_SHOWN = 60


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


def load_function(function: str) -> Callable[..., Any]:
    """Import a function of a user's own; ConfigError with one line if that fails."""
    source = source_of(function)
    module, _, name = function.partition(":")
    if search_path()[-1] not in sys.path:
        sys.path.append(search_path()[-1])
    try:
        found = getattr(importlib.import_module(module), name, None)
    except Exception as error:
        # Foreign code may raise anything when it is imported.
        raise ConfigError(
            f"{function}: {source} cannot be imported ({type(error).__name__}: {first_line(error)})"
        ) from error
    if not callable(found):
        raise ConfigError(f"{function}: {source} has no function {name}")
    return found


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
    if source_digest(function) != digest:
        raise ConfigError(f"{function}: its source changed after the run was planned, start the workflow again")
    call = load_function(function)

    def value(response: str, gold: str) -> float:
        try:
            found = call(response, gold)
        except Exception as error:
            # Foreign code may raise anything.
            raise ConfigError(
                f"{function}: raised {type(error).__name__}: {first_line(error)}, for the response "
                f"{response[:_SHOWN]!r} and the gold answer {gold[:_SHOWN]!r}"
            ) from error
        if not isinstance(found, int | float) or not math.isfinite(found):
            raise ConfigError(
                f"{function}: returned {str(found)[:_SHOWN]!r} ({type(found).__name__}) for the response "
                f"{response[:_SHOWN]!r}, expected a finite number"
            )
        return float(found)

    return value
