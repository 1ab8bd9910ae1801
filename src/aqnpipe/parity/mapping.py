"""The operators of a transformers model: finds them, watches them, and proves what they compute.

They are linears, norms, rotations, attention, activations and sums, seen by hooks on modules, by the additions of a
layer, and in the function that every attention module calls. The proof: two layers of the model's configuration get
random weights, gains and biases, so that no two operators and no missing term can agree by chance. Every result must
then be the one that its form gives, to the rounding of float32. A model whose layers scale, cap or reorder something
that is not described here fails, and is refused. So is one in which an operator runs where it is not seen: it would be
missing from the comparison.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

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
    layer_sites,
    matrices_outside,
    norms_outside_layers,
    output_projection,
)
from aqnpipe.parity.forms import (
    ActivationForm,
    AttentionForm,
    EmbeddingForm,
    LinearForm,
    Operator,
    RotaryForm,
    SumForm,
    norm_form,
)
from aqnpipe.parity.recorder import RESIDUALS, Attention, Recorder, Recording, Taps
from aqnpipe.parity.sample import Padding, Score, calls, choose_sample, score
from aqnpipe.seeding import keyed_generator

_ADDITIONS = frozenset({"add", "__add__", "__radd__", "add_", "__iadd__"})
_UNKNOWN_ATTENTION = ("s_aux", "position_bias", "cache", "sinks")
"""Arguments of attention functions that change what they compute, in ways that are not known here."""

_LAYERS, _VOCABULARY, _TOKENS = 2, 512, 7
_SPREAD = 0.3


class ModelTaps(Taps):
    """The taps of a transformers model. Raises ModelError for models that it cannot describe."""

    def __init__(self, model: nn.Module, *, interleaved: bool = False) -> None:
        super().__init__()
        if is_mixture_of_experts(model):
            raise ModelError(f"{type(model).__name__}: a mixture of experts, whose operators parity does not map")
        self._attentions: dict[nn.Module, Attention] = {}
        # Of each module that runs: the sums that it is still to make, of a layer; None for modules in it.
        self._additions: list[list[Operator] | None] = []
        embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
        form = EmbeddingForm(embedding.weight, float(getattr(embedding, "embed_scale", 1.0)))
        self.watch(embedding, self.operator("embed_tokens", form))
        for index, layer in enumerate(decoder_layers(model)):
            self._add_layer(model, layer, index, interleaved=interleaved)
        _refuse_unmapped(model, self.watched)
        paths = {module: path for path, module in model.named_modules()}
        for name, module in norms_outside_layers(model).items():
            kind = paths[module].rsplit(".", 1)[-1]
            self.watch(module, self.operator(kind, norm_form(module), name=name))
        head = output_projection(model)
        self.watch(head, self.operator("lm_head", _linear_form(head), is_wide=True))

    def __enter__(self) -> Self:
        super().__enter__()
        self.stack.enter_context(_watched_attention(self._attentions, self.recorder))
        self.stack.enter_context(_Additions(self._see_addition))
        return self

    def batched(self, tensor: Tensor) -> Tensor:
        """See `Taps`: some families normalise heads after they were put before the tokens."""
        is_moved = tensor.dim() == 4 and tensor.shape[1] != self.recorder.num_columns
        return tensor.transpose(1, 2) if is_moved else tensor

    def _add_layer(self, model: nn.Module, layer: nn.Module, index: int, *, interleaved: bool) -> None:
        sites = layer_sites(layer)
        if sites.adapted:
            raise ModelError("parity: the model has adapters beside its weights; expected them merged into the weights")
        inside = set(sites.attention.modules())
        branch = {name: module for name, module in sites.linears.items() if module not in inside}
        if not branch:
            raise ModelError(f"{type(model).__name__}: no linear modules in the MLP of its layers, expected some")
        for name, linear in sites.linears.items():
            self.watch(linear, self.operator(name, _linear_form(linear), index))
        for name, norm in sites.norms.items():
            self.watch(norm, self.operator(name, norm_form(norm), index))
        rotary = _rotary_form(model, sites.attention, index, interleaved=interleaved)
        self._attentions[sites.attention] = Attention(self, index, rotary, {*sites.linears, *sites.norms})
        *before, down = branch
        form = _activation_form(model, [branch[name] for name in before], branch[down])
        self.watch_activation(index, form, before, branch[down])
        residuals = [self.operator(kind, SumForm(), index) for kind in RESIDUALS]
        self.before(layer, lambda *_: self._additions.append(list(residuals)))
        self.after(layer, lambda *_: self._additions.pop())
        for child in layer.children():
            self.before(child, lambda *_: self._additions.append(None))
            self.after(child, lambda *_: self._additions.pop())

    def _see_addition(self, name: str, addends: Sequence[Tensor], output: Tensor) -> None:
        """See an addition of a layer itself, outside of its modules: the residual stream."""
        left = self._additions[-1] if self._additions else None
        if left is None:
            return
        if not left:
            raise ModelError(
                f"parity: a layer of this model adds more than {len(RESIDUALS)} times, expected two branches"
            )
        if name in ("add_", "__iadd__"):
            raise ModelError("parity: the layers of this model add in place, so the inputs of the sum are lost")
        self.recorder.see(left.pop(0), addends, output)


class _Additions(TorchFunctionMode):
    """Calls `see` with name, addends and sum of every addition of two tensors of one shape."""

    def __init__(self, see: Callable[[str, Sequence[Tensor], Tensor], None]) -> None:
        super().__init__()
        self._see = see

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`."""
        output = func(*args, **(kwargs or {}))
        if func.__name__ in _ADDITIONS and len(args) > 1:
            addends = args[:2]
            if all(isinstance(part, Tensor) and part.shape == output.shape for part in addends):
                self._see(func.__name__, addends, output)
        return output


@contextmanager
def _watched_attention(attentions: Mapping[nn.Module, Attention], recorder: Recorder) -> Iterator[None]:
    """Watch the function to which every attention module of transformers hands queries, keys and values."""
    original = ALL_ATTENTION_FUNCTIONS.get_interface

    def get_interface(name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        attend = original(name, default)

        def watched(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
            found = attentions.get(module)
            if found is None or recorder.is_idle:
                return attend(module, query, key, value, mask, **kwargs)
            # Behind those of this call lie keys and values of the cache. What replaces its keys stays in it.
            parts = [part[:, :, -recorder.num_columns :].transpose(1, 2) for part in (query, key, value)]
            with torch._C.DisableTorchFunction():
                found.see_inputs(parts)
            output, *rest = attend(module, query, key, value, mask, **kwargs)
            with torch._C.DisableTorchFunction():
                found.see_output(parts, _attention_form(module, query, kwargs), output)
            return (output, *rest)

        return watched

    ALL_ATTENTION_FUNCTIONS.get_interface = get_interface
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS.get_interface


def _attention_form(module: nn.Module, query: Tensor, kwargs: dict[str, Any]) -> AttentionForm:
    for name in _UNKNOWN_ATTENTION:
        if kwargs.get(name) is not None:
            raise ModelError(
                f"parity: attention of {type(module).__name__} takes {name}, whose effect is not known here"
            )
    scaling, head_dim = kwargs.get("scaling"), query.shape[-1]
    return AttentionForm(
        scaling=head_dim**-0.5 if scaling is None else float(scaling),
        head_dim=head_dim,
        window=kwargs.get("sliding_window"),
        soft_cap=kwargs.get("softcap"),
    )


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


def _refuse_unmapped(model: nn.Module, watched: Iterable[nn.Module]) -> None:
    """Raise ModelError if a layer has parameters that belong to no module which is watched."""
    mapped = {id(parameter) for module in watched for parameter in module.parameters()}
    unmapped = [
        f"layers.{index}.{name}"
        for index, layer in enumerate(decoder_layers(model))
        for name, parameter in layer.named_parameters()
        if id(parameter) not in mapped
    ] + matrices_outside(model)
    if unmapped:
        raise ModelError(
            f"{type(model).__name__}: parity does not map {', '.join(unmapped[:3])} ({len(unmapped)} parameters in all)"
        )


class Runner:
    """A transformers model that runs batches; `interleaved`: see `RotaryForm`."""

    def __init__(self, model: Any, batch_size: int, padding: Padding, *, interleaved: bool) -> None:
        self._model, self._batch_size, self._padding = model, batch_size, padding
        self.taps = ModelTaps(model, interleaved=interleaved)

    def run(
        self, sequences: Sequence[Sequence[int]], num_decoded: int, recorder: Recorder
    ) -> dict[tuple[int, int], Score]:
        """Run sequences; return the log-probability of every token but the first of each, and the best id."""
        scores: dict[tuple[int, int], Score] = {}
        device = next(self._model.parameters()).device
        pad_token = int(getattr(self._model.config, "pad_token_id", None) or 0)
        with torch.no_grad(), self.taps.of(recorder):
            for first in range(0, len(sequences), self._batch_size):
                cache = DynamicCache(config=self._model.config)
                batch = sequences[first : first + self._batch_size]
                for call in calls(batch, first, self._padding, num_decoded, pad_token):
                    recorder.begin(call.token_ids.shape, call.tokens)
                    logits = self._model(
                        input_ids=call.token_ids.to(device),
                        attention_mask=None if call.mask is None else call.mask.to(device),
                        position_ids=call.positions.to(device),
                        past_key_values=cache,
                        use_cache=True,
                    ).logits
                    scores |= score(logits, call.tokens, sequences)
        return scores


def prove(model: Any) -> tuple[bool, Recording]:
    """Return whether rotations are interleaved, and what a random model of this kind with two layers recorded.

    Raises ModelError, which names the first operator that computes something else.
    """
    small = _random_model(model.config)
    failures = []
    for interleaved in (False, True):
        recording = _recorded(small, interleaved=interleaved)
        wrong = {name: facts["loose"] for name, facts in recording.operators.items() if facts["loose"] > 1}
        if not wrong:
            return interleaved, recording
        failures.append(wrong)
    name, error = next(iter(min(failures, key=len).items()))
    raise ModelError(
        f"{type(model).__name__}: on random weights its {name} is not what parity takes it for (error "
        f"{error:.3g} times the bound of rounding), so the operators of this model cannot be mapped"
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


def _recorded(model: Any, *, interleaved: bool) -> Recording:
    generator = keyed_generator("cpu", 0, "parity.proof.tokens")
    shape = (2, _TOKENS)
    sequences = torch.randint(model.config.vocab_size, shape, generator=generator).tolist()
    sequences[1] = sequences[1][1:]
    recorder = Recorder(choose_sample([len(ids) for ids in sequences], 2 * _TOKENS))
    runner = Runner(model, 2, "left", interleaved=interleaved)
    runner.run(sequences, 2, recorder)
    recording = recorder.finish()
    unseen = [operator.name for operator in runner.taps.operators if operator.name not in recording.operators]
    if unseen:
        raise ModelError(
            f"{type(model).__name__}: parity did not see {', '.join(unseen[:3])} run ({len(unseen)} operators in all), "
            "so it could not compare them"
        )
    return recording
