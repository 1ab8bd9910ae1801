"""Audit of weights: before training, of the reference, of all workers, and in the checkpoints."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from aqnpipe.artifacts.training_facts import INITIAL, REFERENCE
from aqnpipe.models.adapters import adapted_modules
from aqnpipe.models.loading import stored_weights
from aqnpipe.models.shares import is_sharded, local, own_share
from aqnpipe.models.verification import as_stored
from aqnpipe.reference.decoder import unobserved
from aqnpipe.seeding import derive_seed
from aqnpipe.training.audit.measure import Element, ElementSample, Errors

_EXACT = 1e-300
_BASE = ".base_layer."


class WeightAudit:
    """Samples the weights of one worker's policy at the start of the run; all else is compared with them.

    Create it before a resume point is loaded. `folder` is the prepared model.
    """

    def __init__(
        self, model: nn.Module, folder: Path, seed: int, errors: Errors, report: Callable[[str], None]
    ) -> None:
        self._errors = errors
        self._report = report
        weights = dict(model.named_parameters())
        shapes = {name.replace(_BASE, "."): weight.shape for name, weight in weights.items() if "lora_" not in name}
        self._sample = ElementSample.draw(shapes, derive_seed(seed, "audit of weights"), 2)
        self._initial = self._sample.read(_tensors_of(model))
        self._whole = ElementSample.draw(
            {name: weight.shape for name, weight in weights.items()}, derive_seed(seed, "audit of workers"), 2
        )
        self._check_initial(model, folder)
        self._frozen = [not weights[_own_name(weights, e.name)].requires_grad for e in self._sample.elements]

    def _check_initial(self, model: nn.Module, folder: Path) -> None:
        """Compare the weights in memory with the files of the prepared model; adapters must begin without effect."""
        stored: dict[Element, float] = {}
        weights = dict(model.named_parameters())
        own = {name.replace(_BASE, "."): weight for name, weight in weights.items() if "lora_" not in name}
        with stored_weights(folder) as files:
            for element in self._sample.elements:
                if element.name in files:
                    file = files[element.name]
                    ranges = tuple(slice(place, place + 1) for place in element.index)
                    value = file.get_slice(element.name)[ranges] if ranges else file.get_tensor(element.name)
                    stored[element] = float(value.to(own[element.name].dtype).double().reshape(()))
            renamed = {
                name: _equal(tensor, files[name].get_tensor(name).to(tensor.dtype))
                for name, tensor in as_stored(model, own, files.keys())
            }
        pairs = [
            (value, stored[element], element)
            for element, value in zip(self._sample.elements, self._initial.tolist(), strict=True)
            if element in stored
        ]
        wrong = [element.name for value, wanted, element in pairs if value != wanted]
        wrong += [name for name, is_equal in renamed.items() if not is_equal]
        self._errors.note(INITIAL, len(pairs) + len(renamed), 0.0 if not wrong else 1e9)
        if wrong:
            self._report(f"{wrong[0]} before training is not the weight of the prepared model")
        for name, weight in weights.items():
            if "lora_B" in name and bool(local(weight.detach()).any()):
                self._report(f"{name} is not 0 before training: the policy does not begin as the prepared model")
                return

    def check_reference(self, model: nn.Module) -> None:
        """Compare a model that computes for the reference with the weights before training."""
        found = self._sample.read(_tensors_of(model))
        weights = dict(model.named_parameters())
        wanted = torch.tensor(
            [
                float(torch.tensor(value, dtype=torch.float64).to(weights[_own_name(weights, e.name)].dtype))
                for e, value in zip(self._sample.elements, self._initial.tolist(), strict=True)
            ],
            dtype=torch.float64,
        )
        if not self._errors.add(REFERENCE, found - wanted, _EXACT):
            self._report("the reference model has other weights than the model before training")

    def check_frozen(self, model: nn.Module) -> None:
        """Compare weights that the study does not train with those before training."""
        found = self._sample.read(_tensors_of(model))
        for element, before, now, is_frozen in zip(
            self._sample.elements, self._initial.tolist(), found.tolist(), self._frozen, strict=True
        ):
            if is_frozen and before != now:
                self._report(f"{element.name} is not trained by the study and has changed")
                return

    def digest(self, model: nn.Module) -> str:
        """Return a digest of sampled weights, the same on all workers if their weights are."""
        weights = dict(model.named_parameters())
        values = self._whole.read(lambda name: weights[name])
        return hashlib.sha256(values.numpy().tobytes()).hexdigest()

    def check_checkpoint(self, model: nn.Module, folder: Path, step: int) -> bool:
        """Compare the weights of a checkpoint with those in memory; return whether they are the same."""
        # The state dict of a sharded model would free gathered weights.
        own = (
            dict([*model.named_parameters(), *model.named_buffers()]) if is_sharded(model) else dict(model.state_dict())
        )
        trained = {name: weight.numel() for name, weight in model.named_parameters() if weight.requires_grad}
        compared, problem = 0, ""
        with stored_weights(folder) as files:
            known = {name if name in own else _adapter_name(name): name for name in files}
            for name in known.keys() & own.keys():
                stored = files[known[name]].get_tensor(known[name])
                compared += stored.numel() if name in trained else 0
                # Each worker compares its own share of a sharded model.
                if not _equal(own_share(model, name, own[name]), own_share(model, name, stored)):
                    problem = problem or known[name]
            # In the same order on every worker, because shares are gathered.
            others = {name: own[name] for name in trained if name not in known}
            for name, tensor in as_stored(model, others, files):
                compared += tensor.numel()
                if not _equal(tensor, files[name].get_tensor(name)):
                    problem = problem or name
        if problem:
            self._report(f"{problem} in the checkpoint of step {step} is not the weight in memory after step {step}")
        elif compared != sum(trained.values()):
            self._report(f"the checkpoint of step {step} has {compared} of {sum(trained.values())} trained values")
            problem = "incomplete"
        return not problem


def adapters_are_off(model: nn.Module) -> bool:
    """Return whether `model` has low-rank adapters and computes without them now."""
    layers = adapted_modules(model).values()
    return bool(layers) and all(layer.disable_adapters for layer in layers)


def _equal(memory: Tensor, stored: Tensor) -> bool:
    with unobserved():
        return memory.shape == stored.shape and torch.equal(memory.detach().cpu().to(stored.dtype), stored)


def _tensors_of(model: nn.Module) -> Callable[[str], Tensor | None]:
    weights = dict(model.named_parameters())
    return lambda name: weights[_own_name(weights, name)]


def _own_name(weights: dict[str, nn.Parameter], name: str) -> str:
    """Return the name of a plain weight in a model that may have adapters."""
    if name in weights:
        return name
    owner, _, last = name.rpartition(".")
    return f"{owner}{_BASE}{last}"


def _adapter_name(name: str) -> str:
    """Return the name in memory of an adapter's matrix, from its name in a checkpoint."""
    owner, _, last = name.rpartition(".")
    return f"{owner}.default.{last}"
