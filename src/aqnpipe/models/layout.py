"""The layers, norms and output projection of a decoder-only model, and the sites in a layer, by structure and name."""

import fnmatch
import hashlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from aqnpipe.config.noise import ModuleScope
from aqnpipe.errors import ModelError

_EXPERT_MARKS = ("experts", "shared_expert", "num_experts", "expert_")
"""Parts of module names that occur only in mixtures of experts. Not plain "gate", which also matches `gate_proj`."""

_LAYER_LISTS = ("layers", "h", "blocks")
"""Names of the list of decoder layers: of most families; of GPT-2, Falcon and BLOOM; of MPT."""

GROUPED_SDPA = "aqnpipe_grouped_sdpa"
"""The kernel of generation: sdpa whose heads share keys."""

_ATTENTION_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""Types of decoder layers, in the words of a transformers configuration, that attend to keys and values of tokens."""

_ADVICE = "use another model family"

_LAYER_NUMBER = re.compile(rf"(?:^|\.)(?:{'|'.join(_LAYER_LISTS)})\.(\d+)\.")


ATTENTION_KERNELS = {"sdpa": frozenset({"sdpa", GROUPED_SDPA}), "eager": frozenset({"eager"})}
"""The kernels that compute each form of attention that a study can ask for."""

_ATTENTION_NAMES = ("self_attn", "attention", "attn")
_MLP_NAMES = ("mlp", "feed_forward", "fc2")
"""Modules whose output is that of the MLP; the layers of OPT have its linears and no module around them."""


def dropout_rates(module: nn.Module) -> Iterator[tuple[str, float]]:
    """Yield the dropout rates that a module itself has, by the name of the attribute."""
    for attribute, value in vars(module).items():
        is_rate = "drop" in attribute or (attribute == "p" and isinstance(module, nn.Dropout))
        if is_rate and isinstance(value, int | float):
            yield attribute, float(value)


def noised_attention(model: nn.Module) -> Literal["decomposed", "fused"]:
    """Return how operator noise reaches the attention of `model`: in its products (eager), or as one operator (sdpa).

    Raises ModelError for another kernel, which noise cannot reach.
    """
    kernel = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if kernel not in (None, "eager", "sdpa"):
        raise ModelError(
            f"{type(model).__name__}: attention is {kernel}, whose products noise cannot reach; expected eager or sdpa"
        )
    return "fused" if kernel == "sdpa" else "decomposed"


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """Return the decoder layers of `model`.

    Raises ModelError if none are found, or if they are not one list of layers with attention to keys and values:
    state-space, recurrent and convolution layers, and hybrids with them, are not supported.
    """
    lists = {
        name: module
        for name, module in model.named_modules()
        if name.rsplit(".", 1)[-1] in _LAYER_LISTS and isinstance(module, nn.ModuleList) and len(module)
    }
    found = [name for name in lists if not any(name.startswith(f"{outer}.") for outer in lists)]
    if not found:
        raise ModelError(
            f"{type(model).__name__}: no decoder layers found (expected a module list named {', '.join(_LAYER_LISTS)})"
        )
    if len(found) > 1:
        raise ModelError(
            f"{type(model).__name__}: several lists of layers ({', '.join(found)}), expected one; {_ADVICE}"
        )
    _refuse_other_layers(model)
    return lists[found[0]]


def path_of_layers(model: nn.Module) -> str:
    """Return the path of the list of decoder layers, such as `model.layers`."""
    layers = decoder_layers(model)
    return next(name for name, module in model.named_modules() if module is layers)


def _refuse_other_layers(model: nn.Module) -> None:
    """Raise ModelError if a layer is not attention, or if the model stores anything but keys and values of tokens."""
    expected = f"expected attention to keys and values in every layer; {_ADVICE}"
    types: Sequence[str] = getattr(getattr(model, "config", None), "layer_types", None) or ()
    others = [kind for kind in types if kind not in _ATTENTION_TYPES]
    if others:
        kinds = ", ".join(dict.fromkeys(others))
        raise ModelError(f"{type(model).__name__}: {len(others)} of {len(types)} layers are {kinds}, {expected}")
    if not types and getattr(model, "_is_stateful", False):
        raise ModelError(f"{type(model).__name__}: its layers keep a recurrent state, {expected}")
    accepted = _arguments(model)
    for name in ("past_key_values", "attention_mask"):
        if accepted is not None and name not in accepted:
            raise ModelError(f"{type(model).__name__}: its forward takes no {name}, which generation needs; {_ADVICE}")


def _arguments(model: nn.Module) -> Set[str] | None:
    """Return the names of the arguments that reach the layers; None for models that are not of transformers."""
    if not hasattr(model, "get_output_embeddings"):
        return None
    # PEFT's wrapper passes all arguments on. The outer forward may take arguments for show alone.
    own = model.get_base_model() if hasattr(type(model), "get_base_model") else model  # type: ignore[operator]
    inner: nn.Module = getattr(own, "base_model", own)
    return inspect.signature(type(inner).forward).parameters.keys()


def takes_positions(model: nn.Module) -> bool:
    """Return whether the position of a token is an argument of the model, so that padding may stand anywhere in a row.

    Otherwise the model counts the places of a row itself (ALiBi: BLOOM, MPT, some Falcon), and padding has to come
    first.
    """
    accepted = _arguments(model)
    return accepted is not None and "position_ids" in accepted and not getattr(model.config, "alibi", False)


def matrices_outside(model: nn.Module) -> list[str]:
    """Return the names of matrices outside the decoder layers, the output projection and embeddings.

    Operator noise does not reach products with them.
    """
    known = {*decoder_layers(model).modules(), *output_projection(model).modules()}
    known |= {module for module in model.modules() if isinstance(module, nn.Embedding)}
    reached = {id(parameter) for module in known for parameter in module.parameters(recurse=False)}
    return [name for name, parameter in model.named_parameters() if parameter.ndim > 1 and id(parameter) not in reached]


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


def is_norm(module: nn.Module) -> bool:
    """Return whether `module` is an RMSNorm, a LayerNorm or another norm with a weight, by class name."""
    return "norm" in type(module).__name__.lower() and isinstance(getattr(module, "weight", None), nn.Parameter)


def refuse_norms_without_weight(model: nn.Module) -> None:
    """Raise ModelError if `model` has norms without parameters (OLMo 1), which no parity measures."""
    found = [
        name
        for name, module in model.named_modules()
        if "norm" in type(module).__name__.lower() and not [*module.children(), *module.parameters()]
    ]
    if found:
        raise ModelError(
            f"{type(model).__name__}: {len(found)} norms have no weight ({found[0]}, ...), so no parity measures their "
            "error; expected a model whose norms all have weights"
        )


def norms_outside_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the norms outside the decoder layers: `norm` if there is one, else all by their qualified names."""
    inside = {module for layer in decoder_layers(model) for module in layer.modules()}
    norms = {name: module for name, module in model.named_modules() if is_norm(module) and module not in inside}
    return dict(zip(["norm"], norms.values(), strict=True)) if len(norms) == 1 else norms


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
    every = {name: module for name, module in model.named_modules() if is_rms_norm(module)}
    norms = {name: norm for name, norm in every.items() if not post_attention_only or _is_post_attention(name)}
    if not norms:
        raise ModelError(f"{type(model).__name__}: no RMSNorm matches targets={targets!r}; {_other_targets(every)}")
    return norms


def _is_post_attention(name: str) -> bool:
    return name.endswith("post_attention_layernorm")


def _other_targets(norms: Iterable[str]) -> str:
    """Return what AQN can target in a model whose RMSNorms, by name, do not match."""
    kinds = list(dict.fromkeys(re.sub(r"\.\d+$", "", name).rsplit(".", 1)[-1] for name in norms))
    if not kinds:
        return "it has no RMSNorm with a weight: use an arm without AQN, or aqn.targets: hidden_states"
    return f"its RMSNorms are {', '.join(kinds)}: use aqn.targets: all_norms or hidden_states, or an arm without AQN"


def num_rms_norms(model: nn.Module) -> int:
    """Return the number of norms that AQN targets by default; 0 if it has none to target."""
    every = [name for name, module in model.named_modules() if is_rms_norm(module)]
    return sum(map(_is_post_attention, every)) if is_mixture_of_experts(model) else len(every)


def norms_sha256(model: nn.Module, dtype: torch.dtype | None = None) -> str:
    """Return the SHA-256 of the names and weights of all RMSNorms of `model`, or of all LayerNorms if it has none.

    With `dtype` weights are rounded first.
    """
    digest = hashlib.sha256()
    norms = {name: module for name, module in model.named_modules() if is_rms_norm(module)}
    if not norms:
        norms = {name: module for name, module in model.named_modules() if is_norm(module)}
    for name, norm in norms.items():
        digest.update(name.encode())
        weight = weight_of(norm).detach()
        digest.update(weight.to(dtype or weight.dtype).cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def select_modules(
    model: nn.Module, modules: ModuleScope | tuple[str, ...], exclude: tuple[str, ...] = ()
) -> dict[str, nn.Module]:
    """Return the modules of a scope or of name patterns (`*.down_proj`) but for those excluded, by qualified name.

    Raises ModelError if a scope or a pattern matches no module, or if all are excluded.
    """
    named = dict(model.named_modules())
    linears = {name for name, module in named.items() if isinstance(module, nn.Linear)}
    norms = {name for name, module in named.items() if is_rms_norm(module)}
    chosen = select_names(list(named), linears, norms, modules, type(model).__name__, exclude)
    return {name: named[name] for name in chosen}


def select_names(
    names: Sequence[str],
    linears: Set[str],
    norms: Set[str],
    modules: ModuleScope | tuple[str, ...],
    model_name: str,
    exclude: tuple[str, ...] = (),
) -> list[str]:
    """Return the qualified `names` in a scope or matching any of the patterns but for those excluded, in their order.

    Raises ModelError if a scope or a pattern matches nothing, or if nothing is left.
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
    for pattern in exclude:
        if not fnmatch.filter(chosen, pattern):
            raise ModelError(f"{model_name}: excluded {pattern!r} matches none of the {len(chosen)} selected modules")
    left = [name for name in names if name in chosen and not any(fnmatch.fnmatchcase(name, out) for out in exclude)]
    if not left:
        raise ModelError(f"{model_name}: all {len(chosen)} selected modules are excluded")
    return left


def _in_scope(linears: Set[str], norms: Set[str], scope: ModuleScope) -> Set[str]:
    match scope:
        case "minimal":
            return norms
        case "mlp":
            # With adapters, its linears are `down_proj.base_layer` and the two of the adapter.
            return norms | {name for name in linears if "down_proj" in name.split(".")}
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


@dataclass(frozen=True)
class LayerSites:
    """The modules of one decoder layer by role; linears and norms by the last part of their names, in module order.

    `adapted` are linears with a low-rank adapter: modules of several linears whose outputs are added.
    """

    layer: nn.Module
    attention: nn.Module
    mlp: nn.Module
    linears: dict[str, nn.Linear]
    norms: dict[str, nn.Module]
    adapted: dict[str, nn.Module] = field(default_factory=dict)

    @property
    def branch_ends(self) -> tuple[nn.Module, nn.Module]:
        """Modules whose outputs enter the residual stream: attention and MLP, or norms after them (Gemma 2, OLMo 2)."""
        if "post_feedforward_layernorm" in self.norms:
            return self.norms["post_attention_layernorm"], self.norms["post_feedforward_layernorm"]
        return self.attention, self.mlp

    @property
    def modules(self) -> dict[str, nn.Module]:
        """All sites by name: the three outputs, linears and norms."""
        outputs = {"layer_output": self.layer, "attention_output": self.attention, "mlp_output": self.mlp}
        return {**outputs, **self.linears, **self.adapted, **self.norms}


def layer_sites(layer: nn.Module) -> LayerSites:
    """Return the sites of one decoder layer; ModelError if no attention or no MLP is found by name.

    A name that occurs twice in a layer (the experts of a mixture) is not a site, because it is ambiguous.
    """
    linears: dict[str, nn.Linear] = {}
    norms: dict[str, nn.Module] = {}
    repeated: set[str] = set()
    adapted = {path: module for path, module in layer.named_modules() if hasattr(module, "base_layer")}
    for path, module in layer.named_modules():
        if any(path.startswith(f"{owner}.") for owner in adapted):
            continue
        name = path.rsplit(".", 1)[-1]
        repeated |= {name} & (linears.keys() | norms.keys())
        if isinstance(module, nn.Linear):
            linears[name] = module
        elif is_norm(module):
            norms[name] = module
    return LayerSites(
        layer=layer,
        attention=attention_of(layer),
        mlp=mlp_of(layer),
        linears={name: module for name, module in linears.items() if name not in repeated},
        norms={name: module for name, module in norms.items() if name not in repeated},
        adapted={path.rsplit(".", 1)[-1]: module for path, module in adapted.items()},
    )


def site_module(model: nn.Module, layer_index: int, site: str) -> nn.Module:
    """Return the module whose output is `site` of decoder layer `layer_index`; ModelError if there is no such site."""
    layers = decoder_layers(model)
    if layer_index >= len(layers):
        raise ModelError(f"fault.layer is {layer_index}, expected 0 to {len(layers) - 1} ({type(model).__name__})")
    layer = layers[layer_index]
    if site == "layer_output":
        return layer
    modules = layer_sites(layer).modules
    if site not in modules:
        raise ModelError(f"fault.site is {site!r}, {type(model).__name__} has {', '.join(modules)}")
    return modules[site]


def attention_of(layer: nn.Module) -> nn.Module:
    """Return the attention module of a decoder layer; ModelError if none is found by name."""
    return _child(layer, _ATTENTION_NAMES)


def mlp_of(layer: nn.Module) -> nn.Module:
    """Return the MLP of a decoder layer; ModelError if none is found by name."""
    return _child(layer, _MLP_NAMES)


def _child(layer: nn.Module, names: tuple[str, ...]) -> nn.Module:
    for name in names:
        module = getattr(layer, name, None)
        # A list of attention modules has no output of its own.
        if isinstance(module, nn.Module) and not isinstance(module, nn.ModuleList):
            return module
    raise ModelError(f"{type(layer).__name__}: no module named {' or '.join(names)} in this decoder layer")
