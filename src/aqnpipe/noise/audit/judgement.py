"""Judges what an observer saw: each product and each claim against the request and the audit's own keys."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from aqnpipe.config.measured_noise import LayerErrors, OperatorError
from aqnpipe.config.noise import ModuleNoise, Phase, PlacedError, TensorError
from aqnpipe.noise.audit.comparison import Comparison, Sample, compare, values_of
from aqnpipe.noise.audit.expected_values import measured_size, spacing
from aqnpipe.noise.audit.observer import Claim, Followed, Observer
from aqnpipe.noise.audit.random_numbers import FloatArray, Position, key_at
from aqnpipe.noise.receipts.recorder import ReceiptRecorder

HIDDEN_STATES = "aqn.hidden"
"""Name of AQN's noise on hidden states, as an operator and as a stream of keys."""

_HIDDEN, _FIRST_MODULE = 8, 16
"""Streams: 0 for outputs, 1 + i for the gradient of operand i, one for hidden states, and from 16 on for modules."""


@dataclass(frozen=True)
class Origin:
    """Where a product was computed: its part of the model, the forward, and the error that it was requested to have.

    `keyed_phase` is the phase in the keys of its noise: a backward pass has the keys of its forward. `name` is the
    qualified name of the part, for backward passes.
    """

    phase: Phase
    keyed_phase: Phase
    position: Position
    place: int
    layer: int | None
    error: PlacedError | None
    needs_noise: bool
    name: str = ""


class Judge:
    """Judges what an observer saw.

    `outside`: the place of the model around layers and output projection. `origin_of` returns where a tensor was made,
    None if not in an audited part. `sigma_of`: AQN's requested sigma on the hidden states of a layer.
    """

    def __init__(
        self,
        comparison: Comparison,
        recorder: ReceiptRecorder,
        modules: ModuleNoise | None,
        outside: int,
        origin_of: Callable[[Followed], Origin | None],
        sigma_of: Callable[[int], float],
    ) -> None:
        self._comparison = comparison
        self._recorder = recorder
        self._modules = modules
        self._outside = outside
        self._origin_of = origin_of
        self._sigma_of = sigma_of

    def judge(self, observer: Observer) -> None:
        """Record escapes and contradictions, and compare the sampled values."""
        for what in observer.unused:
            self._comparison.note(f"{what}: the noised values were never used")
        samples: list[Sample] = []
        for reading, clean, used in values_of(observer.readings):
            followed = reading.followed
            origin = self._origin_of(followed)
            if origin is None:
                continue
            if not followed.claims:
                self._judge_unclaimed(followed, origin, clean, used)
            for claim in followed.claims:
                covered, elements = claim.elements_at(followed.addresses)
                error, key = self._expected(claim, origin, followed)
                rows = input_rms_at(followed, clean.shape)[covered]
                if error is not None:
                    dtype = followed.tensor.dtype
                    samples.append(Sample(claim, error, key, dtype, elements, clean[covered], used[covered], rows))
                self._record(claim, clean[covered], used[covered], rows, followed.tensor.dtype)
            if followed.claims:
                self._judge_cover(followed, origin)
        self._judge_draws(observer)
        compare(samples, self._comparison, where)

    def _judge_unclaimed(self, followed: Followed, origin: Origin, clean: FloatArray, used: FloatArray) -> None:
        made_by = f"{followed.made_by} in {origin.name}" if origin.name else followed.made_by
        if origin.needs_noise:
            # Products outside noised calls are already counted where they ran.
            if followed.is_norm:
                self._comparison.note(f"{made_by}: no measured error was put on its result")
            elif followed.call or followed.frame.is_backward:
                self._recorder.count_escape(origin.phase, made_by)
        elif not np.array_equal(clean, used, equal_nan=True):
            self._comparison.note(f"{made_by}: its values were changed, no noise was requested")

    def _expected(self, claim: Claim, origin: Origin, followed: Followed) -> tuple[TensorError | None, int]:
        """Return the requested error and the key of a claim; note what contradicts the request."""
        places = [origin.place]
        stream: str = origin.keyed_phase
        requested: PlacedError | OperatorError | None
        if claim.operator == HIDDEN_STATES:
            sigma = self._sigma_of(origin.place)
            requested = claim.error.model_copy(update={"scale": sigma}) if sigma > 0 else None
            # The passes of a training step have the numbers of the rollout's: their noise has a stream of its own.
            stream = f"{HIDDEN_STATES}.actor_forward" if origin.phase == "actor_forward" else HIDDEN_STATES
        elif claim.operator.startswith("module."):
            requested = self._modules.error if self._modules is not None else None
            places.append(self._outside)
        else:
            requested = self._requested_of(claim, origin, followed)
        is_elsewhere = claim.layer != origin.layer and not claim.operator.startswith("module.")
        if claim.phase != origin.phase or is_elsewhere:
            self._comparison.note(f"{where(claim)}: computed in {origin.phase}, layer {origin.layer}")
        if requested != claim.error:
            self._comparison.note(f"{where(claim)}: noised with {claim.error!r}, requested {requested!r}")
            return None, 0
        keys = [key_at(origin.position, stream, place) for place in places]
        if claim.key not in keys:
            place = origin.position
            self._comparison.note(
                f"{where(claim)}: its random numbers are not those of seed {place.seed}, step {place.step}, this "
                "forward and this layer"
            )
            return None, 0
        return claim.error, claim.key

    def _requested_of(self, claim: Claim, origin: Origin, followed: Followed) -> PlacedError | OperatorError | None:
        """Return the error that was requested where a tensor was made; a measured one by the operator that made it."""
        if not isinstance(origin.error, LayerErrors):
            return origin.error
        identity = followed.identity
        if identity is None or claim.operator.partition(".")[2] != identity.operator:
            found = identity.operator if identity is not None else "no operator of the parity"
            self._comparison.note(f"{where(claim)}: put on the result of {found}")
        return None if identity is None else origin.error.operators.get(identity.operator)

    def _judge_cover(self, followed: Followed, origin: Origin) -> None:
        """No value may have noise twice, and no value of a product or a norm may lack it."""
        covered = np.concatenate([claim.elements_at(followed.addresses)[0] for claim in followed.claims])
        name, num_noised = where(followed.claims[0]), len(np.unique(covered))
        if num_noised != len(covered):
            self._comparison.note(f"{name}: noised more than once")
        num_sampled = len(followed.addresses)
        without = num_sampled - num_noised - num_padded(followed)
        if followed.is_product and origin.needs_noise and without > 0:
            self._comparison.note(f"{name}: noised in part, {without} of {num_sampled} sampled values have no noise")

    def _judge_draws(self, observer: Observer) -> None:
        """Random numbers must not be used twice; the calls of a pass are numbered from 1 without a gap."""
        seen: set[tuple[int, int, int]] = set()
        calls: dict[int, list[int]] = defaultdict(list)
        for claim in observer.claims:
            if not _has_its_stream(claim):
                self._comparison.note(f"{where(claim)}: its random numbers are those of another stream")
            draw = (claim.key, claim.call, claim.stream)
            if draw in seen:
                self._comparison.note(f"{where(claim)}: random numbers of another call were used again")
            seen.add(draw)
            if claim.stream == 0 and not claim.operator.startswith("module."):
                calls[claim.key].append(claim.call)
        for numbers in calls.values():
            if numbers != list(range(1, len(numbers) + 1)):
                self._comparison.note(f"calls of a layer are numbered {numbers[:4]}..., expected 1, 2, 3, ...")

    def _record(
        self, claim: Claim, clean: FloatArray, used: FloatArray, input_rms: FloatArray, dtype: torch.dtype
    ) -> None:
        rounding = spacing(used, dtype) / np.sqrt(12)
        if isinstance(claim.error, OperatorError):
            # In units of the measured machine: the error over the size that it has there at this element.
            size = measured_size(claim.error.figures, clean, input_rms)
            known = size > 0
            clean, used, rounding = size[known], size[known] + (used - clean)[known], rounding[known]
        if claim.operator != HIDDEN_STATES:
            self._recorder.measure_values(claim.phase, claim.operator, claim.layer, clean, used, rounding)


def _has_its_stream(claim: Claim) -> bool:
    """Whether the stream of a draw is the one of its kind: outputs, gradients by operand, hidden states, modules."""
    operator, _, part = claim.operator.partition(".")
    if operator == "module":
        return claim.stream >= _FIRST_MODULE
    if claim.operator == HIDDEN_STATES:
        return (claim.call, claim.stream) == (0, _HIDDEN)
    if part.startswith("gradient_"):
        return claim.stream == 1 + int(part.removeprefix("gradient_"))
    return claim.stream == 0


def input_rms_at(followed: Followed, shape: tuple[int, ...]) -> FloatArray:
    """Return the root mean square of the input row of each sampled element of a product; 0 where it is not known."""
    rows = followed.identity.input_rms if followed.identity is not None else None
    if rows is None:
        return np.zeros(shape)
    row = (followed.addresses - int(followed.tensor.storage_offset())) // followed.tensor.shape[-1]
    return np.asarray(rows.double().cpu().numpy()[row])


def num_padded(followed: Followed) -> int:
    """Return how many sampled values are padding of the vocabulary, whose logits are cut off."""
    num_logits = followed.frame.num_logits
    if num_logits is None:
        return 0
    column = (followed.addresses - int(followed.tensor.storage_offset())) % followed.tensor.shape[-1]
    return int((column >= num_logits).sum())


def where(claim: Claim) -> str:
    """Return the name of a claim in messages."""
    if claim.layer is None and claim.operator.startswith("norm."):
        return f"{claim.operator} outside the layers"
    layer = "lm_head" if claim.layer is None else claim.layer
    return f"{claim.operator} layer {layer}"


def forward_origin(followed: Followed) -> Origin:
    """Return the origin of a tensor that was made in a forward pass."""
    frame = followed.frame
    return Origin(frame.phase, frame.phase, frame.position, frame.place, frame.layer, frame.error, frame.needs_noise)
