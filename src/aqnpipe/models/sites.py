"""The sites of a decoder layer: modules whose output can be observed or faulty, by name, in any architecture."""

from dataclasses import dataclass, field

from torch import nn

from aqnpipe.errors import ModelError
from aqnpipe.models.layout import decoder_layers, is_norm

_ATTENTION_NAMES = ("self_attn", "attention", "attn")
_MLP_NAMES = ("mlp", "feed_forward", "fc2")
"""Modules whose output is that of the MLP; the layers of OPT have its linears and no module around them."""


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
