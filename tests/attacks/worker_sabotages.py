"""Sabotage of one process of several: the others do what was requested."""

from contextlib import contextmanager
from typing import Any
from unittest import mock

from hold import took_effect
from sabotage import END, Sabotage, of_group

from aqnpipe.runtime import evaluation_workers, training


@contextmanager
def _not_in_the_second_trainer(_: Any) -> Any:
    """Functions made here are sent to Ray's workers as they are, so what they replace is replaced there."""
    work = training._ray_worker

    def sabotaged(config: Any) -> None:
        from torch import distributed

        from aqnpipe.noise.kernels import error_models

        if distributed.get_rank() == 1:
            error_models.add_relative_gaussian_ = lambda tensor, scale, source: tensor
        work(config)

    with mock.patch.object(training, "_ray_worker", sabotaged):
        # It runs in a process of its own, which cannot note that it did.
        took_effect()
        yield


@contextmanager
def _not_in_the_second_evaluator(_: Any) -> Any:
    whole = evaluation_workers.EvaluationActor

    class Sabotaged(whole):  # type: ignore[misc, valid-type]
        def __init__(self, log: str) -> None:
            super().__init__(log)
            from aqnpipe.noise.kernels import error_models

            if "worker1" in log:
                error_models.add_relative_gaussian_ = lambda tensor, scale, source: tensor

    with mock.patch.object(evaluation_workers, "EvaluationActor", Sabotaged):
        took_effect()
        yield


SABOTAGES = of_group(
    "processes",
    "they have no error",
    (
        Sabotage(
            "noise not installed in one trainer",
            "the function that adds it does nothing in the second of two workers",
            _not_in_the_second_trainer,
            (("train_by_two", "guided", 0),),
            (),
            2,
        ),
        Sabotage(
            "noise not installed in one evaluator",
            "the function that adds it does nothing in the second of two actors",
            _not_in_the_second_evaluator,
            (("evaluate_by_two", "guided", 0),),
            END,
            5,
        ),
    ),
)
