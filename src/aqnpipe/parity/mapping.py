"""The operators of a transformers model: finds them, watches them, and proves what they compute.

They are linears, norms, rotations, attention, activations and sums, seen by hooks on modules, by the additions of a
layer, and in the function that every attention module calls. The proof: two layers of the model's configuration get
random weights, gains and biases, so that no two operators and no missing term can agree by chance. Every result must
then be the one that its form gives, to the rounding of float32. A model whose layers scale, cap or reorder something
that is not described here fails, and is refused. So is one in which an operator runs where it is not seen: it would be
missing from the comparison.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.activations import ACT2FN
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from aqnpipe.errors import ModelError
from aqnpipe.models.layout import (
    decoder_layers,
    is_mixture_of_experts,
    matrices_outside,
    norms_outside_layers,
    output_projection,
)
from aqnpipe.models.sites import attention_of, layer_sites
from aqnpipe.parity.expected import AttentionFacts
from aqnpipe.parity.forms import (
    ActivationForm,
    EmbeddingForm,
    LinearForm,
    Operator,
    RotaryForm,
    SumForm,
    norm_form,
)
from aqnpipe.parity.recorder import Recorded, Recorder
from aqnpipe.parity.sample import batches_of, choose_sample
from aqnpipe.seeding import keyed_generator

RESIDUALS = ("attention_residual", "mlp_residual")

_ADDITIONS = frozenset({"add", "__add__", "__radd__", "add_", "__iadd__"})
_UNKNOWN_ATTENTION = ("s_aux", "position_bias", "cache", "sinks")
"""Arguments of attention functions that change what they compute, in ways that are not known here."""

_LAYERS, _VOCABULARY, _TOKENS = 2, 512, 7
_SPREAD = 0.3


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


def watch(mapped: ModelMap, recorder: Recorder) -> ExitStack:
    """Let `recorder` see every operator of the model; closing the returned stack ends it."""
    stack = ExitStack()

    def after(module: nn.Module, hook: Callable[..., Any]) -> None:
        stack.callback(module.register_forward_hook(hook).remove)

    def whole(operator: Operator) -> Callable[..., Any]:
        return lambda module, args, output: recorder.see(operator, [recorder.rows_of(args[0])], output)

    def heads(operator: Operator) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
            # Some families normalise heads after they were put before the tokens.
            columns = None if recorder.is_idle else recorder.num_columns
            if output.dim() == 4 and output.shape[1] != columns:
                edited = recorder.see(operator, [recorder.rows_of(args[0].transpose(1, 2))], output.transpose(1, 2))
                return None if edited is None else edited.transpose(1, 2)
            return recorder.see(operator, [recorder.rows_of(args[0])], output)

        return _unless_idle(recorder, hook)

    def before_down(layer: LayerMap) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any) -> Any:
            inputs = [recorder.last(name) for name in layer.activated]
            edited = recorder.see(layer.activation, inputs, args[0])
            return None if edited is None else (edited, *args[1:])

        return _unless_idle(recorder, hook)

    after(
        mapped.embedding,
        lambda _, args, output: recorder.see(mapped.embed, [recorder.rows_of(args[0][..., None])], output),
    )
    module: nn.Module
    for layer in mapped.layers:
        stack.callback(layer.down.register_forward_pre_hook(before_down(layer)).remove)
        for module, operator in layer.linears.items():
            after(module, _unless_idle(recorder, whole(operator)))
        for module, operator in layer.norms.items():
            after(module, heads(operator))
    for module, operator in mapped.norms.items():
        after(module, _unless_idle(recorder, whole(operator)))
    after(mapped.head, _unless_idle(recorder, whole(mapped.lm_head)))
    stack.enter_context(_watched_attention(mapped, recorder))
    stack.enter_context(_Additions(mapped, recorder, stack))
    return stack


def _unless_idle(recorder: Recorder, hook: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        if recorder.is_idle:
            return None
        with torch._C.DisableTorchFunction():
            return hook(*args)

    return run


class _Additions(TorchFunctionMode):
    """Sees the additions that decoder layers make themselves, outside of their modules: the residual stream."""

    def __init__(self, mapped: ModelMap, recorder: Recorder, stack: ExitStack) -> None:
        super().__init__()
        self._recorder = recorder
        self._layer: LayerMap | None = None
        self._depth = self._number = 0
        for layer in mapped.layers:
            for hook in (
                layer.layer.register_forward_pre_hook(self._entering(layer)),
                layer.layer.register_forward_hook(self._leave_layer),
            ):
                stack.callback(hook.remove)
            for child in layer.layer.children():
                stack.callback(child.register_forward_pre_hook(self._enter_child).remove)
                stack.callback(child.register_forward_hook(self._leave_child).remove)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`; record it if it is an addition of the layer that is running."""
        output = func(*args, **(kwargs or {}))
        layer = self._layer
        if layer is None or self._depth or self._recorder.is_idle or func.__name__ not in _ADDITIONS:
            return output
        if len(args) < 2 or not all(isinstance(part, Tensor) and part.shape == output.shape for part in args[:2]):
            return output
        if self._number == len(layer.residuals):
            raise ModelError(
                f"parity: a layer of this model adds more than {self._number} times, expected two branches"
            )
        operator = layer.residuals[self._number]
        self._number += 1
        if func.__name__ in ("add_", "__iadd__"):
            raise ModelError("parity: the layers of this model add in place, so the inputs of the sum are lost")
        edited = self._recorder.see(operator, [self._recorder.rows_of(part) for part in args[:2]], output)
        return output if edited is None else edited

    def _entering(self, layer: LayerMap) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            self._layer, self._depth, self._number = layer, 0, 0

        return enter

    def _leave_layer(self, *_: Any) -> None:
        self._layer = None

    def _enter_child(self, *_: Any) -> None:
        self._depth += 1

    def _leave_child(self, *_: Any) -> None:
        self._depth -= 1


@contextmanager
def _watched_attention(mapped: ModelMap, recorder: Recorder) -> Iterator[None]:
    """Watch the function to which every attention module of transformers hands queries, keys and values."""
    layers = {layer.attention: layer for layer in mapped.layers}
    original = ALL_ATTENTION_FUNCTIONS.get_interface

    def get_interface(name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        attend = original(name, default)

        def watched(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
            layer = layers.get(module)
            if layer is None or recorder.is_idle:
                return attend(module, query, key, value, mask, **kwargs)
            with torch._C.DisableTorchFunction():
                query, key = _see_rotations(layer, recorder, query, key, value)
            output, *rest = attend(module, query, key, value, mask, **kwargs)
            with torch._C.DisableTorchFunction():
                inputs = tuple(_tokens(part, recorder) for part in (query, key, value))
                facts = _attention_facts(module, query, kwargs)
                edited = recorder.see_attention(layer.core, inputs, facts, output)  # type: ignore[arg-type]
            return (output if edited is None else edited, *rest)

        return watched

    ALL_ATTENTION_FUNCTIONS.get_interface = get_interface
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS.get_interface


def _see_rotations(
    layer: LayerMap, recorder: Recorder, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor]:
    if layer.rotary is None:
        return query, key
    before = []
    for number, names in enumerate(layer.projections()):
        name = next((name for name in names if recorder.has(name)), None)
        before.append(recorder.last(name) if name else _part_of_merged(layer, recorder, query, key, number))
    seen_query = recorder.see(layer.rotations[0], [before[0]], query.transpose(1, 2))
    seen_key = recorder.see_keys(layer.rotations[1], [before[1]], key.transpose(1, 2))
    return (
        query if seen_query is None else seen_query.transpose(1, 2),
        key if seen_key is None else seen_key.transpose(1, 2),
    )


def _part_of_merged(layer: LayerMap, recorder: Recorder, query: Tensor, key: Tensor, number: int) -> Tensor:
    if not recorder.has(layer.merged()):
        raise ModelError("parity: no linear that makes queries and keys was found by name in this model's attention")
    queries, keys = (part.shape[1] * part.shape[3] for part in (query, key))
    start = 0 if number == 0 else queries
    return recorder.last(layer.merged())[:, start : start + (queries if number == 0 else keys)]


def _tokens(part: Tensor, recorder: Recorder) -> Tensor:
    """Return the rows [rows, heads, dim] of queries, keys or values [batch, heads, tokens, dim] of this call."""
    heads, dim = part.shape[1], part.shape[3]
    tokens = part[:, :, -recorder.num_columns :].transpose(1, 2)
    return recorder.rows_of(tokens).reshape(-1, heads, dim)


def _attention_facts(module: nn.Module, query: Tensor, kwargs: dict[str, Any]) -> AttentionFacts:
    for name in _UNKNOWN_ATTENTION:
        if kwargs.get(name) is not None:
            raise ModelError(
                f"parity: attention of {type(module).__name__} takes {name}, whose effect is not known here"
            )
    scaling = kwargs.get("scaling")
    return AttentionFacts(
        scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=kwargs.get("sliding_window"),
        soft_cap=kwargs.get("softcap"),
    )


def prove(model: Any) -> tuple[ModelMap, dict[str, Recorded]]:
    """Return the map of `model`, and what a random model of its kind recorded for each operator of two layers.

    Raises ModelError, which names the first operator that computes something else.
    """
    small = _random_model(model.config)
    failures = []
    for interleaved in (False, True):
        recorded = _recorded(small, interleaved=interleaved)
        wrong = {name: found for name, found in recorded.items() if found.tally.loose > 1}
        if not wrong:
            return ModelMap(model, interleaved=interleaved), recorded
        failures.append(wrong)
    name, found = next(iter(min(failures, key=len).items()))
    raise ModelError(
        f"{type(model).__name__}: on random weights its {name} is not what parity takes it for (error "
        f"{found.tally.loose:.3g} times the bound of rounding), so the operators of this model cannot be mapped"
    )


def _random_model(config: Any) -> nn.Module:
    settings = copy.deepcopy(config)
    settings.num_hidden_layers = _LAYERS
    if getattr(settings, "layer_types", None):
        kinds = list(dict.fromkeys(settings.layer_types))[:_LAYERS]
        settings.layer_types = [kinds[index % len(kinds)] for index in range(_LAYERS)]
    settings.vocab_size = min(settings.vocab_size, _VOCABULARY)
    for token in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(settings, token, None)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        model: nn.Module = AutoModelForCausalLM.from_config(
            settings, dtype=torch.float32, attn_implementation=config._attn_implementation
        )
    generator = keyed_generator("cpu", 0, "parity.proof")
    for _, parameter in model.named_parameters():
        if parameter.ndim == 1:
            noise: Tensor = torch.randn(parameter.shape, generator=generator)
            parameter.data += _SPREAD * noise
    return model.eval()


def _recorded(model: Any, *, interleaved: bool) -> dict[str, Recorded]:
    generator = keyed_generator("cpu", 0, "parity.proof.tokens")
    shape = (2, _TOKENS)
    sequences = torch.randint(model.config.vocab_size, shape, generator=generator).tolist()
    sequences[1] = sequences[1][1:]
    sample = choose_sample([len(ids) for ids in sequences], 2 * _TOKENS)
    recorder = Recorder(sample)
    mapped = ModelMap(model, interleaved=interleaved)
    with torch.no_grad(), watch(mapped, recorder):
        for batch in batches_of(sequences, 2, "left"):
            cache = DynamicCache(config=model.config)
            for call in batch.calls(sample, 2, 0):
                recorder.begin(call)
                model(
                    input_ids=call.token_ids,
                    attention_mask=call.mask,
                    position_ids=call.positions,
                    past_key_values=cache,
                    use_cache=True,
                )
    recorded = recorder.finish()
    unseen = [operator.name for operator in mapped.operators if operator.name not in recorded]
    if unseen:
        raise ModelError(
            f"{type(model).__name__}: parity did not see {', '.join(unseen[:3])} run ({len(unseen)} operators in all), "
            "so it could not compare them"
        )
    return recorded
