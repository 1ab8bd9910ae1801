"""Audit of weights: before training, of the reference, of all workers, and in the checkpoints."""

import hashlib
from pathlib import Path

import torch
from torch import nn

from aqnpipe.artifacts.training_facts import INITIAL, REFERENCE
from aqnpipe.models.adapters import adapted_modules
from aqnpipe.models.sharding import local, own_share
from aqnpipe.models.verification import name_in_files, weights_and_files
from aqnpipe.reference.decoder import unobserved
from aqnpipe.seeding import derive_seed
from aqnpipe.training.audit.measure import ElementSample, Ledger

_EXACT = 1e-300


class WeightAudit:
    """Samples the weights of one worker's policy at the start of the run; all else is compared with them.

    Create it before a resume point is loaded. `folder` is the prepared model.
    """

    def __init__(self, model: nn.Module, folder: Path, seed: int, ledger: Ledger) -> None:
        self._model = model
        self._ledger = ledger
        self._report = ledger.report
        weights = dict(model.named_parameters())
        shapes = {name: weight.shape for name, weight in weights.items()}
        self._sample = ElementSample.draw(shapes, derive_seed(seed, "audit of weights"), 2)
        self._initial = self._sample.read(weights.get)
        self._trained = {
            name_in_files(name): weight.numel() for name, weight in weights.items() if weight.requires_grad
        }
        held = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
        self._held = {name_in_files(name) for name, _ in held}
        self._check_initial(weights, folder)

    def _check_initial(self, weights: dict[str, nn.Parameter], folder: Path) -> None:
        """Compare the weights in memory with the files of the prepared model; adapters must begin without effect."""
        compared, wrong = _compared(self._model, folder)
        self._ledger.note(INITIAL, sum(compared.values()), 1e9 if wrong else 0.0)
        if wrong:
            self._report(f"{wrong} before training is not the weight of the prepared model")
        for name, weight in weights.items():
            if "lora_B" in name and bool(local(weight.detach()).any()):
                self._report(f"{name} is not 0 before training: the policy does not begin as the prepared model")
                return

    def check_reference(self, model: nn.Module) -> None:
        """Compare a model that computes for the reference with the weights before training."""
        weights = dict(model.named_parameters())
        # Adapters are the policy's, and are switched off.
        kept = torch.tensor(["lora_" not in element.name for element in self._sample.elements])
        formats = [weights[element.name].dtype for element in self._sample.elements]
        initial = zip(self._initial, formats, strict=True)
        rounded = torch.stack([value.to(number_format).double() for value, number_format in initial])
        if not self._ledger.compare(REFERENCE, (self._sample.read(weights.get) - rounded)[kept], _EXACT):
            self._report("the reference model has other weights than the model before training")

    def check_frozen(self) -> str:
        """Compare weights that the study does not train with those before training; return a digest of all samples."""
        found = self._sample.read(dict(self._model.named_parameters()).get)
        changed = (found != self._initial).tolist()
        for element, is_changed in zip(self._sample.elements, changed, strict=True):
            if is_changed and name_in_files(element.name) not in self._trained:
                self._report(f"{element.name} is not trained by the study and has changed")
                break
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
            wrong = "incomplete"
        return not wrong


def adapters_are_off(model: nn.Module) -> bool:
    """Return whether `model` has low-rank adapters and computes without them now."""
    layers = adapted_modules(model).values()
    return bool(layers) and all(layer.disable_adapters for layer in layers)


def _compared(model: nn.Module, folder: Path) -> tuple[dict[str, int], str]:
    """Return how many values of each weight the files in `folder` have, and the name of one with other values."""
    compared, wrong = {}, ""
    with unobserved():
        for name, mine, stored in weights_and_files(model, folder):
            compared[name] = stored.numel()
            # Each worker compares its own share of a sharded model.
            memory, file = own_share(model, name, mine).cpu(), own_share(model, name, stored).to(mine.dtype)
            # Weights that are NaN in both end the run at their loss.
            if memory.shape != file.shape or not torch.isclose(memory, file, rtol=0, atol=0, equal_nan=True).all():
                wrong = wrong or name
    return compared, wrong
