"""The taps of vLLM's model in a worker: its operators, as those of a transformers model.

vLLM has one row per token, without padding. It computes queries, keys and values in one product, gate and up in
another, and adds the residual stream inside of its norms. So a layer returns (output of the MLP, residual stream), and
the sum that transformers' layer returns exists only in the next norm, which is where it is recorded. What lies on
several tensor-parallel workers is recorded whole, by all of them (`shares`).
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.activations import ACT2FN

from aqnpipe.errors import ModelError
from aqnpipe.generation.vllm.linears import Linear
from aqnpipe.generation.vllm.modules import EngineLayer, EngineModel
from aqnpipe.noise.kernels.shards import Shard
from aqnpipe.parity.forms import ActivationForm, AttentionForm, Operator, RotaryForm, SumForm, norm_form
from aqnpipe.parity.recorder import Result
from aqnpipe.parity.sample import Token
from aqnpipe.parity.taps import RESIDUALS, Attention, Taps
from aqnpipe.parity.vllm.shares import SharedLinearForm, embedding_form
from aqnpipe.parity.vllm.tokens import GivenTokens, Place


class EngineTaps(Taps):
    """The taps of vLLM's model, by which the recorder sees the `given` tokens and no others.

    `requests` returns those of the present pass, as sequence and number of tokens. `score` gets the logits of all
    tokens of a pass and the tokens.
    """

    def __init__(
        self,
        engine: EngineModel,
        given: GivenTokens,
        requests: Callable[[], list[Place]],
        score: Callable[[Tensor, list[Token]], None],
    ) -> None:
        super().__init__()
        if engine.out_of_reach:
            raise ModelError(f"parity does not map {', '.join(engine.out_of_reach[:3])} of vLLM's model")
        self._engine, self._score, self._given, self._requests = engine, score, given, requests
        self._tokens: list[Token] = []
        self._scores_pass = False
        self._addends: list[Tensor] = []
        model = engine.model
        # Also in passes that are not recorded.
        self._hooks.append(lambda: model.register_forward_pre_hook(self._enter_model, with_kwargs=True))
        self._hooks.append(lambda: model.register_forward_hook(self._leave_model))
        self._hooks.append(lambda: engine.logits[0].register_forward_hook(self._choose_given))
        embedding = next(module for name, module in model.named_modules() if name.rsplit(".", 1)[-1] == "embed_tokens")
        self.watch(embedding, self.operator("embed_tokens", embedding_form(embedding)))
        for index, layer in enumerate(engine.layers):
            self._add_layer(index, layer)
        inside = {module for layer in engine.layers for module in layer.module.modules()}
        last = [module for name, module in model.named_modules() if name in engine.norm_inputs and module not in inside]
        if len(last) != 1:
            raise ModelError(f"vLLM's {type(model).__name__}: {len(last)} norms outside of its layers, expected one")
        self._watch_sum(last[0], self.operator("norm", norm_form(last[0])), len(engine.layers) - 1, RESIDUALS[1])
        head, weight = engine.head, engine.head.module.weight[: engine.head.width]
        form = SharedLinearForm(weight, getattr(head.module, "bias", None), head.projections[0].output_shard)
        self._head = self.operator("lm_head", form, is_wide=True)

    def batched(self, tensor: Tensor) -> Tensor:
        """See `Taps`."""
        return tensor[None]

    def _add_layer(self, index: int, layer: EngineLayer) -> None:
        if len(layer.attentions) != 1:
            raise ModelError(f"vLLM's layer {index}: expected one attention")
        columns: dict[str, Shard | None] = {}
        for linear in layer.linears:
            self._watch_linear(index, linear)
            columns |= {projection.name: projection.output_shard for projection in linear.projections}
        for path, norm in layer.norms.items():
            shard, kind = self._engine.shards.get(norm), path.rsplit(".", 1)[-1]
            operator = self.operator(kind, norm_form(norm), index, shard=shard, input_shards=(shard,) if shard else ())
            columns[kind] = shard
            if "." in path:
                self.watch(norm, operator)
            else:
                is_first = kind == "input_layernorm"
                self._watch_sum(norm, operator, index - is_first, RESIDUALS[is_first])
        paths = {path.rsplit(".", 1)[-1]: module for path, module in layer.module.named_modules()}
        rotary = _rotary_form(paths["rotary_emb"]) if "rotary_emb" in paths else None
        core = layer.attentions[0]
        shards = [*(columns.get(f"{letter}_proj") for letter in "qkv"), self._engine.shards.get(core)]
        self._watch_attention(core, Attention(self, index, rotary, columns, shards))
        act = ACT2FN[self._engine.model.config.hidden_act]  # type: ignore[union-attr]
        down = next(linear for linear in layer.linears if linear.projections[0].name == "down_proj")
        self.watch_activation(
            index,
            ActivationForm(act, True),
            ("gate_proj", "up_proj"),
            down.module,
            down.projections[0].input_shard,
        )

    def _watch_linear(self, index: int, linear: Linear) -> None:
        bias = linear.module.bias
        weights = linear.module.weight.split(linear.widths)
        biases = [None] * len(weights) if bias is None else bias.split(linear.widths)
        operators = [
            self.operator(
                projection.name,
                SharedLinearForm(weight, bias, projection.output_shard, projection.input_shard),
                index,
                shard=projection.output_shard,
                input_shards=(projection.input_shard,),
            )
            for projection, weight, bias in zip(linear.projections, weights, biases, strict=True)
        ]
        self.watch(linear.module, *operators, views=linear.views)

    def _watch_sum(self, module: nn.Module, operator: Operator, layer: int, residual: str) -> None:
        """Watch a norm that adds the residual stream; the sum belongs to `layer`."""
        total = self.operator(residual, SumForm(), layer)

        def before(args: Any, kwargs: Any) -> None:
            # The kernel writes into its arguments.
            given = [*args, *kwargs.values()]
            self._addends = [self.batched(part).clone() for part in given if isinstance(part, Tensor)]

        def after(args: Any, output: Any) -> None:
            if not isinstance(output, tuple):
                self.recorder.see(operator, self._addends, self.batched(output))
                return
            normed, stream = map(self.batched, output)
            self.recorder.see(total, self._addends, stream)
            self.recorder.see(operator, [Result(total.name), *self._addends], normed)

        self.before(module, before)
        self.after(module, after)

    def _watch_attention(self, module: Any, attention: Attention) -> None:
        window, cap = getattr(module, "sliding_window", None), getattr(module.impl, "logits_soft_cap", None)
        form = AttentionForm(float(module.impl.scale), module.impl.head_size, window or None, cap or None)
        self.before(module, lambda args, _: attention.see_inputs([self.batched(part) for part in args[:3]]))
        self.after(
            module,
            lambda args, output: attention.see_output(
                [self.batched(part) for part in args[:3]], form, self.batched(output)
            ),
        )

    def _enter_model(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        named = dict(zip(("input_ids", "positions"), args, strict=False)) | kwargs
        ids, positions = named["input_ids"].tolist(), named["positions"].tolist()
        places = self._given.take(self._requests(), ids, positions)
        self._tokens = [Token(0, column, *place) for column, place in enumerate(places)]
        self.recorder.begin((1, len(ids)), self._tokens)

    def _leave_model(self, module: Any, args: Any, output: Tensor) -> None:
        if not self._tokens:
            return
        self._scores_pass = True
        logits = self.batched(module.compute_logits(output)[: len(self._tokens)])
        self._scores_pass = False
        self.recorder.see(self._head, [self.batched(output)], logits)
        self._score(logits, self._tokens)

    def _choose_given(self, module: nn.Module, args: Any, logits: Tensor) -> Tensor | None:
        """Leave vLLM's sampler one choice, the next given token."""
        return None if self._scores_pass or not self._tokens else self._given.only_next(logits)


def _rotary_form(module: Any) -> RotaryForm:
    return RotaryForm(
        module._compute_inv_freq(module.base).detach().cpu(),
        float(getattr(module, "mscale", 1.0)),
        module.head_size,
        not module.is_neox_style,
    )
