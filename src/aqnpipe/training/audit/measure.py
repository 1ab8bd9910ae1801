"""Small tools of the audit: errors in units of what rounding allows, sampled elements, and freedom from modes."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from aqnpipe.artifacts.training_facts import Recomputed
from aqnpipe.models.shares import element_of, sum_of_workers
from aqnpipe.reference.decoder import unobserved
from aqnpipe.seeding import derive_seed

_WORST = 1e9
"""Errors are cut here, so that they remain readable numbers."""


class Errors:
    """The recomputations of a run by name: how many values were compared, and the worst error of each."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[int, float]] = {}

    def add(self, name: str, errors: Tensor, allowed: Tensor | float) -> bool:
        """Add absolute errors, with the errors that rounding allows (same shape); return whether all are allowed."""
        ratios = errors.double().abs() / allowed
        # 0/0: nothing differs where nothing is allowed to.
        ratios = torch.where(errors == 0, torch.zeros_like(ratios), ratios).nan_to_num(nan=_WORST, posinf=_WORST)
        worst = min(float(ratios.max()), _WORST) if ratios.numel() else 0.0
        self.note(name, ratios.numel(), worst)
        return worst <= 1

    def note(self, name: str, compared: int, worst: float = 0.0) -> None:
        """Add a number of compared values and their worst error."""
        count, before = self._found.get(name, (0, 0.0))
        self._found[name] = (count + compared, max(before, worst))

    def facts(self) -> dict[str, Recomputed]:
        """Return the recomputations so far."""
        return {name: Recomputed(compared=count, worst=worst) for name, (count, worst) in sorted(self._found.items())}

    def restore(self, facts: Mapping[str, Recomputed]) -> None:
        """Continue from `facts`."""
        self._found = {name: (entry.compared, entry.worst) for name, entry in facts.items()}


@dataclass(frozen=True)
class Element:
    """One element of a named tensor."""

    name: str
    index: tuple[int, ...]


@dataclass(frozen=True)
class ElementSample:
    """Some elements of the tensors of a model, the same on every worker and in every process."""

    elements: tuple[Element, ...] = field(default=())

    @classmethod
    def draw(
        cls, shapes: Mapping[str, Sequence[int]], seed: int, of_each: int, names: int | None = None
    ) -> "ElementSample":
        """Return `of_each` elements of each tensor, or of `names` tensors drawn among them."""
        chosen = sorted(shapes)
        if names is not None:
            ranked = sorted(range(len(chosen)), key=lambda place: derive_seed(seed, "audited tensors", place))
            chosen = [chosen[place] for place in sorted(ranked[:names])]
        return cls(
            tuple(
                Element(name, _unravelled(derive_seed(seed, "audited element", place, number), shapes[name]))
                for place, name in enumerate(chosen)
                for number in range(of_each)
            )
        )

    def read(self, tensor_of: Callable[[str], Tensor | None]) -> Tensor:
        """Return the values as float64 [elements]; 0 where there is no tensor.

        A collective operation for weights that are divided among workers.
        """
        with unobserved():
            values = [tensor_of(element.name) for element in self.elements]
            found = [
                (torch.zeros(()), False) if tensor is None else element_of(tensor, element.index)
                for tensor, element in zip(values, self.elements, strict=True)
            ]
            if not found:
                return torch.zeros(0, dtype=torch.float64)
            picked = [value for value, _ in found]
            device = next((value.device for value in picked if value.device.type != "cpu"), torch.device("cpu"))
            read = torch.stack([value.double().to(device) for value in picked])
            shared = torch.tensor([is_shared for _, is_shared in found], device=device)
            if shared.any():
                read = torch.where(shared, sum_of_workers(torch.where(shared, read, 0.0)), read)
            return read.cpu()


def rounding_of(dtype: torch.dtype) -> float:
    """Return the largest relative rounding error of a number format."""
    return float(torch.finfo(dtype).eps) if dtype.is_floating_point else 0.0


def _unravelled(number: int, shape: Sequence[int]) -> tuple[int, ...]:
    place, index = number % math.prod(shape), []
    for size in reversed(shape):
        index.append(place % size)
        place //= size
    return tuple(reversed(index))
