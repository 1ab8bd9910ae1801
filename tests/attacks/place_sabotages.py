"""Sabotage of places: some of what computes is not noised, or is noised twice or at the wrong moment."""

from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from hold import (
    LINEAR,
    OPERATOR_CALL,
    PUT_ERROR,
    clean_modules,
    kernel,
    not_put,
    put_twice,
    replaced,
    skipped,
    together,
    took_effect,
    undone,
)
from sabotage import COMPARE, EVALUATE, TRAIN, Apply, Sabotage, of_group
from torch import Tensor
from torch.nn import functional

from aqnpipe.noise.injection.operators import GradientError

_AFTER_TRAINING = (("evaluate", "guided", 0, 1), *EVALUATE, *COMPARE)


def _only_measured() -> Apply:
    """Forwards in which one would measure are noised: the first over prompts and over single tokens, and every 16th."""
    return skipped(
        lambda call: (
            call.phase != "backward"
            and not call.state.is_first_of_kind
            and (call.state.forward_index + call.state.key.step) % 16 != 0
        )
    )


def _fast_path_clean() -> Apply:
    def make(original: Any) -> Any:
        def linear(self: Any, module: Any, input: Tensor) -> Tensor:
            if self._survey is None or self._throughout:
                return original(self, module, input)  # type: ignore[no-any-return]
            took_effect()
            self._linears.append(module)
            output = functional.linear(input, module.weight, module.bias)
            if len(self._linears) in self._survey.others_after and not self._in_copy:
                self._mode.activate()
            return output

        return linear

    return replaced((LINEAR, make))


def _attention_copy_clean() -> Apply:
    def make(original: Any) -> Any:
        def product(self: Any, *args: Any, **kwargs: Any) -> Any:
            took_effect()
            with torch._C.DisableTorchFunction():
                return torch.matmul(*args, **kwargs)

        return product

    return replaced(("aqnpipe.noise.injection.operator_watch.OperatorWatch._matmul", make))


def _matmul_calls(number: int) -> Apply:
    """In each layer the product of attention with this number (0: scores, 1: values) is skipped by the kernel."""
    count: dict[tuple[int, int | None, int], int] = {}

    def when(call: Any) -> bool:
        if call.operator != "matmul":
            return False
        place = (id(call.state), call.layer, call.state.forward_index)
        count[place] = count.get(place, -1) + 1
        return count[place] % 2 == number

    return skipped(when)


def _before_the_product() -> Apply:
    """The noise is put on the input of a linear module in place of its output."""

    def make(original: Any) -> Any:
        def call(self: Any, operator: str, function: Any, args: Any, kwargs: Any) -> Any:
            if operator != "linear" or torch.is_grad_enabled():
                return original(self, operator, function, args, kwargs)
            took_effect()
            inputs, *rest = args
            noised = inputs.detach().clone()
            place = self._state.place
            place.calls += 1
            from aqnpipe.noise.kernels.stream import NoiseStream

            source = NoiseStream(place.key, place.calls, 0)
            self._state.put_error(self._state.phase, operator, place.layer, place.error, source, noised, repeats=True)
            with torch._C.DisableTorchFunction():
                return functional.linear(noised, *rest)

        return call

    return replaced((OPERATOR_CALL, make))


def _on_the_bias() -> Apply:
    """The noise is put on the sum of product and bias."""

    def make(original: Any) -> Any:
        def call(self: Any, operator: str, function: Any, args: Any, kwargs: Any) -> Any:
            if operator != "linear" or len(args) < 3 or args[2] is None or torch.is_grad_enabled():
                return original(self, operator, function, args, kwargs)
            took_effect()
            inputs, weight, bias = args
            with torch._C.DisableTorchFunction():
                product = functional.linear(inputs, weight)
            # As if the product had the size of the sum: the noise of the sum minus the bias.
            noised = original(self, "linear", lambda *_: product + bias, (inputs, weight, None), {})
            return noised

        return call

    return replaced((OPERATOR_CALL, make))


def _on_a_copy(operators: tuple[str, ...]) -> Apply:
    """The model goes on with the clean product; a copy of it is noised and dropped."""

    def make(original: Any) -> Any:
        def call(self: Any, operator: str, function: Any, args: Any, kwargs: Any) -> Any:
            if operator not in operators or torch.is_grad_enabled():
                return original(self, operator, function, args, kwargs)
            took_effect()
            original(self, operator, function, args, kwargs)
            with torch._C.DisableTorchFunction():
                return function(*args, **kwargs)

        return call

    return replaced((OPERATOR_CALL, make))


def _rows(first: int) -> Any:
    def change(tensor: Tensor, scale: float, source: Any, original: Any) -> None:
        clean = tensor.clone()
        original(tensor, scale, source)
        tensor[first:] = clean[first:]

    return change


def _part(last: Any) -> Any:
    """Noise everywhere but where the index `last` of the last dimension is."""

    def change(tensor: Tensor, scale: float, source: Any, original: Any) -> None:
        clean = tensor.clone()
        original(tensor, scale, source)
        tensor[last] = clean[last]

    return change


def _backward_only(positions: tuple[int, ...]) -> Apply:
    """Only the gradients of operands at these positions get noise."""

    def backward(ctx: Any, *gradients: Tensor) -> Any:
        dense = [gradient.contiguous() for gradient in gradients]
        for position, gradient in enumerate(dense):
            if position in positions or len(dense) == 1:
                ctx.add_error_(position, gradient)
            else:
                took_effect()
        return (None, *dense)

    @contextmanager
    def apply(_: Any) -> Any:
        with mock.patch.object(GradientError, "backward", staticmethod(backward)):
            yield

    return apply


def _straight_gradient(name: str) -> Any:
    return lambda call: call.phase == "backward" and call.operator.startswith(name)


def _no_hooks_after(forwards: int) -> Apply:
    return not_put(lambda call: call.phase != "backward" and call.state.forward_index >= forwards)


def _operator_unknown(name: str) -> Apply:
    """The table of operators lacks a function."""

    def make(original: Any) -> Any:
        def functions(noise: Any) -> Any:
            took_effect()
            return {function: found for function, found in original(noise).items() if found != name}

        return functions

    return replaced(("aqnpipe.noise.injection.operator_watch.noised_functions", make))


def _norms_clean() -> Apply:
    def make(original: Any) -> Any:
        def after_norm(self: Any, module: Any, args: Any, output: Any) -> None:
            took_effect()

        return after_norm

    return replaced(("aqnpipe.noise.injection.operator_errors.OperatorErrors.after_norm", make))


def _experts_clean() -> Apply:
    """The experts compute where nothing intercepts torch's functions."""
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    experts = modeling_qwen3_moe.Qwen3MoeExperts

    def make(original: Any) -> Any:
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            took_effect()
            with torch._C.DisableTorchFunction():
                return original(self, *args, **kwargs)

        return forward

    return replaced((f"{experts.__module__}.{experts.__name__}.forward", make))


def _recomputed(act: str) -> Apply:
    """Layers that gradient checkpointing computes again get other noise, or none."""

    def make(original: Any) -> Any:
        def put_error(self: Any, *args: Any, **settings: Any) -> None:
            if not (self.recomputing and settings.get("repeats")):
                original(self, *args, **settings)
                return
            took_effect()
            if act == "other":
                *rest, source, tensor = args
                original(self, *rest, source._replace(key=source.key ^ 1), tensor, **settings)

        return put_error

    return replaced((PUT_ERROR, make))


def _without_backward(model: Any, spec: Any, phase: Any, *args: Any, **settings: Any) -> Any:
    from aqnpipe.noise.injection.phase import phase_noise

    if phase == "reference":
        took_effect()
        spec = spec.model_copy(update={"operator_noise": None})
    return phase_noise(model, spec, phase, *args, **settings)


def _actor_as_reference(model: Any, spec: Any, phase: Any, *args: Any, **settings: Any) -> Any:
    from aqnpipe.noise.injection.phase import phase_noise

    return phase_noise(model, spec, "reference" if phase == "actor_forward" else phase, *args, **settings)


def training(name: str, what: str, apply: Any, **settings: Any) -> Sabotage:
    """A sabotage of a training run."""
    return Sabotage(name, what, apply, TRAIN, _AFTER_TRAINING, **settings)


def evaluating(name: str, what: str, apply: Any, **settings: Any) -> Sabotage:
    """A sabotage of an evaluation."""
    return Sabotage(name, what, apply, EVALUATE, COMPARE, **settings)


def _gradient(call: Any) -> bool:
    return bool(call.phase == "backward")


def _one_token(call: Any) -> bool:
    return bool(call.phase != "backward" and call.state.reads_one_token)


def _prompt(call: Any) -> bool:
    return bool(call.phase != "backward" and not call.state.reads_one_token)


_NOISE = r"(noise|random numbers|draw|measured scale|noised value|recomputed|escaped|clean|noised)"

SABOTAGES = of_group(
    "place",
    _NOISE,
    (
        training(
            "only every 16th forward noised",
            "and the first of each kind; others stay clean",
            _only_measured(),
        ),
        evaluating(
            "only every 16th forward noised in the evaluation",
            "and the first of each kind; others stay clean",
            _only_measured(),
        ),
        training("fast path clean", "linear modules outside surveys compute in plain torch", _fast_path_clean()),
        training("copy of attention clean", "the copied code calls torch's own product", _attention_copy_clean()),
        training(
            "only the first forward noised",
            "later forwards of a phase are counted and stay clean",
            skipped(lambda call: not _gradient(call) and call.state.forward_index > 0),
            cause=rf"rollout.*{_NOISE}|{_NOISE}.*rollout",
        ),
        evaluating(
            "hooks lost after three forwards", "later tokens are neither noised nor counted", _no_hooks_after(3)
        ),
        evaluating("prompts alone noised", "single tokens stay clean", skipped(_one_token)),
        evaluating("prompts clean", "only single tokens are noised", skipped(_prompt)),
        training(
            "every second forward clean",
            "the kernel does nothing in odd forwards",
            skipped(lambda c: c.state.forward_index % 2 == 1),
        ),
        training("every third call clean", "the kernel drops calls", skipped(lambda call: call.number % 3 == 0)),
        evaluating(
            "one projection left out",
            "q_proj of layer 2 computes past the noise",
            clean_modules(lambda n, s: "2.self_attn.q_proj" in n),
        ),
        evaluating(
            "one projection left out for single tokens",
            "down_proj of layer 4, from the first generated token on",
            clean_modules(lambda name, state: "4.mlp.down_proj" in name and state.reads_one_token),
        ),
        evaluating(
            "one projection left out late",
            "o_proj of layer 1, from the sixth forward on",
            clean_modules(lambda name, state: "1.self_attn.o_proj" in name and state.forward_index > 5),
        ),
        training(
            "only attention's projections noised",
            "the MLP computes past the noise",
            clean_modules(lambda n, s: ".mlp." in n),
        ),
        training(
            "q, k and v alone noised",
            "all other linear modules compute past the noise",
            clean_modules(lambda name, state: not name.endswith(("q_proj", "k_proj", "v_proj"))),
        ),
        evaluating(
            "output projection clean", "lm_head computes past the noise", clean_modules(lambda n, s: n == "lm_head")
        ),
        evaluating(
            "output projection clean in the kernel",
            "lm_head is counted and not noised",
            skipped(lambda call: call.layer is None),
        ),
        evaluating(
            "second half of the layers clean", "the kernel does nothing there", skipped(lambda c: (c.layer or 0) > 2)
        ),
        evaluating(
            "products on a copy", "the model continues with the clean product", _on_a_copy(("linear", "matmul"))
        ),
        evaluating("attention on a copy", "both products of attention continue clean", _on_a_copy(("matmul",))),
        evaluating("noise before the product", "the input is noised in place of the output", _before_the_product()),
        evaluating("noise on the bias too", "the sum of product and bias is noised", _on_the_bias()),
        evaluating(
            "twice on one operator",
            "attention's products are noised twice",
            put_twice(lambda c: c.operator == "matmul"),
        ),
        evaluating(
            "twice on one, never on another",
            "layer 1 is noised twice, layer 2 stays clean",
            together(put_twice(lambda call: call.layer == 1), skipped(lambda call: call.layer == 2)),
        ),
        training(
            "taken back after the measurement",
            "values are restored before they are used",
            undone(lambda call: not _gradient(call)),
        ),
        evaluating(
            "taken back in one layer", "layer 3 is restored before it is used", undone(lambda call: call.layer == 3)
        ),
        evaluating("first rows alone noised", "rows from the fifth on stay clean", kernel(_rows(4))),
        evaluating("last row clean", "the last row of each call stays clean", kernel(_rows(-1))),
        training("last column clean", "the last channel stays clean", kernel(_part((..., -1)))),
        evaluating(
            "first half of the channels clean",
            "a view of half the width is noised",
            kernel(lambda t, s, r, o: o(t[..., t.shape[-1] // 2 :], s, r)),
        ),
        training(
            "last token of prompts clean",
            "the place that the first token is drawn from",
            kernel(_part((slice(None), -1)), _prompt),
        ),
        evaluating(
            "large tensors clean",
            "calls on more than 20,000 values do nothing",
            skipped(lambda c: c.tensor.numel() > 20_000),
        ),
        evaluating(
            "small tensors clean",
            "calls on fewer than 600 values do nothing",
            skipped(lambda c: c.tensor.numel() < 600),
        ),
        evaluating("attention scores clean", "the product of queries and keys", _matmul_calls(0)),
        evaluating("attention values clean", "the product of weights and values", _matmul_calls(1)),
        training("matmul unknown", "torch.matmul is not in the table of operators", _operator_unknown("matmul")),
        training(
            "gradients clean in the kernel",
            "they are counted and measured, and not noised",
            skipped(_gradient),
            cause=rf"backward.*{_NOISE}",
        ),
        training(
            "gradients taken back",
            "noised gradients are restored before they are used",
            undone(_gradient),
            cause=rf"backward.*{_NOISE}",
        ),
        training(
            "noise on gradients of inputs alone",
            "those of weights stay clean",
            _backward_only((0,)),
            cause=rf"backward.*{_NOISE}",
        ),
        training(
            "noise on gradients of weights alone",
            "those of inputs stay clean",
            _backward_only((1,)),
            cause=rf"backward.*{_NOISE}",
        ),
        training(
            "gradients of one layer clean",
            "layer 2 in the backward pass",
            not_put(lambda call: _gradient(call) and call.layer == 2),
            cause=rf"backward.*{_NOISE}",
        ),
        training(
            "gradients of attention clean",
            "both its products",
            skipped(_straight_gradient("matmul")),
            cause=rf"backward.*{_NOISE}",
        ),
        training(
            "gradients noised twice", "the hook is registered twice", put_twice(_gradient), cause=rf"backward.*{_NOISE}"
        ),
        training(
            "reference clean",
            "the reference computes without noise",
            replaced(("aqnpipe.training.trainer.phase_noise", lambda original: _without_backward)),
            cause=rf"reference.*{_NOISE}",
        ),
        training(
            "reference clean in the kernel",
            "its calls are counted and not noised",
            skipped(lambda call: call.phase == "reference"),
            cause=rf"reference.*{_NOISE}",
        ),
        training(
            "actor in the phase of the reference",
            "the phase is wrong, the noise of the right size",
            replaced(
                (
                    "aqnpipe.training.trainer.phase_noise",
                    lambda original: lambda *args, **kw: (took_effect(), _actor_as_reference(*args, **kw))[1],
                )
            ),
            cause=r"actor_forward|backward|phase|reference: the key of its noise is used twice",
        ),
        training(
            "second step clean",
            "the kernel does nothing after the first step",
            skipped(lambda call: call.state.key.step > 0),
        ),
        training(
            "second micro-batch clean",
            "only the first micro-batch of a step is noised",
            skipped(lambda call: call.state.key.micro_step > 0),
            variant="checkpointed",
        ),
        training(
            "recomputed layers clean",
            "gradient checkpointing computes them without noise",
            _recomputed("none"),
            variant="checkpointed",
        ),
        training("recomputed layers with other noise", "they draw anew", _recomputed("other"), variant="checkpointed"),
        training(
            "softmax unknown",
            "softmax is not in the table of operators",
            _operator_unknown("softmax"),
            variant="checkpointed",
        ),
        training(
            "activation unknown",
            "silu is not in the table of operators",
            _operator_unknown("silu"),
            variant="checkpointed",
        ),
        training("norms clean", "RMSNorm gets no noise", _norms_clean(), variant="checkpointed"),
        evaluating(
            "softmax clean in the kernel",
            "it is counted and not noised",
            skipped(lambda call: call.operator == "softmax"),
            variant="checkpointed",
        ),
        evaluating(
            "experts clean", "the experts of a mixture compute past the noise", _experts_clean(), variant="mixture"
        ),
        evaluating(
            "second batch clean",
            "only the first batch of a pass is noised",
            skipped(lambda call: call.state.key.step > 0),
            variant="checkpointed",
        ),
        evaluating(
            "second noise seed clean", "only the first is noised", skipped(lambda call: call.state.key.seed > 0)
        ),
        training(
            "adapters clean",
            "the products of adapters compute past the noise",
            clean_modules(lambda n, s: ".lora_" in n),
            variant="adapters",
        ),
        training(
            "base under adapters clean",
            "the base layers of adapted modules compute past the noise",
            clean_modules(lambda name, state: ".base_layer" in name),
            variant="adapters",
        ),
    ),
)
