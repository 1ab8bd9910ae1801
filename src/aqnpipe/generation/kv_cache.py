"""Key-value cache of a batch in buffers allocated once: each step writes its own token in place.

transformers' own cache copies all keys and values at every token.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer


class BufferPool:
    """Buffers reused across batches: fresh memory costs the system a page fault per page.

    A buffer still contains values of the previous batch, so users must write before they read.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, Tensor] = {}

    def take(self, number: int, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return buffer `number` in this shape, with the dtype and device of `like`."""
        size = math.prod(shape)
        block = self._blocks.pop(number, None)
        if block is None or len(block) < size or (block.dtype, block.device) != (like.dtype, like.device):
            del block
            block = like.new_empty(size)
        self._blocks[number] = block
        return block[:size].view(*shape)


class InPlaceLayer(DynamicLayer):
    """Keys and values of one layer, [rows, heads, tokens, channels]: views of buffers for `capacity` tokens per row.

    Each row has `width` places for its prompt, with zeros behind a shorter prompt; generated tokens follow. Prompts can
    be read in groups of rows.
    """

    def __init__(self, rows: int, width: int, capacity: int, pool: BufferPool, number: int) -> None:
        """Create layer `number` of a batch; its buffers come from `pool`."""
        super().__init__()
        self._rows, self._width, self._capacity = rows, width, capacity
        self._pool, self._number = pool, number
        self._buffers: list[Tensor] = []
        self._first_row = 0

    def select_rows(self, first_row: int, rows: int, tokens: int) -> None:
        """Make the next update write to `rows` rows from `first_row` on, behind their first `tokens` tokens."""
        self._first_row = first_row
        if self._buffers:
            self._show(rows, tokens)

    def repeat_first_row(self, tokens: int) -> None:
        """Copy the first `tokens` tokens of the first row to all rows."""
        for buffer in self._buffers:
            buffer[1:, :, :tokens] = buffer[:1, :, :tokens]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the states of the next tokens of the selected rows; return the states of all their tokens."""
        if not self._buffers:
            self._buffers = [
                self._pool.take(number, (self._rows, states.shape[1], self._capacity, states.shape[3]), states)
                for number, states in enumerate((key_states, value_states), start=2 * self._number)
            ]
            self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
            self._show(len(key_states), 0)
        rows, _, seen, _ = self.keys.shape
        end = seen + key_states.shape[2]
        self._show(rows, end)
        for shown, states, buffer in zip(
            (self.keys, self.values), (key_states, value_states), self._buffers, strict=True
        ):
            shown[:, :, seen:] = states
            if end < self._width:
                # Padding is masked, but must be finite: attention multiplies it by a weight of zero.
                buffer[self._first_row : self._first_row + rows, :, end : self._width] = 0
        # The states just computed are contiguous, the same states in the buffers are not.
        return (self.keys, self.values) if seen else (key_states, value_states)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace row i by the old row `beam_idx[i]`; rows that keep their place cost nothing."""
        moved = (beam_idx != torch.arange(len(beam_idx), device=beam_idx.device)).nonzero()[:, 0]
        for buffer in self._buffers:
            # Rows of a buffer are contiguous, rows of the views are not.
            buffer.index_copy_(0, moved, buffer.index_select(0, beam_idx[moved]))
        self._show(len(beam_idx), self.keys.shape[2])

    def _show(self, rows: int, tokens: int) -> None:
        end = self._first_row + rows
        self.keys, self.values = (buffer[self._first_row : end, :, :tokens] for buffer in self._buffers)
