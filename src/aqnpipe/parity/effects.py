"""What the differences of operators do to log-probabilities, and which operators explain it."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl
import torch
from torch import Tensor

from aqnpipe.artifacts.captures import CaptureConfig
from aqnpipe.artifacts.parities import LogProbabilities, SubstitutedKind, Substitution
from aqnpipe.parity.capture import Passes
from aqnpipe.parity.capture_file import Capture
from aqnpipe.parity.compare import Sides, finite
from aqnpipe.parity.proof import prove
from aqnpipe.parity.recorder import Recorder
from aqnpipe.parity.sample import Sample, batches_of, choose_sample

_LM_HEAD = "lm_head"
_MAX_TOGETHER = 5
"""Kinds of operators that are substituted cumulatively, before all of them."""

_MIN_TOKENS = 32
"""Tokens on which operators are substituted, at least."""

Errors = Mapping[str, Tensor]


def log_probability_differences(first: Capture, second: Capture) -> LogProbabilities:
    """Return how the log-probabilities of all tokens differ."""
    both = first.tokens.join(second.tokens, on=["sequence", "position"], suffix="_second").drop_nulls(
        ["log_probability", "log_probability_second"]
    )
    difference = (both["log_probability_second"] - both["log_probability"]).to_torch()
    changed = (both["predicted"] != both["predicted_second"]).mean()
    decoded = (both["is_decoded"] | both["is_decoded_second"]).to_torch()
    return LogProbabilities(
        num_tokens=both.height,
        mean=finite(difference.mean()),
        rms=_rms(difference),
        p99=finite(difference.abs().sort()[0][math.ceil(0.99 * len(difference)) - 1]),
        largest=finite(difference.abs().max()),
        argmax_changes=float(changed or 0.0),  # type: ignore[arg-type]
        prefill_rms=_rms(difference[~decoded]) if bool((~decoded).any()) else None,
        decode_rms=_rms(difference[decoded]) if bool(decoded.any()) else None,
    )


class Substitute:
    """Adds the difference of the two sides' operators to the results of the first side's."""

    def __init__(self, errors: Errors) -> None:
        self._errors = errors

    def apply(self, name: str, rows: Tensor, values: Tensor) -> Tensor | None:
        """Return the results with the second side's error in place of the first side's."""
        error = self._errors.get(name)
        return None if error is None else (values.double() + error[rows].to(values.device)).to(values.dtype)


class Substitutions:
    """Runs the first side's model on the recorded tokens, with the second side's operators in place of its own."""

    def __init__(self, model: Any, sides: Sides, threads: int) -> None:
        """`model`: the model of the captures in the first side's dtype; `sides` must have the same inputs."""
        sequences = sides.first.sequences
        self._errors = _operator_errors(sides)
        self._kinds = dict(sides.first.operators.select("name", "kind").iter_rows())
        passes = len(self._different_kinds()) + _MAX_TOGETHER + 1
        # All passes together cost about as much as one over all tokens.
        most = max(_MIN_TOKENS, sides.first.identity.num_tokens // passes)
        self._sample = choose_sample(_shared_lengths(sides), most)
        cut = [sequences[number][:length] for number, length in enumerate(self._sample.lengths)]
        config = CaptureConfig(
            dtype=sides.first.identity.dtype, padding="right", num_decoded=0, threads=threads, batch_size=len(cut)
        )
        self._batches = batches_of(cut, len(cut), "right")
        self._passes = Passes(model, prove(model)[0], config, 0)
        self._places, self._target, self._head = _token_differences(sides, self._sample)

    def measured(self) -> Substitution:
        """Return the effect of every kind of operator alone, and of several together, those with the largest first."""
        clean = self._scores({})
        kinds = self._different_kinds()
        changes = {kind: self._scores(self._of_kinds([kind])) - clean for kind in kinds}
        if bool(self._head.any()):
            changes[_LM_HEAD] = self._head
        order = sorted(changes, key=lambda kind: -_rms(changes[kind]))
        alone = tuple(self._row([kind], changes[kind]) for kind in order)
        groups = [order[:number] for number in range(2, min(_MAX_TOGETHER, len(order) - 1) + 1)]
        groups += [order] if len(order) > 1 else []
        together = tuple(self._row(group, self._together(group) - clean) for group in groups)
        return Substitution(num_tokens=len(self._target), rms=_rms(self._target), alone=alone, together=together)

    def _different_kinds(self) -> list[str]:
        return list(dict.fromkeys(self._kinds[name] for name, error in self._errors.items() if bool(error.any())))

    def _together(self, kinds: Sequence[str]) -> Tensor:
        return self._scores(self._of_kinds(kinds)) + (self._head if _LM_HEAD in kinds else 0.0)

    def _of_kinds(self, kinds: Sequence[str]) -> Errors:
        return {name: error for name, error in self._errors.items() if self._kinds[name] in kinds}

    def _scores(self, errors: Errors) -> Tensor:
        recorder = Recorder(self._sample, edits=Substitute(errors), judges=False, keeps_full=False)
        found = self._passes.run(self._batches, recorder)
        return torch.tensor([found[place][0] for place in self._places], dtype=torch.float64)

    def _row(self, kinds: Sequence[str], change: Tensor) -> SubstitutedKind:
        left, whole = float((self._target - change).square().sum()), float(self._target.square().sum())
        return SubstitutedKind(kinds=tuple(kinds), rms=_rms(change), explained=1 - left / whole if whole > 0 else None)


def _shared_lengths(sides: Sides) -> list[int]:
    lengths = zip(sides.first.sample.lengths, sides.second.sample.lengths, strict=False)
    return [min(pair) for pair in lengths]


def _operator_errors(sides: Sides) -> dict[str, Tensor]:
    errors = {}
    for name, width in sides.first.operators.select("name", "width").iter_rows():
        one, other = sides.results(name)
        if one.shape[1] == width and name != _LM_HEAD:
            errors[name] = other.double() - one.double()
    return errors


def _token_differences(sides: Sides, sample: Sample) -> tuple[list[tuple[int, int]], Tensor, Tensor]:
    """Return the tokens with scores in the sample, the differences of their scores, and the output projection's."""
    both = sides.first.tokens.join(sides.second.tokens, on=["sequence", "position"], suffix="_second").filter(
        pl.col("position") >= 1
    )
    places, target, head = [], [], []
    columns = ("sequence", "position", "log_probability", "log_probability_second", "replayed_log_probability_second")
    for sequence, position, one, other, replayed in both.select(columns).iter_rows():
        if sample.row(sequence, position) is None:
            continue
        places.append((sequence, position))
        target.append(other - one)
        head.append(0.0 if replayed is None else replayed - one)
    return places, torch.tensor(target, dtype=torch.float64), torch.tensor(head, dtype=torch.float64)


def _rms(values: Tensor) -> float:
    return finite(values.double().square().mean().sqrt()) if len(values) else 0.0
