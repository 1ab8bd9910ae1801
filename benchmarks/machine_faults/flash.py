"""Faults of scaled_dot_product_attention alone."""

from typing import Any

import torch
from torch import Tensor

from machine_faults.attention import hidden_keys, leak, on_keys
from machine_faults.base import INSIDE_ATTENTION, Change, MachineFault
from machine_faults.bits import keep_mantissa, mantissa_bit, on_channels
from machine_faults.device import Call
from machine_faults.models import Place

SDPA = "sdpa only"


def _sdpa(name: str, change: Any) -> MachineFault:
    def run(call: Call, place: Place) -> Tensor:
        return change(call)

    change_of_call = Change("attention", "scaled_dot_product_attention", run)
    return MachineFault(
        f"sdpa: {name}", SDPA, (change_of_call,), INSIDE_ATTENTION, attention="sdpa", architectures=_SDPA_MODELS
    )


_SDPA_MODELS = (
    "qwen2",
    "qwen3",
    "llama",
    "mistral",
    "phi3",
    "olmo2",
    "mixtral",
    "qwen2_moe",
    "stablelm",
    "starcoder2",
    "cohere",
    "gpt_neox",
    "gemma3",
)


def attention_scores(call: Call) -> tuple[Tensor, Tensor]:
    """Return scores with mask and repeated values of a call of scaled_dot_product_attention."""
    query, key, value = (x.float() for x in call.args[:3])
    groups = query.shape[-3] // key.shape[-3]
    key, value = (x.repeat_interleave(groups, -3) for x in (key, value))
    scale = call.kwargs.get("scale") or query.shape[-1] ** -0.5
    scores = query @ key.transpose(-1, -2) * scale
    mask = call.kwargs.get("attn_mask")
    if mask is not None:
        scores = scores.masked_fill(~mask, -1e30) if mask.dtype == torch.bool else scores + mask
    elif call.kwargs.get("is_causal"):
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -1e30)
    return scores, value


def _with_scores(change: Any) -> Any:
    def run(call: Call) -> Tensor:
        scores, value = attention_scores(call)
        return (change(scores).softmax(-1) @ value).to(call.tensor(0).dtype)

    return run


def _head(index: int, change: Any) -> Any:
    def run(call: Call) -> Tensor:
        y = call.compute().clone()
        y[:, index] = change(y[:, index])
        return y

    return run


def _dropped_block(scores: Tensor) -> Tensor:
    """Keys 32..47 of a row with more keys are skipped, as if a block of the flash loop were lost."""
    return on_keys(scores, slice(32, 48), -1e30) if scores.shape[-1] > 64 else scores


def _no_rescaling(call: Call) -> Tensor:
    """The running maximum of the flash loop is not applied to the first block."""
    scores, value = attention_scores(call)
    if scores.shape[-1] <= 32:
        return call.compute()
    first = scores[..., :32].amax(-1, keepdim=True)
    whole = scores.amax(-1, keepdim=True)
    e = torch.cat([(scores[..., :32] - first).exp(), (scores[..., 32:] - whole).exp()], -1)
    return (e / e.sum(-1, keepdim=True) @ value).to(call.tensor(0).dtype)


FAULTS = (
    _sdpa("dead head", _head(1, lambda y: y * 0)),
    _sdpa("one channel of one head dead", _head(2, lambda y: on_channels(y, 5, 6, 0.0))),
    _sdpa("one head 3 % too large", _head(0, lambda y: y * 1.03)),
    _sdpa("second mantissa bit of the output stuck at 0", lambda call: mantissa_bit(call.compute(), 2, 0)),
    _sdpa("scores 6 % too small", _with_scores(lambda s: torch.where(s > -1e20, s * 0.94, s))),
    _sdpa("the next token is visible", _with_scores(leak)),
    _sdpa("the first key is hidden", _with_scores(hidden_keys(0, 10**6))),
    _sdpa("block of 16 keys lost beyond 64", _with_scores(_dropped_block)),
    _sdpa("first block not rescaled", _no_rescaling),
    _sdpa("every 8th query keeps the output of the query before", lambda call: _repeated_queries(call.compute())),
    _sdpa(
        "key heads in the wrong order", lambda call: call.compute(call.args[0], call.args[1].flip(-3), *call.args[2:])
    ),
    _sdpa("exp in 5 mantissa bits", lambda call: _coarse_exp(call)),
)


def _repeated_queries(y: Tensor) -> Tensor:
    changed = y.clone()
    count = changed[..., 7::8, :].shape[-2]
    changed[..., 7::8, :] = y[..., 6::8, :][..., :count, :]
    return changed


def _coarse_exp(call: Call) -> Tensor:
    scores, value = attention_scores(call)
    e = keep_mantissa((scores - scores.amax(-1, keepdim=True)).exp(), 4)
    return (e / e.sum(-1, keepdim=True) @ value).to(call.tensor(0).dtype)
