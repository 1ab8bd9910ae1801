"""What runs in vLLM's workers for a capture: methods that the engine calls, taps of its model, and proof of the tokens.

vLLM chooses the tokens that it decodes. Here the logits of all others are set to minus infinity, so its sampler has one
choice: the next given token, which the engine then runs like one of its own. The worker finds the tokens of a pass by
the engine's requests, each of which carries the number of its sequence.

vLLM has one row per token, without padding. It computes queries, keys and values in one product, gate and up in
another, and adds the residual stream inside of its norms. So a layer returns (output of the MLP, residual stream), and
the sum that transformers' layer returns exists only in the next norm, which is where it is recorded.

A capture does not depend on the number of tensor-parallel workers: columns of a result are gathered in the order of the
whole, of a row-parallel product the sum is recorded. All workers record the same, and take part in the same exchanges
in the same order. Arguments and results of methods are plain data; tensors go through files.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.activations import ACT2FN

from aqnpipe.errors import ModelError, ReceiptError
from aqnpipe.generation.vllm.modules import EngineLayer, EngineModel, Linear, head_of
from aqnpipe.generation.vllm.worker import NoiseExtension, reported
from aqnpipe.models.loading import stored_tensors
from aqnpipe.noise.kernels.shards import Shard
from aqnpipe.parity.capture import compare_with_files
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
from aqnpipe.parity.recorder import RESIDUALS, Attention, Recorder, Result, Taps, replaying
from aqnpipe.parity.sample import Sample, Score, Token, score

SEQUENCE = "aqnpipe_sequence"
"""Key of a request's `extra_args`: the number of the sequence that it reads."""

Place = tuple[int, int]


def requests_of(runner: Any) -> list[Place]:
    """Return the requests of the pass that vLLM's model runner computes: number of the sequence, number of tokens.

    Raises ModelError for a model runner that does not say them.
    """
    batch = getattr(runner, "input_batch", None)
    if batch is None:
        raise ModelError(
            f"vLLM's {type(runner).__module__}: which request a token belongs to is not known here; expected the first "
            "version of its model runner (VLLM_USE_V2_MODEL_RUNNER=0)"
        )
    ends = runner.query_start_loc.np
    found = []
    for row, request in enumerate(batch.req_ids):
        arguments = runner.requests[request].sampling_params.extra_args or {}
        found.append((int(arguments.get(SEQUENCE, -1)), int(ends[row + 1] - ends[row])))
    return found


class GivenTokens:
    """Token ids of `sequences`, of which the last `num_decoded` of each are run one at a time."""

    def __init__(self, sequences: Sequence[Sequence[int]], num_decoded: int) -> None:
        self._sequences, self._num_decoded = [list(ids) for ids in sequences], num_decoded
        self._done = [0] * len(sequences)
        self._ends: list[Place] = []
        self._reason = ""

    def take(self, requests: Sequence[Place], ids: Sequence[int], positions: Sequence[int]) -> list[Place]:
        """Return sequence and position of the tokens of a pass; empty if it is none over given tokens.

        vLLM runs passes of its own, without requests. What else is not the next given token is kept for `check`.
        """
        self._ends = []
        places: list[Place] = []
        for sequence, count in requests:
            part = slice(len(places), len(places) + count)
            reason = self._why_not_next(sequence, ids[part], positions[part])
            if reason:
                self._reason = self._reason or reason
                return []
            places += [(sequence, self._done[sequence] + column) for column in range(count)]
            self._ends.append((sequence, self._done[sequence] + count))
        for sequence, done in self._ends:
            self._done[sequence] = done
        return places

    def only_next(self, logits: Tensor) -> Tensor:
        """Return logits [requests, vocabulary] of the last pass in which only the next given token is possible."""
        if not self._ends:
            return logits
        if len(logits) != len(self._ends):
            self._reason = self._reason or f"logits of {len(logits)} tokens, expected one for each of its requests"
            return logits
        chosen = torch.full_like(logits, -torch.inf)
        for row, (sequence, position) in enumerate(self._ends):
            # Behind the last token vLLM chooses one more, which it does not run.
            given = self._sequences[sequence][min(position, len(self._sequences[sequence]) - 1)]
            chosen[row, given] = 0
        return chosen

    def check(self) -> None:
        """Raise ModelError unless all given tokens were run, each once, and no others."""
        if self._reason:
            raise ModelError(f"vLLM ran other tokens than the given ones: {self._reason}")
        for number, (done, ids) in enumerate(zip(self._done, self._sequences, strict=True)):
            if done != len(ids):
                raise ModelError(f"vLLM ran {done} tokens of sequence {number}, expected its {len(ids)}")

    def _why_not_next(self, sequence: int, ids: Sequence[int], positions: Sequence[int]) -> str:
        if not 0 <= sequence < len(self._sequences):
            return "a request that is none of the capture"
        done, whole = self._done[sequence], self._sequences[sequence]
        expected = whole[done : done + len(ids)]
        if list(ids) != expected or list(positions) != list(range(done, done + len(ids))):
            return (
                f"sequence {sequence}: found ids {list(ids)[:4]} at position {positions[0] if positions else None}, "
                f"expected {expected[:4]} at position {done}"
            )
        num_read = len(whole) - self._num_decoded
        if done + len(ids) > num_read and len(ids) != 1:
            return f"sequence {sequence}: {len(ids)} tokens in a forward pass, expected 1 from position {num_read} on"
        return ""


def gather(own: Tensor) -> Tensor:
    """Return the columns [rows, width] of all workers behind each other, in the order of their ranks."""
    from vllm.distributed import tensor_model_parallel_all_gather

    found: Tensor = tensor_model_parallel_all_gather(own.contiguous())
    return found


@dataclass(frozen=True)
class SharedLinearForm(LinearForm):
    """A product of whose weight [out, in] a worker has some rows, some columns, or all."""

    output_shard: Shard | None = None
    input_shard: Shard | None = None

    def rows(self, channels: Tensor) -> tuple[Tensor, Tensor | None]:
        """See `LinearForm`; every worker must call this with the same channels."""
        if self.output_shard is not None:
            bias = None if self.bias is None else _rows(self.bias[:, None], channels, self.output_shard)[:, 0]
            return _rows(self.weight, channels, self.output_shard), bias
        weight, bias = super().rows(channels)
        return weight if self.input_shard is None else self.input_shard.whole(gather(weight)), bias


@dataclass(frozen=True)
class SharedEmbeddingForm(EmbeddingForm):
    """Rows of an embedding of which every worker has some."""

    shard: Shard | None = None

    def rows(self, ids: Tensor) -> Tensor:
        """See `EmbeddingForm`; every worker must call this with the same ids."""
        return super().rows(ids) if self.shard is None else _rows(self.weight, ids, self.shard)


def embedding_form(module: torch.nn.Module) -> EmbeddingForm:
    """Return the form of vLLM's embedding."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    if getattr(module, "tp_size", 1) == 1:
        return EmbeddingForm(weight)
    return SharedEmbeddingForm(weight, shard=head_of(module).projections[0].output_shard)


def _rows(own: Tensor, rows: Tensor, shard: Shard) -> Tensor:
    """Return some rows of a matrix of which this worker has `own`, the rows of `shard`."""
    from vllm.distributed import get_tp_group, tensor_model_parallel_all_reduce

    group = get_tp_group()
    # Of several workers with the same rows only the first contributes.
    copies = max(1, group.world_size * shard.size // shard.width)
    chosen = rows.to(own.device) - shard.start
    is_own = (chosen >= 0) & (chosen < shard.size) & (group.rank_in_group % copies == 0)
    found = own.detach().new_zeros(len(rows), *own.shape[1:])
    found[is_own] = own.detach()[chosen[is_own]]
    return tensor_model_parallel_all_reduce(found)


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


class CaptureExtension(NoiseExtension):
    """Mixin for vLLM's worker; `self` is the worker."""

    def aqnpipe_compare_with_files(self: Any, folder: str) -> dict[str, Any]:
        """Return how many parameters were compared with the files in `folder`, and which differ."""
        engine = EngineModel(self.get_model())
        compared, stale = compare_with_files(engine.weights(), Path(folder), engine.weight_shares())
        return {"compared": compared, "stale": list(stale)}

    @reported
    def aqnpipe_load_for_capture(self: Any, folder: str) -> None:
        """Load the weights in `folder`, and compare every value of the model with them."""
        engine, source = EngineModel(self.get_model()), Path(folder)
        with torch.no_grad():
            engine.model.load_weights(stored_tensors(source))  # type: ignore[operator] # every vLLM model has it
        held = engine.weights()
        compared, stale = compare_with_files(held, source, engine.weight_shares(), every_value=True)
        if stale or compared != len(held):
            wrong = stale[0] if stale else f"{len(held) - compared} of {len(held)} parameters"
            raise ReceiptError(f"vLLM's {type(engine.model).__name__} did not load {wrong} of {source.name}")

    @reported
    def aqnpipe_begin_capture(
        self: Any,
        sequences: list[list[int]],
        num_decoded: int,
        lengths: list[int],
        replay: str | None,
        judges: bool,
    ) -> None:
        """Record the first `lengths` tokens of `sequences`, the last `num_decoded` of each in decode.

        `replay`: file of values to feed to every operator.
        """
        self._aqnpipe_scores: dict[tuple[int, int], Score] = {}

        def keep(logits: Tensor, tokens: list[Token]) -> None:
            self._aqnpipe_scores |= score(logits, tokens, sequences)

        edit = None if replay is None else replaying(load_file(replay))
        self._aqnpipe_recorder = Recorder(Sample(tuple(lengths)), edit=edit, judges=judges, gather=gather)
        self._aqnpipe_given = given = GivenTokens(sequences, num_decoded)
        requests_of(self.model_runner)
        engine = EngineModel(self.get_model())
        self._aqnpipe_taps = EngineTaps(engine, given, lambda: requests_of(self.model_runner), keep)
        self._aqnpipe_taps.of(self._aqnpipe_recorder).__enter__()

    @reported
    def aqnpipe_end_capture(self: Any, path: str) -> dict[str, Any]:
        """Return the facts of each operator, the scores of the tokens, and a digest of what was recorded.

        The first of tensor-parallel workers, all of which record the same, writes it to `path`.
        """
        self._aqnpipe_taps.stack.close()
        self._aqnpipe_given.check()
        # What was recorded was made in vLLM's passes, which run in inference mode.
        with torch.inference_mode():
            found = self._aqnpipe_recorder.finish()
        tensors = {name: tensor.clone().contiguous() for name, tensor in found.tensors.items()}
        digest = sha256()
        for name in sorted(tensors):
            digest.update(tensors[name].view(torch.uint8).numpy().tobytes())
        if not self.rank:
            save_file(tensors, path)
        kernel = type(EngineModel(self.get_model()).layers[0].attentions[0].impl).__name__
        scores = [[*place, *found_score] for place, found_score in self._aqnpipe_scores.items()]
        return {"operators": found.operators, "scores": scores, "attention": kernel, "sha256": digest.hexdigest()}
