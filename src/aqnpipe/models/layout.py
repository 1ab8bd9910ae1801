"""Finds the layers, norms and output projection of a decoder-only model, by structure and name."""

import fnmatch
import hashlib
import re
from collections.abc import Callable, Sequence, Set
from typing import Literal

import torch
from torch import nn

from aqnpipe.config.noise import ModuleScope
from aqnpipe.errors import ModelError

_EXPERT_MARKS = ("experts", "shared_expert", "num_experts", "expert_")
"""Parts of module names that occur only in mixtures of experts. Not plain "gate", which also matches `gate_proj`."""

_SAMPLED_VALUES = 64
_LAYER_LISTS = ("layers", "h", "blocks")
"""Names of the list of decoder layers: of most families; of GPT-2, Falcon and BLOOM; of MPT."""

_LAYER_NUMBER = re.compile(rf"(?:^|\.)(?:{'|'.join(_LAYER_LISTS)})\.(\d+)\.")


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """Return the decoder layers of `model`; ModelError if none are found."""
    for name, module in model.named_modules():
        if name.rsplit(".", 1)[-1] in _LAYER_LISTS and isinstance(module, nn.ModuleList) and len(module):
            return module
    raise ModelError(
        f"{type(model).__name__}: no decoder layers found (expected a module list named {', '.join(_LAYER_LISTS)})"
    )


def output_projection(model: nn.Module) -> nn.Module:
    """Return the module that maps hidden states to logits; ModelError if there is none."""
    getter: Callable[[], object] | None = getattr(model, "get_output_embeddings", None)
    # vLLM's models have no such method.
    head = getter() if getter is not None else getattr(model, "lm_head", None)
    if not isinstance(head, nn.Module):
        raise ModelError(f"{type(model).__name__}: no output projection (lm_head) found")
    return head


def is_rms_norm(module: nn.Module) -> bool:
    """Return whether `module` is an RMSNorm, by class name, because vLLM and transformers have unrelated classes."""
    return "rmsnorm" in type(module).__name__.lower() and isinstance(getattr(module, "weight", None), nn.Parameter)


def is_mixture_of_experts(model: nn.Module) -> bool:
    """Return whether any module of `model` belongs to a mixture of experts."""
    return any(mark in name for name, _ in model.named_modules() for mark in _EXPERT_MARKS)


def rms_norms(
    model: nn.Module, targets: Literal["auto", "all_norms", "post_attention"] = "auto"
) -> dict[str, nn.Module]:
    """Return the RMSNorm modules that AQN targets, by qualified name; ModelError if none match.

    auto: every RMSNorm of a dense model, only `post_attention_layernorm` of a mixture of experts.
    """
    post_attention_only = targets == "post_attention" or (targets == "auto" and is_mixture_of_experts(model))
    norms = {
        name: module
        for name, module in model.named_modules()
        if is_rms_norm(module) and (not post_attention_only or name.endswith("post_attention_layernorm"))
    }
    if not norms:
        raise ModelError(f"{type(model).__name__}: no RMSNorm matches targets={targets!r}")
    return norms


def num_rms_norms(model: nn.Module) -> int:
    """Return the number of norms that AQN targets by default; 0 for a model with LayerNorm."""
    return len(rms_norms(model)) if any(map(is_rms_norm, model.modules())) else 0


def norms_sha256(model: nn.Module) -> str:
    """Return the SHA-256 of the names and weights of all RMSNorms of `model`, or of all LayerNorms if it has none."""
    digest = hashlib.sha256()
    norms = {name: module for name, module in model.named_modules() if is_rms_norm(module)}
    if not norms:
        norms = {
            name: module
            for name, module in model.named_modules()
            if "norm" in type(module).__name__.lower() and isinstance(getattr(module, "weight", None), nn.Parameter)
        }
    for name, norm in norms.items():
        digest.update(name.encode())
        digest.update(weight_of(norm).detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def matrices_sha256(model: nn.Module) -> str:
    """Return the SHA-256 of about 64 evenly spaced values of every matrix of `model`.

    It is cheap to compute, and every optimiser step changes it.
    """
    samples = []
    for parameter in model.parameters():
        if parameter.ndim > 1:
            values = parameter.detach().reshape(-1)
            samples.append(values[:: max(1, values.numel() // _SAMPLED_VALUES)].float())
    return hashlib.sha256(torch.cat(samples).cpu().numpy().tobytes()).hexdigest()


def select_modules(model: nn.Module, modules: ModuleScope | tuple[str, ...]) -> dict[str, nn.Module]:
    """Return the modules of a scope or of name patterns (`*.down_proj`), by qualified name.

    Raises ModelError if a scope or a pattern matches no module.
    """
    named = dict(model.named_modules())
    linears = {name for name, module in named.items() if isinstance(module, nn.Linear)}
    norms = {name for name, module in named.items() if is_rms_norm(module)}
    chosen = select_names(list(named), linears, norms, modules, type(model).__name__)
    return {name: named[name] for name in chosen}


def select_names(
    names: Sequence[str],
    linears: Set[str],
    norms: Set[str],
    modules: ModuleScope | tuple[str, ...],
    model_name: str,
) -> list[str]:
    """Return the qualified `names` in a scope or matching any of the patterns, in their order.

    Raises ModelError if a scope or a pattern matches nothing.
    """
    if isinstance(modules, tuple):
        matches = [fnmatch.filter(names, pattern) for pattern in modules]
        for pattern, found in zip(modules, matches, strict=True):
            if not found:
                raise ModelError(f"{model_name}: pattern {pattern!r} matches none of {len(names)} modules")
        chosen: Set[str] = {name for found in matches for name in found}
    else:
        chosen = _in_scope(linears, norms, modules)
        if not chosen:
            raise ModelError(f"{model_name}: no module is in scope {modules!r}")
    return [name for name in names if name in chosen]


def _in_scope(linears: Set[str], norms: Set[str], scope: ModuleScope) -> Set[str]:
    match scope:
        case "minimal":
            return norms
        case "mlp":
            return norms | {name for name in linears if name.endswith("down_proj")}
        case "linear":
            return linears
        case "all":
            return linears | norms


def layer_of(module_name: str) -> int | None:
    """Return the index of the decoder layer of a qualified module name, or None outside the layers."""
    match = _LAYER_NUMBER.search(module_name)
    return int(match.group(1)) if match else None


def weight_of(module: nn.Module) -> nn.Parameter:
    """Return the weight of a norm or linear module; ModelError if it has none."""
    weight = module.weight
    if not isinstance(weight, nn.Parameter):
        raise ModelError(f"{type(module).__name__}: expected a weight, found {type(weight).__name__}")
    return weight
