"""Records what operators make of the sampled tokens, and puts other values in their place where that is asked."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from aqnpipe.errors import ModelError
from aqnpipe.parity import expected
from aqnpipe.parity.expected import AttentionFacts, Expected
from aqnpipe.parity.forms import ActivationForm, EmbeddingForm, LinearForm, Operator, RotaryForm
from aqnpipe.parity.sample import Call, Sample
from aqnpipe.seeding import keyed_generator

MAX_CHANNELS = 64
"""Output channels of every operator whose exact results are computed and stored."""


class Edits(Protocol):
    """Values to put in the place of an operator's results."""

    def apply(self, name: str, rows: Tensor, values: Tensor) -> Tensor | None:
        """Return what replaces `values` [rows, width] of an operator; None to leave them."""


@lru_cache(maxsize=64)
def sampled_channels(width: int) -> Tensor:
    """Return the sampled output channels, in order, not to be written to; random: a stride meets the same lanes."""
    if width <= MAX_CHANNELS:
        return torch.arange(width)
    return torch.randperm(width, generator=keyed_generator("cpu", 0, "parity.channels", width))[:MAX_CHANNELS].sort()[0]


@dataclass
class Tally:
    """How far results are from exact ones, as multiples of the bounds, and the agreement with known algorithms.

    `reduced` is None where no such bound exists. `equal` counts elements by algorithm, of `elements`.
    """

    strict: float = 0.0
    loose: float = 0.0
    reduced: float | None = None
    elements: int = 0
    equal: dict[str, int] = field(default_factory=dict)

    def add(self, output: Tensor, found: Expected) -> None:
        """Take in results of some rows and channels."""
        error = (output.double() - found.exact).abs()
        self.strict = max(self.strict, _largest(error / found.strict))
        self.loose = max(self.loose, _largest(error / found.loose))
        if found.reduced is not None:
            self.reduced = max(self.reduced or 0.0, _largest(error / found.reduced))

    def count(self, equal: dict[str, int], elements: int) -> None:
        """Take in the agreement with algorithms."""
        self.elements += elements
        for name, number in equal.items():
            self.equal[name] = self.equal.get(name, 0) + number


@dataclass
class Recorded:
    """Record of one operator: rows of results, exact results, their bounds, and sizes of the inputs.

    `is_linked`: its inputs were the results of operators seen before, so that nothing else computes in between.
    """

    operator: Operator
    width: int
    output: Tensor
    exact: Tensor
    bound: Tensor
    input_rms: Tensor
    tally: Tally = field(default_factory=Tally)
    is_linked: bool = True
    seen: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))


class Recorder:
    """Sees the results of operators in their order. `begin` names the call that the next results belong to.

    `edits` replace results after they were recorded, so the next operator gets them as its input. Without `judges`,
    no exact results are computed. `keeps_full`: keep all channels of results, otherwise the sampled ones.
    """

    def __init__(
        self, sample: Sample, *, edits: Edits | None = None, judges: bool = True, keeps_full: bool = True
    ) -> None:
        self.sample = sample
        self.operators: dict[str, Recorded] = {}
        self._edits, self._judges, self._keeps_full = edits, judges, keeps_full
        self._call: Call | None = None
        self._last: dict[str, Tensor] = {}
        self._attention: dict[str, tuple[Tensor, Tensor, Tensor, AttentionFacts]] = {}

    def begin(self, call: Call) -> None:
        """Start a forward call."""
        self._call, self._last = call, {}

    @property
    def is_idle(self) -> bool:
        """Return whether no token of this call is recorded."""
        return self._call is None or not len(self._call.places[2])

    @property
    def num_columns(self) -> int:
        """Number of columns of this call."""
        return 0 if self._call is None else self._call.last - self._call.first

    def last(self, name: str) -> Tensor:
        """Return the rows of an operator's results in this call, as the next operator gets them."""
        return self._last[name]

    def has(self, name: str) -> bool:
        """Return whether an operator was seen in this call."""
        return name in self._last

    def rows_of(self, tensor: Tensor) -> Tensor:
        """Return the recorded tokens of a tensor [batch, columns, ...] of this call as [rows, width], detached."""
        numbers, columns, _ = self._places(tensor)
        return tensor.detach()[numbers, columns].flatten(1)

    def see(self, operator: Operator, inputs: Sequence[Tensor], output: Tensor) -> Tensor | None:
        """Record an operator's results [batch, columns, ...]; `inputs` are rows. Return them edited, or None."""
        if self.is_idle:
            return None
        numbers, columns, rows = self._places(output)
        values = output.detach()[numbers, columns].flatten(1)
        edited = None if self._edits is None else self._edits.apply(operator.name, rows.cpu(), values)
        self._record(operator, tuple(inputs), values, edited)
        self._last[operator.name] = values if edited is None else edited
        if edited is None:
            return None
        changed = output.detach().clone()
        changed[numbers, columns] = edited.reshape(changed[numbers, columns].shape)
        return changed

    def see_keys(self, operator: Operator, inputs: Sequence[Tensor], keys: Tensor) -> Tensor | None:
        """Like `see` for rotated keys [batch, columns since the start, ...]; those in the cache are edited too."""
        call = self._call
        if call is None or self.is_idle:
            return None
        self._record(operator, tuple(inputs), (values := self.rows_of(keys[:, -(call.last - call.first) :])))
        self._last[operator.name] = values
        if self._edits is None:
            return None
        if keys.shape[1] != call.last:
            raise ModelError(
                f"{operator.name}: attention got {keys.shape[1]} keys for {call.last} tokens, which a replay needs"
            )
        numbers, columns, rows = (place.to(keys.device) for place in call.keys)
        before = keys.detach()[numbers, columns].flatten(1)
        edited = self._edits.apply(operator.name, rows.cpu(), before)
        if edited is None:
            return None
        changed = keys.detach().clone()
        changed[numbers, columns] = edited.reshape(changed[numbers, columns].shape)
        self._last[operator.name] = self.rows_of(changed[:, -(call.last - call.first) :])
        return changed

    def see_attention(
        self, operator: Operator, inputs: tuple[Tensor, Tensor, Tensor], facts: AttentionFacts, output: Tensor
    ) -> Tensor | None:
        """Like `see` for attention; `inputs` are rows [rows, heads, dim] of this call."""
        if self.is_idle:
            return None
        rows = self._places(output)[2].cpu()
        if self._judges:
            if operator.name not in self._attention:
                empty = (part.new_zeros(self.sample.num_rows, *part.shape[1:], device="cpu") for part in inputs)
                self._attention[operator.name] = (*empty, facts)  # type: ignore[assignment]
            for kept, part in zip(self._attention[operator.name][:3], inputs, strict=True):
                kept[rows] = part.cpu()
        return self.see(operator, [part.flatten(1) for part in inputs], output)

    def finish(self) -> dict[str, Recorded]:
        """Return what was recorded, by operator; ModelError unless every sampled token was seen exactly once."""
        for name, (query, key, value, facts) in self._attention.items():
            self._judge_attention(self.operators[name], query, key, value, facts)
        if not self.operators:
            raise ModelError("no operator was seen: no forward pass was over the tokens of the capture")
        wanted = torch.arange(self.sample.num_rows)
        for name, found in self.operators.items():
            if not torch.equal(found.seen.sort()[0], wanted):
                raise ModelError(
                    f"operator {name}: seen for {len(found.seen)} tokens, expected each of {len(wanted)} once; "
                    "a forward pass of another kind (profiling, padding) would be compared"
                )
        return self.operators

    @property
    def _running(self) -> Call:
        if self._call is None:
            raise RuntimeError("no call has begun; this is a bug")
        return self._call

    def _places(self, tensor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        expected_shape = self._running.token_ids.shape
        if tensor.shape[:2] != expected_shape or tensor.dim() < 3:
            raise ModelError(
                f"parity: an operator has values of shape {list(tensor.shape)}, expected a row of channels for each of "
                f"{list(expected_shape)} tokens"
            )
        numbers, columns, rows = (place.to(tensor.device) for place in self._running.places)
        return numbers, columns, rows

    def _record(
        self, operator: Operator, inputs: tuple[Tensor, ...], values: Tensor, other: Tensor | None = None
    ) -> None:
        numbers, columns, rows = self._running.places
        width, channels = values.shape[1], sampled_channels(values.shape[1])
        kept = values if self._keeps_full and not operator.is_wide else values[:, channels.to(values.device)]
        found = self.operators.get(operator.name)
        if found is None:
            found = self.operators[operator.name] = _empty(operator, width, kept, len(channels), self.sample.num_rows)
        found.output[rows] = kept.cpu()
        found.seen = torch.cat((found.seen, rows))
        if not self._judges:
            return
        found.is_linked &= self._are_linked(operator, inputs)
        found.input_rms[rows] = inputs[0].detach().float().square().mean(-1).sqrt().cpu()
        if operator.form is None:
            return
        positions = self._running.positions[numbers, columns]
        judged = self._judged_channels(operator, channels, values, other)
        whole = operator.form.expected(inputs, positions, judged, values.dtype)
        found.tally.add(values.cpu()[:, judged], whole)
        kept_results = whole.at(torch.isin(judged, channels))
        found.exact[rows], found.bound[rows] = kept_results.exact, kept_results.loose.float()
        if values.dtype in (torch.bfloat16, torch.float16):
            candidates = operator.form.candidates(inputs, positions, values.dtype)
            found.tally.count(expected.equal_shares(values.cpu(), candidates), values.numel())

    def _judged_channels(self, operator: Operator, sampled: Tensor, values: Tensor, other: Tensor | None) -> Tensor:
        """Return the channels to compare with exact results, in order: all, of a linear the sampled ones.

        The exact result of a linear costs as much as the operator. In a replay it is computed also for the channels
        that differ most from those of the other side, so that a fault of one channel does not escape the sample.
        """
        if not isinstance(operator.form, LinearForm):
            return torch.arange(values.shape[1])
        if other is None:
            return sampled
        apart, size = (values.double() - other.double()).abs().amax(0), other.double().square().mean(0).sqrt()
        share = (apart / (size + size.mean())).nan_to_num(torch.inf, posinf=torch.inf)
        return torch.cat((sampled, share.topk(min(MAX_CHANNELS, len(share))).indices.cpu())).unique()

    def _are_linked(self, operator: Operator, inputs: tuple[Tensor, ...]) -> bool:
        """Return whether the inputs are results seen in this call. Those of other forms are taken from them anyway."""
        if isinstance(operator.form, EmbeddingForm | RotaryForm | ActivationForm):
            return True
        latest = list(reversed(self._last.values()))
        # The values of attention may be the last columns of a merged projection.
        is_attention = operator.form is None
        return all(
            any(
                torch.equal(part, seen[:, -part.shape[1] :].to(part))
                for seen in latest
                if seen.shape == part.shape or (is_attention and seen.shape[1] > part.shape[1])
            )
            for part in inputs
        )

    def _judge_attention(
        self, found: Recorded, query: Tensor, key: Tensor, value: Tensor, facts: AttentionFacts
    ) -> None:
        channels, start = sampled_channels(found.width), 0
        is_full = found.output.shape[1] == found.width
        for length in self.sample.lengths:
            rows = slice(start, start := start + length)
            dtype = found.output.dtype
            whole = expected.attention(query[rows], key[rows], value[rows], facts, dtype)
            judged, output = whole.at(channels), found.output[rows]
            found.exact[rows], found.bound[rows] = judged.exact, judged.loose.float()
            found.tally.add(output, whole if is_full else judged)
            plain = facts.window is None and facts.soft_cap is None
            if is_full and plain and dtype in (torch.bfloat16, torch.float16):
                candidates = expected.attentions(query[rows], key[rows], value[rows], facts.scaling, dtype)
                found.tally.count(expected.equal_shares(output, candidates), output.numel())


def _empty(operator: Operator, width: int, kept: Tensor, channels: int, rows: int) -> Recorded:
    output, exact = torch.zeros(rows, kept.shape[1], dtype=kept.dtype), torch.zeros(rows, channels, dtype=torch.float64)
    return Recorded(operator, width, output, exact, bound=torch.zeros(rows, channels), input_rms=torch.zeros(rows))


def _largest(ratios: Tensor) -> float:
    largest = float(ratios.max())
    return largest if math.isfinite(largest) else math.inf
