"""Keys and values of a batch in memory that is taken once: a step writes its own, and a row that ended leaves."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer


class InPlaceLayer(DynamicLayer):
    """Keys and values of one layer, [rows, heads, tokens, channels]: views of memory for `capacity` tokens per row.

    transformers' own layer is copied at every token. Every row has place for `width` tokens of its prompt, and zeros
    behind a prompt that is shorter; what is generated comes after it.
    """

    def __init__(self, rows: int, width: int, capacity: int) -> None:
        super().__init__()
        self._rows, self._width, self._capacity = rows, width, capacity
        self._memory: list[Tensor] = []

    def take_prompts(self, first_row: int, keys: Tensor, values: Tensor) -> None:
        """Take the states of some prompts, [prompts, heads, tokens, channels], for the rows from `first_row` on."""
        if not self._memory:
            self._memory = [
                states.new_empty((self._rows, states.shape[1], self._capacity, states.shape[3]))
                for states in (keys, values)
            ]
            self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        for memory, states in zip(self._memory, (keys, values), strict=True):
            place = memory[first_row : first_row + len(states)]
            place[:, :, : states.shape[2]] = states
            # Padding is never seen, but what it holds has to be finite: it is multiplied with a weight of zero.
            place[:, :, states.shape[2] : self._width] = 0
        self._show(self._rows, self._width)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the states of the next token of every row, and return those of all tokens."""
        rows, _, seen, _ = self.keys.shape
        self._show(rows, seen + key_states.shape[2])
        self.keys[:, :, seen:] = key_states
        self.values[:, :, seen:] = value_states
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row i be what row `beam_idx[i]` was; rows that stay where they are cost nothing."""
        moved = (beam_idx != torch.arange(len(beam_idx), device=beam_idx.device)).nonzero()[:, 0]
        for memory in self._memory:
            # Whole rows of memory: they lie in one piece each, those of the views do not.
            memory.index_copy_(0, moved, memory.index_select(0, beam_idx[moved]))
        self._show(len(beam_idx), self.keys.shape[2])

    def _show(self, rows: int, tokens: int) -> None:
        self.keys, self.values = (memory[:rows, :, :tokens] for memory in self._memory)
