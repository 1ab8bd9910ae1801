"""Which operators explain how log-probabilities differ: those of one side are put in the place of the other's."""

from collections.abc import Sequence, Set
from typing import Any

import polars as pl
import torch
from torch import Tensor

from aqnpipe.artifacts.parities import SubstitutedKind, Substitution
from aqnpipe.parity.compare import Sides, root_mean_square, scored_by_both
from aqnpipe.parity.mapping import Runner, prove
from aqnpipe.parity.recorder import Recorder
from aqnpipe.parity.sample import Sample, choose_sample

_LM_HEAD = "lm_head"
_MAX_TOGETHER = 5
"""Kinds of operators that are substituted cumulatively, before all of them."""

_MIN_TOKENS = 32
"""Tokens on which operators are substituted, at least."""


class Substitutions:
    """Runs the first side's model on recorded tokens, with the second side's operators in place of its own.

    The scores without substitution are those of the same batches, so that only the substituted operators make a
    difference.
    """

    def __init__(self, model: Any, sides: Sides) -> None:
        """`model`: the model of the captures in the first side's dtype; `sides` must have the same inputs."""
        self._kinds = dict(sides.first.operators.select("name", "kind").iter_rows())
        self._errors = _operator_errors(sides)
        self._different = list(dict.fromkeys(self._kinds[name] for name, error in self._errors.items() if error.any()))
        passes = len(self._different) + _MAX_TOGETHER + 1
        # All passes together cost about as much as one over all tokens.
        most = max(_MIN_TOKENS, sides.first.identity.num_tokens // passes)
        self._sample = choose_sample(sides.shared.lengths, most)
        self._cut = [ids[:length] for ids, length in zip(sides.first.sequences, self._sample.lengths, strict=False)]
        self._runner = Runner(model, sides.first.identity.batch_size, "right", interleaved=prove(model)[0])
        self._target, self._head = _token_differences(sides, self._sample)
        self.unchanged = self._scores(frozenset())

    def measured(self) -> Substitution:
        """Return the effect of every kind of operator alone, and of several together, those with the largest first."""
        changes = {kind: self.change({kind}) for kind in self._different}
        if bool(self._head.any()):
            changes[_LM_HEAD] = self._head
        order = sorted(changes, key=lambda kind: -root_mean_square(changes[kind]))
        groups = [order[:number] for number in range(2, min(_MAX_TOGETHER, len(order) - 1) + 1)]
        groups += [order] if len(order) > 1 else []
        return Substitution(
            num_tokens=len(self._target),
            rms=root_mean_square(self._target),
            alone=tuple(self._row([kind], changes[kind]) for kind in order),
            together=tuple(
                self._row(group, self.change(set(group)) + (self._head if _LM_HEAD in group else 0.0))
                for group in groups
            ),
        )

    def change(self, kinds: Set[str]) -> Tensor:
        """Return how the scores of all tokens but the first of each sequence change with these kinds substituted.

        The output projection is none of these kinds.
        """
        return self._scores(kinds) - self.unchanged

    def _scores(self, kinds: Set[str]) -> Tensor:
        def edit(name: str, rows: Tensor, results: Tensor) -> Tensor | None:
            if name not in self._errors or self._kinds[name] not in kinds:
                return None
            return (results.double() + self._errors[name][rows].to(results.device)).to(results.dtype)

        found = self._runner.run(self._cut, 0, Recorder(self._sample, edit=edit, judges=False))
        return torch.tensor([value for _, (value, _) in sorted(found.items())], dtype=torch.float64)

    def _row(self, kinds: Sequence[str], change: Tensor) -> SubstitutedKind:
        left, whole = float((self._target - change).square().sum()), float(self._target.square().sum())
        explained = 1 - left / whole if whole > 0 else None
        return SubstitutedKind(kinds=tuple(kinds), rms=root_mean_square(change), explained=explained)


def _operator_errors(sides: Sides) -> dict[str, Tensor]:
    """Return the errors [rows of the first side's sample, width] of the operators that have all their channels."""
    errors = {}
    for name, width in sides.first.operators.select("name", "width").iter_rows():
        one, other = sides.results(name)
        if one.shape[1] == width and name != _LM_HEAD:
            errors[name] = other.double() - one.double()
    return errors


def _token_differences(sides: Sides, sample: Sample) -> tuple[Tensor, Tensor]:
    """Return the differences of the scores of the sample's tokens, in order, and the output projection's part."""
    lengths = pl.DataFrame({"sequence": range(len(sample.lengths)), "length": sample.lengths})
    both = (
        scored_by_both(sides.first, sides.second)
        .join(lengths, on="sequence")
        .filter(pl.col("position") < pl.col("length"))
        # Joining keeps no order, and scores come by sequence and position.
        .sort("sequence", "position")
    )
    target = both["log_probability_second"] - both["log_probability"]
    head = (both["replayed_log_probability_second"] - both["log_probability"]).fill_null(0.0)
    return target.to_torch(), head.to_torch()
