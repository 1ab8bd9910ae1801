"""Keys and values rounded as a cache in another number format stores them."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from aqnpipe.config.noise import CacheFormat
from aqnpipe.models.caches import Update, put_in_front
from aqnpipe.noise.kernels.quantization import round_as_cached


def round_caches(layers: Sequence[nn.Module], number_format: CacheFormat) -> list[Any]:
    """Round what attention writes and reads back in every layer; return the handles. See `put_in_front` for errors."""

    def rounded(layer: int, keys: Tensor, values: Tensor, update: Update) -> tuple[Tensor, Tensor]:
        return update(round_as_cached(keys, number_format), round_as_cached(values, number_format))

    return put_in_front(layers, rounded)
