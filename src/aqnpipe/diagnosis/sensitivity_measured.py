"""Measured sensitivity: loss and accuracy with noise in one layer at a time, each pass proven by its receipt."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from aqnpipe.config.noise import Fault, NoiseSpec
from aqnpipe.data.scoring import is_correct
from aqnpipe.diagnosis.scored_texts import ScoredText, summed_losses, text_batches
from aqnpipe.diagnosis.sensitivity_estimate import layer_noise
from aqnpipe.errors import ModelError, ReceiptError
from aqnpipe.generation.backend import Sampling
from aqnpipe.generation.transformers_backend import TransformersBackend
from aqnpipe.machine.machine import NoiseKey
from aqnpipe.models.layout import decoder_layers, num_rms_norms
from aqnpipe.noise.injection.faults import ActiveFaults
from aqnpipe.noise.injection.phase import phase_noise
from aqnpipe.noise.receipts.recorder import ReceiptRecorder

_QUESTIONS_PER_BATCH = 125


@dataclass(frozen=True)
class Noise:
    """The noise of one pass: relative noise of `scale` in one layer (None: the output projection), and its seed."""

    layer: int | None
    scale: float
    seed: int


class NoisyPasses:
    """Passes over texts with noise in one layer, on a machine with simulated `faults` (default: none).

    The receipt of every pass is checked. ReceiptError: a pass had other noise or faults than requested.
    """

    def __init__(self, model: Any, texts: Sequence[ScoredText], faults: Sequence[Fault] = ()) -> None:
        self._model = model
        self._texts = texts
        self._faults = tuple(faults)
        embeddings = model.get_input_embeddings().weight
        self._batches = text_batches(texts, embeddings.shape[0], embeddings.device)

    def losses(self, noise: Noise | None) -> NDArray[np.float64]:
        """Return the summed loss of every text in nats, [texts]; ModelError if one is not finite."""
        losses = np.zeros(len(self._texts))
        with torch.no_grad():
            for number, batch in enumerate(self._batches):
                with self._checked(noise, number):
                    losses[list(batch.positions)] = summed_losses(self._model, batch).double().cpu().numpy()
        if not np.isfinite(losses).all():
            where = "without noise" if noise is None else f"with noise of {noise.scale:g} in {name_of(noise.layer)}"
            raise ModelError(f"{type(self._model).__name__}: its loss {where} is NaN or infinite, expected a number")
        return losses

    def correct(self, noise: Noise | None, tokenizer: Any, max_response_tokens: int) -> NDArray[np.float64]:
        """Return 1 for every text whose greedy response has the gold answer, else 0; [texts with a gold answer]."""
        asked = [text for text in self._texts if text.gold_answer is not None]
        backend = TransformersBackend(self._model, tokenizer)
        sampling = Sampling(max_response_tokens=max_response_tokens)
        found: list[bool] = []
        for number, first in enumerate(range(0, len(asked), _QUESTIONS_PER_BATCH)):
            batch = asked[first : first + _QUESTIONS_PER_BATCH]
            prompts = [text.token_ids[: text.prompt_tokens] for text in batch]
            with torch.no_grad(), self._checked(noise, number):
                completions = backend.generate(prompts, sampling)
            for text, completion in zip(batch, completions, strict=True):
                response = tokenizer.decode(completion.token_ids, skip_special_tokens=True)
                found.append(is_correct(response, str(text.gold_answer), "strict"))
        return np.array(found, dtype=np.float64)

    @contextmanager
    def _checked(self, noise: Noise | None, batch: int) -> Iterator[None]:
        """Run the body with the noise and the faults; raise ReceiptError if anything else was measured."""
        operator_noise = None if noise is None else layer_noise(self._model, noise.layer, noise.scale)
        spec = NoiseSpec(operator_noise=operator_noise, faults=self._faults)
        seed = 0 if noise is None else noise.seed
        recorder = ReceiptRecorder(
            spec,
            expected_phases=("evaluation",),
            num_layers=len(decoder_layers(self._model)),
            num_norms=num_rms_norms(self._model),
            seed=seed,
        )
        key = NoiseKey(seed=seed, step=0, micro_step=batch)
        with phase_noise(self._model, spec, "evaluation", key, recorder, faults=ActiveFaults.of(self._faults)):
            yield
        problems = recorder.receipt().problems()
        if problems:
            raise ReceiptError(f"noise in {name_of(noise.layer) if noise else 'no layer'}: " + "; ".join(problems))


def name_of(layer: int | None) -> str:
    """Return the name of a part of the model in messages."""
    return "the output projection" if layer is None else f"layer {layer}"


def parts_of(model: nn.Module) -> list[int | None]:
    """Return the parts whose sensitivity is measured: the decoder layers, and None for the output projection."""
    return [*range(len(decoder_layers(model))), None]
