"""Keys and values of a batch in memory that is taken once: a step writes its own, and a row that ended leaves."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer


class BatchMemory:
    """Memory that batches take one after the other: new memory costs the system a page fault per page.

    What the batch before has left in it stays there; whoever takes it writes before reading.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, Tensor] = {}

    def take(self, number: int, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return tensor `number` of a batch, of the dtype and on the device of `like`."""
        size = math.prod(shape)
        block = self._blocks.pop(number, None)
        if block is None or len(block) < size or (block.dtype, block.device) != (like.dtype, like.device):
            del block
            block = like.new_empty(size)
        self._blocks[number] = block
        return block[:size].view(*shape)


class InPlaceLayer(DynamicLayer):
    """Keys and values of one layer, [rows, heads, tokens, channels]: views of memory for `capacity` tokens per row.

    transformers' own layer is copied at every token. Every row has place for `width` tokens of its prompt, and zeros
    behind a prompt that is shorter; what is generated comes after it. Prompts may be read some rows at a time.
    """

    def __init__(self, rows: int, width: int, capacity: int, taken: BatchMemory, number: int) -> None:
        """Be layer `number` of a batch in the memory that is `taken` for it."""
        super().__init__()
        self._rows, self._width, self._capacity = rows, width, capacity
        self._taken, self._number = taken, number
        self._memory: list[Tensor] = []
        self._first_row = 0

    def turn_to(self, first_row: int, rows: int, tokens: int) -> None:
        """Let the next states be those of `rows` rows from `first_row` on, behind their first `tokens` tokens."""
        self._first_row = first_row
        if self._memory:
            self._show(rows, tokens)

    def repeat_first_row(self, tokens: int) -> None:
        """Give all rows the first `tokens` tokens of the first one."""
        for memory in self._memory:
            memory[1:, :, :tokens] = memory[:1, :, :tokens]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the states of the next tokens of every row, and return those of all tokens."""
        if not self._memory:
            self._memory = [
                self._taken.take(number, (self._rows, states.shape[1], self._capacity, states.shape[3]), states)
                for number, states in enumerate((key_states, value_states), start=2 * self._number)
            ]
            self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
            self._show(len(key_states), 0)
        rows, _, seen, _ = self.keys.shape
        end = seen + key_states.shape[2]
        self._show(rows, end)
        for whole, states, memory in zip(
            (self.keys, self.values), (key_states, value_states), self._memory, strict=True
        ):
            whole[:, :, seen:] = states
            if end < self._width:
                # Padding is never seen, but what it holds has to be finite: it is multiplied with a weight of zero.
                memory[self._first_row : self._first_row + rows, :, end : self._width] = 0
        # What the model has just computed lies in one piece, the same states in memory do not.
        return (self.keys, self.values) if seen else (key_states, value_states)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row i be what row `beam_idx[i]` was; rows that stay where they are cost nothing."""
        moved = (beam_idx != torch.arange(len(beam_idx), device=beam_idx.device)).nonzero()[:, 0]
        for memory in self._memory:
            # Whole rows of memory: they lie in one piece each, those of the views do not.
            memory.index_copy_(0, moved, memory.index_select(0, beam_idx[moved]))
        self._show(len(beam_idx), self.keys.shape[2])

    def _show(self, rows: int, tokens: int) -> None:
        end = self._first_row + rows
        self.keys, self.values = (memory[self._first_row : end, :, :tokens] for memory in self._memory)
