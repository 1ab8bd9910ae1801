"""Which tokens are run, in which batches and calls, and of which the operators are recorded.

Recorded are the first tokens of the first sequences. A prefix is closed under causal attention: nothing outside of it
enters its values, so another machine can be fed exactly the same inputs, and errors put into it have their full effect.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Padding = Literal["left", "right"]


@dataclass(frozen=True)
class Sample:
    """The recorded tokens: the first `lengths[s]` of sequence s. Rows of all recorded tensors are in this order."""

    lengths: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        """Number of recorded tokens."""
        return sum(self.lengths)

    def row(self, sequence: int, position: int) -> int | None:
        """Return the row of a token; None if it is not recorded."""
        if sequence >= len(self.lengths) or position >= self.lengths[sequence]:
            return None
        return sum(self.lengths[:sequence]) + position


def choose_sample(lengths: Sequence[int], max_rows: int) -> Sample:
    """Return as many of the first tokens of sequences with these `lengths` as `max_rows` allows."""
    chosen, left = [], max_rows
    for length in lengths:
        chosen.append(min(length, left))
        left -= chosen[-1]
        if not left:
            break
    return Sample(tuple(chosen))


@dataclass(frozen=True)
class Call:
    """One forward call: columns `first` to `last` (exclusive) of a padded batch.

    `places` are the recorded tokens of this call as (row of the batch, column of the call, row of the sample);
    `keys` the recorded tokens whose keys the call reads, with columns from the start of the batch.
    """

    token_ids: Tensor
    mask: Tensor | None
    positions: Tensor
    first: int
    last: int
    places: tuple[Tensor, Tensor, Tensor]
    keys: tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Batch:
    """Sequences of one batch, padded to one width; `offsets` are the columns of their first tokens."""

    first_sequence: int
    sequences: tuple[tuple[int, ...], ...]
    padding: Padding

    @property
    def width(self) -> int:
        """Number of columns."""
        return max(map(len, self.sequences))

    @property
    def offsets(self) -> tuple[int, ...]:
        """Column of the first token of each sequence."""
        return tuple(self.width - len(ids) if self.padding == "left" else 0 for ids in self.sequences)

    def calls(self, sample: Sample, num_decoded: int, pad_token: int) -> Iterator[Call]:
        """Yield the prefill and `num_decoded` calls of one column each."""
        ids = torch.full((len(self.sequences), self.width), pad_token)
        mask = torch.zeros_like(ids)
        for number, (offset, sequence) in enumerate(zip(self.offsets, self.sequences, strict=True)):
            ids[number, offset : offset + len(sequence)] = torch.tensor(sequence)
            mask[number, offset : offset + len(sequence)] = 1
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        start = self.width - num_decoded
        for first, last in [(0, start), *((column, column + 1) for column in range(start, self.width))]:
            yield Call(
                token_ids=ids[:, first:last],
                mask=None if bool(mask.all()) else mask[:, :last],
                positions=positions[:, first:last],
                first=first,
                last=last,
                places=self._places(sample, first, last),
                keys=self._places(sample, 0, last),
            )

    def _places(self, sample: Sample, first: int, last: int) -> tuple[Tensor, Tensor, Tensor]:
        found = [
            (number, offset + position - first, row)
            for number, (offset, sequence) in enumerate(zip(self.offsets, self.sequences, strict=True))
            for position in range(len(sequence))
            if first <= offset + position < last
            and (row := sample.row(self.first_sequence + number, position)) is not None
        ]
        numbers, columns, rows = torch.tensor(found, dtype=torch.long).reshape(-1, 3).unbind(-1)
        return numbers, columns, rows


def batches_of(sequences: Sequence[Sequence[int]], batch_size: int, padding: Padding) -> list[Batch]:
    """Return the sequences in batches, in their order."""
    rows = tuple(map(tuple, sequences))
    return [Batch(first, rows[first : first + batch_size], padding) for first in range(0, len(rows), batch_size)]
