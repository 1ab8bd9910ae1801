"""Rotary position embeddings: the table of cosines and sines, and the rotation of queries and keys by it.

The operands of the attention kernel are recorded twice, with the model's own table and with a table of angle zero,
while the outputs of the projections are the same test numbers. The second are the operands before rotation in any
architecture, whatever norm or split lies between, and the first have to be their rotation.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from aqnpipe.diagnosis.capture import hooked
from aqnpipe.diagnosis.checks import OUTSIDE_LAYERS, Check, compare
from aqnpipe.diagnosis.probes.reference import FLOAT32_EPS, full_mantissas, mantissa_bits, on_host
from aqnpipe.seeding import keyed_generator

SITE = "rotary"
TABLE_SITE = "rotary_table"

PROJECTIONS = frozenset(
    {"q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "c_attn"}
    | {"q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"}
)
_FIXED_TABLES = frozenset({"default", "linear", "llama3", "yarn"})
"""Kinds of tables that depend on the position alone."""

Operands = Mapping[tuple[int, int], tuple[Tensor, Tensor]]
"""Pairs by layer and number of tokens in the cache, of one sequence: queries and keys [heads, tokens, channels], or
cosines and sines [tokens, channels]."""


@contextmanager
def shown_projections(
    attentions: Mapping[nn.Module, int],
    seed: int,
    longest: int,
    period: int,
    total: Callable[[], int],
    record: Callable[[int, Tensor], None],
) -> Iterator[None]:
    """Replace the outputs of the projections to queries, keys and values by test numbers while the body runs.

    The tokens up to position `longest` have numbers of their own, which repeat after a `period`, and every sequence has
    them at other channels; `total` returns the number of tokens so far, with those of the call. `record` gets the layer
    and its numbers of every call.
    """

    def show(layer: int, number: int, output: Tensor) -> Tensor:
        generator = keyed_generator("cpu", seed, "diagnosis.rotary", layer, number)
        with on_host():
            bits = mantissa_bits(output.dtype)
            numbers = full_mantissas((period, output.shape[-1]), bits, generator)[torch.arange(longest) % period]
            shown = numbers[total() - output.shape[-2] : total()].expand(output.shape).clone()
            for sequence in range(1, len(shown)):  # equal sequences would hide that a cache confuses them
                shown[sequence] = shown[sequence].roll(sequence, -1)
            record(layer, shown.to(output.dtype))
            return torch.empty_like(output).copy_(shown)

    with hooked(
        module.register_forward_hook(lambda m, a, out, i=index, n=number: show(i, n, out))
        for attention, index in attentions.items()
        for number, (name, module) in enumerate(attention.named_children())
        if name in PROJECTIONS
    ):
        yield


@contextmanager
def zero_angles(model: nn.Module) -> Iterator[None]:
    """Replace every table of cosines and sines by that of angle zero while the body runs."""
    with hooked(
        module.register_forward_hook(lambda m, a, out: (torch.ones_like(out[0]), torch.zeros_like(out[1])))
        for module in model.modules()
        if "rotaryembedding" in type(module).__name__.lower()
    ):
        yield


def rotation_checks(
    before: Operands, after: Operands, tables: Mapping[tuple[int, int], tuple[Tensor, Tensor]]
) -> list[Check]:
    """Compare operands `after` rotation with those `before` and the tables that the layers got.

    The four layouts are pairs of neighbours or of halves, at the first or the last channels. One layout, the one that
    fits most values, has to fit every layer.
    """
    found = []
    for layout in itertools.product((False, True), (False, True)):
        checks = _checks_of_layout(before, after, tables, *layout)
        found.append((sum(len(check.mismatch.channels) for check in checks if check.mismatch), checks))
        if not found[-1][0]:
            break
    return min(found, key=lambda pair: pair[0])[1]


def _checks_of_layout(
    before: Operands,
    after: Operands,
    tables: Operands,
    is_neighbours: bool,
    is_last: bool,
) -> list[Check]:
    checks = []
    for key, (cos, sin) in tables.items():
        for unrotated, rotated in zip(before[key], after[key], strict=True):
            expected, allowed = _rotate(unrotated, cos, sin, is_neighbours, is_last)
            flat = [tensor.transpose(0, 1).flatten(1) for tensor in (expected, rotated, allowed)]
            checks.append(compare("rotary", key[0], SITE, flat[0], flat[1], allowed=flat[2]))
    return checks


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, is_neighbours: bool, is_last: bool) -> tuple[Tensor, Tensor]:
    """Return x [heads, tokens, channels] rotated, float64, and the rounding allowed.

    Two products and their sum, and a norm before them, whose root may round differently in both passes.
    """
    width = cos.shape[-1]
    start = x.shape[-1] - width if is_last else 0
    own = x[..., start : start + width].double()
    if is_neighbours:
        other = torch.stack((-own[..., 1::2], own[..., 0::2]), dim=-1).flatten(-2)
    else:
        other = torch.cat((-own[..., width // 2 :], own[..., : width // 2]), dim=-1)
    expected, magnitude = x.double().clone(), x.double().abs()
    first, second = own * cos.double(), other * sin.double()
    expected[..., start : start + width] = first + second
    magnitude[..., start : start + width] = first.abs() + second.abs()
    eps = torch.finfo(x.dtype).eps
    allowed = (3 * eps + 8 * FLOAT32_EPS) * magnitude + torch.finfo(x.dtype).tiny
    return expected, allowed


def table_checks(
    module: nn.Module, cos: Tensor, sin: Tensor, first_position: int, untested: dict[str, str]
) -> list[Check]:
    """Compare one table [tokens, channels] with float64 on the host; a new module of the class has its frequencies."""
    kinds = _kinds(module)
    if not kinds <= _FIXED_TABLES:
        untested[TABLE_SITE] = f"tables of type {', '.join(sorted(kinds))} depend on more than the position"
        return []
    fresh: Any = type(module)(config=module.config)
    positions = torch.arange(first_position, first_position + len(cos), dtype=torch.float64)
    eps = torch.finfo(cos.dtype).eps
    found = []
    for name, frequencies in fresh.named_buffers():
        own = getattr(module, name, None)
        if not name.endswith("inv_freq") or not isinstance(own, Tensor):
            continue
        scale = float(getattr(fresh, name.removesuffix("inv_freq") + "attention_scaling", 1.0))
        half = positions.unsqueeze(1) * frequencies.cpu().to(own.dtype).double()
        for angle in (torch.cat((half, half), -1), half.repeat_interleave(2, -1)):
            if angle.shape == cos.shape:
                allowed = scale * (eps + 2.0**-22 * (1 + angle.abs()))
                found.append(
                    [
                        compare("table", OUTSIDE_LAYERS, TABLE_SITE, wanted * scale, seen, allowed=allowed)
                        for wanted, seen in ((angle.cos(), cos), (angle.sin(), sin))
                    ]
                )
    if not found:
        untested[TABLE_SITE] = "its frequencies are not known"
        return []
    return min(found, key=lambda checks: sum(len(check.mismatch.channels) for check in checks if check.mismatch))


def _kinds(module: nn.Module) -> set[str]:
    kind = getattr(module, "rope_type", "default")
    return set(kind.values()) if isinstance(kind, dict) else {str(kind)}
