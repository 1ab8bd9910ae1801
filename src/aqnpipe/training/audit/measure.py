"""What an audit has found, in units of what rounding allows, and the elements of weights that it samples."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import ConfigDict, Field
from torch import Tensor

from aqnpipe.artifacts.base import Artifact
from aqnpipe.artifacts.training_facts import Recomputed
from aqnpipe.models.sharding import element_of, sum_of_workers
from aqnpipe.reference.decoder import unobserved
from aqnpipe.seeding import derive_seed

_WORST = 1e9
"""Errors are cut here, so that they remain readable numbers."""


class Ledger(Artifact):
    """What the audit of one worker has found so far: what a resume point needs. See `TrainingFacts` for the fields.

    last_values: weights and moments of the followed elements after the last update. differing_groups: groups with
    different rewards. had_advantage: whether this worker has trained on a completion with an advantage; otherwise only
    the KL term has a slope.
    """

    model_config = ConfigDict(frozen=False)

    steps: int = 0
    audited_steps: list[int] = Field(default_factory=list)
    verified_steps: list[int] = Field(default_factory=list)
    completions: int = 0
    correct: list[int] = Field(default_factory=list)
    validated: dict[int, int] = Field(default_factory=dict)
    checkpoints: dict[int, dict[str, str]] = Field(default_factory=dict)
    recomputed: dict[str, Recomputed] = Field(default_factory=dict)
    problems: list[str] = Field(default_factory=list)
    last_values: list[list[float]] = Field(default_factory=list)
    differing_groups: int = 0
    had_advantage: bool = False

    def restore(self, saved: "Ledger") -> None:
        """Continue from a resume point."""
        for name, value in saved:
            setattr(self, name, value)

    def report(self, problem: str) -> None:
        """Add a difference between the run and its study."""
        if problem not in self.problems:
            self.problems.append(problem)

    def require(self, name: str, whose: str, settings: Mapping[str, tuple[Any, Any]]) -> None:
        """Add settings, each with the value found and the study's; report those that differ."""
        wrong = {key: pair for key, pair in settings.items() if pair[0] != pair[1]}
        self.note(name, len(settings), 2.0 if wrong else 0.0)
        for key, (found, value) in wrong.items():
            self.report(f"{whose} {key} is {found!r}, the study asks for {value!r}")

    def compare(self, name: str, errors: Tensor, allowed: Tensor | float) -> bool:
        """Add absolute errors, with the errors that rounding allows (same shape); return whether all are allowed."""
        ratios = errors.double().abs() / allowed
        # 0/0: nothing differs where nothing is allowed to.
        ratios = torch.where(errors == 0, torch.zeros_like(ratios), ratios).nan_to_num(nan=_WORST, posinf=_WORST)
        worst = min(float(ratios.max()), _WORST) if ratios.numel() else 0.0
        self.note(name, ratios.numel(), worst)
        return worst <= 1

    def note(self, name: str, compared: int, worst: float = 0.0) -> None:
        """Add a number of compared values and their worst error."""
        before = self.recomputed.get(name, Recomputed(compared=0, worst=0.0))
        self.recomputed[name] = Recomputed(compared=before.compared + compared, worst=max(before.worst, worst))


class Element(NamedTuple):
    """One element of a named tensor."""

    name: str
    place: tuple[int, ...]


@dataclass(frozen=True)
class ElementSample:
    """Some elements of the tensors of a model, the same on every worker and in every process."""

    elements: tuple[Element, ...]

    @classmethod
    def draw(
        cls, shapes: Mapping[str, Sequence[int]], seed: int, of_each: int, names: int | None = None
    ) -> "ElementSample":
        """Return `of_each` elements of each tensor, or of `names` tensors drawn among them."""
        chosen = sorted(shapes)
        if names is not None:
            ranked = sorted(range(len(chosen)), key=lambda place: derive_seed(seed, "audited tensors", place))
            chosen = [chosen[place] for place in sorted(ranked[:names])]
        elements = []
        for place, name in enumerate(chosen):
            for number in range(of_each):
                flat = derive_seed(seed, "audited element", place, number) % math.prod(shapes[name])
                elements.append(Element(name, tuple(map(int, np.unravel_index(flat, tuple(shapes[name]))))))
        return cls(tuple(elements))

    def read(self, tensor_of: Callable[[str], Tensor | None]) -> Tensor:
        """Return the values as float64 [elements]; 0 where there is no tensor.

        A collective operation for weights that are divided among workers.
        """
        with unobserved():
            values = [tensor_of(element.name) for element in self.elements]
            found = [
                (torch.zeros(()), False) if tensor is None else element_of(tensor, element.place)
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
