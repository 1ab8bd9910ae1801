"""This process among the workers of a run: alone, or one of a process group that someone else has started."""

from typing import TypeVar

from torch import distributed

_Value = TypeVar("_Value")


def rank_and_size() -> tuple[int, int]:
    """Return (rank of this worker, number of workers): (0, 1) for a process alone."""
    if not distributed.is_initialized():
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def gathered(value: _Value) -> list[_Value]:
    """Return the `value` of every worker, by rank; all workers have to call this alike."""
    if not distributed.is_initialized():
        return [value]
    values: list[_Value] = [value] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values
