"""Whole sequences through the model: attention over many keys, prefill and decode with the KV cache, residual sums.

Four batches run through the whole model. The first has no padding, the second has some at the start of each sequence,
because kernels are chosen by the mask, and the third is one sequence, as in plain generation. The fourth is long: every
module gets more than 1,024 rows, attention and rotation get positions beyond 512, in whole tiles of keys, and the
linears select. Each is a prefill and single tokens; the prefill of the second comes in two parts, so that several
queries meet a filled cache. Kernels run on
test operands (see attention_kernel.py), everything else on what the model makes of them: the embedding, every sum of
the residual stream, the way from one layer to the next, and from the last one to the logits, is recomputed on the host
from its own terms, bit for bit (see ends_in_sequences.py for the ends).

So are the places between the modules of a layer: what attention and MLP read, and the sum that ends a mixture of
experts. Every tensor that a block reads has to be one that the layer has read or written before, bit for bit: its
input, the output of a norm, or the sum of its input and a branch. Which of them it is depends on the architecture, so
the one that fits best is compared.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from aqnpipe.diagnosis.checks import OUTSIDE_LAYERS, Check, compare, differs
from aqnpipe.diagnosis.probes.attention import GRADIENT_SITE, SITE, Observation, replaced_operands
from aqnpipe.diagnosis.probes.attention_operands import KINDS
from aqnpipe.diagnosis.probes.experts import experts_of
from aqnpipe.diagnosis.probes.layers import norm_offset, subtracts_mean
from aqnpipe.diagnosis.probes.linears import selecting_in_model
from aqnpipe.diagnosis.probes.norms import has_answer, norm_in_model
from aqnpipe.diagnosis.probes.outer_modules import changed_logits
from aqnpipe.diagnosis.probes.outer_modules_in_sequences import OuterModulesObserver
from aqnpipe.diagnosis.probes.reference import on_host
from aqnpipe.diagnosis.probes.rotary import SITE as ROTARY_SITE
from aqnpipe.diagnosis.probes.rotary import TABLE_SITE, rotation_checks, shown_projections, table_checks, zero_angles
from aqnpipe.diagnosis.probes.trace import first_input, first_tensor
from aqnpipe.error_bounds import few_roundings
from aqnpipe.models.layout import weight_of
from aqnpipe.models.sites import LayerSites

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
_ENDS_OF_ATTENTION = ("o_proj", "dense", "c_proj", "out_proj")
_ENDS_OF_MLP = ("down_proj", "dense_4h_to_h", "c_proj", "fc2")
"""Linears whose output is that of the attention or the MLP that they belong to."""
_LOGIT_SETTINGS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
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
"""Model types on which the probes of structure were tried: residual sums, rotation, cache, norms and experts."""

_ATTENTION_INPUT = "attention_input"
_MLP_INPUT = "mlp_input"
_SHARED = ("shared_expert", "shared_experts")
_GATE_OF_SHARED = "shared_expert_gate"


@dataclass
class _LayerCall:
    hidden: Tensor | None = None
    branches: list[Tensor] = field(default_factory=list)


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
        _observed(model, layers, observation, untested) as ends,
    ):
        ends_of_calls = [first_part or length, length, *range(length + 1, total + 1)]
        for start, end in itertools.pairwise([0, *sorted(set(ends_of_calls))]):
            observation.seen, observation.num_new = start, end - start
            shown = mask[:, :end] if observation.padding.any() else None
            output = model(input_ids=ids[:, start:end], attention_mask=shown, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            observation.checks += _logits_check(model, ends.raw, output.logits, untested)
            ends.finish(output.logits)
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
def _observed(
    model: nn.Module, layers: Sequence[LayerSites], observation: Observation, untested: dict[str, str]
) -> Iterator[OuterModulesObserver]:
    """Compare residual sums, inputs of layers and of every output projection of attention, and the model's ends."""
    if not is_known(model):
        untested["residual sums and KV cache"] = f"not tried on model type {model_type(model)}"
    observer = _Observer(observation, untested, is_known=is_known(model))
    handles = [handle for index, sites in enumerate(layers) for handle in observer.hooks_of_layer(index, sites)]
    ends = OuterModulesObserver(model, observation, untested, known=is_known(model))
    handles += ends.hooks(layers)
    try:
        yield ends
    finally:
        ends.shown.close()
        for handle in handles:
            handle.remove()


@dataclass
class _Observer:
    """Hooks that compare what the layers of a model read and write; without `is_known` they only keep the tables.

    `calls`: the current call of each layer. `outputs`: of the last call of each layer. `ends`: outputs of the last
    linears of blocks whose own output has not come yet.
    """

    observation: Observation
    untested: dict[str, str]
    is_known: bool
    calls: dict[int, _LayerCall] = field(default_factory=dict)
    outputs: dict[int, Tensor] = field(default_factory=dict)
    ends: dict[nn.Module, Tensor] = field(default_factory=dict)

    def hooks_of_layer(self, index: int, sites: LayerSites) -> list[RemovableHandle]:
        """Register the hooks of a layer, its blocks and their ends."""
        layer = sites.layer
        # What a norm adds to its weight is found by a call, before any hook of this layer is there.
        known = sites.norms.items() if self.is_known else ()
        norms = {module: (name, _unit(module)) for name, module in known if has_answer(module)}
        handles = [self._norm_hook(index, module, *facts) for module, facts in norms.items()]
        handles += [
            layer.register_forward_pre_hook(lambda m, a, kw: self._enter(index, a, kw), with_kwargs=True),
            layer.register_forward_hook(lambda m, a, out: self._leave(index, first_tensor(out))),
        ]
        for end in sites.branch_ends:
            handles.append(
                end.register_forward_hook(lambda m, a, out: self.calls[index].branches.append(first_tensor(out)))
            )
        if not self.is_known:
            return handles
        fusable = {module: norms[module][1] for module in layer.children() if module in norms}
        handles += _handoff_hooks(sites, index, fusable, self.observation.checks.append)
        handles += _mixture_hooks(sites.mlp, index, self.observation.checks.append)
        for site, block, end in _blocks_with_end(sites):
            handles += [
                end.register_forward_hook(lambda m, a, out: self.ends.__setitem__(m, out)),
                block.register_forward_hook(
                    lambda m, a, out, s=site, e=end: self._compare_end(index, s, e, first_tensor(out))
                ),
            ]
            if site == "attention_output":
                handles.append(end.register_forward_pre_hook(lambda m, a: self._compare_feed(index, a[0])))
        return handles

    def _norm_hook(self, index: int, module: nn.Module, site: str, unit: float) -> RemovableHandle:
        """Compare every call of a norm: a norm of heads has rows of its own for each."""

        def check(own: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            with on_host():
                self.observation.checks.append(norm_in_model(own, index, site, unit, args[0], output))

        return module.register_forward_hook(check)

    def _enter(self, index: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        hidden = first_input(args, kwargs)
        self.calls[index] = _LayerCall(hidden)
        table = kwargs.get("position_embeddings")
        if isinstance(table, tuple) and len(table) == 2:
            self.observation.tables[index, self.observation.seen] = (table[0][0].cpu(), table[1][0].cpu())
        if index and self.is_known:
            self._compare("chain", index - 1, "layer_output", self.outputs[index - 1], hidden)

    def _leave(self, index: int, output: Tensor) -> None:
        self.outputs[index] = output
        if not self.is_known:
            return
        found = _residual_check(index, self.calls[index], output)
        if found is None:
            self.untested["residual sums"] = "the branches of a layer were not seen"
        else:
            self.observation.checks.append(found)

    def _compare_feed(self, index: int, fed: Tensor) -> None:
        result = self.observation.results.pop(index, None)
        if result is not None:
            self._compare("attention_feed", index, SITE, result.reshape(fed.shape), fed)

    def _compare_end(self, index: int, site: str, end: nn.Module, result: Tensor) -> None:
        if end in self.ends:
            self._compare("output", index, site, self.ends.pop(end).reshape(result.shape), result)

    def _compare(self, probe: str, index: int, site: str, wanted: Tensor, seen: Tensor) -> None:
        self.observation.checks.append(compare(probe, index, site, wanted.cpu(), seen))


def _unit(norm: nn.Module) -> float:
    """Return what a norm adds to its weight."""
    weight = weight_of(norm)
    return 0.0 if subtracts_mean(norm) else norm_offset(norm, weight.dtype, weight.device)


def _blocks_with_end(sites: LayerSites) -> list[tuple[str, nn.Module, nn.Module]]:
    """Return site, module and last linear of attention and MLP; a mixture of experts ends in no linear."""
    found = []
    for site, block, names in (
        ("attention_output", sites.attention, _ENDS_OF_ATTENTION),
        ("mlp_output", sites.mlp, _ENDS_OF_MLP),
    ):
        found += [(site, block, module) for name, module in block.named_children() if name in names]
    return found


def _residual_check(index: int, call: _LayerCall, output: Tensor) -> Check | None:
    """Compare the output of a layer with the sum of its input and branches, in the order that fits best.

    None without an input and two branches, of which the sum would be known.
    """
    host = output.detach().cpu()
    if call.hidden is None or len(call.branches) != 2:
        return None
    with on_host():
        h, a, m = (tensor.detach().cpu().reshape(host.shape) for tensor in (call.hidden, *call.branches))
        # A fused kernel does not round the sum in between.
        fused = ((h.float() + a.float()) + m.float()).to(host.dtype)
        sums = ((h + a) + m, (a + m) + h, (h + m) + a, fused)
        best = min(sums, key=lambda total: int((total != host).sum()))
    return compare("residual", index, "layer_output", best, host)


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


@dataclass
class _Written:
    """The input of the layer in its current call, and what its modules wrote so far: norms and attention.

    `norms`: the norms of the layer and what each adds to its weight; `called`: the modules that ran in this call.
    """

    norms: dict[nn.Module, float]
    hidden: Tensor | None = None
    outputs: list[Tensor] = field(default_factory=list)
    called: set[nn.Module] = field(default_factory=set)

    def begin(self, hidden: Tensor) -> None:
        self.hidden, self.outputs, self.called = hidden, [], set()

    def add(self, module: nn.Module, output: Tensor) -> None:
        self.outputs.append(output)
        self.called.add(module)

    def read(self, like: Tensor) -> list[Tensor]:
        """Return on the host, in the shape of `like`, the input of the layer and the outputs of its modules."""
        if self.hidden is None or self.hidden.numel() != like.numel():
            return []
        same = (tensor for tensor in (self.hidden, *self.outputs) if tensor.numel() == like.numel())
        return [tensor.detach().cpu().reshape(like.shape).to(like.dtype) for tensor in same]

    def fused(self, layer: int, site: str, seen: Tensor) -> Iterator[Check]:
        """Yield the checks of `seen` as the output of a norm that was not called, of a sum that may not be rounded."""
        hidden, *outputs = self.read(seen)
        for norm, unit in self.norms.items():
            if norm not in self.called:
                for x in (hidden, *(hidden + own for own in outputs), *(hidden.double() + own for own in outputs)):
                    yield norm_in_model(norm, layer, site, unit, x, seen)


def _handoff_hooks(
    sites: LayerSites, layer: int, norms: dict[nn.Module, float], record: Callable[[Check], None]
) -> list[RemovableHandle]:
    """Compare what the blocks of a layer read in every call; `norms` are those that a kernel may have fused."""
    written = _Written(norms)

    def compare_input(site: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with on_host():
            seen = first_input(args, kwargs).detach().cpu()
            read = written.read(seen)
            if read:
                candidates = (*read, *(read[0] + output for output in read[1:]))
                best = min(candidates, key=lambda tensor: int(differs(tensor, seen).sum()))
                own = compare("handoff", layer, site, best, seen)
                fused = written.fused(layer, site, seen) if own.mismatch else ()
                record(next((check for check in fused if not check.mismatch), own))

    blocks = [(_ATTENTION_INPUT, sites.attention)]
    if not isinstance(sites.mlp, nn.Linear):  # the layers of OPT have no module around their MLP
        blocks.append((_MLP_INPUT, sites.mlp))
    handles = [
        sites.layer.register_forward_pre_hook(lambda m, a, kw: written.begin(first_input(a, kw)), with_kwargs=True),
        *(
            module.register_forward_hook(lambda m, a, out: written.add(m, first_tensor(out)))
            for module in sites.layer.children()
        ),
    ]
    return handles + [
        block.register_forward_pre_hook(lambda m, a, kw, s=site: compare_input(s, a, kw), with_kwargs=True)
        for site, block in blocks
    ]


def _mixture_hooks(block: nn.Module, layer: int, record: Callable[[Check], None]) -> list[RemovableHandle]:
    """Compare the output of a mixture with that of its routed and shared experts; no hooks on other blocks."""
    routed, children = experts_of(block), dict(block.named_children())
    if routed is None or routed not in children.values():
        return []
    shared = next((children[name] for name in _SHARED if name in children), None)
    parts = {"routed": routed, "shared": shared, "gate": children.get(_GATE_OF_SHARED)}
    seen: dict[str, Tensor] = {}

    def compare_sum(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if "routed" in seen:
            with on_host():
                host = {name: tensor.detach().cpu() for name, tensor in seen.items()}
                record(_sum_check(layer, host, first_tensor(output).detach().cpu()))
        seen.clear()

    # Some versions of transformers add the shared experts to the output of the routed ones in place.
    handles = [
        module.register_forward_hook(lambda m, a, out, n=name: seen.__setitem__(n, first_tensor(out).clone()))
        for name, module in parts.items()
        if module is not None
    ]
    return [*handles, block.register_forward_hook(compare_sum)]


def _sum_check(layer: int, terms: dict[str, Tensor], output: Tensor) -> Check:
    """Compare with the sum of the terms, which is rounded once; a gate and its product are rounded before it."""
    shared, gate = terms.get("shared"), terms.get("gate")
    flat = output.reshape(-1, output.shape[-1])
    expected = terms["routed"].reshape(flat.shape)
    if shared is None:
        return compare("output", layer, "mlp_output", expected, flat)
    other = shared.reshape(flat.shape)
    if gate is None:
        return compare("output", layer, "mlp_output", expected + other, flat)
    product = gate.reshape(-1, 1).double().sigmoid() * other.double()
    total = expected.double() + product
    one_rounding = torch.finfo(output.dtype).eps / 2 * (expected.double().abs() + product.abs())
    return compare(
        "output", layer, "mlp_output", total, flat, allowed=few_roundings(product, output.dtype) + 1.1 * one_rounding
    )
