"""Follows rows through the cache of keys and values of one layer."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Tokens = tuple[list[int], list[int] | None]
"""The tokens that the rows read now, and those chosen by the rows before; None if these are not known."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class CacheRows:
    """Recognises rows by the key of the token that they read last. `number` chooses the layer."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._layer: int | None = None
        self._marks: list[Tensor] = []
        self._columns: list[int] = []
        self._mark: Tensor | None = None

    def forget(self) -> None:
        """Forget the prompts read so far: they were a common prefix."""
        self._marks, self._columns = [], []

    def note_prompts(self, cache: Any, columns: Sequence[int], width: int) -> None:
        """Note the keys of the last tokens of some prompts, at `columns` of the cache, which ends at `width`."""
        keys = self._keys(cache)
        if keys is None:
            return
        # A layer with a sliding window keeps the last tokens only.
        shown = [column - width + keys.shape[2] for column in columns]
        self._marks += [_bits(keys[row, :, max(column, 0)]) for row, column in enumerate(shown)]
        self._columns += list(columns)

    def note_step(self, cache: Any) -> None:
        """Note the keys of the tokens just read."""
        keys = self._keys(cache)
        self._mark = None if keys is None else keys[:, :, -1].detach().clone()

    def places(self, cache: Any, tokens: Callable[[], Tokens]) -> tuple[list[int], int]:
        """Return which place each row of the cache had in the last forward, and the number of rows not recognised.

        tokens: the tokens that are read now, and those that were chosen at the places before; they decide between rows
        of equal keys.
        """
        keys = self._keys(cache)
        if keys is None:
            raise ValueError("no layer has keys; this is a bug")
        if self._mark is not None:
            now = keys[:, :, -1]
            if now.shape == self._mark.shape and torch.equal(now, self._mark):
                return list(range(len(now))), 0
            return _assigned(_equal_rows(_bits(now), _bits(self._mark)), *tokens())
        marks = torch.stack(self._marks)
        columns = [min(column, keys.shape[2] - 1) for column in self._columns]
        if len(keys) == len(marks):
            rows = torch.arange(len(keys), device=keys.device)
            if torch.equal(_bits(keys[rows, :, torch.tensor(columns, device=keys.device)]), marks):
                return list(range(len(marks))), 0
        found = [
            _equal_rows(_bits(keys[:, :, column]), mark[None]) for column, mark in zip(columns, marks, strict=True)
        ]
        return _assigned(torch.cat(found, dim=1), *tokens())

    def _keys(self, cache: Any) -> Tensor | None:
        """Return the keys [rows, heads, tokens, channels] of the chosen layer; None if no layer has such keys."""
        layers = getattr(cache, "layers", ())
        if self._layer is None:
            usable = [number for number, layer in enumerate(layers) if _has_keys(layer)]
            if not usable:
                return None
            # In the first layer, keys depend on token and position alone: rows have equal ones.
            deep = usable[1:] or usable
            self._layer = deep[self._number % len(deep)]
        keys: Tensor = layers[self._layer].keys
        return keys

    @property
    def is_followed(self) -> bool:
        """Return whether the model has a cache in which rows can be recognised."""
        return self._layer is not None


def _has_keys(layer: Any) -> bool:
    keys = getattr(layer, "keys", None)
    return isinstance(keys, Tensor) and keys.ndim == 4 and keys.numel() > 0


def _bits(keys: Tensor) -> Tensor:
    """Return a copy of keys as integers: equal bits compare as equal, also those of a NaN."""
    return keys.detach().clone(memory_format=torch.contiguous_format).view(_BITS[keys.element_size()])


def _equal_rows(now: Tensor, before: Tensor) -> Tensor:
    """Return whether rows have equal keys, [rows now, rows before]: by a sum in which each place has its own weight."""
    sums = []
    for bits in (now, before):
        flat = bits.flatten(1).long()
        sums.append((flat * torch.arange(1, 2 * flat.shape[1], 2, device=flat.device)).sum(1))
    return sums[0][:, None] == sums[1][None, :]


def _assigned(equal: Tensor, read: Sequence[int], chosen: Sequence[int] | None) -> tuple[list[int], int]:
    """Assign places before to places now by `equal` [now, before].

    Of several rows with equal keys, one whose choice is now read is taken; of these the same place, or the last one,
    because rows move from the end. A row without equals is taken to have kept its place.
    """
    free, places, strangers = set(range(equal.shape[1])), [], 0
    for place, same in enumerate(equal.tolist()):
        candidates = [before for before in sorted(free) if same[before]]
        strangers += not candidates
        if len(candidates) > 1 and chosen is not None:
            candidates = [before for before in candidates if chosen[before] == read[place]] or candidates
        fitting = candidates or [place]
        places.append(place if place in fitting else fitting[-1])
        free.discard(places[-1])
    return places, strangers
