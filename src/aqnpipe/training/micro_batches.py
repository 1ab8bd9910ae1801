"""Micro-batches by tokens: sequences of similar length together, padded to the longest of their own micro-batch.

TRL pads the sequences of a rollout to the longest prompt (on the left) and to the longest completion (on the right) of
all. Micro-batches by sequences keep these columns, most of which are padding. Here a micro-batch keeps the columns that
one of its rows needs, and has as many rows as fit into a number of tokens, padding included. A step trains on the same
sequences either way, and its loss is a sum over their tokens, so that only the order of sums differs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from aqnpipe.training.ranks import gathered

Batch = dict[str, Any]
"""Tensors of some sequences by TRL's names, of one row per sequence or without dimensions."""


@dataclass(frozen=True)
class Group:
    """Rows of a padded batch, and the tokens of the longest prompt and the longest completion among them."""

    rows: list[int]
    prompt: int
    completion: int

    def cut(self, name: str, tensor: Tensor) -> Tensor:
        """Return this group's rows of the tensor `name` without columns in which all of them have padding."""
        picked = tensor[self.rows]
        if tensor.ndim < 2:
            return picked
        return picked[:, -self.prompt :] if name.startswith("prompt") else picked[:, : self.completion]


def groups_by_tokens(prompts: Sequence[int], completions: Sequence[int], most_tokens: int) -> list[Group]:
    """Return groups of at most `most_tokens` tokens with padding, from the lengths of prompts and completions by row.

    The longest completions come first. A row that is longer than `most_tokens` is a group of its own. Call it on all
    workers, which have the same number of rows: they get groups of the same numbers of rows, because they exchange
    gradients, shared weights and metrics of each.
    """
    rows = sorted(range(len(prompts)), key=lambda row: (-completions[row], -prompts[row], row))
    of_workers = gathered([(prompts[row], completions[row]) for row in rows])
    starts: list[int] = []
    for end in range(1, len(rows) + 1):
        if not starts or any(_tokens(lengths[starts[-1] : end]) > most_tokens for lengths in of_workers):
            starts.append(end - 1)
    groups = [rows[start:end] for start, end in zip(starts, [*starts[1:], None], strict=True)]
    return [Group(group, max(prompts[row] for row in group), completions[group[0]]) for group in groups]


def _tokens(lengths: Sequence[tuple[int, int]]) -> int:
    """Return the tokens of rows with these lengths of prompt and completion, padded to the longest."""
    return len(lengths) * sum(map(max, zip(*lengths, strict=True)))


def micro_batches(batch: Mapping[str, Any], most_tokens: int) -> list[Batch]:
    """Return the sequences of one optimiser step in micro-batches of at most `most_tokens` tokens."""
    prompts, completions = (batch[name].sum(dim=1).tolist() for name in ("prompt_mask", "completion_mask"))
    return [
        {
            name: group.cut(name, value) if isinstance(value, Tensor) and value.ndim else value
            for name, value in batch.items()
        }
        for group in groups_by_tokens(prompts, completions, most_tokens)
    ]
