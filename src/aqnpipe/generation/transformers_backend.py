"""Generation with transformers, in this process, on the given model object.

A batch is decoded token by token, and rows leave it when their response ends. transformers' `generate` computes every
row until the last one ends, pads every prompt to the longest, and copies keys and values at every token. Here a step
costs only what its active rows cost, and writes its own token in place, into buffers allocated once.

transformers also repeats the keys and values for each query head of a group before it calls torch's attention. Here the
query heads of a group are the queries of one attention call: the same products, sums and softmax without the copies.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import takewhile
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from aqnpipe.errors import ModelError
from aqnpipe.generation.backend import Completion, RoutedCompletion, Sampling, StopText
from aqnpipe.models.layout import GROUPED_SDPA, takes_positions
from aqnpipe.models.routers import ReadExperts, Routers

_MAX_PREFILL_TOKENS = 2048
"""Prompt tokens per forward, including padding: few enough for the cache of a CPU."""
_LARGEST_FREED_BLOCK = 31 * 2**20
_MIN_PREFIX_TOKENS = 16
"""A shorter common prefix is not worth a forward of its own."""

Choose = Callable[[Tensor, Sequence[int]], Tensor]
"""Returns the next tokens [rows] for the logits [rows, vocabulary]; the others are the row numbers in the batch."""


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


class TransformersBackend:
    """Batched generation by the model's own forward; the model and the global random state stay unchanged."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        if tokenizer.eos_token_id is None or tokenizer.pad_token_id is None:
            raise ModelError("the tokenizer has no end token or no padding token; batched generation needs both")
        self._model, self._tokenizer = model, tokenizer
        self._pool = BufferPool()
        # Page faults took a tenth of the time: a C library gives freed memory back to the system if it is more than
        # twice the largest block that was freed so far. This block, never written, is the largest that glibc considers.
        torch.empty(_LARGEST_FREED_BLOCK, dtype=torch.uint8)
        self._end_token: int = tokenizer.eos_token_id
        self._padding_token: int = tokenizer.pad_token_id

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        share_prefix: bool = False,
        routers: Routers | None = None,
    ) -> list[Completion]:
        """Return one completion per prompt, in order.

        With `share_prefix` the common prefix of all prompts may be computed once for all rows. Noise on the prefix
        would then be the same in all rows. With `routers`, those of the model, completions contain the experts that
        they chose; not with a shared prefix.
        """
        if not prompts:
            return []
        is_finished = self._is_finished(sampling.stop_text)
        draws = None if sampling.temperature is None else _Draws(sampling, len(prompts), self._model.device)
        experts = ReadExperts(routers, len(prompts)) if routers else None
        was_training = self._model.training
        self._model.eval()
        try:
            with routers.observed() if routers else nullcontext():
                responses = decode(
                    self._model,
                    prompts,
                    _most_probable if draws is None else draws,
                    is_finished=is_finished,
                    padding_token=self._padding_token,
                    limit=sampling.max_response_tokens,
                    pool=self._pool,
                    share_prefix=share_prefix,
                    experts=experts,
                )
        finally:
            self._model.train(was_training)
        kept = draws.log_probabilities() if draws is not None and sampling.log_probabilities else [None] * len(prompts)
        completions = [
            Completion(ids, "stop" if is_finished(ids) else "length", log_probabilities)
            for ids, log_probabilities in zip(responses, kept, strict=True)
        ]
        if experts is None:
            return completions
        return [
            completion if of_row is None else RoutedCompletion(**vars(completion), experts=of_row)
            for completion, of_row in zip(completions, experts.of_rows(), strict=True)
        ]

    def _is_finished(self, stop_text: str | None) -> Callable[[Sequence[int]], bool]:
        end_token = self._end_token
        if stop_text is None:
            return lambda response: response[-1] == end_token
        stop = StopText(self._tokenizer, stop_text)
        return lambda response: response[-1] == end_token or stop.is_complete(response)


def _most_probable(logits: Tensor, rows: Sequence[int]) -> Tensor:
    return logits.argmax(dim=-1)


class _Draws:
    """Draws tokens from the softmax of logits: `argmax_i p_i/e_i`, e_i ~ Exp(1).

    torch.multinomial computes the same for one draw. Here each row of the whole batch has its own e, whichever rows are
    present, so that a row's draws do not depend on the other rows.
    """

    def __init__(self, sampling: Sampling, rows: int, device: torch.device) -> None:
        if sampling.temperature is None:
            raise ValueError("drawing tokens needs a temperature, found None; this is a bug")
        self._temperature = sampling.temperature
        self._num_rows = rows if sampling.num_rows is None else sampling.num_rows
        self._first_row = sampling.first_row
        self._generator = torch.Generator(device=device).manual_seed(sampling.seed)
        self._keeps_log_probabilities = sampling.log_probabilities
        self._chosen: list[tuple[Sequence[int], Tensor]] = []

    def __call__(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        """Return a token per row, drawn by the logits [rows, vocabulary]."""
        logits = logits.float()
        draws = torch.empty(self._num_rows, logits.shape[-1], device=logits.device)
        draws.exponential_(generator=self._generator)
        probabilities = torch.softmax(logits / self._temperature, dim=-1)
        places = torch.tensor(rows, device=logits.device) + self._first_row
        tokens = (probabilities / draws[places]).argmax(dim=-1)
        if self._keeps_log_probabilities:
            self._chosen.append((list(rows), probabilities.gather(-1, tokens[:, None])[:, 0].log()))
        return tokens

    def log_probabilities(self) -> list[list[float]]:
        """Return the log-probabilities of the drawn tokens, row by row."""
        found: dict[int, list[float]] = {}
        for rows, values in self._chosen:
            for row, value in zip(rows, values.tolist(), strict=True):
                found.setdefault(row, []).append(value)
        return [found[row] for row in sorted(found)]


def decode(
    model: Any,
    prompts: Sequence[Sequence[int]],
    choose: Choose,
    *,
    is_finished: Callable[[Sequence[int]], bool],
    padding_token: int,
    limit: int,
    pool: BufferPool,
    share_prefix: bool = False,
    experts: ReadExperts | None = None,
) -> list[list[int]]:
    """Return a response per prompt (token ids): the tokens until `is_finished(response)`, at most `limit`.

    The first forwards read the prompts, shortest first, in groups of similar length. With `share_prefix`, one forward
    before them reads the common prefix of all prompts once, if it is long enough. Each later forward reads one token of
    every active row; when rows leave, the last rows take their places.
    """
    responses: list[list[int]] = [[] for _ in prompts]
    # Models whose attention transformers does not look up by name compare the name themselves, so it must stay.
    looked_up = getattr(model, "_supports_attention_backend", False)
    with torch.no_grad(), grouped_attention(model.config) if looked_up else nullcontext():
        batch = _Batch(model, prompts, padding_token, limit, pool, share_prefix, experts)
        logits = batch.prefill()
        for step in range(1, limit + 1):
            tokens = choose(logits, batch.rows)
            chosen = tokens.tolist()
            for row, token in zip(batch.rows, chosen, strict=True):
                responses[row].append(token)
            active = compacted([not is_finished(responses[row]) for row in batch.rows])
            if not active or step == limit:
                break
            if len(active) < len(chosen):
                tokens = tokens[batch.keep(active)]
            logits = batch.step(tokens)
    return responses


def compacted(active: Sequence[bool]) -> list[int]:
    """Return the active places without gaps: the last active places fill the gaps, so that few rows move."""
    count = sum(active)
    last = iter([place for place in range(len(active) - 1, count - 1, -1) if active[place]])
    return [place if active[place] else next(last) for place in range(count)]


def _prefix_length(prompts: Sequence[Sequence[int]]) -> int:
    """Return the length of the common prefix of all prompts, 0 if too short; each prompt keeps its last token."""
    common = sum(1 for _ in takewhile(lambda tokens: len(set(tokens)) == 1, zip(*prompts, strict=False)))
    length = min(common, min(map(len, prompts)) - 1)
    return length if len(prompts) > 1 and length >= _MIN_PREFIX_TOKENS else 0


class _Batch:
    """The active rows: their numbers, their keys and values, and their attention masks.

    Prompts start at the first place of a row, with padding behind them, so that prefill needs no mask. If layers have a
    sliding window, or the model counts the places of a row itself, padding comes first and the cache is transformers'
    own.
    """

    def __init__(
        self,
        model: Any,
        prompts: Sequence[Sequence[int]],
        padding_token: int,
        limit: int,
        pool: BufferPool,
        share_prefix: bool,
        experts: ReadExperts | None,
    ) -> None:
        self._model, self._device, self._experts = model, model.device, experts
        self._padding_token = padding_token
        self.rows = sorted(range(len(prompts)), key=lambda row: (len(prompts[row]), row))
        self._prompts = [prompts[row] for row in self.rows]
        self._width = self._length = len(self._prompts[-1])
        library_cache = DynamicCache(config=model.config)
        self._in_place = takes_positions(model) and all(type(layer) is DynamicLayer for layer in library_cache.layers)
        capacity = self._width + limit
        self._layers = [
            InPlaceLayer(len(prompts), self._width, capacity, pool, number)
            for number in range(len(library_cache.layers))
        ]
        self._cache = Cache(layers=self._layers) if self._in_place else library_cache
        self._prefix_length = _prefix_length(self._prompts) if self._in_place and share_prefix else 0
        places, lengths = torch.arange(capacity), torch.tensor([[len(prompt)] for prompt in self._prompts])
        is_padding = (lengths <= places) & (places < self._width) if self._in_place else places < self._width - lengths
        self._visible = (~is_padding).long().to(self._device)
        self._positions = (self._visible.cumsum(-1) - 1).clamp_min(0)
        # Added to the attention scores of a single token: masks the padding.
        self._bias = torch.zeros(self._visible.shape, dtype=model.dtype, device=self._device)
        self._bias = self._bias.masked_fill_(self._visible == 0, torch.finfo(model.dtype).min)[:, None, None, :]

    def prefill(self) -> Tensor:
        """Read the prompts; return the logits [rows, vocabulary] after the last token of each."""
        if not self._in_place:
            mask, positions = self._visible[:, : self._width], self._positions[:, : self._width]
            return self._forward(0, list(map(len, self._prompts)), self._padded(self._prompts), 1, mask, positions)[
                :, -1
            ]
        if self._prefix_length:
            self._prefill_rows(0, [self._prompts[0][: self._prefix_length]], 0)
            for layer in self._layers:
                layer.repeat_first_row(self._prefix_length)
        logits = [self._prefill_rows(first, prompts, self._prefix_length) for first, prompts in self._groups()]
        for layer in self._layers:
            layer.select_rows(0, len(self._prompts), self._width)
        return torch.cat(logits)

    def step(self, tokens: Tensor) -> Tensor:
        """Read one more token of every row; return the logits [rows, vocabulary] after it."""
        self._length += 1
        mask = self._bias[..., : self._length] if self._in_place else self._visible[:, : self._length]
        positions = self._positions[:, self._length - 1 : self._length]
        return self._forward(0, [1] * len(self.rows), tokens[:, None], 1, mask, positions)[:, -1]

    def keep(self, active: list[int]) -> Tensor:
        """Replace row i by the old row `active[i]` and drop all others; return `active` as a tensor."""
        index = torch.tensor(active, device=self._device)
        self.rows = [self.rows[place] for place in active]
        self._visible, self._positions, self._bias = self._visible[index], self._positions[index], self._bias[index]
        self._cache.reorder_cache(index)
        return index

    def _groups(self) -> Iterator[tuple[int, Sequence[Sequence[int]]]]:
        """Yield the prompts of one forward, without their common prefix, and the place of the first."""
        rests = [prompt[self._prefix_length :] for prompt in self._prompts]
        first = 0
        for place in range(1, len(rests) + 1):
            if place == len(rests) or (place + 1 - first) * len(rests[place]) > _MAX_PREFILL_TOKENS:
                yield first, rests[first:place]
                first = place

    def _prefill_rows(self, first: int, prompts: Sequence[Sequence[int]], seen: int) -> Tensor:
        """Read prompts behind `seen` tokens, into rows from `first` on; return the logits [prompts, vocabulary]."""
        lengths = list(map(len, prompts))
        ends, which = torch.tensor(lengths).unique(return_inverse=True)
        for layer in self._layers:
            layer.select_rows(first, len(prompts), seen)
        logits = self._forward(first, lengths, self._padded(prompts), (ends - 1).to(self._device), None, None)
        return logits[torch.arange(len(prompts)), which]

    def _padded(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        rows: list[list[int]] = []
        for prompt in prompts:
            padding = [self._padding_token] * (len(prompts[-1]) - len(prompt))
            rows.append([*prompt, *padding] if self._in_place else [*padding, *prompt])
        return torch.tensor(rows, dtype=torch.long, device=self._device)

    def _forward(
        self,
        first: int,
        lengths: Sequence[int],
        ids: Tensor,
        keep: int | Tensor,
        mask: Tensor | None,
        positions: Tensor | None,
    ) -> Tensor:
        """Return the logits [rows, places, vocabulary] at the places `keep` of `ids`.

        `ids` are `lengths` tokens and padding of the rows from place `first` on.
        """
        logits: Tensor = self._model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=keep,
        ).logits
        if self._experts is not None:
            rows = self.rows[first : first + len(lengths)]
            self._experts.note(rows, lengths, padded_behind=self._in_place)
        return logits


@contextmanager
def grouped_attention(config: PreTrainedConfig) -> Iterator[None]:
    """Use grouped attention in the body for models of `config` with attention `sdpa`; leave others as they are."""
    before = config._attn_implementation
    if before == "sdpa":
        config._attn_implementation = GROUPED_SDPA
    try:
        yield
    finally:
        config._attn_implementation = before


def _grouped_sdpa(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Compute the attention of transformers' `sdpa`; `query`, `key` and `value` are [rows, heads, tokens, channels].

    The mask of a single token is [rows, 1, 1, visible tokens] and is added to the scores. Calls with several new
    tokens, without shared heads, with a position bias or with a mask per head go to transformers' own function.
    """
    rows, heads, tokens, channels = query.shape
    shared = key.shape[1]
    masks_heads = attention_mask is not None and attention_mask.shape[1] > 1
    if tokens > 1 or heads == shared or masks_heads or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    attended = F.scaled_dot_product_attention(
        query.reshape(rows, shared, heads // shared, channels),
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=kwargs.get("dropout", 0.0),
        scale=kwargs.get("scaling"),
    )
    return attended.reshape(rows, 1, heads, -1), None


AttentionInterface.register(GROUPED_SDPA, _grouped_sdpa)


AttentionMaskInterface.register(GROUPED_SDPA, sdpa_mask)
