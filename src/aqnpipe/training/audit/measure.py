"""What an audit has found, in units of what rounding allows, the elements of weights that it samples, and all weights.

`WeightAudit` compares weights before training, of the reference, of all workers, and in the checkpoints.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import ConfigDict, Field
from torch import Tensor, nn

from aqnpipe.artifacts.base import Artifact
from aqnpipe.artifacts.training_facts import INITIAL, REFERENCE, Recomputed
from aqnpipe.models.adapters import adapted_modules
from aqnpipe.models.sharding import element_of, local, own_share, sum_of_workers
from aqnpipe.models.verification import name_in_files, weights_and_files
from aqnpipe.reference.decoder import unobserved
from aqnpipe.seeding import derive_seed

_WORST = 1e9
"""Errors are cut here, so that they remain readable numbers."""

_EXACT = 1e-300


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


class ElementSample(NamedTuple):
    """Some elements of the tensors of a model, the same on every worker and in every process."""

    elements: tuple[Element, ...]

    @classmethod
    def draw(
        cls, shapes: Mapping[str, Sequence[int]], seed: int, of_each: int, names: int | None = None
    ) -> "ElementSample":
        """Return `of_each` elements of each tensor, or of `names` tensors drawn among them."""
        chosen = sorted(shapes)
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
        if not self.elements:
            return torch.zeros(0, dtype=torch.float64)
        with unobserved():
            tensors = ((tensor_of(element.name), element.place) for element in self.elements)
            found = [(torch.zeros(()), False) if one is None else element_of(one, place) for one, place in tensors]
            devices = (value.device for value, _ in found if value.device.type != "cpu")
            device = next(devices, torch.device("cpu"))
            read = torch.stack([value.double().to(device) for value, _ in found])
            shared = torch.tensor([is_shared for _, is_shared in found], device=device)
            if shared.any():
                read = torch.where(shared, sum_of_workers(torch.where(shared, read, 0.0)), read)
            return read.cpu()


def rounding_of(dtype: torch.dtype) -> float:
    """Return the largest relative rounding error of a number format."""
    return float(torch.finfo(dtype).eps) if dtype.is_floating_point else 0.0


class WeightAudit:
    """Samples the weights of one worker's policy at the start of the run; all else is compared with them.

    Create it before a resume point is loaded. `folder` is the prepared model.
    """

    def __init__(self, model: nn.Module, folder: Path, seed: int, ledger: Ledger) -> None:
        self._model, self._ledger, self._report = model, ledger, ledger.report
        weights = dict(model.named_parameters())
        shapes = {name: weight.shape for name, weight in weights.items()}
        self._sample = ElementSample.draw(shapes, derive_seed(seed, "audit of weights"), 2)
        self._initial = self._sample.read(weights.get)
        trained = {name: weight for name, weight in weights.items() if weight.requires_grad}
        self._trained = {name_in_files(name): weight.numel() for name, weight in trained.items()}
        held = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
        self._held = {name_in_files(name) for name, _ in held}
        self._check_initial(weights, folder)

    def _check_initial(self, weights: dict[str, nn.Parameter], folder: Path) -> None:
        """Compare the weights in memory with the files of the prepared model; adapters must begin without effect."""
        compared, wrong = _compared(self._model, folder)
        self._ledger.note(INITIAL, compared.total(), 1e9 if wrong else 0.0)
        if wrong:
            self._report(f"{wrong} before training is not the weight of the prepared model")
        for name, weight in weights.items():
            if "lora_B" in name and bool(local(weight.detach()).any()):
                return self._report(f"{name} is not 0 before training: the policy does not begin as the prepared model")

    def check_reference(self, model: nn.Module) -> None:
        """Compare a model that computes for the reference with the weights before training."""
        weights, elements = dict(model.named_parameters()), self._sample.elements
        # Adapters are the policy's, and are switched off.
        kept = torch.tensor(["lora_" not in element.name for element in elements])
        rounded = [
            value.to(weights[element.name].dtype).double()
            for value, element in zip(self._initial, elements, strict=True)
        ]
        errors = self._sample.read(weights.get) - torch.stack(rounded)
        if not self._ledger.compare(REFERENCE, errors[kept], _EXACT):
            self._report("the reference model has other weights than the model before training")

    def check_frozen(self) -> str:
        """Compare weights that the study does not train with those before training; return a digest of all samples."""
        found = self._sample.read(dict(self._model.named_parameters()).get)
        changed = zip(self._sample.elements, (found != self._initial).tolist(), strict=True)
        names = (element.name for element, is_changed in changed if is_changed)
        if frozen := next((name for name in names if name_in_files(name) not in self._trained), None):
            self._report(f"{frozen} is not trained by the study and has changed")
        return hashlib.sha256(found.numpy().tobytes()).hexdigest()

    def check_checkpoint(self, folder: Path, step: int) -> bool:
        """Compare the weights of a checkpoint with those in memory; return whether they are the same."""
        compared, wrong = _compared(self._model, folder)
        total = sum(self._trained.values())
        # A weight that the loader fused has several names in the files.
        found = sum(count for name, count in compared.items() if name in self._trained or name not in self._held)
        if wrong:
            self._report(f"{wrong} in the checkpoint of step {step} is not the weight in memory after step {step}")
        elif found != total:
            self._report(f"the checkpoint of step {step} has {found} of {total} trained values")
        return not wrong and found == total


def adapters_are_off(model: nn.Module) -> bool:
    """Return whether `model` has low-rank adapters and computes without them now."""
    layers = adapted_modules(model).values()
    return bool(layers) and all(layer.disable_adapters for layer in layers)


def _compared(model: nn.Module, folder: Path) -> tuple[Counter[str], str]:
    """Return how many values of each weight the files in `folder` have, and the name of one with other values."""
    compared, wrong = Counter[str](), ""
    with unobserved():
        for name, mine, stored in weights_and_files(model, folder):
            compared[name] = stored.numel()
            # Each worker compares its own share of a sharded model.
            memory, file = own_share(model, name, mine).cpu(), own_share(model, name, stored).to(mine.dtype)
            # Weights that are NaN in both end the run at their loss.
            if memory.shape != file.shape or not torch.isclose(memory, file, rtol=0, atol=0, equal_nan=True).all():
                wrong = wrong or name
    return compared, wrong
