"""Decoding a batch token by token, from which rows that have ended leave.

transformers' `generate` computes every row until the last one has ended, pads every prompt to the longest, and copies
keys and values at every token. Here a step costs what its living rows cost.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from aqnpipe.generation.grouped_attention import grouped_attention
from aqnpipe.generation.kv_cache import BatchMemory, InPlaceLayer

_PROMPT_TOKENS_AT_ONCE = 2048
"""Tokens of prompts, padding included, that one forward reads: few enough to stay in a CPU's cache."""
_FEWEST_SHARED_TOKENS = 16
"""A beginning that is shorter is not worth a forward of its own."""


class Chooser(Protocol):
    """Chooses the next token of every row."""

    def __call__(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        """Return tokens [rows] by their logits [rows, vocabulary]; `rows` says which of the batch they are."""
        ...


def decode(
    model: Any,
    prompts: Sequence[Sequence[int]],
    choose: Chooser,
    *,
    is_over: Callable[[Sequence[int]], bool],
    padding_token: int,
    limit: int,
    memory: BatchMemory,
    reads_beginning_once: bool = False,
) -> list[list[int]]:
    """Return up to `limit` tokens for each of the prompts (token ids), until with one of them a response `is_over`.

    The first forwards read the prompts, shortest first, those of like length together; before them one reads what all
    prompts begin with, if `reads_beginning_once` allows it and there is enough. Each one after them has a token of
    every row that goes on; when rows leave, the last ones take their places.
    """
    responses: list[list[int]] = [[] for _ in prompts]
    with torch.no_grad(), grouped_attention(model.config):
        batch = _Batch(model, prompts, padding_token, limit, memory, reads_beginning_once)
        logits = batch.read_prompts()
        for step in range(1, limit + 1):
            tokens = choose(logits, batch.rows)
            chosen = tokens.tolist()
            for row, token in zip(batch.rows, chosen, strict=True):
                responses[row].append(token)
            living = without_gaps([not is_over(responses[row]) for row in batch.rows])
            if not living or step == limit:
                break
            if len(living) < len(chosen):
                tokens = tokens[batch.keep(living)]
            logits = batch.read(tokens)
    return responses


def without_gaps(lives: Sequence[bool]) -> list[int]:
    """Return the living places, those at the end moved into the gaps before them, so that few have to move."""
    count = sum(lives)
    last = iter([place for place in range(len(lives) - 1, count - 1, -1) if lives[place]])
    return [place if lives[place] else next(last) for place in range(count)]


def _num_shared(prompts: Sequence[Sequence[int]]) -> int:
    """Return how many tokens all prompts begin with, if a forward of their own is worth it; each keeps a last one."""
    alike = sum(1 for _ in takewhile(lambda tokens: len(set(tokens)) == 1, zip(*prompts, strict=False)))
    shared = min(alike, min(map(len, prompts)) - 1)
    return shared if len(prompts) > 1 and shared >= _FEWEST_SHARED_TOKENS else 0


class _Batch:
    """The rows that have not ended: their numbers, their keys and values, and which tokens they see.

    Prompts begin at the first place of a row and are followed by padding, so that they are read without a mask. Where
    layers see a window of the last tokens alone, padding comes first, and the cache is transformers' own.
    """

    def __init__(
        self,
        model: Any,
        prompts: Sequence[Sequence[int]],
        padding_token: int,
        limit: int,
        memory: BatchMemory,
        reads_beginning_once: bool,
    ) -> None:
        self._model, self._device = model, model.device
        self._padding_token = padding_token
        self.rows = sorted(range(len(prompts)), key=lambda row: (len(prompts[row]), row))
        self._prompts = [prompts[row] for row in self.rows]
        self._width = self._length = len(self._prompts[-1])
        library = DynamicCache(config=model.config)
        self._in_place = all(type(layer) is DynamicLayer for layer in library.layers)
        capacity = self._width + limit
        self._layers = [
            InPlaceLayer(len(prompts), self._width, capacity, memory, number) for number in range(len(library.layers))
        ]
        self._cache = Cache(layers=self._layers) if self._in_place else library
        self._shared = _num_shared(self._prompts) if self._in_place and reads_beginning_once else 0
        seen = torch.ones(len(prompts), capacity, dtype=torch.long)
        for place, prompt in enumerate(self._prompts):
            padding = self._width - len(prompt)
            start = len(prompt) if self._in_place else 0
            seen[place, start : start + padding] = 0
        self._seen = seen.to(self._device)
        self._positions = (self._seen.cumsum(-1) - 1).clamp_min(0)
        # Added to the scores of a single token: it sees all but padding.
        self._bias = torch.zeros(seen.shape, dtype=model.dtype, device=self._device)
        self._bias = self._bias.masked_fill_(self._seen == 0, torch.finfo(model.dtype).min)[:, None, None, :]

    def read_prompts(self) -> Tensor:
        """Return the logits [rows, vocabulary] behind the last token of every prompt."""
        if not self._in_place:
            mask, positions = self._seen[:, : self._width], self._positions[:, : self._width]
            return self._forward(self._padded(self._prompts), self._cache, 1, mask, positions)[:, -1]
        if self._shared:
            self._read_some(0, [self._prompts[0][: self._shared]], 0)
            for layer in self._layers:
                layer.repeat_first_row(self._shared)
        logits = [self._read_some(first, prompts, self._shared) for first, prompts in self._portions()]
        for layer in self._layers:
            layer.turn_to(0, len(self._prompts), self._width)
        return torch.cat(logits)

    def read(self, tokens: Tensor) -> Tensor:
        """Return the logits [rows, vocabulary] behind one more token of every row."""
        self._length += 1
        mask = self._bias[..., : self._length] if self._in_place else self._seen[:, : self._length]
        positions = self._positions[:, self._length - 1 : self._length]
        return self._forward(tokens[:, None], self._cache, 1, mask, positions)[:, -1]

    def keep(self, living: list[int]) -> Tensor:
        """Let row i be what row `living[i]` was; return `living` as a tensor."""
        index = torch.tensor(living, device=self._device)
        self.rows = [self.rows[place] for place in living]
        self._seen, self._positions, self._bias = self._seen[index], self._positions[index], self._bias[index]
        self._cache.reorder_cache(index)
        return index

    def _portions(self) -> Iterator[tuple[int, Sequence[Sequence[int]]]]:
        """Yield what one forward reads of the prompts, with the place of the first."""
        rests = [prompt[self._shared :] for prompt in self._prompts]
        first = 0
        for place in range(1, len(rests) + 1):
            if place == len(rests) or (place + 1 - first) * len(rests[place]) > _PROMPT_TOKENS_AT_ONCE:
                yield first, rests[first:place]
                first = place

    def _read_some(self, first: int, prompts: Sequence[Sequence[int]], seen: int) -> Tensor:
        """Return the logits [prompts, vocabulary] behind prompts whose first `seen` tokens have been read."""
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        ends, which = lengths.unique(return_inverse=True)
        for layer in self._layers:
            layer.turn_to(first, len(prompts), seen)
        logits = self._forward(self._padded(prompts), self._cache, (ends - 1).to(self._device), None, None)
        return logits[torch.arange(len(prompts)), which]

    def _padded(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        width = len(prompts[-1])
        ids = torch.full((len(prompts), width), self._padding_token)
        for place, prompt in enumerate(prompts):
            start = 0 if self._in_place else width - len(prompt)
            ids[place, start : start + len(prompt)] = torch.tensor(prompt)
        return ids.to(self._device)

    def _forward(
        self, ids: Tensor, cache: Cache, keep: int | Tensor, mask: Tensor | None, positions: Tensor | None
    ) -> Tensor:
        """Return the logits [rows, places, vocabulary] at the places that are kept of `ids`."""
        logits: Tensor = self._model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=keep,
        ).logits
        return logits
