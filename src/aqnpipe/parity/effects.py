"""Effect of the differences of operators on log-probabilities, and the operators that explain it."""

import math
from collections.abc import Sequence
from typing import Any

import polars as pl
import torch
from torch import Tensor

from aqnpipe.artifacts.parities import LogProbabilities, SubstitutedKind, Substitution
from aqnpipe.parity.capture_file import Capture
from aqnpipe.parity.compare import Sides, finite, quantile
from aqnpipe.parity.mapping import Runner, prove
from aqnpipe.parity.recorder import Recorder
from aqnpipe.parity.sample import Sample, choose_sample

_LM_HEAD = "lm_head"
_MAX_TOGETHER = 5
"""Kinds of operators that are substituted cumulatively, before all of them."""

_MIN_TOKENS = 32
"""Tokens on which operators are substituted, at least."""

_SHORTEST_CUT = 16
"""Tokens of a sequence that is cut short, at least, where others are enough: few at once cost more each."""

_TOKENS_AT_ONCE = 64
"""Tokens of a batch of copies, at least: fewer cost more each."""

Kinds = frozenset[str]


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
        p99=finite(quantile(difference.abs(), 0.99)),
        largest=finite(difference.abs().max()),
        argmax_changes=float(changed or 0.0),  # type: ignore[arg-type]
        prefill_rms=_rms(difference[~decoded]) if bool((~decoded).any()) else None,
        decode_rms=_rms(difference[decoded]) if bool(decoded.any()) else None,
    )


class Substitutions:
    """Runs the first side's model on the recorded tokens, with the second side's operators in place of its own.

    Each sequence runs in batches of several copies, one copy for each set of operators that is substituted: large
    batches are cheaper by the token. Its scores without substitution are taken at the same place of a batch of the same
    size, so that only the substituted operators make a difference.
    """

    def __init__(self, model: Any, sides: Sides, threads: int) -> None:
        """`model`: the model of the captures in the first side's dtype; `sides` must have the same inputs."""
        sequences = sides.first.sequences
        self._errors = _operator_errors(sides)
        self._kinds = dict(sides.first.operators.select("name", "kind").iter_rows())
        passes = len(self._different_kinds()) + _MAX_TOGETHER + 1
        # All passes together cost about as much as one over all tokens.
        most = max(_MIN_TOKENS, sides.first.identity.num_tokens // passes)
        sample = enough_of(choose_sample(sides.shared.lengths, most), sequences)
        self._cut = [sequences[number][:length] for number, length in enumerate(sample.lengths)]
        self._runner = Runner(model, _TOKENS_AT_ONCE, "right", interleaved=prove(model)[0])
        self._target, self._head = _token_differences(sides, sample)
        self._unchanged: dict[tuple[int, int], Tensor] = {}

    def measured(self) -> Substitution:
        """Return the effect of every kind of operator alone, and of several together, those with the largest first."""
        kinds = self._different_kinds()
        changes = dict(zip(kinds, self.changes([frozenset({kind}) for kind in kinds]), strict=True))
        if bool(self._head.any()):
            changes[_LM_HEAD] = self._head
        order = sorted(changes, key=lambda kind: -_rms(changes[kind]))
        alone = tuple(self._row([kind], changes[kind]) for kind in order)
        groups = [order[:number] for number in range(2, min(_MAX_TOGETHER, len(order) - 1) + 1)]
        groups += [order] if len(order) > 1 else []
        found = self.changes([frozenset(group) - {_LM_HEAD} for group in groups])
        together = tuple(
            self._row(group, change + (self._head if _LM_HEAD in group else 0.0))
            for group, change in zip(groups, found, strict=True)
        )
        return Substitution(num_tokens=len(self._target), rms=_rms(self._target), alone=alone, together=together)

    def _different_kinds(self) -> list[str]:
        return list(dict.fromkeys(self._kinds[name] for name, error in self._errors.items() if bool(error.any())))

    def changes(self, sets: Sequence[Kinds]) -> list[Tensor]:
        """Return how the scores of all tokens but the first of each sequence change with each set of kinds substituted.

        The output projection is none of these kinds.
        """
        parts: list[list[Tensor]] = [[] for _ in sets]
        start = 0
        for ids in self._cut:
            rows = slice(start, start := start + len(ids))
            copies = min(len(sets), math.ceil(_TOKENS_AT_ONCE / len(ids)))
            # The first token of a sequence has no score.
            if len(ids) < 2 or not sets:
                continue
            if (rows.start, copies) not in self._unchanged:
                self._unchanged[rows.start, copies] = self._scores(ids, rows, [frozenset()] * copies)
            for first in range(0, len(sets), copies):
                stack = sets[first : first + copies]
                filled = [*stack, *[frozenset[str]()] * (copies - len(stack))]
                change = self._scores(ids, rows, filled) - self._unchanged[rows.start, copies]
                for part, of_copy in zip(parts[first:], change[: len(stack)], strict=False):
                    part.append(of_copy)
        return [torch.cat(part) if part else torch.zeros(0, dtype=torch.float64) for part in parts]

    def _scores(self, ids: Sequence[int], rows: slice, stack: Sequence[Kinds]) -> Tensor:
        """Return the scores [copies, tokens - 1] of copies of a sequence, each with its set of kinds substituted."""

        def edit(name: str, _: Tensor, results: Tensor) -> Tensor | None:
            chosen = torch.tensor([self._kinds[name] in kinds for kinds in stack])
            if name not in self._errors or not chosen.any():
                return None
            changed = results.clone().unflatten(0, (len(stack), -1))
            changed[chosen] = (changed[chosen].double() + self._errors[name][rows].to(results.device)).to(results.dtype)
            return changed.flatten(0, 1)

        recorder = Recorder(Sample((len(ids),) * len(stack)), edit=edit, judges=False)
        found = self._runner.run([ids] * len(stack), 0, recorder)
        scores = [value for _, (value, _) in sorted(found.items())]
        return torch.tensor(scores, dtype=torch.float64).reshape(len(stack), -1)

    def _row(self, kinds: Sequence[str], change: Tensor) -> SubstitutedKind:
        left, whole = float((self._target - change).square().sum()), float(self._target.square().sum())
        return SubstitutedKind(kinds=tuple(kinds), rms=_rms(change), explained=1 - left / whole if whole > 0 else None)


def enough_of(sample: Sample, sequences: Sequence[Sequence[int]]) -> Sample:
    """Return the sample without its last sequence, if only few tokens of it are left and the others are enough."""
    *others, last = sample.lengths
    is_cut = last < len(sequences[len(others)])
    return Sample(tuple(others)) if is_cut and last < _SHORTEST_CUT and sum(others) >= _MIN_TOKENS else sample


def _operator_errors(sides: Sides) -> dict[str, Tensor]:
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
        sides.first.tokens.join(sides.second.tokens, on=["sequence", "position"], suffix="_second")
        .join(lengths, on="sequence")
        .filter((pl.col("position") >= 1) & (pl.col("position") < pl.col("length")))
        # Joining keeps no order, and scores come by sequence and position.
        .sort("sequence", "position")
    )
    target = both["log_probability_second"] - both["log_probability"]
    head = (both["replayed_log_probability_second"] - both["log_probability"]).fill_null(0.0)
    return target.to_torch(), head.to_torch()


def _rms(values: Tensor) -> float:
    return finite(values.double().square().mean().sqrt()) if len(values) else 0.0
