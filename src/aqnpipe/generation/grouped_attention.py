"""Grouped-query attention of one new token per row, without copying the shared keys and values.

transformers repeats the keys and values for each query head of a group before it calls torch's attention. Here the
query heads of a group are the queries of one attention call: the same products, sums and softmax without the copies.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

_NAME = "aqnpipe_grouped_sdpa"


@contextmanager
def grouped_attention(config: PreTrainedConfig) -> Iterator[None]:
    """Use grouped attention in the body for models of `config` with attention `sdpa`; leave others as they are."""
    before = config._attn_implementation
    if before == "sdpa":
        config._attn_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation = before


def grouped_sdpa(
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


AttentionInterface.register(_NAME, grouped_sdpa)
AttentionMaskInterface.register(_NAME, sdpa_mask)
