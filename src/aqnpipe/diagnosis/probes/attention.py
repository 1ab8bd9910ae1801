"""The attention kernel with operands whose answer is known: many keys, prefill and decode, eager or fused.

transformers looks the kernel of every attention module up in one table. While `replaced_operands` is active the lookup
returns a wrapper, which runs the kernel that the model would have used on test operands of the same shapes and strides,
and compares its result with float64 on the host. The reference derives the mask from positions and padding by itself,
so a wrong mask is a fault.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from aqnpipe.diagnosis.capture import first_tensor, on_host
from aqnpipe.diagnosis.checks import Check, compare
from aqnpipe.diagnosis.probes.attention_operands import (
    KINDS,
    VALUE_BITS,
    Setting,
    gradients,
    kind_of,
    known_operands,
    like,
    reference,
)
from aqnpipe.diagnosis.probes.patterns import full_mantissas
from aqnpipe.error_bounds import few_roundings
from aqnpipe.seeding import keyed_generator

SITE = "attention_core"
GRADIENT_SITE = f"{SITE}.gradient"
CACHE_SITE = "kv_cache"

_NUM_OPERANDS = 4
"""Queries, keys, values and the mask."""
_KNOWN_ARGUMENTS = frozenset(
    {"scaling", "dropout", "sliding_window", "softcap", "is_causal"}
    | {"position_ids", "cache_position", "use_cache", "output_attentions", "output_router_logits", "return_dict"}
)
"""Arguments that the reference follows, or that change nothing of the kernel."""
_NEGLIGIBLE = 1e-13
_COMPARED_QUERIES = 36
"""Queries of a long sequence whose answer is computed on the host."""
_OTHER_NUMBERS = (2, 3, 16)
"""Numbers of sequences that kernels run on beside those of a batch, the last ones copies of it."""
_OF_BATCH = frozenset({"position_ids", "cache_position"})
"""Arguments with the shape of the whole batch, which kernels do without."""


@dataclass
class Observation:
    """Facts about the batch that the kernel wrapper needs, and what it found.

    `padding`: number of masked tokens at the start of each sequence. `seen`: tokens in the cache before this call;
    `num_new`: tokens of this call. `operands` and `tables`: queries and new keys of the first sequence as the model
    made them, and its cosines and sines, by layer and `seen`. `shown`: outputs of the projections in this call.
    `with_gradients` differentiates the kernel of the prefill as well, `with_fewer` also runs it on fewer sequences.
    Only some queries of a `long` batch are compared, from every part of the sequences.
    """

    padding: Tensor
    seed: int
    seen: int = 0
    num_new: int = 0
    with_gradients: bool = False
    with_fewer: bool = False
    long: bool = False
    checks: list[Check] = field(default_factory=list)
    unknown: dict[str, str] = field(default_factory=dict)
    operands: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)
    tables: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)
    results: dict[int, Tensor] = field(default_factory=dict)
    cached: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    shown: dict[int, list[Tensor]] = field(default_factory=dict)

    def show(self, layer: int, numbers: Tensor) -> None:
        """Record what a projection of the attention of a layer outputs in this call: [sequences, tokens, channels]."""
        self.shown.setdefault(layer, []).append(numbers)


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
    with on_host():
        observation.checks += _cache_checks(layer, k, v, observation)
        observation.checks += _value_checks(layer, v, observation)
    odd = [key for key, value in kwargs.items() if value is not None and key not in _KNOWN_ARGUMENTS]
    if odd or q.ndim != 4 or q.shape[1] % k.shape[1]:
        observation.unknown[SITE] = f"its kernel takes {', '.join(odd) or 'operands of unknown shape'}"
        return kernel(module, q, k, v, mask, **kwargs)
    run = partial(kernel, module)
    generator = keyed_generator("cpu", observation.seed, "diagnosis.attention", layer, observation.seen)
    visible = visible_keys(q.shape[2], k.shape[2], observation, kwargs.get("sliding_window"))
    setting = Setting(float(kwargs.get("scaling") or q.shape[-1] ** -0.5), _softcap(module, kwargs), visible)
    # A sequence has one kind of operands: fewer of them than kinds have others in every layer; of more, the last ones
    # have the last kinds, in which every step of softmax shows.
    first_kind = len(q) * layer + observation.seen if len(q) < len(KINDS) else -len(q) % len(KINDS)
    with on_host():
        test = known_operands((q, k, v), setting.scale, visible, generator, first_kind)
    result = run(*test, mask, **kwargs)
    observation.results[layer] = first_tensor(result)
    with on_host():
        rows = _some(q.shape[2], generator) if observation.long else torch.arange(q.shape[2])
        compared = replace(setting, visible=visible[:, rows])
        answer = _Answer(layer, first_kind, compared.visible, *reference((test[0][:, :, rows], *test[1:]), compared))
        observation.checks += answer.checks(first_tensor(result)[:, rows])
    if observation.with_gradients and observation.seen == 0:
        found = _gradient_checks(layer, lambda *own: run(*own, mask, **kwargs), test, setting, generator)
        observation.checks += found
        if not found:
            observation.unknown[GRADIENT_SITE] = "its kernel has no gradient"
    if observation.with_fewer:
        observation.checks += _few_checks(run, test, mask, kwargs, answer)
    return result


def _some(count: int, generator: torch.Generator) -> Tensor:
    """Return one of every few queries, at random, and the last one."""
    step = -(-count // _COMPARED_QUERIES)
    first = torch.arange(0, count, step)
    return (first + torch.randint(0, step, first.shape, generator=generator)).clamp(max=count - 1)


def _softcap(module: nn.Module, kwargs: dict[str, Any]) -> float | None:
    """Return the bound of the scores, None without one; sdpa has no such argument, and transformers drops it there."""
    implementation = getattr(getattr(module, "config", None), "_attn_implementation", None)
    return None if implementation == "sdpa" else kwargs.get("softcap")


@dataclass(frozen=True)
class _Answer:
    """Required output of a kernel, how far it may be off, and its probabilities, all [sequences, heads, queries, ...].

    `visible`: keys that each query sees. `first_kind`: position of the first sequence's operands among KINDS.
    """

    layer: int
    first_kind: int
    visible: Tensor
    expected: Tensor
    bound: Tensor
    weights: Tensor

    def checks(self, output: Tensor) -> list[Check]:
        """Compare the output [sequences, queries, heads, channels] of a kernel; queries of padding see no key.

        The output may be that of several copies of the sequences, one after the other, or of the first ones alone.
        """
        number = torch.arange(len(output)) % len(self.expected)
        visible = self.visible.expand(len(self.expected), -1, -1)[number].any(-1)
        expected, bound, weights = (part[number].transpose(1, 2) for part in (self.expected, self.bound, self.weights))
        kinds = [kind_of(int(sequence), self.first_kind) for sequence in number]
        checks = []
        for kind in KINDS:
            keep = visible & torch.tensor([own == kind for own in kinds]).unsqueeze(1)
            if kind not in kinds:
                continue
            wanted, spread = expected[keep].flatten(1), bound[keep].flatten(1)
            # All probabilities are 0 or 1 to far more digits than any device computes.
            if kind == "one-hot" and (weights[keep].minimum(1 - weights[keep]).abs() < _NEGLIGIBLE).all():
                # 16-bit formats round the reciprocal of the sum away, whatever its last bits in float32 are.
                spread = few_roundings(wanted, output.dtype) if output.dtype == torch.float32 else torch.zeros(())
            probe = f"attention_{kind.replace('-', '_')}"
            found = output[keep.to(output.device)].flatten(1)
            checks.append(compare(probe, self.layer, SITE, wanted, found, allowed=spread))
        return checks


def _few_checks(
    run: Callable[..., Any], test: Sequence[Tensor], mask: Tensor | None, kwargs: dict[str, Any], answer: _Answer
) -> list[Check]:
    """Run the kernel on other numbers of the sequences of a batch: kernels are chosen by their number."""
    others = {name: value for name, value in kwargs.items() if name not in _OF_BATCH}
    checks = []
    for count in _OTHER_NUMBERS:
        with on_host():
            chosen = torch.arange(count, device=test[0].device) % len(test[0])
            shown = mask if mask is None or len(mask) == 1 else mask[chosen]
            given = [tensor[chosen] for tensor in test]
        result = run(*given, shown, **others)
        with on_host():
            checks += answer.checks(first_tensor(result))
    return checks


def _gradient_checks(
    layer: int,
    kernel: Callable[..., Any],
    operands: tuple[Tensor, Tensor, Tensor],
    setting: Setting,
    generator: torch.Generator,
) -> list[Check]:
    """Compare the gradients of queries, keys and values of a kernel; none if it has no graph."""
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_(True) for tensor in operands]
        output = first_tensor(kernel(*leaves))
        if not output.requires_grad:
            return []
        with on_host():
            given = full_mantissas(tuple(output.shape), VALUE_BITS, generator)
            given *= setting.visible.any(-1).unsqueeze(-1).unsqueeze(-1)  # padding sees no key and has no answer
            shown = like(output, given)
        observed = torch.autograd.grad(output, leaves, shown, retain_graph=True)
    with on_host():
        expected = gradients(operands, setting, given.transpose(1, 2))
        checks = []
        for (wanted, bound), seen in zip(expected, observed, strict=True):
            flat = [tensor.transpose(1, 2).flatten(2) for tensor in (wanted, seen, bound)]
            checks.append(compare("backward", layer, GRADIENT_SITE, flat[0], flat[1], allowed=flat[2]))
    return checks


def _value_checks(layer: int, v: Tensor, observation: Observation) -> list[Check]:
    """Compare the values of new tokens with the output of their projection, of which they are copies.

    A projection of queries, keys and values has the values last, as a whole or in every head; the one that fits best
    is compared. Where the cache holds compressed values, the projection runs on all tokens, of which the last are new.
    """
    new = v[:, :, v.shape[2] - observation.num_new :].transpose(1, 2).detach().cpu()
    length, heads, width = new.shape[1:]
    sources = []
    for output in observation.shown.pop(layer, ()):
        numbers = output.reshape(len(new), -1, output.shape[-1])
        if numbers.shape[1] > length:
            observation.unknown["compressed keys and values in the cache"] = "test numbers follow their expansion"
            numbers = numbers[:, -length:]
        if numbers.shape[-1] >= heads * width:
            sources.append(numbers[..., -heads * width :].unflatten(-1, (heads, width)))
        if numbers.shape[-1] % heads == 0 and numbers.shape[-1] > heads * width:
            sources.append(numbers.unflatten(-1, (heads, -1))[..., -width:])
    if not sources:
        observation.unknown["values on their way to attention"] = "no projection of them is known"
        return []
    best = min(sources, key=lambda source: int((source != new).sum()))
    return [compare("cache", layer, CACHE_SITE, best.flatten(2), new.flatten(2))]


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
