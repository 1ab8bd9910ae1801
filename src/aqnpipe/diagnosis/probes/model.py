"""The probes beyond the linears of single layers: ends of the model, ranges, sequences, shapes, experts, gradients."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from aqnpipe.artifacts.diagnoses import Untested
from aqnpipe.diagnosis.checks import OUTSIDE_LAYERS, Check
from aqnpipe.diagnosis.probes.activations import (
    MODULE_SITE,
    activation_gradient,
    activation_name,
    activation_of,
    activation_sweep,
    gated_sweep,
)
from aqnpipe.diagnosis.probes.activations import SITE as CORE_SITE
from aqnpipe.diagnosis.probes.experts import (
    EXPERT_SITE,
    ROUTER_SITE,
    experts_of,
    probe_experts,
    probe_router,
    router_of,
)
from aqnpipe.diagnosis.probes.flow import FINITE, is_known, model_type
from aqnpipe.diagnosis.probes.linears import (
    LARGE,
    LARGE_OF_GRADIENTS,
    SMALL,
    SMALL_OF_GRADIENTS,
    probe_gradients,
    probe_shapes,
    rows_of_layer,
)
from aqnpipe.diagnosis.probes.norms import norm_gradient, norm_sweep
from aqnpipe.diagnosis.probes.outer_modules import EMBEDDING_GRADIENT, probe_outer_modules
from aqnpipe.diagnosis.probes.reference import FEW_ROWS
from aqnpipe.diagnosis.probes.repeats import Part
from aqnpipe.diagnosis.probes.rotary import SITE as ROTARY_SITE
from aqnpipe.diagnosis.probes.sequences import long_batch, longest_sequence, probe_sequences
from aqnpipe.models.layout import LayerSites
from aqnpipe.seeding import keyed_generator

_NO_GRADIENT = "the module has no gradient"
_NORMS_OF_HEADS = frozenset({"q_norm", "k_norm", "q_layernorm", "k_layernorm"})
"""Norms between the projections and the rotation."""
_OTHER_ROUTER = "it returns something else than logits, shares and experts, or has more experts than inputs"
_TOP_K = ("num_experts_per_tok", "moe_topk", "moe_top_k")


def model_checks(
    model: nn.Module,
    layers: Sequence[LayerSites],
    seed: int,
    show_progress: Callable[[str], None] = lambda line: None,
    elements_at_ends: int = 1,
) -> tuple[list[Part], tuple[Untested, ...]]:
    """Return the parts of the probes of a model with their checks, and what did not fit it, with the reason.

    `elements_at_ends`: least number of values on each channel of the final norm and lm_head.
    """
    gaps: dict[tuple[str, str], list[int]] = {}
    unreached: dict[str, str] = {}
    show_progress("exact probes: embedding, final norm, lm_head")
    parts = [Part(lambda: probe_outer_modules(model, seed, is_known=is_known(model), num_elements=elements_at_ends))]
    for index, sites in enumerate(layers):
        show_progress(f"exact probes: ranges, shapes and gradients of layer {index + 1} of {len(layers)}")
        parts.append(Part(partial(_checks_of_layer, model, index, sites, len(layers), seed, gaps)))
    show_progress("exact probes: sequences")
    parts.append(Part(lambda: probe_sequences(model, layers, seed, unreached)))
    checks = [check for part in parts for check in part.checks]
    if not any(check.site == EMBEDDING_GRADIENT for check in checks):
        unreached["gradient of the embedding"] = f"{_NO_GRADIENT}, or a class of its own"
    if not is_known(model):
        reason = f"not tried on model type {model_type(model)}"
        unreached["ranges and gradients of norms, experts, router"] = reason
    untested = [Untested(part=part, reason=reason) for part, reason in sorted(unreached.items())]
    untested += [
        Untested(part=part, layers=tuple(found), reason=reason) for (part, reason), found in sorted(gaps.items())
    ]
    if any(check.probe == "shapes" for check in checks):
        untested.append(_other_shapes(len(layers)))
    return parts, (*untested, *_limits(model, layers))


def _other_shapes(num_layers: int) -> Untested:
    """Return the gap that the probes of shapes leave."""
    small = ", ".join(map(str, SMALL))
    gradients = f"gradients with {', '.join(map(str, SMALL_OF_GRADIENTS))} in every layer, {LARGE_OF_GRADIENTS} in one"
    return Untested(
        part="linears with other numbers of rows",
        reason=f"{small} and those of the sequences in every layer, {LARGE} in 1 of {num_layers} layers, {gradients} "
        "(by the seed)",
    )


def _limits(model: nn.Module, layers: Sequence[LayerSites]) -> list[Untested]:
    """Return what no diagnosis tests: learned positions, some gradients, other sequences, other attention kernels."""
    used = getattr(model.config, "_attn_implementation", None)
    without_probe = ["gains", "biases", "rotary embedding", "gated products", "residual sums", "lm_head"]
    if any(experts_of(sites.layer) is not None or router_of(sites.layer) is not None for sites in layers):
        without_probe[:0] = ["experts", "router"]
    tokens = model.get_input_embeddings()  # type: ignore[operator]
    others = [
        name for name, module in model.named_modules() if isinstance(module, nn.Embedding) and module is not tokens
    ]
    return [
        *(Untested(part=name, reason="no probe reads its rows") for name in others),
        Untested(part=f"gradients of {', '.join(without_probe)}", reason="no probe differentiates them"),
        Untested(
            part="other numbers of sequences",
            reason=f"1, 4, 6 and {long_batch(model)[0]} through the whole model, attention also with 2, 3 and 16, its "
            "gradients with 4",
        ),
        Untested(
            part="operations beside linears with other numbers of rows",
            reason=f"activations, experts and router ran with {', '.join(map(str, FEW_ROWS))} and hundreds, norms and "
            "residual sums with those of the sequences and hundreds",
        ),
        Untested(part="longer sequences", reason=f"the longest had {longest_sequence(model)} tokens"),
        Untested(part="other attention kernels", reason=f"the model ran with {used}"),
    ]


def _checks_of_layer(
    model: nn.Module,
    index: int,
    sites: LayerSites,
    num_layers: int,
    seed: int,
    gaps: dict[tuple[str, str], list[int]],
) -> list[Check]:
    generator = keyed_generator("cpu", seed, "diagnosis.further", index)
    like = next(iter(sites.layer.parameters()))
    checks: list[Check] = []
    for name, module in sites.norms.items() if is_known(model) else ():
        found = norm_sweep(module, index, name, like.dtype, like.device, generator)
        backward = norm_gradient(module, index, name, like.dtype, like.device, generator)
        checks += found + backward
        if not found:
            gaps.setdefault((name, "a norm without a known epsilon"), []).append(index)
        elif not backward:
            gaps.setdefault((f"gradients of {name}", _NO_GRADIENT), []).append(index)
    checks += _core_checks(model, index, sites, like, generator, gaps)
    for name, linear in sites.linears.items():
        if type(linear).forward is not nn.Linear.forward:
            gaps.setdefault((name, "a linear with another output, such as a choice of experts"), []).append(index)
            continue
        gradients = probe_gradients(name, linear, index, generator, large=index == seed % num_layers)
        checks += gradients
        if len({check.site for check in gradients}) < 2:
            gaps.setdefault((f"gradients of {name}", _NO_GRADIENT), []).append(index)
        checks += probe_shapes(name, linear, index, rows_of_layer(index, num_layers, seed), generator)
    return checks + (_mixture_checks(model, index, sites, generator, gaps) if is_known(model) else [])


def _core_checks(
    model: nn.Module,
    index: int,
    sites: LayerSites,
    like: torch.Tensor,
    generator: torch.Generator,
    gaps: dict[tuple[str, str], list[int]],
) -> list[Check]:
    name, module = activation_name(model.config), activation_of(sites.layer)
    if name is None or module is None:
        gaps.setdefault((f"{CORE_SITE}, activation", "no reference of its activation is known"), []).append(index)
        return []
    checks = activation_sweep(module, name, index, like.dtype, like.device, generator)
    backward = activation_gradient(module, name, index, like.dtype, like.device, generator)
    if not backward:
        gaps.setdefault((f"gradients of {MODULE_SITE}", _NO_GRADIENT), []).append(index)
    return checks + backward + gated_sweep(sites, name, index, like.dtype, generator)


def _mixture_checks(
    model: nn.Module,
    index: int,
    sites: LayerSites,
    generator: torch.Generator,
    gaps: dict[tuple[str, str], list[int]],
) -> list[Check]:
    experts, router = experts_of(sites.layer), router_of(sites.layer)
    top_k = next((int(value) for key in _TOP_K if (value := getattr(model.config, key, None))), 1)
    checks: list[Check] = []
    if experts is not None:
        checks += probe_experts(experts, index, top_k, generator)
    found = [] if router is None else probe_router(router, index, generator)
    if not found and (experts is not None or router is not None):
        gaps.setdefault((ROUTER_SITE, _OTHER_ROUTER), []).append(index)
    return checks + found


def without_consequences(checks: Sequence[Check]) -> list[Check]:
    """Return `checks` without those whose mismatch follows from another: one fault is not reported twice.

    Gradients go back through the output of their linear, a core through its activation, and the sum of experts through
    each of them. The rotation is compared between two passes, through the norms of heads, which differ between them
    if their fault is random. A number that is not finite leaves its layer from the site that made it.
    A check of a faulty source says nothing about what follows it.
    """
    wrong = {(check.layer, check.site) for check in checks if check.mismatch and check.probe != "backward"}
    explained = {c.layer for c in checks if c.mismatch and c.probe != FINITE and c.layer != OUTSIDE_LAYERS}

    def follows(check: Check) -> bool:
        if check.probe == FINITE:
            return check.layer in explained
        if check.probe == "backward":
            return (check.layer, check.site.rsplit(".", 1)[0]) in wrong
        if check.site == EXPERT_SITE:
            return any(layer == check.layer and site.startswith(f"{EXPERT_SITE}.") for layer, site in wrong)
        if check.site == ROTARY_SITE:
            return any((check.layer, name) in wrong for name in _NORMS_OF_HEADS)
        return check.site == CORE_SITE and (check.layer, MODULE_SITE) in wrong

    return [check for check in checks if not (check.mismatch and follows(check))]
