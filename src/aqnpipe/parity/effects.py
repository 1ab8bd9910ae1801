"""Effect of the differences of operators on log-probabilities, and the operators that explain it."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl
import torch
from torch import Tensor

from aqnpipe.artifacts.parities import CaptureConfig, LogProbabilities, SubstitutedKind, Substitution
from aqnpipe.parity.capture import Passes
from aqnpipe.parity.capture_file import Capture
from aqnpipe.parity.compare import Sides, finite
from aqnpipe.parity.expected import AttentionFacts
from aqnpipe.parity.forms import Operator
from aqnpipe.parity.mapping import prove
from aqnpipe.parity.recorder import Recorder
from aqnpipe.parity.sample import Call, Sample, batches_of, choose_sample

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
        p99=finite(difference.abs().sort()[0][math.ceil(0.99 * len(difference)) - 1]),
        largest=finite(difference.abs().max()),
        argmax_changes=float(changed or 0.0),  # type: ignore[arg-type]
        prefill_rms=_rms(difference[~decoded]) if bool((~decoded).any()) else None,
        decode_rms=_rms(difference[decoded]) if bool(decoded.any()) else None,
    )


class _Substitute(Recorder):
    """Adds errors to the results of operators, in each copy of a sequence those of its own kinds; records nothing."""

    def __init__(self, errors: Mapping[str, Mapping[int, Tensor]], sample: Sample) -> None:
        """`errors`: by operator and number of the copy, [tokens, width] in float64."""
        super().__init__(sample, judges=False, keeps_full=False)
        self._errors = errors

    def begin(self, call: Call) -> None:
        """See `Recorder`."""
        if len(call.places[2]) != call.token_ids.numel():
            raise RuntimeError("copies of a sequence are padded or cut; this is a bug")
        super().begin(call)

    def last(self, name: str) -> Tensor:
        """Return nothing: inputs of operators are not looked at."""
        return torch.empty(0)

    def has(self, name: str) -> bool:
        """Return that an operator was seen; see `last`."""
        return True

    def rows_of(self, tensor: Tensor) -> Tensor:
        """Return the tensor as it is; see `last`."""
        return tensor

    def see(self, operator: Operator, inputs: Sequence[Tensor], output: Tensor) -> Tensor | None:
        """Return the results [copies, tokens, ...] with the errors; None where there are none."""
        errors = self._errors.get(operator.name)
        if not errors:
            return None
        changed = output.detach().clone()
        for copy, error in errors.items():
            values = changed[copy]
            values.copy_(values.double().add_(error.to(values.device).reshape(values.shape)))
        return changed

    def see_keys(self, operator: Operator, inputs: Sequence[Tensor], keys: Tensor) -> Tensor | None:
        """See `see`: without decoding, the keys of a call are all keys."""
        return self.see(operator, inputs, keys)

    def see_attention(
        self, operator: Operator, inputs: tuple[Tensor, Tensor, Tensor], facts: AttentionFacts, output: Tensor
    ) -> Tensor | None:
        """See `see`."""
        return self.see(operator, inputs, output)


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
        sample = enough_of(choose_sample(_shared_lengths(sides), most), sequences)
        self._cut = [tuple(sequences[number][:length]) for number, length in enumerate(sample.lengths)]
        config = CaptureConfig(dtype=sides.first.identity.dtype, padding="right", num_decoded=0, threads=threads)
        self._passes = Passes(model, prove(model)[0], config, 0)
        self._target, self._head = _token_differences(sides, sample)
        self._unchanged: dict[tuple[int, int], Tensor] = {}

    def measured(self) -> Substitution:
        """Return the effect of every kind of operator alone, and of several together, those with the largest first."""
        kinds = self._different_kinds()
        scores = self._scores([*(frozenset({kind}) for kind in kinds), frozenset(kinds)])
        changes = {kind: _change(scores[frozenset({kind})]) for kind in kinds}
        if bool(self._head.any()):
            changes[_LM_HEAD] = self._head
        order = sorted(changes, key=lambda kind: -_rms(changes[kind]))
        alone = tuple(self._row([kind], changes[kind]) for kind in order)
        groups = [order[:number] for number in range(2, min(_MAX_TOGETHER, len(order) - 1) + 1)]
        groups += [order] if len(order) > 1 else []
        sets = [frozenset(group) - {_LM_HEAD} for group in groups]
        scores |= self._scores([wanted for wanted in sets if wanted not in scores])
        together = tuple(
            self._row(group, _change(scores[found], self._head if _LM_HEAD in group else 0.0))
            for group, found in zip(groups, sets, strict=True)
        )
        return Substitution(num_tokens=len(self._target), rms=_rms(self._target), alone=alone, together=together)

    def _different_kinds(self) -> list[str]:
        return list(dict.fromkeys(self._kinds[name] for name, error in self._errors.items() if bool(error.any())))

    def _scores(self, sets: Sequence[Kinds]) -> dict[Kinds, tuple[Tensor, Tensor]]:
        """Return the scores of all tokens with each set of kinds substituted, and without, at the same places."""
        wanted = [kinds for kinds in dict.fromkeys(sets) if kinds]
        parts: dict[Kinds, list[tuple[Tensor, Tensor]]] = {kinds: [] for kinds in wanted}
        start = 0
        for ids in self._cut:
            rows = slice(start, start := start + len(ids))
            copies = min(len(wanted), math.ceil(_TOKENS_AT_ONCE / len(ids)))
            # The first token of a sequence has no score.
            if len(ids) < 2 or not wanted:
                continue
            clean = self._clean(ids, rows, copies)
            for first in range(0, len(wanted), copies):
                stack = wanted[first : first + copies]
                found = self._run(ids, rows, [*stack, *[frozenset()] * (copies - len(stack))])
                for kinds, changed, unchanged in zip(stack, found, clean, strict=False):
                    parts[kinds].append((changed, unchanged))
        return {
            kinds: (torch.cat([one for one, _ in found]), torch.cat([one for _, one in found]))
            for kinds, found in parts.items()
        }

    def _clean(self, ids: tuple[int, ...], rows: slice, copies: int) -> Tensor:
        key = rows.start, copies
        if key not in self._unchanged:
            self._unchanged[key] = self._run(ids, rows, [frozenset()] * copies)
        return self._unchanged[key]

    def _run(self, ids: tuple[int, ...], rows: slice, stack: Sequence[Kinds]) -> Tensor:
        """Return the scores [copies, tokens - 1] of copies of a sequence, each with its set of kinds substituted."""
        errors = {
            name: {copy: error[rows] for copy, kinds in enumerate(stack) if self._kinds[name] in kinds}
            for name, error in self._errors.items()
        }
        sample = Sample((len(ids),) * len(stack))
        found = self._passes.run(batches_of([ids] * len(stack), len(stack), "right"), _Substitute(errors, sample))
        places = [[found[copy, position][0] for position in range(1, len(ids))] for copy in range(len(stack))]
        return torch.tensor(places, dtype=torch.float64)

    def _row(self, kinds: Sequence[str], change: Tensor) -> SubstitutedKind:
        left, whole = float((self._target - change).square().sum()), float(self._target.square().sum())
        return SubstitutedKind(kinds=tuple(kinds), rms=_rms(change), explained=1 - left / whole if whole > 0 else None)


def _change(scores: tuple[Tensor, Tensor], head: Tensor | float = 0.0) -> Tensor:
    changed, unchanged = scores
    return changed + head - unchanged


def _shared_lengths(sides: Sides) -> list[int]:
    lengths = zip(sides.first.sample.lengths, sides.second.sample.lengths, strict=False)
    return [min(pair) for pair in lengths]


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
