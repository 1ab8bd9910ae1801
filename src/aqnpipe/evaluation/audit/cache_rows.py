"""Follows rows through the cache of keys and values of one layer."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

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

    def places(self, cache: Any) -> tuple[list[int], int]:
        """Return which place each row of the cache had in the last forward, and the number of rows not recognised."""
        keys = self._keys(cache)
        if keys is None:
            raise ValueError("no layer has keys; this is a bug")
        if self._mark is not None:
            now = keys[:, :, -1]
            if now.shape == self._mark.shape and torch.equal(now, self._mark):
                return list(range(len(now))), 0
            return _matched(_bits(now), _bits(self._mark))
        marks = torch.stack(self._marks)
        last = keys.shape[2] - 1
        columns = torch.tensor([min(column, last) for column in self._columns], device=keys.device)
        if len(keys) == len(marks):
            own = _bits(keys[torch.arange(len(keys), device=keys.device), :, columns])
            return _matched(own, marks)
        return _searched(keys, columns, marks)

    def _keys(self, cache: Any) -> Tensor | None:
        """Return the keys [rows, heads, tokens, channels] of the chosen layer; None if no layer has such keys."""
        layers = getattr(cache, "layers", ())
        if self._layer is None:
            usable = [number for number, layer in enumerate(layers) if _has_keys(layer)]
            if not usable:
                return None
            self._layer = usable[self._number % len(usable)]
        keys: Tensor = layers[self._layer].keys
        return keys

    @property
    def is_followed(self) -> bool:
        """Whether the model has a cache in which rows can be recognised."""
        return self._layer is not None


def _has_keys(layer: Any) -> bool:
    keys = getattr(layer, "keys", None)
    return isinstance(keys, Tensor) and keys.ndim == 4 and keys.numel() > 0


def _bits(keys: Tensor) -> Tensor:
    """Return a copy of keys as integers: equal bits compare as equal, also those of a NaN."""
    return keys.detach().clone(memory_format=torch.contiguous_format).view(_BITS[keys.element_size()])


def _matched(now: Tensor, before: Tensor) -> tuple[list[int], int]:
    """Match rows by equal keys. Most rows keep their place, so only the others are searched."""
    count = min(len(now), len(before))
    kept = (now[:count] == before[:count]).flatten(1).all(1).tolist() + [False] * (len(now) - count)
    free = [place for place in range(len(before)) if place >= count or not kept[place]]
    moved = [place for place, same in enumerate(kept) if not same]
    places, strangers = list(range(len(now))), 0
    for place in moved:
        same = (before[free] == now[place]).flatten(1).all(1).tolist() if free else []
        strangers += not any(same)
        chosen = free[same.index(True)] if any(same) else place
        if any(same):
            free.remove(chosen)
        places[place] = chosen
    return places, strangers


def _searched(keys: Tensor, columns: Tensor, marks: Tensor) -> tuple[list[int], int]:
    """Match the rows of a cache with prompts that end at different columns; rows of equal prompts keep their order."""
    found = [
        (_bits(keys[:, :, column]) == mark).flatten(1).all(1)
        for column, mark in zip(columns.tolist(), marks, strict=True)
    ]
    free, places, strangers = set(range(len(marks))), [], 0
    for place, same in enumerate(torch.stack(found, dim=1).tolist()):
        candidates = [before for before in sorted(free) if same[before]]
        strangers += not candidates
        # Without a candidate, and among equal ones, a row is taken to have kept its place.
        chosen = place if place in candidates or not candidates else candidates[0]
        free.discard(chosen)
        places.append(chosen)
    return places, strangers
