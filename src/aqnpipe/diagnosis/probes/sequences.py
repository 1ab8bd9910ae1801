"""Whole sequences through the model: attention over many keys, prefill and decode with the KV cache, residual sums.

Four batches run through the whole model. The first has no padding, the second has some at the start of each sequence,
because kernels are chosen by the mask, and the third is one sequence, as in plain generation. The fourth is long: every
module gets more than 1,024 rows, attention and rotation get positions beyond 512, in whole tiles of keys, and the
linears select. Each is a prefill and single tokens; the prefill of the second comes in two parts, so that several
queries meet a filled cache. Kernels run on test operands (see attention.py), everything else on what the model makes of
them, and is recomputed on the host from its own terms (see flow.py).
"""

import itertools
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from aqnpipe.diagnosis.checks import OUTSIDE_LAYERS, Check, compare
from aqnpipe.diagnosis.probes.attention import GRADIENT_SITE, SITE, Observation, replaced_operands
from aqnpipe.diagnosis.probes.attention_operands import KINDS
from aqnpipe.diagnosis.probes.flow import is_known, model_type, observed
from aqnpipe.diagnosis.probes.linears import selecting_in_model
from aqnpipe.diagnosis.probes.outer_modules import changed_logits
from aqnpipe.diagnosis.probes.reference import on_host
from aqnpipe.diagnosis.probes.rotary import SITE as ROTARY_SITE
from aqnpipe.diagnosis.probes.rotary import TABLE_SITE, rotation_checks, shown_projections, table_checks, zero_angles
from aqnpipe.models.layout import LayerSites

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
_POSITIONS = ("max_position_embeddings", "n_positions")


def probe_sequences(model: nn.Module, layers: Sequence[LayerSites], seed: int, untested: dict[str, str]) -> list[Check]:
    """Return the checks of kernels, cache, rotation, residual sums and logits; `untested` collects the gaps."""
    count, longest = long_batch(model)
    length = min(_PREFILL, longest_sequence(model) - _NUM_DECODED)
    unpadded = torch.zeros(len(KINDS), dtype=torch.long)
    observation = Observation(unpadded, seed, with_gradients=True, with_fewer=True)
    first = _run_batch(model, layers, length, observation, untested)
    single = Observation(torch.zeros(1, dtype=torch.long), seed)
    with zero_angles(model) if is_known(model) and first.tables else nullcontext():
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
        rotations = rotation_checks(single.operands, first.operands, first.tables)
        rotations += rotation_checks(_repeated(single, long), long.operands, long.tables)
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


def _repeated(single: Observation, long: Observation) -> dict[tuple[int, int], tuple[Tensor, Tensor]]:
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
        shown_projections(
            attention,
            observation.seed,
            total,
            period or total,
            lambda: observation.seen + observation.num_new,
            observation.show,
        ),
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


def _table_checks(model: nn.Module, observation: Observation, untested: dict[str, str]) -> list[Check]:
    """Compare the tables of cosines and sines with the host, each different one once."""
    modules = [module for module in model.modules() if "rotaryembedding" in type(module).__name__.lower()]
    if len(modules) != 1:
        untested[TABLE_SITE] = f"{len(modules)} modules make tables, expected one"
        return []
    checks: list[Check] = []
    compared: list[tuple[int, Tensor]] = []
    for (_, seen), (cos, sin) in observation.tables.items():
        if not any(seen == other and torch.equal(cos, table) for other, table in compared):
            compared.append((seen, cos))
            checks += table_checks(modules[0], cos, sin, seen, untested)
    return checks
