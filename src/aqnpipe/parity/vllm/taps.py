"""Watches the operators of vLLM's model in a worker, as the operators of a transformers model.

vLLM has one row per token, without padding. It computes queries, keys and values in one product, gate and up in
another, and adds the residual stream inside of its norms. So a layer returns (output of the MLP, residual stream), and
the sum that transformers' layer returns exists only in the next norm, which is where it is recorded.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from aqnpipe.errors import ModelError
from aqnpipe.generation.vllm.modules import EngineLayer, EngineModel, Linear
from aqnpipe.parity.expected import AttentionFacts
from aqnpipe.parity.forms import (
    ActivationForm,
    EmbeddingForm,
    LinearForm,
    NormForm,
    Operator,
    RotaryForm,
    SumForm,
)
from aqnpipe.parity.mapping import RESIDUALS
from aqnpipe.parity.recorder import Recorder
from aqnpipe.parity.sample import Call
from aqnpipe.parity.vllm.forms import FusedNormForm


class EngineTaps:
    """Hooks on vLLM's model that let `recorder` see the tokens of known sequences. Close the `stack` to remove them.

    `score` gets the logits of all tokens of a forward pass and their sequences and positions.
    """

    def __init__(
        self,
        engine: EngineModel,
        recorder: Recorder,
        sequences: Sequence[Sequence[int]],
        score: Callable[[Tensor, list[tuple[int, int]]], None],
    ) -> None:
        if engine.out_of_reach:
            raise ModelError(f"parity does not map {', '.join(engine.out_of_reach[:3])} of vLLM's model")
        self.stack = ExitStack()
        self._engine, self._recorder, self._score = engine, recorder, score
        self._waiting = dict(enumerate(map(tuple, sequences)))
        self._places: list[tuple[int, int]] = []
        self._addends: tuple[Tensor, ...] = ()
        self._rotaries: set[nn.Module] = set()
        self._layer = 0
        model = engine.model
        self._keep(model.register_forward_pre_hook(self._enter_model, with_kwargs=True))
        self._keep(model.register_forward_hook(self._leave_model))
        embedding = next(module for name, module in model.named_modules() if name.rsplit(".", 1)[-1] == "embed_tokens")
        self._embed = Operator("embed_tokens", "embed_tokens", None, EmbeddingForm(embedding.weight))
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
        head: Any = engine.head.module
        self._head = Operator(
            "lm_head", "lm_head", None, LinearForm(head.weight[: engine.head.width], getattr(head, "bias", None)), True
        )

    def _install_layer(self, index: int, layer: EngineLayer) -> None:
        for linear in layer.linears:
            self._install_linear(index, linear)
        for path, norm in layer.norms.items():
            kind = path.rsplit(".", 1)[-1]
            operator = Operator(f"layers.{index}.{kind}", kind, index, _norm(norm))
            if "." in path:
                self._keep(norm.register_forward_hook(self._plain(operator)))
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
        operators = [
            Operator(f"layers.{index}.{projection.name}", projection.name, index, LinearForm(weight, part))
            for projection, weight, part in zip(linear.projections, weights, biases, strict=True)
        ]

        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            if self._recorder.is_idle:
                return None
            whole = output[0] if isinstance(output, tuple) else output
            inputs = [self._recorder.rows_of(args[0][None])]
            views = linear.views(whole)
            edited = [self._see(operator, inputs, view) for operator, view in zip(operators, views, strict=True)]
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

    def _plain(self, operator: Operator) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, output: Tensor) -> Any:
            if self._recorder.is_idle:
                return None
            return self._see(operator, [self._recorder.rows_of(args[0][None])], output)

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
                edited = self._see(operator, [self._recorder.last(name)], part)
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
            inputs = tuple(
                self._recorder.rows_of(part.reshape(len(part), -1)[None]).reshape(
                    -1, part.numel() // len(part) // dim, dim
                )
                for part in args[:3]
            )
            edited = self._recorder.see_attention(operator, inputs, facts, output[None])  # type: ignore[arg-type]
            return None if edited is None else edited[0]

        return hook

    def _activation(self, index: int) -> Callable[..., Any]:
        act = ACT2FN[self._engine.model.config.hidden_act]  # type: ignore[union-attr]
        operator = Operator(f"layers.{index}.activation", "activation", index, ActivationForm(act, True))
        names = [f"layers.{index}.gate_proj", f"layers.{index}.up_proj"]

        def hook(module: nn.Module, args: Any, output: Tensor) -> Any:
            if self._recorder.is_idle:
                return None
            return self._see(operator, [self._recorder.last(name) for name in names], output)

        return hook

    def _see_embedding(self, module: nn.Module, args: Any, output: Tensor) -> Any:
        if self._recorder.is_idle:
            return None
        return self._see(self._embed, [self._recorder.rows_of(args[0][None, :, None])], output)

    def _see(self, operator: Operator, inputs: Sequence[Tensor], output: Tensor) -> Tensor | None:
        edited = self._recorder.see(operator, inputs, output[None])
        return None if edited is None else edited[0]

    def _enter_model(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        named = dict(zip(("input_ids", "positions"), args, strict=False)) | kwargs
        ids, positions = named["input_ids"].cpu(), named["positions"].cpu()
        self._places = self._known_tokens(ids.tolist(), positions.tolist())
        sample = self._recorder.sample
        rows = [
            (0, column, row)
            for column, (sequence, position) in enumerate(self._places)
            if (row := sample.row(sequence, position)) is not None
        ]
        numbers, columns, found = torch.tensor(rows, dtype=torch.long).reshape(-1, 3).unbind(-1)
        places = (numbers, columns, found)
        self._recorder.begin(Call(ids[None], None, positions[None], 0, len(ids), places, places))

    def _known_tokens(self, ids: list[int], positions: list[int]) -> list[tuple[int, int]]:
        """Return the sequence and position of every token of a pass; empty for a pass that is none of the capture.

        vLLM runs passes of its own, on zeros, to measure memory.
        """
        starts = [column for column, position in enumerate(positions) if position == 0]
        places: list[tuple[int, int]] = []
        for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
            part = tuple(ids[start:end])
            number = next((number for number, sequence in self._waiting.items() if sequence == part), None)
            if number is None or positions[start:end] != list(range(len(part))):
                return []
            del self._waiting[number]
            places += [(number, position) for position in range(len(part))]
        return places

    def _leave_model(self, module: Any, args: Any, output: Tensor) -> None:
        if not self._places:
            return
        logits = module.compute_logits(output)[: len(self._places)]
        if not self._recorder.is_idle:
            self._see(self._head, [self._recorder.rows_of(output[None])], logits)
        self._score(logits, self._places)

    def _keep(self, handle: Any) -> None:
        self.stack.callback(handle.remove)


def _norm(module: Any) -> FusedNormForm:
    # The names of the classes whose gain is stored minus one; the proof on random weights decides if that is right.
    adds_one = "gemma" in type(module).__name__.lower()
    return FusedNormForm(NormForm(module.weight, None, float(module.variance_epsilon), False, adds_one))
