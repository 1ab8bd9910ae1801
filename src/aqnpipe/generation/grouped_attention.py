"""Attention of one new token per row, without copies of the keys and values that heads share.

transformers repeats them for every head of a group before it calls torch's attention. Here the heads of a group are the
queries of one call instead: the same products, sums and softmax.
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
    """Let models of `config` that attend by `sdpa` attend in groups within the body."""
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
    """Attend as transformers' `sdpa` does; `query` is [rows, heads, tokens, channels], as are its keys and values.

    The mask of a single token is [rows, 1, 1, tokens seen] and is added to the scores. What has more than one new
    token, no shared heads or anything that torch's attention alone cannot do is left to transformers.
    """
    rows, heads, tokens, channels = query.shape
    shared = key.shape[1]
    if tokens > 1 or heads == shared or kwargs.get("position_bias") is not None:
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
