"""This process among the workers of a run: a single process, or a member of a process group (started by Ray Train)."""

from typing import TypeVar

from torch import distributed

_Value = TypeVar("_Value")


def rank_and_size() -> tuple[int, int]:
    """Return (rank of this worker, number of workers); (0, 1) for a single process."""
    if not distributed.is_initialized():
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def gathered(value: _Value) -> list[_Value]:
    """Return the `value` of every worker by rank; a collective operation, which all workers must call."""
    if not distributed.is_initialized():
        return [value]
    values: list[_Value] = [value] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values
