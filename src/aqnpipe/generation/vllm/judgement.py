"""Judges what an observer saw: each product and each claim against the request and the audit's own keys."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from aqnpipe.config.noise import ModuleNoise, Phase, RelativeGaussian
from aqnpipe.generation.vllm.claim import HIDDEN_STATES, Claim
from aqnpipe.generation.vllm.observer import EngineObserver, Followed
from aqnpipe.noise.audit.comparison import Comparison
from aqnpipe.noise.audit.expected_values import deviations, expected_values, spacing
from aqnpipe.noise.audit.random_numbers import Draws, FloatArray, IntArray, Position, key_at
from aqnpipe.noise.receipts.recorder import ReceiptRecorder


@dataclass(frozen=True)
class Judge:
    """Judges what an observer saw in `phase`, into `comparison` and `recorder`.

    `modules`: the requested module noise. `outside`: the place of the model around layers and output projection.
    `sigma_of`: AQN's requested sigma on the hidden states of a layer.
    """

    comparison: Comparison
    recorder: ReceiptRecorder
    phase: Phase
    modules: ModuleNoise | None
    outside: int
    sigma_of: Callable[[int], float]

    def judge(self, observer: EngineObserver, position: Position) -> None:
        """Record escapes and contradictions of passes at `position`, and compare the sampled values."""
        for what in observer.unused:
            self.comparison.note(f"{what}: the noised values were never used")
        for followed, read in observer.readings:
            clean, used = (values.double().cpu().numpy() for values in (followed.clean, read))
            if followed.claims:
                self._judge_claims(followed, position, clean, used)
            elif followed.frame.part.error is None:
                if not np.array_equal(clean, used, equal_nan=True):
                    self.comparison.note(f"{followed.made_by}: its values were changed, no noise was requested")
            elif followed.call:
                # Products outside noised calls are already counted where they ran.
                self.recorder.count_escape(self.phase, followed.made_by)
        self._judge_draws(observer.claims)

    def _judge_claims(self, followed: Followed, position: Position, clean: FloatArray, used: FloatArray) -> None:
        dtype = followed.tensor.dtype
        covered: list[IntArray] = []
        for claim in followed.claims:
            places, elements = claim.elements_at(followed.addresses)
            covered.append(places)
            before, after = clean[places], used[places]
            if self._is_requested(claim, followed, position):
                draws = Draws.of(claim.key, claim.call, claim.stream)
                with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
                    expected, allowed = expected_values(before, claim.error, dtype, draws, elements)
                self._compare(claim, before, after, deviations(before, after, expected, allowed, dtype))
            if claim.operator != HIDDEN_STATES:
                rounding = spacing(after, dtype) / np.sqrt(12)
                self.recorder.measure_values(self.phase, claim.operator, claim.layer, before, after, rounding)
        self._judge_cover(followed, np.concatenate(covered))

    def _is_requested(self, claim: Claim, followed: Followed, position: Position) -> bool:
        """Return whether the error and the key of a claim are the requested ones; note what contradicts the request."""
        part = followed.frame.part
        places, stream = [part.place], str(self.phase)
        requested: object = part.error
        if claim.operator == HIDDEN_STATES:
            sigma, stream = self.sigma_of(part.place), HIDDEN_STATES
            requested = RelativeGaussian(scale=sigma) if sigma > 0 else None
        elif claim.is_of_module:
            requested = self.modules.error if self.modules is not None else None
            places.append(self.outside)
        if claim.layer != part.layer and not claim.is_of_module:
            self.comparison.note(f"{claim}: computed in layer {part.layer}")
        if requested != claim.error:
            self.comparison.note(f"{claim}: noised with {claim.error!r}, requested {requested!r}")
            return False
        if claim.key not in [key_at(position, stream, place) for place in places]:
            self.comparison.note(
                f"{claim}: its random numbers are not those of seed {position.seed}, step {position.step}, this "
                "forward and this layer"
            )
            return False
        return True

    def _compare(self, claim: Claim, clean: FloatArray, used: FloatArray, deviation: FloatArray) -> None:
        found = self.comparison
        found.numbers += len(deviation)
        found.largest_deviation = max(found.largest_deviation, float(deviation.max(initial=0.0)))
        wrong = deviation > 1
        if wrong.any() and (used == clean).all():
            found.note(f"{claim}: the values used have no noise")
        elif wrong.any():
            found.note(
                f"{claim}: {wrong.mean():.0%} of the sampled values are not those of the requested noise "
                f"({claim.error.kind})"
            )

    def _judge_cover(self, followed: Followed, covered: IntArray) -> None:
        """No value may have noise twice, and no value of a product may lack it."""
        name, num_noised, num_sampled = followed.claims[0], len(np.unique(covered)), len(followed.addresses)
        if num_noised != len(covered):
            self.comparison.note(f"{name}: noised more than once")
        without = num_sampled - num_noised - num_padded(followed)
        if followed.is_product and followed.frame.part.error is not None and without > 0:
            self.comparison.note(f"{name}: noised in part, {without} of {num_sampled} sampled values have no noise")

    def _judge_draws(self, claims: list[Claim]) -> None:
        """Random numbers must not be used twice; the calls of a pass are numbered from 1 without a gap."""
        seen: set[tuple[int, int, int]] = set()
        calls: dict[int, list[int]] = defaultdict(list)
        for claim in claims:
            if not claim.has_its_stream:
                self.comparison.note(f"{claim}: its random numbers are those of another stream")
            draw = (claim.key, claim.call, claim.stream)
            if draw in seen:
                self.comparison.note(f"{claim}: random numbers of another call were used again")
            seen.add(draw)
            if claim.stream == 0 and not claim.is_of_module:
                calls[claim.key].append(claim.call)
        for numbers in calls.values():
            if numbers != list(range(1, len(numbers) + 1)):
                self.comparison.note(f"calls of a layer are numbered {numbers[:4]}..., expected 1, 2, 3, ...")


def num_padded(followed: Followed) -> int:
    """Return how many sampled values are padding of the vocabulary, whose logits are cut off."""
    num_logits = followed.frame.part.num_logits
    if num_logits is None:
        return 0
    column = (followed.addresses - int(followed.tensor.storage_offset())) % followed.tensor.shape[-1]
    return int((column >= num_logits).sum())
