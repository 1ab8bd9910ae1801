"""Finds the operators of a transformers model: linears, norms, rotations, attention, activations and sums."""

from typing import Any

from torch import nn
from transformers.activations import ACT2FN

from aqnpipe.errors import ModelError
from aqnpipe.models.layout import (
    decoder_layers,
    is_mixture_of_experts,
    matrices_outside,
    norms_outside_layers,
    output_projection,
)
from aqnpipe.models.sites import attention_of, layer_sites
from aqnpipe.parity.forms import (
    ActivationForm,
    EmbeddingForm,
    LinearForm,
    Operator,
    RotaryForm,
    SumForm,
    norm_form,
)

RESIDUALS = ("attention_residual", "mlp_residual")


class LayerMap:
    """The operators of one decoder layer. `down` is the linear behind the activation."""

    def __init__(self, model: nn.Module, layer: nn.Module, index: int, *, interleaved: bool) -> None:
        sites = layer_sites(layer)
        if sites.adapted:
            raise ModelError("parity: the model has adapters beside its weights; expected them merged into the weights")
        self.index, self.layer, self.attention = index, layer, attention_of(layer)
        inside = set(self.attention.modules())
        self.linears = {module: self._operator(name, _linear_form(module)) for name, module in sites.linears.items()}
        self.norms = {module: self._operator(name, norm_form(module)) for name, module in sites.norms.items()}
        branch = {name: module for name, module in sites.linears.items() if module not in inside}
        if not branch:
            raise ModelError(f"{type(model).__name__}: no linear modules in the MLP of its layers, expected some")
        *before, self.down = branch.values()
        self.activated = [self.linears[module].name for module in before]
        self.activation = self._operator("activation", _activation_form(model, before, self.down))
        self.rotary = _rotary_form(model, self.attention, index, interleaved=interleaved)
        self.rotations = tuple(self._operator(name, self.rotary) for name in ("rotary_q", "rotary_k"))
        self.core = self._operator("attention", None)
        self.residuals = [self._operator(name, SumForm()) for name in RESIDUALS]

    @property
    def operators(self) -> list[Operator]:
        """The operators of the layer; rotations only if the model has a table for them."""
        return [
            *self.linears.values(),
            *self.norms.values(),
            *(self.rotations if self.rotary is not None else ()),
            self.core,
            self.activation,
            *self.residuals,
        ]

    def projections(self) -> tuple[list[str], ...]:
        """Return the operators that may make queries and keys, the last one first."""
        return tuple(
            [self._name(f"{letter}_norm"), self._name(f"{letter}_layernorm"), self._name(f"{letter}_proj")]
            for letter in ("q", "k")
        )

    def merged(self) -> str:
        """Return the name of the linear that makes queries, keys and values together."""
        return self._name("qkv_proj")

    def _name(self, kind: str) -> str:
        return f"layers.{self.index}.{kind}"

    def _operator(self, kind: str, form: Any) -> Operator:
        return Operator(self._name(kind), kind, self.index, form)


class ModelMap:
    """The operators of a transformers model, by module. Raises ModelError for models that it cannot describe."""

    def __init__(self, model: nn.Module, *, interleaved: bool = False) -> None:
        if is_mixture_of_experts(model):
            raise ModelError(f"{type(model).__name__}: a mixture of experts, whose operators parity does not map")
        self.model = model
        self.layers = [
            LayerMap(model, layer, index, interleaved=interleaved) for index, layer in enumerate(decoder_layers(model))
        ]
        _refuse_unmapped(model, self.layers)
        embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
        scale = float(getattr(embedding, "embed_scale", 1.0))
        self.embedding = embedding
        self.embed = Operator("embed_tokens", "embed_tokens", None, EmbeddingForm(embedding.weight, scale))
        self.head = output_projection(model)
        self.lm_head = Operator("lm_head", "lm_head", None, _linear_form(self.head), is_wide=True)
        paths = {module: path for path, module in model.named_modules()}
        self.norms = {
            module: Operator(name, paths[module].rsplit(".", 1)[-1], None, norm_form(module))
            for name, module in norms_outside_layers(model).items()
        }

    @property
    def operators(self) -> list[Operator]:
        """All operators of the model."""
        inside = [operator for layer in self.layers for operator in layer.operators]
        return [self.embed, *inside, *self.norms.values(), self.lm_head]


def _linear_form(module: Any) -> LinearForm:
    return LinearForm(module.weight, getattr(module, "bias", None))


def _activation_form(model: Any, before: list[nn.Linear], down: nn.Linear) -> ActivationForm:
    config = model.config
    names = ("hidden_act", "hidden_activation", "activation_function")
    act = next((found for name in names if (found := getattr(config, name, None)) in ACT2FN), None)
    if act is None or len(before) not in (1, 2):
        raise ModelError(
            f"{type(model).__name__}: {len(before)} linears before its activation {act!r}, expected one or two before "
            "an activation of transformers"
        )
    return ActivationForm(ACT2FN[act], len(before) == 2 or before[0].out_features == 2 * down.in_features)


def _rotary_form(model: Any, attention: nn.Module, index: int, *, interleaved: bool) -> RotaryForm | None:
    modules = [module for module in model.modules() if "rotary" in type(module).__name__.lower()]
    if not modules:
        return None
    module, config = modules[0], model.config
    types = getattr(config, "layer_types", None)
    prefix = f"{types[index]}_" if types and hasattr(module, f"{types[index]}_inv_freq") else ""
    frequencies = getattr(module, f"{prefix}inv_freq", None)
    if frequencies is None:
        raise ModelError(f"{type(module).__name__}: no frequencies found (inv_freq), so parity cannot check rotations")
    head_dim = getattr(attention, "head_dim", None) or config.hidden_size // config.num_attention_heads
    scaling = float(getattr(module, f"{prefix}attention_scaling", 1.0))
    return RotaryForm(frequencies, scaling, int(head_dim), interleaved)


def _refuse_unmapped(model: nn.Module, layers: list[LayerMap]) -> None:
    """Raise ModelError if a layer has parameters that belong to no mapped operator."""
    known = {
        id(parameter)
        for layer in layers
        for module in (*layer.linears, *layer.norms)
        for parameter in module.parameters()
    }
    unmapped = [
        f"layers.{layer.index}.{name}"
        for layer in layers
        for name, parameter in layer.layer.named_parameters()
        if id(parameter) not in known
    ] + matrices_outside(model)
    if unmapped:
        raise ModelError(
            f"{type(model).__name__}: parity does not map {', '.join(unmapped[:3])} ({len(unmapped)} parameters in all)"
        )
