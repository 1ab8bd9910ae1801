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

    The longest completions come first. A row that is longer than `most_tokens` is a group of its own. All workers get
    the same number of groups, because their forwards exchange gradients or weights: a collective operation, for which
    each has the same number of rows.
    """
    groups: list[list[int]] = []
    for row in sorted(range(len(prompts)), key=lambda row: (-completions[row], -prompts[row], row)):
        group = [*groups[-1], row] if groups else []
        if group and len(group) * (_longest(prompts, group) + _longest(completions, group)) <= most_tokens:
            groups[-1] = group
        else:
            groups.append([row])
    most_groups = max(gathered(len(groups)))
    while len(groups) < most_groups:
        place, rows = max(enumerate(groups), key=lambda entry: len(entry[1]))
        groups[place : place + 1] = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    return [Group(rows, _longest(prompts, rows), _longest(completions, rows)) for rows in groups]


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


def _longest(lengths: Sequence[int], rows: Sequence[int]) -> int:
    return max(lengths[row] for row in rows)
