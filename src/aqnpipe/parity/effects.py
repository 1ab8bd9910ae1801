"""Effect of the differences of operators on log-probabilities, and the operators that explain it."""

import math
from collections.abc import Sequence, Set
from typing import Any

import polars as pl
import torch
from torch import Tensor

from aqnpipe.artifacts.parities import LogProbabilities, SubstitutedKind, Substitution
from aqnpipe.parity.capture_file import Capture
from aqnpipe.parity.compare import Sides, finite
from aqnpipe.parity.mapping import Runner, prove
from aqnpipe.parity.recorder import Recorder
from aqnpipe.parity.sample import Sample, choose_sample

_LM_HEAD = "lm_head"
_MAX_TOGETHER = 5
"""Kinds of operators that are substituted cumulatively, before all of them."""

_MIN_TOKENS = 32
"""Tokens on which operators are substituted, at least."""

_BATCH_SIZE = 8


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


class Substitutions:
    """Runs the first side's model on the recorded tokens, with the second side's operators in place of its own.

    Scores without substitution are taken in batches of the same shape, so that only the substituted operators make a
    difference.
    """

    def __init__(self, model: Any, sides: Sides, threads: int) -> None:
        """`model`: the model of the captures in the first side's dtype; `sides` must have the same inputs."""
        sequences = sides.first.sequences
        self._errors = _operator_errors(sides)
        self._kinds = dict(sides.first.operators.select("name", "kind").iter_rows())
        passes = len(self._different_kinds()) + _MAX_TOGETHER + 1
        # All passes together cost about as much as one over all tokens.
        most = max(_MIN_TOKENS, sides.first.identity.num_tokens // passes)
        self._sample = choose_sample(sides.shared.lengths, most)
        self._cut = [tuple(sequences[number][:length]) for number, length in enumerate(self._sample.lengths)]
        self._runner = Runner(model, prove(model)[0], _BATCH_SIZE, "right")
        self._target, self._head = _token_differences(sides, self._sample)
        self._unchanged = self.scores(frozenset())

    def measured(self) -> Substitution:
        """Return the effect of every kind of operator alone, and of several together, those with the largest first."""
        kinds = self._different_kinds()
        changes = {kind: self._change([kind]) for kind in kinds}
        if bool(self._head.any()):
            changes[_LM_HEAD] = self._head
        order = sorted(changes, key=lambda kind: -_rms(changes[kind]))
        alone = tuple(self._row([kind], changes[kind]) for kind in order)
        groups = [order[:number] for number in range(2, min(_MAX_TOGETHER, len(order) - 1) + 1)]
        groups += [order] if len(order) > 1 else []
        together = tuple(self._row(group, self._change(group)) for group in groups)
        return Substitution(num_tokens=len(self._target), rms=_rms(self._target), alone=alone, together=together)

    def _different_kinds(self) -> list[str]:
        return list(dict.fromkeys(self._kinds[name] for name, error in self._errors.items() if bool(error.any())))

    def _change(self, kinds: Sequence[str]) -> Tensor:
        """Return how the scores change with the second side's operators of these kinds."""
        head = self._head if _LM_HEAD in kinds else 0.0
        return self.scores(frozenset(kinds)) + head - self._unchanged

    def scores(self, kinds: Set[str]) -> Tensor:
        """Return the scores of all tokens but the first of each sequence, with operators of these kinds substituted."""

        def edit(name: str, rows: Tensor, results: Tensor) -> Tensor | None:
            error = self._errors.get(name) if self._kinds[name] in kinds else None
            return None if error is None else (results.double() + error[rows].to(results.device)).to(results.dtype)

        found = self._runner.run(self._cut, 0, Recorder(self._sample, edit=edit, judges=False))
        return torch.tensor([value for _, (value, _) in sorted(found.items())], dtype=torch.float64)

    def _row(self, kinds: Sequence[str], change: Tensor) -> SubstitutedKind:
        left, whole = float((self._target - change).square().sum()), float(self._target.square().sum())
        return SubstitutedKind(kinds=tuple(kinds), rms=_rms(change), explained=1 - left / whole if whole > 0 else None)


def _operator_errors(sides: Sides) -> dict[str, Tensor]:
    errors = {}
    for name, width in sides.first.operators.select("name", "width").iter_rows():
        one, other = sides.results(name)
        if one.shape[1] == width and name != _LM_HEAD:
            errors[name] = other.double() - one.double()
    return errors


def _token_differences(sides: Sides, sample: Sample) -> tuple[Tensor, Tensor]:
    """Return the differences of the scores of the sample's tokens, in order, and the output projection's part."""
    both = (
        sides.first.tokens.join(sides.second.tokens, on=["sequence", "position"], suffix="_second")
        .filter(pl.col("position") >= 1)
        # Joining keeps no order, and scores come by sequence and position.
        .sort("sequence", "position")
    )
    target, head = [], []
    columns = ("sequence", "position", "log_probability", "log_probability_second", "replayed_log_probability_second")
    for sequence, position, one, other, replayed in both.select(columns).iter_rows():
        if sample.row(sequence, position) is None:
            continue
        target.append(other - one)
        head.append(0.0 if replayed is None else replayed - one)
    return torch.tensor(target, dtype=torch.float64), torch.tensor(head, dtype=torch.float64)


def _rms(values: Tensor) -> float:
    return finite(values.double().square().mean().sqrt()) if len(values) else 0.0
