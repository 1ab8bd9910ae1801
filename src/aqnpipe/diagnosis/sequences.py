"""Whole sequences through the model: attention over many keys, prefill and decode with the KV cache, rotation.

Three batches run through the whole model. The first has no padding, the second has some at the start of each sequence,
because kernels are chosen by the mask, and the third is one sequence, as in plain generation. Each is a prefill and
single tokens; the prefill of the second comes in two parts, so that several queries meet a filled cache. Kernels run on
test operands (see attention_kernel.py). What the model makes of its own operands is observed (see kernels.py).
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from aqnpipe.diagnosis.attention_kernel import GRADIENT_SITE, SITE, Observation, replaced_operands
from aqnpipe.diagnosis.attention_operands import KINDS
from aqnpipe.diagnosis.checks import Check
from aqnpipe.diagnosis.rotary import SITE as ROTARY_SITE
from aqnpipe.diagnosis.rotary import TABLE_SITE, rotation_checks, shown_projections, table_checks, zero_angles
from aqnpipe.models.sites import LayerSites

_PREFILL = 131
"""Tokens of the first prefill, more than two tiles of 64 and not a multiple of any tile."""
_PADDED_PREFILL = 63
_PAGE = 16
"""The padded prefill is one less than a multiple of it, so that single tokens cross a boundary of a cache."""
_FIRST_PART = 32
_PADDING = (7, 0, 19, 3)
"""Masked tokens of the four sequences, one for each kind of operands."""
_NUM_DECODED = 2
_POSITIONS = ("max_position_embeddings", "n_positions")

# fmt: off
FAMILIES = frozenset({
    "cohere", "deepseek_v3", "dots1", "flex_olmo", "gemma", "gemma2",
    "gemma3_text", "glm4_moe", "gpt2", "gpt_bigcode", "gpt_neox", "llama",
    "ministral", "mistral", "mixtral", "olmo", "olmo2", "olmo3",
    "olmoe", "opt", "phi", "phi3", "qwen2", "qwen2_moe",
    "qwen3", "qwen3_moe", "seed_oss", "stablelm", "starcoder2",
})
# fmt: on
"""Model types on which the probes of structure were tried: rotation, cache, norms and experts."""


def probe_sequences(model: nn.Module, layers: Sequence[LayerSites], seed: int, untested: dict[str, str]) -> list[Check]:
    """Return the checks of kernels, cache and rotation; `untested` collects the gaps."""
    length = longest_sequence(model) - _NUM_DECODED
    unpadded = torch.zeros(len(KINDS), dtype=torch.long)
    observation = Observation(unpadded, seed, with_gradients=True, with_full_tiles=True)
    first = _run_batch(model, layers, length, observation, untested)
    single = Observation(torch.zeros(1, dtype=torch.long), seed)
    with zero_angles(model) if is_known(model) and first.tables else nullcontext():
        _run_batch(model, layers, length, single, untested)
    short = min(_PADDED_PREFILL, length)
    if short >= _PAGE:
        short = (short + 1) // _PAGE * _PAGE - 1
    padding = torch.tensor(_PADDING).clamp(max=short - 1)
    second = _run_batch(model, layers, short, Observation(padding, seed + 1), untested, min(_FIRST_PART, short))
    rotations: list[Check] = []
    if not first.tables:
        untested[ROTARY_SITE] = "the layers get no table of cosines and sines"
    elif not is_known(model):
        untested[ROTARY_SITE] = f"not tried on model type {model_type(model)}"
    else:
        rotations = rotation_checks(single.operands, first.operands, first.tables)
        rotations += _table_checks(model, first, untested)
    if not any(check.site == SITE for check in first.checks):
        untested.setdefault(SITE, "its kernel is not looked up in the table of transformers")
    if not any(check.site == GRADIENT_SITE for check in first.checks):
        untested.setdefault(GRADIENT_SITE, untested.get(SITE, "its kernel has no gradient"))
    checks = first.checks + single.checks + second.checks + rotations
    return checks if is_known(model) else [check for check in checks if check.probe != "cache"]


def longest_sequence(model: nn.Module) -> int:
    """Return the number of tokens of the longest sequence, with the decoded ones: fewer if the model takes fewer."""
    positions = next((int(value) for name in _POSITIONS if (value := getattr(model.config, name, None))), None)
    full = _PREFILL + _NUM_DECODED
    return full if positions is None else min(full, positions - 2)  # OPT numbers its positions from two


def _run_batch(
    model: nn.Module,
    layers: Sequence[LayerSites],
    length: int,
    observation: Observation,
    untested: dict[str, str],
    first_part: int | None = None,
) -> Observation:
    """Prefill `length` tokens per sequence, the `first_part` of them in a call of its own, then decode."""
    if not is_known(model):
        untested["KV cache"] = f"not tried on model type {model_type(model)}"
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    device = embedding.weight.device
    num_sequences, total = len(observation.padding), length + _NUM_DECODED
    ids = (torch.arange(num_sequences * total) * 7919 + 1 + observation.seed) % embedding.num_embeddings
    ids = ids.reshape(num_sequences, total).to(device)
    mask = (torch.arange(total) >= observation.padding.unsqueeze(1)).long().to(device)
    attention = {sites.attention: index for index, sites in enumerate(layers)}
    cache = None
    with (
        shown_projections(
            attention, observation.seed, total, lambda: observation.seen + observation.num_new, observation.show
        ),
        replaced_operands(attention, observation),
        _tables_kept(layers, observation),
    ):
        ends_of_calls = [first_part or length, length, *range(length + 1, total + 1)]
        for start, end in itertools.pairwise([0, *sorted(set(ends_of_calls))]):
            observation.seen, observation.num_new = start, end - start
            shown = mask[:, :end] if observation.padding.any() else None
            output = model(input_ids=ids[:, start:end], attention_mask=shown, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
    untested.update(observation.unknown)
    return observation


def model_type(model: nn.Module) -> str:
    """Return the name that transformers gives to the family of a model."""
    return str(getattr(model.config, "model_type", None))


def is_known(model: nn.Module) -> bool:
    """Return whether the answers that depend on the structure of a model type hold for this one."""
    norms_after = model_type(model) == "opt" and not getattr(model.config, "do_layer_norm_before", True)
    return model_type(model) in FAMILIES and not norms_after


@contextmanager
def _tables_kept(layers: Sequence[LayerSites], observation: Observation) -> Iterator[None]:
    """Keep the table of cosines and sines that each layer gets."""

    def keep(index: int, kwargs: Mapping[str, Any]) -> None:
        table = kwargs.get("position_embeddings")
        if isinstance(table, tuple) and len(table) == 2:
            observation.tables[index, observation.seen] = (table[0][0].cpu(), table[1][0].cpu())

    handles = [
        sites.layer.register_forward_pre_hook(lambda m, a, kw, i=index: keep(i, kw), with_kwargs=True)
        for index, sites in enumerate(layers)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


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
