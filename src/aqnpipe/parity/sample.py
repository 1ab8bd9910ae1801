"""The tokens that are run: in which calls, of which the operators are recorded, and their log-probabilities.

Recorded are the first tokens of the first sequences. A prefix is closed under causal attention: nothing outside of it
enters its values, so another machine can be fed exactly the same inputs, and errors put into it have their full effect.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

_LOGITS_AT_ONCE = 2**19
"""Logits that are made float64 at once: no more than fit into a processor's caches."""

Padding = Literal["left", "right"]

Score = tuple[float, int]
"""The log-probability of a token, and the most likely id in its place."""


class Token(NamedTuple):
    """A token of a forward call: its row and column in the batch, its sequence, and its position there."""

    row: int
    column: int
    sequence: int
    position: int


@dataclass(frozen=True)
class Sample:
    """The recorded tokens: the first `lengths[s]` of sequence s. Rows of all recorded tensors are in this order."""

    lengths: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        """Number of recorded tokens."""
        return sum(self.lengths)

    @property
    def positions(self) -> Tensor:
        """The position of every recorded token in its sequence, [rows]."""
        return torch.cat([torch.arange(length) for length in self.lengths])

    def row(self, sequence: int, position: int) -> int | None:
        """Return the row of a token; None if it is not recorded."""
        if sequence >= len(self.lengths) or position >= self.lengths[sequence]:
            return None
        return sum(self.lengths[:sequence]) + position

    def shared(self, other: "Sample") -> "Sample":
        """Return the tokens that both samples have."""
        pairs = zip(self.lengths, other.lengths, strict=False)
        return Sample(tuple(min(pair) for pair in pairs))

    def rows_of(self, part: "Sample") -> Tensor:
        """Return the rows of the tokens of another sample, all of which are in this one."""
        starts = torch.tensor([0, *self.lengths]).cumsum(0)
        return torch.cat([start + torch.arange(length) for start, length in zip(starts, part.lengths, strict=False)])

    def places(self, tokens: Iterable[Token]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the recorded ones of the tokens of a call: rows and columns of the batch, and rows of the sample."""
        found = [
            (token.row, token.column, row)
            for token in tokens
            if (row := self.row(token.sequence, token.position)) is not None
        ]
        rows, columns, recorded = torch.tensor(found, dtype=torch.long).reshape(-1, 3).unbind(-1)
        return rows, columns, recorded


def choose_sample(lengths: Sequence[int], max_rows: int) -> Sample:
    """Return as many of the first tokens of sequences with these `lengths` as `max_rows` allows."""
    chosen, left = [], max_rows
    for length in lengths:
        chosen.append(min(length, left))
        left -= chosen[-1]
        if not left:
            break
    return Sample(tuple(chosen))


class Call(NamedTuple):
    """One forward call over some columns of a padded batch; `mask` is None without padding, `tokens` has none of it."""

    token_ids: Tensor
    mask: Tensor | None
    positions: Tensor
    tokens: tuple[Token, ...]


def calls(
    sequences: Sequence[Sequence[int]], first_sequence: int, padding: Padding, num_decoded: int, pad_token: int
) -> Iterator[Call]:
    """Yield the calls of a batch, the prefill and `num_decoded` of one column; `first_sequence` is that of row 0."""
    width = max(map(len, sequences))
    ids = torch.full((len(sequences), width), pad_token)
    mask = torch.zeros_like(ids)
    tokens = []
    for row, sequence in enumerate(sequences):
        offset = width - len(sequence) if padding == "left" else 0
        ids[row, offset : offset + len(sequence)] = torch.tensor(sequence)
        mask[row, offset : offset + len(sequence)] = 1
        tokens += [(row, offset + position, first_sequence + row, position) for position in range(len(sequence))]
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    start = width - num_decoded
    for first, last in [(0, start), *((column, column + 1) for column in range(start, width))]:
        yield Call(
            token_ids=ids[:, first:last],
            mask=None if bool(mask.all()) else mask[:, :last],
            positions=positions[:, first:last],
            tokens=tuple(
                Token(row, column - first, sequence, position)
                for row, column, sequence, position in tokens
                if first <= column < last
            ),
        )


def score(logits: Tensor, tokens: Iterable[Token], sequences: Sequence[Sequence[int]]) -> dict[tuple[int, int], Score]:
    """Return the scores, by sequence and position, of what follows the tokens of a call in their sequences.

    `logits` are [rows, columns, vocabulary].
    """
    followed = [token for token in tokens if token.position + 1 < len(sequences[token.sequence])]
    found: dict[tuple[int, int], Score] = {}
    at_once = max(1, _LOGITS_AT_ONCE // logits.shape[-1])
    for first in range(0, len(followed), at_once):
        part = followed[first : first + at_once]
        chosen = logits[[token.row for token in part], [token.column for token in part]].double()
        places = [(token.sequence, token.position + 1) for token in part]
        targets = torch.tensor([sequences[sequence][position] for sequence, position in places]).to(chosen.device)
        values = chosen.log_softmax(-1).gather(-1, targets[:, None])[:, 0].tolist()
        found |= zip(places, zip(values, chosen.argmax(-1).tolist(), strict=True), strict=True)
    return found
