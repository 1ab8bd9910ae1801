"""Watches the operators of vLLM's model in a worker, as the operators of a transformers model.

vLLM has one row per token, without padding. It computes queries, keys and values in one product, gate and up in
another, and adds the residual stream inside of its norms. So a layer returns (output of the MLP, residual stream), and
the sum that transformers' layer returns exists only in the next norm, which is where it is recorded. What lies on
several tensor-parallel workers is recorded whole, by all of them (`shares`).
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from aqnpipe.errors import ModelError
from aqnpipe.generation.vllm.linears import Linear
from aqnpipe.generation.vllm.modules import EngineLayer, EngineModel
from aqnpipe.noise.kernels.shards import Shard
from aqnpipe.parity import expected
from aqnpipe.parity.expected import AttentionFacts, Candidates, Expected
from aqnpipe.parity.forms import (
    ActivationForm,
    Inputs,
    NormForm,
    Operator,
    RotaryForm,
    SumForm,
)
from aqnpipe.parity.mapping import RESIDUALS
from aqnpipe.parity.recorder import Recorder
from aqnpipe.parity.sample import Call
from aqnpipe.parity.vllm.shares import embedding_form, linear_form, own_share, whole
from aqnpipe.parity.vllm.tokens import GivenTokens, Place

_UNROUNDED = "of the sum before its rounding"


@dataclass(frozen=True)
class _FusedNormForm:
    """A norm of a sum that it computes itself. Inputs are the rounded sum and the two addends, if there were two."""

    norm: NormForm

    def expected(self, inputs: Inputs, positions: Tensor, channels: Tensor, dtype: torch.dtype) -> Expected:
        """See `Form`: the norm of the rounded sum, so that engines which do not fuse expect the same."""
        return self.norm.expected(inputs[:1], positions, channels, dtype)

    def candidates(self, inputs: Inputs, positions: Tensor, dtype: torch.dtype) -> Candidates:
        """See `Form`."""
        found = dict(self.norm.candidates(inputs[:1], positions, dtype))
        if len(inputs) == 1 or self.norm.subtracts_mean:
            return found
        total = inputs[1].cpu().float() + inputs[2].cpu().float()
        unrounded = expected.rms_norms(total, self.norm.gain, self.norm.epsilon, dtype)
        names = (expected.CAST_BEFORE, expected.CAST_AFTER)
        return found | {f"{name}, {_UNROUNDED}": unrounded[name] for name in names}


class EngineTaps:
    """Hooks on vLLM's model that let `recorder` see the `given` tokens and no others. Close the `stack` to remove them.

    `requests` returns those of the present pass, as sequence and number of tokens. `score` gets the logits of all
    tokens of a pass and their sequences and positions.
    """

    def __init__(
        self,
        engine: EngineModel,
        recorder: Recorder,
        given: GivenTokens,
        requests: Callable[[], list[Place]],
        score: Callable[[Tensor, list[Place]], None],
    ) -> None:
        if engine.out_of_reach:
            raise ModelError(f"parity does not map {', '.join(engine.out_of_reach[:3])} of vLLM's model")
        self.stack = ExitStack()
        self._engine, self._recorder, self._score = engine, recorder, score
        self._given, self._requests = given, requests
        self._places: list[Place] = []
        self._scores_pass = False
        self._addends: tuple[Tensor, ...] = ()
        self._rotaries: set[nn.Module] = set()
        self._layer = 0
        self._columns = [
            {each.name: each.output_shard for linear in layer.linears for each in linear.projections}
            for layer in engine.layers
        ]
        model = engine.model
        self._keep(model.register_forward_pre_hook(self._enter_model, with_kwargs=True))
        self._keep(model.register_forward_hook(self._leave_model))
        self._keep(engine.logits[0].register_forward_hook(self._choose_given))
        embedding = next(module for name, module in model.named_modules() if name.rsplit(".", 1)[-1] == "embed_tokens")
        self._embed = Operator("embed_tokens", "embed_tokens", None, embedding_form(embedding))
        self._keep(embedding.register_forward_hook(self._see_embedding))
        for index, layer in enumerate(engine.layers):
            self._install_layer(index, layer)
        inside = {module for layer in engine.layers for module in layer.module.modules()}
        last = [module for name, module in model.named_modules() if name in engine.norm_inputs and module not in inside]
        if len(last) != 1:
            raise ModelError(f"vLLM's {type(model).__name__}: {len(last)} norms outside of its layers, expected one")
        self._install_norm(
            last[0], Operator("norm", "norm", None, _norm(last[0])), len(engine.layers) - 1, RESIDUALS[1]
        )
        head, weight = engine.head, engine.head.module.weight[: engine.head.width]
        form = linear_form(head, head.projections[0], weight, getattr(head.module, "bias", None))
        self._head = Operator("lm_head", "lm_head", None, form, True)

    def _install_layer(self, index: int, layer: EngineLayer) -> None:
        for linear in layer.linears:
            self._install_linear(index, linear)
        for path, norm in layer.norms.items():
            kind = path.rsplit(".", 1)[-1]
            operator = Operator(f"layers.{index}.{kind}", kind, index, _norm(norm))
            if "." in path:
                self._keep(norm.register_forward_hook(self._plain(operator, self._engine.shards.get(norm))))
            else:
                is_first = kind == "input_layernorm"
                self._install_norm(norm, operator, index - is_first, RESIDUALS[is_first])
        if len(layer.attentions) != 1 or len(layer.activations) != 1:
            raise ModelError(f"vLLM's layer {index}: expected one attention and one activation")
        self._keep(layer.module.register_forward_pre_hook(self._enter_layer(index)))
        for path, module in layer.module.named_modules():
            # Layers share one module.
            if path.rsplit(".", 1)[-1] == "rotary_emb" and module not in self._rotaries:
                self._rotaries.add(module)
                self._keep(module.register_forward_hook(self._rotary(module)))
        core = Operator(f"layers.{index}.attention", "attention", index, None)
        self._keep(layer.attentions[0].register_forward_hook(self._attention(core)))
        self._keep(layer.activations[0].register_forward_hook(self._activation(index)))

    def _install_linear(self, index: int, linear: Linear) -> None:
        bias = linear.module.bias
        weights = linear.module.weight.split(linear.widths)
        biases = [None] * len(weights) if bias is None else bias.split(linear.widths)
        forms = map(linear_form, [linear] * len(weights), linear.projections, weights, biases)
        operators = [
            Operator(f"layers.{index}.{projection.name}", projection.name, index, form)
            for projection, form in zip(linear.projections, forms, strict=True)
        ]
        shards = [projection.output_shard for projection in linear.projections]
        input_shard = linear.projections[0].input_shard

        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            if self._recorder.is_idle:
                return None
            inputs = [whole(self._recorder.rows_of(args[0][None]), input_shard)]
            views = linear.views(output[0] if isinstance(output, tuple) else output)
            edited = [
                self._see(operator, inputs, view, shard)
                for operator, view, shard in zip(operators, views, shards, strict=True)
            ]
            if all(part is None for part in edited):
                return None
            joined = torch.cat([view if part is None else part for view, part in zip(views, edited, strict=True)], -1)
            return (joined, *output[1:]) if isinstance(output, tuple) else joined

        self._keep(linear.module.register_forward_hook(hook))

    def _install_norm(self, module: nn.Module, operator: Operator, layer: int, residual: str) -> None:
        """Watch a norm that adds the residual stream; the sum belongs to `layer`."""
        total = Operator(f"layers.{layer}.{residual}", residual, layer, SumForm())

        def before(norm: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._recorder.is_idle:
                return
            given = [*args, *kwargs.values()]
            # The kernel writes into its arguments.
            self._addends = tuple(
                self._recorder.rows_of(part[None]).clone() for part in given if isinstance(part, Tensor)
            )

        def after(norm: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            if self._recorder.is_idle:
                return None
            if not isinstance(output, tuple):
                return self._see(operator, self._addends, output)
            normed, stream = output
            edited_stream = self._see(total, self._addends, stream)
            rounded = self._recorder.last(total.name)
            edited = self._see(operator, (rounded, *self._addends), normed)
            return (normed if edited is None else edited, stream if edited_stream is None else edited_stream)

        self._keep(module.register_forward_pre_hook(before, with_kwargs=True))
        self._keep(module.register_forward_hook(after))

    def _plain(self, operator: Operator, shard: Shard | None) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, output: Tensor) -> Any:
            if self._recorder.is_idle:
                return None
            return self._see(operator, [whole(self._recorder.rows_of(args[0][None]), shard)], output, shard)

        return hook

    def _rotary(self, module: Any) -> Callable[..., Any]:
        form = RotaryForm(
            module._compute_inv_freq(module.base).detach().cpu(),
            float(getattr(module, "mscale", 1.0)),
            module.head_size,
            not module.is_neox_style,
        )

        def hook(rotary: nn.Module, args: Any, output: Any) -> Any:
            if self._recorder.is_idle:
                return None
            layer, results = f"layers.{self._layer}", []
            for letter, part in zip("qk", output, strict=True):
                kind = f"rotary_{letter}"
                operator = Operator(f"{layer}.{kind}", kind, self._layer, form)
                names = (f"{layer}.{letter}_norm", f"{layer}.{letter}_proj")
                name = next(name for name in names if self._recorder.has(name))
                shard = self._columns[self._layer].get(f"{letter}_proj")
                edited = self._see(operator, [self._recorder.last(name)], part, shard)
                results.append(part if edited is None else edited)
            return tuple(results)

        return hook

    def _enter_layer(self, index: int) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            self._layer = index

        return enter

    def _attention(self, operator: Operator) -> Callable[..., Any]:
        def hook(module: Any, args: Any, output: Tensor) -> Any:
            if self._recorder.is_idle:
                return None
            window, cap = getattr(module, "sliding_window", None), getattr(module.impl, "logits_soft_cap", None)
            facts = AttentionFacts(float(module.impl.scale), window or None, cap or None)
            dim = module.impl.head_size
            columns = [self._columns[operator.layer or 0].get(f"{letter}_proj") for letter in "qkv"]
            inputs = tuple(
                whole(self._recorder.rows_of(part.reshape(len(part), -1)[None]), shard).unflatten(-1, (-1, dim))
                for part, shard in zip(args[:3], columns, strict=True)
            )
            shard = self._engine.shards.get(module)
            seen = whole(output, shard)[None]
            edited = self._recorder.see_attention(operator, inputs, facts, seen)
            return None if edited is None else own_share(edited[0], shard, output)

        return hook

    def _activation(self, index: int) -> Callable[..., Any]:
        act = ACT2FN[self._engine.model.config.hidden_act]  # type: ignore[union-attr]
        operator = Operator(f"layers.{index}.activation", "activation", index, ActivationForm(act, True))
        names = [f"layers.{index}.gate_proj", f"layers.{index}.up_proj"]

        def hook(module: nn.Module, args: Any, output: Tensor) -> Any:
            if self._recorder.is_idle:
                return None
            shard = self._engine.shards.get(module)
            return self._see(operator, [self._recorder.last(name) for name in names], output, shard)

        return hook

    def _see_embedding(self, module: nn.Module, args: Any, output: Tensor) -> Any:
        if self._recorder.is_idle:
            return None
        return self._see(self._embed, [self._recorder.rows_of(args[0][None, :, None])], output)

    def _see(
        self, operator: Operator, inputs: Sequence[Tensor], output: Tensor, shard: Shard | None = None
    ) -> Tensor | None:
        edited = self._recorder.see(operator, inputs, whole(output, shard)[None])
        return None if edited is None else own_share(edited[0], shard, output)

    def _enter_model(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        named = dict(zip(("input_ids", "positions"), args, strict=False)) | kwargs
        ids, positions = named["input_ids"].cpu(), named["positions"].cpu()
        self._places = self._given.take(self._requests(), ids.tolist(), positions.tolist())
        sample = self._recorder.sample
        rows = [
            (0, column, row)
            for column, (sequence, position) in enumerate(self._places)
            if (row := sample.row(sequence, position)) is not None
        ]
        numbers, columns, found = torch.tensor(rows, dtype=torch.long).reshape(-1, 3).unbind(-1)
        places = (numbers, columns, found)
        self._recorder.begin(Call(ids[None], None, positions[None], 0, len(ids), places, places))

    def _leave_model(self, module: Any, args: Any, output: Tensor) -> None:
        if not self._places:
            return
        self._scores_pass = True
        logits = module.compute_logits(output)[: len(self._places)]
        self._scores_pass = False
        if not self._recorder.is_idle:
            self._see(self._head, [self._recorder.rows_of(output[None])], logits)
        self._score(logits, self._places)

    def _choose_given(self, module: nn.Module, args: Any, logits: Tensor) -> Tensor | None:
        """Leave vLLM's sampler one choice, the next given token."""
        return None if self._scores_pass or not self._places else self._given.only_next(logits)

    def _keep(self, handle: Any) -> None:
        self.stack.callback(handle.remove)


def _norm(module: Any) -> _FusedNormForm:
    # The names of the classes whose gain is stored minus one; the proof on random weights decides if that is right.
    adds_one = "gemma" in type(module).__name__.lower()
    return _FusedNormForm(NormForm(module.weight, None, float(module.variance_epsilon), False, adds_one))
