"""Counts, number formats and modes of the passes of a phase, for the receipt."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from aqnpipe.config.noise import Phase
from aqnpipe.models.layout import dropout_rates
from aqnpipe.models.parts import first_tensor

_SAMPLED = 64
_SAMPLED_EVERY = 16
"""Values are sampled in the first two of so many passes: those that read prompts and single tokens."""
_FEWEST = 8
"""Values from which on it is no chance that all are numbers of 16 bits: 2^-16 or 2^-13 each."""
_BELOW = {"bfloat16": 0xFFFF, "float16": 0x1FFF}
"""The bits of a float32 that a format does not have."""


class PassObservation:
    """Observes the passes of one phase on one model. `columns` are of the present pass, for the receipt.

    `rounds`: the requested noise may round results, so that their rounding says nothing about the number format.
    `rounds_cache`: it rounds keys and values.
    """

    def __init__(self, model: nn.Module, phase: Phase, *, rounds: bool, rounds_cache: bool = False) -> None:
        self.columns: dict[str, Any] = {"noised_parts": 0}
        self._phase = phase
        self._model = model
        self._rounds = rounds
        self._rounds_cache = rounds_cache
        self._rated: list[nn.Module] | None = None
        self._number = -1
        self._num_format = ""
        self._cache: Cache | None = None

    def begin(self, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Note the arguments of a pass."""
        ids, cache = first_tensor(args, kwargs), kwargs.get("past_key_values")
        latest, self._cache = self._cache, cache if isinstance(cache, Cache) else None
        sequences = len(ids) if ids is not None and ids.ndim > 1 else 1
        has_gradients, config = torch.is_grad_enabled(), getattr(self._model, "config", None)
        is_first = self._cache is None or not _has_read(self._cache, latest)
        self.columns = {
            "gradient_passes": int(has_gradients),
            "sequences": sequences if is_first and not has_gradients else 0,
            "trained_sequences": sequences if has_gradients else 0,
            "noised_parts": 0,
            "modes": {"training" if self._model.training else "evaluation"},
            "attention": {str(config._attn_implementation)} if config is not None else set(),
            "algorithms": {"deterministic" if torch.are_deterministic_algorithms_enabled() else "default"},
        }
        self._num_format = ""
        self._number += 1
        if self._number == 0 and self._cache is not None:
            self.columns["largest_first_position"] = _tokens_in(self._cache)

    def leave_part(self, output: Any, *, is_noised: bool) -> None:
        """Note that a layer, or the output projection, has computed."""
        self.columns["noised_parts"] += is_noised
        hidden = output[0] if isinstance(output, tuple) else output
        if not self._num_format and isinstance(hidden, Tensor):
            device = hidden.device.type
            is_cast = torch.is_autocast_enabled(device)
            self._num_format = _name(torch.get_autocast_dtype(device) if is_cast else hidden.dtype)

    def end(self, output: Any) -> None:
        """Note the number formats of a pass that has ended."""
        computed, others = self._num_format, list[str]()
        if not computed:
            return
        keys = next((key for layer in self._cache.layers for key in _keys(layer)), None) if self._cache else None
        sampled = (("a cache", None if self._rounds_cache else keys), ("logits", getattr(output, "logits", None)))
        for what, tensor in sampled if self._number % _SAMPLED_EVERY < 2 else ():
            if isinstance(tensor, Tensor) and _spacing(found := self._format_of(tensor)) > _spacing(computed):
                others.append(f"{what} of {found}")
        if self._drops():
            others.append("dropout")
        self.columns["formats"] = {f"{computed} with {' and '.join(others)}" if others else computed}

    def _format_of(self, values: Tensor) -> str:
        """Return the number format of a tensor, one of 16 bits also where all its sampled values are numbers of it."""
        if values.dtype != torch.float32 or self._rounds or not values.numel():
            return _name(values.dtype)
        count = min(_SAMPLED, values.numel())
        places = torch.arange(count) * (values.numel() - 1) // max(count - 1, 1)
        index = torch.unravel_index(places, values.shape)
        bits = values.detach()[index].contiguous().view(torch.int32)
        if int((bits != 0).sum()) < _FEWEST:
            return "float32"
        return next((name for name, below in _BELOW.items() if not (bits & below).any()), "float32")

    def _drops(self) -> bool:
        """Return whether a module with a dropout rate is in training mode."""
        if self._rated is None:
            # The reference of a policy with adapters is the policy without them, in training mode.
            skips = "lora_dropout" if self._phase == "reference" else None
            modules = [module for name, module in self._model.named_modules() if not (skips and skips in name)]
            self._rated = [module for module in modules if any(rate > 0 for _, rate in dropout_rates(module))]
        return any(module.training for module in self._rated)


def _keys(layer: Any) -> list[Tensor]:
    keys = getattr(layer, "keys", None)
    return [keys] if isinstance(keys, Tensor) and keys.numel() else []


def _has_read(cache: Cache, latest: Cache | None) -> bool:
    """Return whether a cache holds tokens; one of linear attention alone, which counts none, after its first pass."""
    return bool(_tokens_in(cache)) if _counting_layer(cache) else cache is latest


def _tokens_in(cache: Cache) -> int:
    layer = _counting_layer(cache)
    return int(layer.get_seq_length()) if layer is not None else 0


def _counting_layer(cache: Cache) -> CacheLayerMixin | None:
    return next((layer for layer in cache.layers if isinstance(layer, CacheLayerMixin)), None)


def _spacing(num_format: str) -> float:
    """Return the distance of 1 to the next number; of formats that are not floating-point numbers 1."""
    dtype = getattr(torch, num_format)
    return torch.finfo(dtype).eps if dtype.is_floating_point else 1.0


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
