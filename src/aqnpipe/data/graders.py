"""Graders of an evaluation and rewards of training: scorers of this package, and functions of a user's own.

A function gets the response, up to the stop text of the prompt format, and the gold answer. A primary scorer returns
True or False, or a pair: the answer that it found (None: none) and True or False. A reward returns a number.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

from aqnpipe.config.custom_code import load_function, planned_function, unusable_result
from aqnpipe.config.evaluation import EvaluationConfig, Scorer, scorer_column
from aqnpipe.config.training import Reward
from aqnpipe.data.scoring import SCORERS, Graded, grade, is_correct

Grader = Callable[[str, str], Graded]
"""Grades a response by its gold answer."""

_EXPECTED = "True or False, or a pair of the answer (text or None) and True or False"


def graders_of(primary: Scorer | str, source_sha256: str | None = None) -> dict[str, Grader]:
    """Return what an evaluation grades with, by column name: the scorers of numbers, and its primary one.

    A task of lm-evaluation-harness grades with the whole question (`HarnessTask`) and has no grader here. Raises
    ConfigError if a function's source has not the digest with which the evaluation was planned.
    """
    of_numbers: dict[str, Grader] = {scorer: _scorer(scorer) for scorer in SCORERS}
    if primary == "task":
        return of_numbers
    return of_numbers | {scorer_column(primary): grader(primary, source_sha256)}


def grader(scorer: Scorer | str, source_sha256: str | None = None) -> Grader:
    """Return the grader of a scorer, or of a function whose source has the digest with which its job was planned."""
    if ":" not in scorer:
        return _scorer(scorer)
    if source_sha256 is None:
        raise RuntimeError("a custom scorer without the digest of its source; this is a bug")
    return _custom(scorer, planned_function(scorer, source_sha256))


def refuse_unusable_scorer(settings: EvaluationConfig) -> None:
    """Raise ConfigError if the scorer's function cannot be imported, or its source has another digest than is given."""
    if settings.planned().scorer_sha256 is not None:
        load_function(settings.primary_scorer)


def pairs(graded: Mapping[str, Graded]) -> dict[str, str | bool | None]:
    """Return gradings as columns of `EvaluationTable`: answer and verdict of every scorer."""
    return {
        name: value
        for scorer, found in graded.items()
        for name, value in ((f"answer_{scorer}", found.answer), (f"correct_{scorer}", found.correct))
    }


def columns_of(scorers: Mapping[str, Any]) -> list[str]:
    """Return the columns of `EvaluationTable` that scorers fill."""
    return [f"{part}_{scorer}" for scorer in scorers for part in ("answer", "correct")]


def _scorer(scorer: Any) -> Grader:
    return partial(grade, scorer=scorer)


def _custom(function: str, call: Callable[[str, str], Any]) -> Grader:
    def graded(response: str, gold: str) -> Graded:
        found = call(response, gold)
        answer, verdict = found if isinstance(found, tuple) and len(found) == 2 else (response.strip() or None, found)
        # Also NumPy's booleans, and 0 and 1; a share of points is not a verdict.
        is_verdict = type(verdict).__name__ in ("bool", "bool_", "int", "float") and verdict in (0, 1)
        if not is_verdict or not isinstance(answer, str | None):
            raise unusable_result(function, found, response, _EXPECTED)
        return Graded(answer, bool(verdict))

    return graded


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


def refuse_unusable_reward(reward: Reward) -> None:
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
