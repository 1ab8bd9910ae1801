"""Whole sequences through the model: attention over many keys, prefill and decode with the KV cache, residual sums.

Four batches run through the whole model. The first has no padding, the second has some at the start of each sequence,
because kernels are chosen by the mask, and the third is one sequence, as in plain generation. The fourth is long: every
module gets more than 1,024 rows, attention and rotation get positions beyond 512, in whole tiles of keys, and the
linears select. Each is a prefill and single tokens; the prefill of the second comes in two parts, so that several
queries meet a filled cache. Kernels run on test operands (see attention.py), everything else on what the model makes of
them, and is recomputed on the host from its own terms (see flow.py).

Rotary position embeddings: the operands of the attention kernel are recorded twice, with the model's own table of
cosines and sines and with a table of angle zero, while the outputs of the projections are the same test numbers. The
second are the operands before rotation in any architecture, whatever norm or split lies between, and the first have to
be their rotation.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from aqnpipe.diagnosis.capture import hooked, on_host
from aqnpipe.diagnosis.checks import OUTSIDE_LAYERS, Check, compare
from aqnpipe.diagnosis.probes.attention import GRADIENT_SITE, SITE, Observation, replaced_operands
from aqnpipe.diagnosis.probes.attention_operands import KINDS
from aqnpipe.diagnosis.probes.flow import changed_logits, is_known, model_type, observed
from aqnpipe.diagnosis.probes.linears import selecting_in_model
from aqnpipe.diagnosis.probes.patterns import FLOAT32_EPS, full_mantissas, mantissa_bits
from aqnpipe.models.layout import LayerSites
from aqnpipe.seeding import keyed_generator

_PREFILL = 131
"""Tokens of the first prefill, more than two tiles of 64 and not a multiple of any tile."""
_LONG = 576
_LEAST_ROWS = 1025
"""Tokens of the longest sequences, and of all sequences of their batch."""
_TILES = (64, 16, 1)
"""Tokens of a tile; kernels skip the handling of ends where the lengths are multiples of theirs."""
_PADDED_PREFILL = 63
_PAGE = 16
"""The padded prefill is one less than a multiple of it, so that single tokens cross a boundary of a cache."""
_FIRST_PART = 32
_PADDING = (7, 0, 19, 3, 11, 5)
"""Masked tokens of the sequences, at least one for each kind of operands and two behind the fourth."""
_NUM_DECODED = 2
_LOGIT_SETTINGS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
ROTARY_SITE, TABLE_SITE = "rotary", "rotary_table"
PROJECTIONS = frozenset(
    {"q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "c_attn"}
    | {"q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"}
)
_FIXED_TABLES = frozenset({"default", "linear", "llama3", "yarn"})
"""Kinds of tables that depend on the position alone."""

Operands = Mapping[tuple[int, int], tuple[Tensor, Tensor]]
"""Pairs by layer and number of tokens in the cache, of one sequence: queries and keys [heads, tokens, channels], or
cosines and sines [tokens, channels]."""

_POSITIONS = ("max_position_embeddings", "n_positions")


def probe_sequences(model: nn.Module, layers: Sequence[LayerSites], seed: int, untested: dict[str, str]) -> list[Check]:
    """Return the checks of kernels, cache, rotation, residual sums and logits; `untested` collects the gaps."""
    count, longest = long_batch(model)
    length = min(_PREFILL, longest_sequence(model) - _NUM_DECODED)
    unpadded = torch.zeros(len(KINDS), dtype=torch.long)
    observation = Observation(unpadded, seed, with_gradients=True, with_fewer=True)
    first = _run_batch(model, layers, length, observation, untested)
    single = Observation(torch.zeros(1, dtype=torch.long), seed)
    with _zero_angles(model) if is_known(model) and first.tables else nullcontext():
        _run_batch(model, layers, length, single, untested)
    short = min(_PADDED_PREFILL, length)
    if short >= _PAGE:
        short = (short + 1) // _PAGE * _PAGE - 1
    padding = torch.tensor(_PADDING).clamp(max=short - 1)
    second = _run_batch(model, layers, short, Observation(padding, seed + 1), untested, min(_FIRST_PART, short))
    long = Observation(torch.zeros(count, dtype=torch.long), seed, long=True)
    with selecting_in_model(layers, long.checks.append):
        _run_batch(model, layers, longest, long, untested, period=length + _NUM_DECODED)
    rotations: list[Check] = []
    if not first.tables:
        untested[ROTARY_SITE] = "the layers get no table of cosines and sines"
    elif not is_known(model):
        untested[ROTARY_SITE] = f"not tried on model type {model_type(model)}"
    else:
        rotations = _rotation_checks(single.operands, first.operands, first.tables)
        rotations += _rotation_checks(_repeated(single, long), long.operands, long.tables)
        rotations += _table_checks(model, first, untested) + _table_checks(model, long, untested)
    if not any(check.site == SITE for check in first.checks):
        untested.setdefault(SITE, "its kernel is not looked up in the table of transformers")
    if not any(check.site == GRADIENT_SITE for check in first.checks):
        untested.setdefault(GRADIENT_SITE, untested.get(SITE, "its kernel has no gradient"))
    checks = first.checks + single.checks + second.checks + long.checks + rotations
    return checks if is_known(model) else [check for check in checks if check.probe != "cache"]


def longest_sequence(model: nn.Module) -> int:
    """Return the number of tokens of the longest sequence, with the decoded ones: fewer if the model takes fewer."""
    positions = next((int(value) for name in _POSITIONS if (value := getattr(model.config, name, None))), None)
    full = _LONG + _NUM_DECODED
    return full if positions is None else min(full, positions - 2)  # OPT numbers its positions from two


def long_batch(model: nn.Module) -> tuple[int, int]:
    """Return the number of sequences of the long batch and of the tokens of each, which are whole tiles."""
    longest = min(_LONG, longest_sequence(model) - _NUM_DECODED)
    length = next(longest // tile * tile for tile in _TILES if tile <= longest)
    return -(-_LEAST_ROWS // length), length


def _repeated(single: Observation, long: Observation) -> Operands:
    """Return the operands before rotation at the tokens of a long batch, whose projections repeat those of `single`."""
    found = {}
    for (layer, seen), rotated in long.operands.items():
        calls = [operands for (own, _), operands in sorted(single.operands.items()) if own == layer]
        queries, keys = (torch.cat([call[side] for call in calls], 1) for side in (0, 1))
        tokens = torch.arange(seen, seen + rotated[0].shape[1]) % queries.shape[1]
        found[layer, seen] = (queries[:, tokens], keys[:, tokens])
    return found


def _run_batch(
    model: nn.Module,
    layers: Sequence[LayerSites],
    length: int,
    observation: Observation,
    untested: dict[str, str],
    first_part: int | None = None,
    period: int | None = None,
) -> Observation:
    """Prefill `length` tokens per sequence, the `first_part` of them in a call of its own, then decode single tokens,
    with every layer observed. The numbers of the projections repeat after `period` tokens.
    """
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    device = embedding.weight.device
    num_sequences, total = len(observation.padding), length + (1 if observation.long else _NUM_DECODED)
    ids = (torch.arange(num_sequences * total) * 7919 + 1 + observation.seed) % embedding.num_embeddings
    ids = ids.reshape(num_sequences, total).to(device)
    mask = (torch.arange(total) >= observation.padding.unsqueeze(1)).long().to(device)
    attention = {sites.attention: index for index, sites in enumerate(layers)}
    cache = None
    with (
        _shown_projections(attention, observation, total, period or total),
        replaced_operands(attention, observation),
        observed(model, layers, observation, untested) as flow,
    ):
        ends_of_calls = [first_part or length, length, *range(length + 1, total + 1)]
        for start, end in itertools.pairwise([0, *sorted(set(ends_of_calls))]):
            observation.seen, observation.num_new = start, end - start
            shown = mask[:, :end] if observation.padding.any() else None
            output = model(input_ids=ids[:, start:end], attention_mask=shown, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            observation.checks += _logits_check(model, flow.raw, output.logits, untested)
            flow.finish(output.logits)
    untested.update(observation.unknown)
    return observation


def _logits_check(model: nn.Module, raw: Tensor | None, logits: Tensor, untested: dict[str, str]) -> list[Check]:
    """Compare the logits with the output of lm_head, capped or scaled as the model does.

    Those of a model that divides by a setting are not compared, nor capped ones of an unknown one.
    """
    used = [name for name in _LOGIT_SETTINGS if getattr(model.config, name, None) not in (None, 1.0)]
    if raw is None or (used and (not is_known(model) or used not in (["final_logit_softcapping"], ["logit_scale"]))):
        untested["logits behind lm_head"] = "the model caps or scales them, or lm_head was not called"
        return []
    if not used:
        return [compare("logits", OUTSIDE_LAYERS, "lm_head", raw.cpu(), logits.cpu())]
    with on_host():
        own = raw.detach().cpu()
        answer, allowed = changed_logits(own.double(), used[0], float(getattr(model.config, used[0])), own.dtype)
    return [compare("logits", OUTSIDE_LAYERS, "lm_head", answer, logits.cpu(), allowed=allowed)]


@contextmanager
def _shown_projections(
    attentions: Mapping[nn.Module, int], observation: Observation, longest: int, period: int
) -> Iterator[None]:
    """Replace the outputs of the projections to queries, keys and values by test numbers while the body runs.

    The tokens up to position `longest` have numbers of their own, which repeat after a `period`, and every sequence has
    them at other channels. They are recorded.
    """

    def show(layer: int, number: int, output: Tensor) -> Tensor:
        generator = keyed_generator("cpu", observation.seed, "diagnosis.rotary", layer, number)
        total = observation.seen + observation.num_new
        with on_host():
            bits = mantissa_bits(output.dtype)
            numbers = full_mantissas((period, output.shape[-1]), bits, generator)[torch.arange(longest) % period]
            shown = numbers[total - output.shape[-2] : total].expand(output.shape).clone()
            for sequence in range(1, len(shown)):  # equal sequences would hide that a cache confuses them
                shown[sequence] = shown[sequence].roll(sequence, -1)
            observation.show(layer, shown.to(output.dtype))
            return torch.empty_like(output).copy_(shown)

    with hooked(
        module.register_forward_hook(lambda m, a, out, i=index, n=number: show(i, n, out))
        for attention, index in attentions.items()
        for number, (name, module) in enumerate(attention.named_children())
        if name in PROJECTIONS
    ):
        yield


@contextmanager
def _zero_angles(model: nn.Module) -> Iterator[None]:
    """Replace every table of cosines and sines by that of angle zero while the body runs."""
    with hooked(
        module.register_forward_hook(lambda m, a, out: (torch.ones_like(out[0]), torch.zeros_like(out[1])))
        for module in model.modules()
        if _makes_table(module)
    ):
        yield


def _rotation_checks(before: Operands, after: Operands, tables: Operands) -> list[Check]:
    """Compare operands `after` rotation with those `before` and the tables that the layers got.

    The four layouts are pairs of neighbours or of halves, at the first or the last channels. One layout, the one that
    fits most values, has to fit every layer.
    """
    found: list[list[Check]] = []
    for layout in itertools.product((False, True), (False, True)):
        found.append([])
        for key, (cos, sin) in tables.items():
            for unrotated, rotated in zip(before[key], after[key], strict=True):
                expected, allowed = _rotate(unrotated, cos, sin, *layout)
                flat = [tensor.transpose(0, 1).flatten(1) for tensor in (expected, rotated, allowed)]
                found[-1].append(compare("rotary", key[0], ROTARY_SITE, flat[0], flat[1], allowed=flat[2]))
        if not _num_wrong(found[-1]):
            break
    return min(found, key=_num_wrong)


def _num_wrong(checks: Iterable[Check]) -> int:
    return sum(len(check.mismatch.channels) for check in checks if check.mismatch)


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


def _table_checks(model: nn.Module, observation: Observation, untested: dict[str, str]) -> list[Check]:
    """Compare the tables of cosines and sines with the host, each different one once.

    A new module of the class has the frequencies.
    """
    modules: list[Any] = [module for module in model.modules() if _makes_table(module)]
    kinds = {kind for module in modules for kind in _kinds(module)}
    if len(modules) != 1:
        untested[TABLE_SITE] = f"{len(modules)} modules make tables, expected one"
    elif not kinds <= _FIXED_TABLES:
        untested[TABLE_SITE] = f"tables of type {', '.join(sorted(kinds))} depend on more than the position"
    if len(modules) != 1 or not kinds <= _FIXED_TABLES:
        return []
    checks: list[Check] = []
    compared: list[tuple[int, Tensor]] = []
    for (_, seen), (cos, sin) in observation.tables.items():
        if not any(seen == other and torch.equal(cos, table) for other, table in compared):
            compared.append((seen, cos))
            found = list(_of_table(modules[0], type(modules[0])(config=modules[0].config), cos, sin, seen))
            checks += min(found, key=_num_wrong) if found else []
            if not found:
                untested[TABLE_SITE] = "its frequencies are not known"
    return checks


def _of_table(module: nn.Module, fresh: nn.Module, cos: Tensor, sin: Tensor, first: int) -> Iterator[list[Check]]:
    """Yield the checks of a table [tokens, channels] from position `first` on, for every layout that fits its shape."""
    positions = torch.arange(first, first + len(cos), dtype=torch.float64)
    for name, frequencies in fresh.named_buffers():
        own = getattr(module, name, None)
        if not name.endswith("inv_freq") or not isinstance(own, Tensor):
            continue
        scale = float(getattr(fresh, name.removesuffix("inv_freq") + "attention_scaling", 1.0))
        half = positions.unsqueeze(1) * frequencies.cpu().to(own.dtype).double()
        for angle in (torch.cat((half, half), -1), half.repeat_interleave(2, -1)):
            if angle.shape == cos.shape:
                allowed = scale * (torch.finfo(cos.dtype).eps + 2.0**-22 * (1 + angle.abs()))
                pairs = ((angle.cos(), cos), (angle.sin(), sin))
                place = ("table", OUTSIDE_LAYERS, TABLE_SITE)
                yield [compare(*place, wanted * scale, seen, allowed=allowed) for wanted, seen in pairs]


def _makes_table(module: nn.Module) -> bool:
    return "rotaryembedding" in type(module).__name__.lower()


def _kinds(module: nn.Module) -> set[str]:
    kind = getattr(module, "rope_type", "default")
    return set(kind.values()) if isinstance(kind, dict) else {str(kind)}
