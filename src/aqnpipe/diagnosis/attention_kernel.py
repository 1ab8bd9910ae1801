"""The attention kernel with operands whose answer is known: many keys, prefill and decode, eager or fused.

transformers looks the kernel of every attention module up in one table. While `replaced_operands` is active the lookup
returns a wrapper, which runs the kernel that the model would have used on test operands of the same shapes and strides,
and compares its result with float64 on the host. The reference derives the mask from positions and padding by itself,
so a wrong mask is a fault.

The sequences of a batch take turns with three kinds of operands:

- one-hot: every query meets one key with a score so far above the others that softmax is exactly 1 and 0. The output is
  the value of that key, bit for bit: a wrong key, row, head or mask entry shows.
- uniform: all queries are zero, so softmax is 1/n over the n allowed keys. One key too many or too few shows.
- ordinary: scores of a few units, from one or four channels of a query, so every step of scores, softmax and sum
  contributes. The bound is first order in the rounding of scores, probabilities and products.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from aqnpipe.diagnosis.checks import Check, compare
from aqnpipe.diagnosis.reference import FLOAT32_EPS, NARROW_PRODUCTS, full_mantissas
from aqnpipe.seeding import keyed_generator

SITE = "attention_core"
CACHE_SITE = "kv_cache"
KINDS = ("one-hot", "uniform", "ordinary")

_NUM_OPERANDS = 4
"""Queries, keys, values and the mask."""
_KNOWN_ARGUMENTS = frozenset(
    {"scaling", "dropout", "sliding_window", "softcap", "is_causal"}
    | {"position_ids", "cache_position", "use_cache", "output_attentions", "output_router_logits", "return_dict"}
)
"""Arguments that the reference follows, or that change nothing of the kernel."""
_VALUE_BITS = 8
_CODED_CHANNELS = 14
_GAP = 40.0
"""Least distance of the chosen key's score from the others in the one-hot sequences; exp(-40) is far below 2^-24."""
_NEGLIGIBLE = 1e-13
_QUERY_CHANNELS = (1, 4)
"""Channels of an ordinary query that are not zero: with one, rounding of the scores is least against their size."""
_SCORE = 2.0


@dataclass
class Observation:
    """What the kernel wrapper needs to know of the batch, and what it found.

    `padding`: number of masked tokens at the start of each sequence. `seen`: tokens in the cache before this call;
    `num_new`: tokens of this call. `operands` and `tables`: queries and new keys of the first sequence as the model
    made them, and its cosines and sines, by layer and `seen`. With `only_records` kernels run on these, unchecked.
    """

    padding: Tensor
    seed: int
    seen: int = 0
    num_new: int = 0
    only_records: bool = False
    checks: list[Check] = field(default_factory=list)
    unknown: dict[str, str] = field(default_factory=dict)
    operands: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)
    tables: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)
    results: dict[int, Tensor] = field(default_factory=dict)
    cached: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


@contextmanager
def replaced_operands(layer_of: dict[nn.Module, int], observation: Observation) -> Iterator[None]:
    """Run the kernels of the attention modules in `layer_of` on test operands and check them, while the body runs."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    lookup = ALL_ATTENTION_FUNCTIONS.get_interface

    def wrapped_lookup(name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        kernel = lookup(name, default)

        def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if module not in layer_of:
                return kernel(module, *args, **kwargs)
            if len(args) != _NUM_OPERANDS:
                observation.unknown[SITE] = "its kernel gets operands by name"
                return kernel(module, *args, **kwargs)
            return _checked_call(kernel, module, layer_of[module], args[:3], args[3], kwargs, observation)

        return run

    ALL_ATTENTION_FUNCTIONS.get_interface = wrapped_lookup
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS.get_interface


def _checked_call(
    kernel: Callable[..., Any],
    module: nn.Module,
    layer: int,
    operands: tuple[Tensor, ...],
    mask: Tensor | None,
    kwargs: dict[str, Any],
    observation: Observation,
) -> Any:
    q, k, v = operands
    new_keys = k[0, :, k.shape[2] - q.shape[2] :]
    observation.operands[layer, observation.seen] = (q[0].detach().cpu(), new_keys.detach().cpu())
    if observation.only_records:
        return kernel(module, q, k, v, mask, **kwargs)
    observation.checks += _cache_checks(layer, k, v, observation)
    odd = [key for key, value in kwargs.items() if value is not None and key not in _KNOWN_ARGUMENTS]
    if odd or q.ndim != 4 or q.shape[1] % k.shape[1]:
        observation.unknown[SITE] = f"its kernel takes {', '.join(odd) or 'operands of unknown shape'}"
        return kernel(module, q, k, v, mask, **kwargs)
    generator = keyed_generator("cpu", observation.seed, "diagnosis.attention", layer, observation.seen)
    scale = float(kwargs.get("scaling") or q.shape[-1] ** -0.5)
    allowed_keys = visible_keys(q.shape[2], k.shape[2], observation, kwargs.get("sliding_window"))
    test = _operands((q, k, v), scale, allowed_keys, generator)
    result = kernel(module, *test, mask, **kwargs)
    output = result[0] if isinstance(result, tuple) else result
    observation.results[layer] = output
    observation.checks += _kernel_checks(layer, test, scale, _softcap(module, kwargs), allowed_keys, output)
    return result


def _softcap(module: nn.Module, kwargs: dict[str, Any]) -> float | None:
    """Return the bound of the scores, None without one; sdpa has no such argument, and transformers drops it there."""
    implementation = getattr(getattr(module, "config", None), "_attn_implementation", None)
    return None if implementation == "sdpa" else kwargs.get("softcap")


def _kernel_checks(
    layer: int,
    operands: tuple[Tensor, Tensor, Tensor],
    scale: float,
    softcap: float | None,
    visible: Tensor,
    output: Tensor,
) -> list[Check]:
    """Compare the output [sequences, queries, heads, channels] of a kernel; queries of padding tokens see no key."""
    expected, bound, weights = reference(*operands, scale, softcap, visible)
    checks = []
    for number, kind in enumerate(KINDS):
        own = (torch.arange(len(output)) % len(KINDS) == number).unsqueeze(1)
        keep = visible.any(-1) & own
        wanted, spread = (tensor.transpose(1, 2)[keep].flatten(1) for tensor in (expected, bound))
        is_exact = kind == "one-hot" and _is_one_hot(weights.transpose(1, 2)[keep])
        probe = f"attention_{kind.replace('-', '_')}"
        found = output[keep.to(output.device)].flatten(1)
        checks.append(compare(probe, layer, SITE, wanted, found, allowed=None if is_exact else spread))
    return checks


def visible_keys(num_queries: int, num_keys: int, observation: Observation, window: int | None) -> Tensor:
    """Return [sequences, queries, keys]: which keys each query may see, from positions, padding and sliding window.

    A cache with a sliding window keeps only the last keys.
    """
    total = observation.seen + num_queries
    query = torch.arange(observation.seen, total).unsqueeze(1)
    key = torch.arange(total - num_keys, total).unsqueeze(0)
    visible = key <= query
    if window:
        visible &= query - key < window
    return visible & (key.unsqueeze(0) >= observation.padding.reshape(-1, 1, 1))


def reference(
    q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None, visible: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return attention [sequences, heads, queries, channels] in float64, how far a healthy device may be from it, and
    the probabilities.

    Roundings to the dtype, each half an epsilon: of the product and of the scaled score (three more for a capped one),
    of a probability, and of the output, with one to spare. Sums are in float32.
    """
    roundoff = torch.finfo(q.dtype).eps / 2
    products = NARROW_PRODUCTS if q.dtype == torch.float32 else FLOAT32_EPS * q.shape[-1]
    groups = q.shape[1] // k.shape[1]
    queries, keys, values = (tensor.double().cpu() for tensor in (q, k, v))
    keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    scores = queries @ keys.transpose(2, 3) * scale
    magnitudes = queries.abs() @ keys.abs().transpose(2, 3) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    steps = 5 if softcap else 2
    shift = products * magnitudes + steps * roundoff * scores.abs() + 2.0**-20
    scores = scores.masked_fill(~visible.unsqueeze(1), -torch.inf)
    weights = scores.softmax(-1).nan_to_num(0.0)  # NaN: a query that sees no key
    expected = weights @ values
    # First order: sum_j p_j shift_j |v_j - o|, bounded by Cauchy and Schwarz.
    scatter = (weights @ values.square() - expected.square()).clamp(min=0).sqrt()
    moved = (weights * shift.square()).sum(-1, keepdim=True).sqrt() * scatter
    sums = weights @ values.abs()
    bound = 1.25 * moved + (3 * roundoff + products + FLOAT32_EPS * k.shape[2] ** 0.5) * sums
    return expected, bound, weights


def _operands(
    like: tuple[Tensor, Tensor, Tensor], scale: float, visible: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Return test operands with the shapes and strides of `like`; the sequences take turns with KINDS."""
    q, k, v = like
    queries, keys = torch.zeros(q.shape, dtype=torch.float64), torch.zeros(k.shape, dtype=torch.float64)
    for sequence in range(len(q)):
        kind = KINDS[sequence % len(KINDS)]
        if kind == "one-hot":
            queries[sequence], keys[sequence] = _one_hot(q, k, scale, visible[sequence], generator)
        else:
            keys[sequence] = full_mantissas(tuple(k.shape[1:]), _VALUE_BITS, generator)
        if kind == "ordinary":
            terms = torch.tensor(_QUERY_CHANNELS)[torch.arange(q.shape[2]) % len(_QUERY_CHANNELS)].unsqueeze(1)
            chosen = torch.rand(q.shape[1:], generator=generator).argsort(-1) < terms
            numbers = _SCORE * full_mantissas(tuple(q.shape[1:]), _VALUE_BITS, generator) / scale / terms
            queries[sequence] = torch.where(chosen, numbers, 0.0)
    values = full_mantissas(tuple(v.shape), _VALUE_BITS, generator)
    values *= 2.0 ** torch.randint(-4, 5, values.shape, generator=generator).double()
    return _like(q, queries), _like(k, keys), _like(v, values)


def _one_hot(q: Tensor, k: Tensor, scale: float, visible: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return queries [heads, queries, channels] and keys of which one per query has by far the largest score.

    Keys are distinct codes of +-1. A query is a multiple of the code of one of its visible keys, drawn at random.
    """
    num_heads, num_keys, width = k.shape[1:]
    coded = min(width, _CODED_CHANNELS)
    keys = 1 - 2.0 * torch.randint(0, 2, (num_heads, num_keys, width), generator=generator).double()
    for head in range(num_heads):
        code = torch.randperm(2**coded, generator=generator)[torch.arange(num_keys) % 2**coded]
        keys[head, :, :coded] = 1 - 2.0 * ((code.unsqueeze(1) >> torch.arange(coded)) & 1).double()
    overlap = (keys @ keys.transpose(1, 2)).masked_fill(torch.eye(num_keys, dtype=torch.bool), -width).max()
    peak = _GAP / max(1 - float(overlap) / width - 7 * torch.finfo(q.dtype).eps, 1e-3)
    factor = 2.0 ** math.ceil(math.log2(peak / (scale * width)))
    odds = visible.double() + (~visible.any(-1, keepdim=True)).double()
    drawn = torch.multinomial(odds, q.shape[1], replacement=True, generator=generator).T
    groups = q.shape[1] // num_heads
    key_head = torch.arange(q.shape[1]).unsqueeze(1) // groups
    return factor * keys[key_head, drawn], keys


def _is_one_hot(weights: Tensor) -> bool:
    """Return whether all probabilities are 0 or 1 to far more digits than any device computes."""
    return bool((weights.minimum(1 - weights).abs() < _NEGLIGIBLE).all())


def _like(original: Tensor, values: Tensor) -> Tensor:
    return torch.empty_like(original).copy_(values)


def _cache_checks(layer: int, k: Tensor, v: Tensor, observation: Observation) -> list[Check]:
    """Compare the keys and values of earlier tokens with those that the layer passed to its kernel before."""
    before = observation.cached.get(layer)
    observation.cached[layer] = (k.detach().clone(), v.detach().clone())
    if before is None or observation.seen == 0:
        return []
    checks = []
    for earlier, now in zip(before, (k, v), strict=True):
        kept = now[:, :, : now.shape[2] - observation.num_new]
        if kept.shape[2]:
            wanted = earlier[:, :, earlier.shape[2] - kept.shape[2] :]
            rows = [tensor.transpose(1, 2).flatten(2).cpu() for tensor in (wanted, kept)]
            checks.append(compare("cache", layer, CACHE_SITE, rows[0], rows[1]))
    return checks
