"""Which layers of a model are fragile: loss and accuracy with noise in one layer at a time, and their estimate.

The measurement needs a pass over the texts per layer and noise seed. The estimate needs one backward pass for all
layers (sensitivity/first_order.py) and is what the diagnosis stage uses; the measurement says how far to trust it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor, nn

from aqnpipe.artifacts.diagnoses import LayerSensitivity, Sensitivity
from aqnpipe.config.noise import Fault, NoiseSpec
from aqnpipe.data.scoring import is_correct
from aqnpipe.diagnosis.capture import inference
from aqnpipe.diagnosis.sensitivity.first_order import (
    ScoredText,
    first_order_estimates,
    layer_noise,
    summed_losses,
    text_batches,
)
from aqnpipe.errors import ConfigError, DataError, ModelError, ReceiptError
from aqnpipe.generation.backend import Sampling
from aqnpipe.generation.transformers_backend import TransformersBackend
from aqnpipe.machine.machine import NoiseKey
from aqnpipe.models.layout import decoder_layers, matrices_outside, num_rms_norms
from aqnpipe.noise.injection.faults import ActiveFaults, simulated_faults
from aqnpipe.noise.injection.phase import phase_noise
from aqnpipe.noise.receipts.recorder import ReceiptRecorder

Floats = NDArray[np.float64]

_ALPHA = 0.05
_LEAST_RESPONSE_TOKENS = 16
_FEWEST_LAYERS_TO_RANK = 3

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
            where = "without noise" if noise is None else f"with noise of {noise.scale:g} in {_name_of(noise.layer)}"
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
            raise ReceiptError(f"noise in {_name_of(noise.layer) if noise else 'no layer'}: " + "; ".join(problems))


def sensitivity(
    model: nn.Module,
    texts: Sequence[ScoredText | str | Sequence[int] | Tensor],
    *,
    tokenizer: Any = None,
    scale: float = 0.1,
    noise_seeds: Sequence[int] = (0, 1, 2, 3),
    faults: Sequence[Fault] = (),
    show_progress: Callable[[str], None] = lambda line: None,
) -> Sensitivity:
    """Measure what relative noise of `scale` in one layer at a time costs `model`, and estimate the same.

    - model: a causal language model of transformers; it is not changed.
    - texts: strings (these need the `tokenizer`), token ids, or `ScoredText`, whose prompts are not scored.
    - tokenizer: with it, accuracy is measured on texts with a gold answer.
    - scale: standard deviation relative to the value of each element.
    - noise_seeds: losses are means over these.
    - faults: faults to simulate during all of it.
    - show_progress: called with a line of text before each part.

    Raises ModelError for a model of another family or a loss that is not finite, DataError for texts that
    cannot be used, ConfigError for a scale outside (0, 1), ReceiptError if the noise was not as requested.
    """
    if not 0 < scale < 1 or not noise_seeds or len(set(noise_seeds)) < len(noise_seeds):
        raise ConfigError(
            f"sensitivity: scale {scale:g}, noise seeds {list(noise_seeds)}: expected a scale above 0 and below 1 and "
            "at least one seed, none of them twice"
        )
    scored = _scored_texts(model, texts, tokenizer)
    # None: the output projection.
    passes, parts = NoisyPasses(model, scored, faults), [*range(len(decoder_layers(model))), None]
    limit = _response_limit(scored) if tokenizer is not None else 0
    with inference(model):
        show_progress("first-order estimate")
        with simulated_faults(model, faults):
            estimates = first_order_estimates(model, scored, scale)
        show_progress("loss without noise")
        clean = _Measured.of(passes, [None], tokenizer, limit)
        noisy = []
        for part in parts:
            show_progress(f"noise in {_name_of(part)}")
            noisy.append(_Measured.of(passes, [Noise(part, scale, seed) for seed in noise_seeds], tokenizer, limit))
    sizes = np.array([text.num_scored for text in scored], dtype=np.float64)
    rows = tuple(_row(*row, clean, sizes) for row in zip(parts, estimates, noisy, strict=True))
    increases = [measured.losses - clean.losses for measured in noisy[:-1]]
    return Sensitivity(
        scale=scale,
        noise_seeds=tuple(noise_seeds),
        num_texts=len(scored),
        num_scored_tokens=int(sizes.sum()),
        num_questions=len(clean.correct),
        loss=float(clean.losses.sum() / sizes.sum()),
        accuracy=float(clean.correct.mean()) if len(clean.correct) else None,
        fragile_layers=fragile_layers(increases, sizes),
        rank_correlation=rank_correlation(
            [row.estimate for row in rows[:-1]], [row.loss_increase for row in rows[:-1]]
        ),
        layers=rows,
        untested=tuple(matrices_outside(model)),
    )


@dataclass(frozen=True)
class _Measured:
    """Summed losses [texts] and correct answers [questions] (none if not measured), means over passes."""

    losses: Floats
    correct: Floats

    @classmethod
    def of(cls, passes: NoisyPasses, noises: Sequence[Noise | None], tokenizer: Any, limit: int) -> "_Measured":
        losses = np.mean([passes.losses(noise) for noise in noises], axis=0)
        correct = [passes.correct(noise, tokenizer, limit) for noise in noises] if limit else np.zeros((1, 0))
        return cls(losses, np.mean(correct, axis=0))


def _row(part: int | None, estimate: float, measured: _Measured, clean: _Measured, sizes: Floats) -> LayerSensitivity:
    increase, error = ratio_and_error(measured.losses - clean.losses, sizes)
    change: tuple[float | None, float | None] = (None, None)
    if len(clean.correct):
        change = ratio_and_error(measured.correct - clean.correct, np.ones(len(clean.correct)))
    return LayerSensitivity(
        layer=part,
        estimate=estimate,
        loss_increase=increase,
        loss_standard_error=error,
        accuracy_change=change[0],
        accuracy_standard_error=change[1],
    )


def ratio_and_error(sums: Floats, sizes: Floats) -> tuple[float, float | None]:
    """Return `sum(sums)/sum(sizes)` and its standard error over texts; None for a single text.

    Cochran (1977), Sampling Techniques, section 6.4: the variance of a ratio is that of `sums - ratio*sizes`.
    """
    ratio, num_texts = float(sums.sum() / sizes.sum()), len(sums)
    if num_texts < 2:
        return ratio, None
    squares = float(((sums - ratio * sizes) ** 2).sum())
    return ratio, float(np.sqrt(num_texts / (num_texts - 1) * squares) / sizes.sum())


def fragile_layers(increases: Sequence[Floats], sizes: Floats) -> tuple[int, ...]:
    """Return the layer with the largest increase of the loss, and the layers that cannot be told from it.

    `increases`: per layer, the summed increase of every text. Empty if the largest is not significantly above 0.
    """
    largest = int(np.argmax([increase.sum() for increase in increases]))
    if not _is_above_zero(increases[largest], sizes, len(increases)):
        return ()
    return tuple(
        layer
        for layer, increase in enumerate(increases)
        if layer == largest or not _is_above_zero(increases[largest] - increase, sizes, len(increases) - 1)
    )


def _is_above_zero(sums: Floats, sizes: Floats, num_tests: int) -> bool:
    """Return whether the ratio of `sums` to `sizes` is significantly above 0, by a t-test over texts (Bonferroni)."""
    ratio, error = ratio_and_error(sums, sizes)
    return error is not None and ratio > error * float(stats.t.isf(_ALPHA / num_tests, len(sums) - 1))


def rank_correlation(estimates: Sequence[float], increases: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation; None below 3 layers or if either is the same in all layers."""
    if len(estimates) < _FEWEST_LAYERS_TO_RANK or len(set(estimates)) == 1 or len(set(increases)) == 1:
        return None
    return float(stats.spearmanr(estimates, increases).statistic)


def _response_limit(texts: Sequence[ScoredText]) -> int:
    """Return the limit of a response in tokens: twice the longest gold solution; 0 without gold answers."""
    lengths = [text.num_scored for text in texts if text.gold_answer is not None]
    return max(_LEAST_RESPONSE_TOKENS, 2 * max(lengths)) if lengths else 0


def _scored_texts(
    model: Any, texts: Sequence[ScoredText | str | Sequence[int] | Tensor], tokenizer: Any
) -> list[ScoredText]:
    if not len(texts):
        raise DataError("sensitivity: no texts, expected at least one")
    scored = [_scored_text(text, tokenizer) for text in texts]
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    wrong = next((i for text in scored for i in text.token_ids if not 0 <= i < vocabulary), None)
    if wrong is not None:
        raise DataError(
            f"sensitivity: found token id {wrong}, expected ids of the model's vocabulary, 0 to {vocabulary - 1}"
        )
    return scored


def _scored_text(text: ScoredText | str | Sequence[int] | Tensor, tokenizer: Any) -> ScoredText:
    if isinstance(text, ScoredText):
        return text
    if isinstance(text, str):
        if tokenizer is None:
            raise DataError("sensitivity: found texts as strings and no tokenizer, expected token ids or a tokenizer")
        return ScoredText(tuple(tokenizer(text)["input_ids"]))
    ids: list[int] = text.tolist() if isinstance(text, Tensor) else list(text)
    return ScoredText(tuple(ids))


def _name_of(layer: int | None) -> str:
    """Return the name of a part of the model in messages."""
    return "the output projection" if layer is None else f"layer {layer}"
