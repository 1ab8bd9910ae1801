"""Sabotage of places: some of what computes is not noised, or is noised twice or at the wrong moment."""

import copy
from contextlib import contextmanager
from typing import Any
from unittest import mock

from hold import (
    ENTER_MODEL,
    INSTALL,
    acting,
    clean_modules,
    kernel,
    not_put,
    put_twice,
    replaced,
    skipped,
    state,
    together,
    took_effect,
    undone,
    watching,
)
from sabotage import COMPARE, EVALUATE, TRAIN, Apply, Sabotage, of_group
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from aqnpipe.machine.operators import Registration
from aqnpipe.noise.kernels.gaussian import NoiseStream, add_relative_gaussian_

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


def _only_while_observed(when: Any = lambda call: True) -> Apply:
    """The kernel does nothing, `when(call)` true, unless a dispatch mode is active: an audit observes by one."""
    return skipped(lambda call: when(call) and not is_in_torch_dispatch_mode())


def _attention_exactly() -> Apply:
    """The products of attention compute as if they were no part of the program."""

    def make(original: Any) -> Any:
        def product(first: Tensor, second: Tensor, **settings: Any) -> Any:
            if first.dim() != 4:
                return original(first, second, **settings)
            took_effect()
            with state().machine.exactly():
                return original(first, second, **settings)

        return product

    return watching(("torch.matmul", make))


def _eager_products(number: int) -> Apply:
    """In each layer the product of attention with this number (0: scores, 1: values) is skipped by the kernel."""
    count: dict[tuple[int, int, int], int] = {}

    def when(call: Any) -> bool:
        if call.operator != "bmm" or call.phase == "backward":
            return False
        place = (id(call.state), call.part, call.state.forward_index)
        count[place] = count.get(place, -1) + 1
        return count[place] % 2 == number

    return skipped(when)


def _before_the_product() -> Apply:
    """The noise is put on the first factor of a product in place of the result."""

    def act(call: Any, put: Any, leave: Any) -> Tensor:
        result: Tensor = put()
        if call.operator == "mm" and call.phase != "backward":
            took_effect()
            inputs, weight = call.factors
            noised, here = inputs.detach().clone(), call.state.machine.places.here()
            with call.state.machine.exactly():
                add_relative_gaussian_(noised, 0.1, NoiseStream(here.key, here.calls, 0))
                result.detach().copy_(noised @ weight)
        return result

    return acting(act)


def _on_the_bias() -> Apply:
    """The noise is put on the sum of product and bias."""

    def make(original: Any) -> Any:
        def registration(*args: Any, **settings: Any) -> Any:
            took_effect()
            return original(*args, **{**settings, "whole_sums": True})

        return registration

    return replaced(("aqnpipe.machine.machine.Registration", make))


def _on_a_copy(*operators: str) -> Apply:
    """The model goes on with the clean result; a copy of it is noised and dropped."""

    def act(call: Any, put: Any, leave: Any) -> Tensor:
        clean = call.tensor.detach().clone()
        found: Tensor = put()
        if call.phase == "backward" or not call.operator.startswith(operators):
            return found
        took_effect()
        return clean

    return acting(act)


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


def _gradient_of(of: str) -> Any:
    """Whether a result is the gradient of a linear module's input, or of its weight."""

    def when(call: Any) -> bool:
        if call.phase != "backward" or call.operator != "mm":
            return False
        weights = {parameter.untyped_storage().data_ptr() for parameter in call.state.model.parameters()}
        has_weight = any(factor.untyped_storage().data_ptr() in weights for factor in call.factors)
        return has_weight == (of == "input")

    return when


def _no_hooks_after(forwards: int) -> Apply:
    return not_put(lambda call: call.phase != "backward" and call.state.forward_index >= forwards)


def _operator_unknown(*names: str) -> Apply:
    """The tables of operators lack those whose names begin so: their kernels are not replaced."""

    def make(original: Any) -> Any:
        took_effect()
        return {name: build for name, build in original.items() if not name.startswith(names)}

    tables = ("_TABLE", "_ELEMENTWISE_TABLE")
    return replaced(*((f"aqnpipe.machine.operators.{table}", make) for table in tables))


def _closed_early(passes: int) -> Apply:
    """The kernels are restored after some passes of each phase."""

    def make(original: Any) -> Any:
        def enter_model(self: Any, *args: Any) -> None:
            original(self, *args)
            if self.forward_index == passes and self._machine._registration is not None:
                took_effect()
                self._machine._registration.close()

        return enter_model

    return replaced((ENTER_MODEL, make))


@contextmanager
def _left_behind(_: Any) -> Any:
    """The kernels of a phase stay when it has ended, and the next phase replaces them again."""
    whole, open_ones = Registration.close, list[Registration]()

    def close(self: Registration) -> None:
        took_effect()
        open_ones.append(self)

    with mock.patch.object(Registration, "close", close):
        try:
            yield
        finally:
            for registration in reversed(open_ones):
                whole(registration)


def _switched_off(when: Any) -> Apply:
    """The machine computes without errors from its start on, `when(key)` true."""

    def make(original: Any) -> Any:
        def start(self: Any, *args: Any) -> None:
            original(self, *args)
            if when(self.request.key):
                took_effect()
                self.switch_off("switched off")

        return start

    return replaced(("aqnpipe.machine.machine.Machine.start", make))


def _norms_clean() -> Apply:
    def make(original: Any) -> Any:
        def after_norm(self: Any, module: Any, args: Any, output: Any) -> Any:
            took_effect()
            return output

        return after_norm

    return replaced(("aqnpipe.machine.norms.NormKernels._after", make))


def _experts_clean() -> Apply:
    """The experts compute as if they were no part of the program."""
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    experts = modeling_qwen3_moe.Qwen3MoeExperts

    def make(original: Any) -> Any:
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            took_effect()
            with state().machine.exactly():
                return original(self, *args, **kwargs)

        return forward

    return watching((f"{experts.__module__}.{experts.__name__}.forward", make))


def _computed_again(find: Any, from_pass: int = 0) -> Apply:
    """A hook of the program's own replaces the output of a module with a second, clean computation."""

    def make(original: Any) -> Any:
        def install(self: Any, stack: Any) -> None:
            original(self, stack)

            def again(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
                if self.forward_index < from_pass:
                    return output
                took_effect()
                with self._machine.exactly():
                    return module.forward(*args, **kwargs)

            stack.callback(find(self.model).register_forward_hook(again, with_kwargs=True).remove)

        return install

    return replaced((INSTALL, make))


def _scaled_output(original: Any) -> Any:
    def install(self: Any, stack: Any) -> None:
        original(self, stack)
        took_effect()
        hook = self.model.model.layers[2].register_forward_hook(lambda module, args, output: 0.999 * output)
        stack.callback(hook.remove)

    return install


def _copy_beside() -> Apply:
    """A clean copy of the model reads the same tokens, and its logits are used."""

    def make(original: Any) -> Any:
        def install(self: Any, stack: Any) -> None:
            beside = copy.deepcopy(self.model)
            original(self, stack)
            found: list[Tensor] = []

            def before(module: Any, args: Any, kwargs: Any) -> None:
                with self._machine.exactly():
                    found[:] = [beside(*args, **copy.deepcopy(kwargs)).logits]

            def after(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
                took_effect()
                output.logits = found[0]
                return output

            stack.callback(self.model.register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(self.model.register_forward_hook(after, with_kwargs=True).remove)

        return install

    return replaced((INSTALL, make))


def _other_numbers(tensor: Tensor, scale: float, source: Any, original: Any) -> None:
    original(tensor, scale, source._replace(key=source.key ^ 1))


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


def _gradient_of_attention(call: Any) -> bool:
    return _gradient(call) and call.operator == "bmm"


def _one_token(call: Any) -> bool:
    return bool(call.phase != "backward" and call.state.reads_one_token)


def _prompt(call: Any) -> bool:
    return bool(call.phase != "backward" and not call.state.reads_one_token)


_NOISE = r"(noise|random numbers|draw|measured scale|noised value|recomputed|had no error|clean|noised)"

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
        training("only observed calls noised", "the kernel looks for a dispatch mode", _only_while_observed()),
        evaluating(
            "only observed calls noised in the evaluation",
            "the kernel looks for a dispatch mode",
            _only_while_observed(),
        ),
        training(
            "attention noised only where it is observed",
            "the kernel looks for a dispatch mode",
            _only_while_observed(lambda call: call.operator == "bmm" and not _gradient(call)),
        ),
        training(
            "gradients noised only where they are observed",
            "the kernel looks for a dispatch mode",
            _only_while_observed(_gradient),
        ),
        training(
            "attention clean", "its products compute as if they were no part of the program", _attention_exactly()
        ),
        training(
            "only the first forward noised",
            "later forwards of a phase are counted and stay clean",
            skipped(lambda call: not _gradient(call) and call.state.forward_index > 0),
            cause=rf"rollout.*{_NOISE}|{_NOISE}.*rollout",
        ),
        evaluating(
            "hooks lost after three forwards", "later tokens are neither noised nor counted", _no_hooks_after(3)
        ),
        evaluating("kernels restored early", "the registration is closed after three forwards", _closed_early(3)),
        training("kernels left behind", "they stay after each phase, and the next one adds its own", _left_behind),
        training(
            "machine switched off from step 2", "its kernels pass results on", _switched_off(lambda key: key.step > 0)
        ),
        evaluating(
            "machine switched off for a noise seed",
            "the kernels of the second seed pass results on",
            _switched_off(lambda key: key.seed > 0),
        ),
        evaluating(
            "a layer clean late",
            "layer 3, from the ninth forward on",
            skipped(lambda call: call.layer == 3 and call.state.forward_index > 7),
        ),
        evaluating(
            "an MLP computed again",
            "a hook replaces the output of layer 2's with a clean one",
            _computed_again(lambda model: model.model.layers[2].mlp),
        ),
        evaluating(
            "an MLP computed again late",
            "a hook does so from the sixth forward on",
            _computed_again(lambda model: model.model.layers[2].mlp, 5),
        ),
        evaluating(
            "a layer's output scaled",
            "a hook makes that of layer 2 smaller by 0.1 %",
            replaced((INSTALL, _scaled_output)),
            cause=r"output of layer 2: .* are not what it computed",
        ),
        evaluating(
            "output projection computed again",
            "a hook replaces the logits with clean ones",
            _computed_again(lambda model: model.lm_head),
        ),
        evaluating("a clean copy beside the model", "its logits are used", _copy_beside()),
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
        evaluating(
            "one projection left out after two forwards",
            "o_proj of layer 1, from the third forward on",
            clean_modules(lambda name, state: "1.self_attn.o_proj" in name and state.forward_index > 1),
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
            skipped(lambda call: call.part == call.state.num_layers),
        ),
        evaluating(
            "second half of the layers clean", "the kernel does nothing there", skipped(lambda c: (c.layer or 0) > 2)
        ),
        evaluating(
            "products on a copy",
            "the model continues with the clean product",
            _on_a_copy("mm", "bmm"),
        ),
        evaluating("attention on a copy", "the model goes on with a clean one", _on_a_copy("bmm")),
        evaluating("noise before the product", "the input is noised in place of the output", _before_the_product()),
        evaluating("noise on the bias too", "the sum of product and bias is noised", _on_the_bias()),
        evaluating(
            "twice on one operator",
            "attention's products are noised twice",
            put_twice(lambda c: c.operator == "bmm"),
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
        evaluating(
            "attention scores clean", "the product of queries and keys", _eager_products(0), variant="checkpointed"
        ),
        evaluating(
            "attention values clean", "the product of weights and values", _eager_products(1), variant="checkpointed"
        ),
        training("mm unknown", "the kernel of products is not replaced", _operator_unknown("mm")),
        evaluating("bmm unknown", "the kernel of attention's products is not replaced", _operator_unknown("bmm")),
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
            skipped(_gradient_of("weight")),
            cause=rf"backward.*{_NOISE}",
        ),
        training(
            "noise on gradients of weights alone",
            "those of inputs stay clean",
            skipped(_gradient_of("input")),
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
            "those of both its products",
            skipped(_gradient_of_attention),
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
            skipped(lambda call: call.is_again),
            variant="checkpointed",
        ),
        training(
            "recomputed layers with other noise",
            "they draw anew",
            kernel(_other_numbers, lambda call: call.is_again),
            variant="checkpointed",
        ),
        training(
            "softmax unknown",
            "its kernel is not replaced",
            _operator_unknown("_softmax"),
            variant="checkpointed",
        ),
        training(
            "activation unknown",
            "the kernel of silu is not replaced",
            _operator_unknown("silu"),
            variant="checkpointed",
        ),
        training("norms clean", "RMSNorm gets no noise", _norms_clean(), variant="checkpointed"),
        training(
            "norms clean in the kernel",
            "they are counted and not noised",
            skipped(lambda call: call.operator == "norm"),
            variant="checkpointed",
        ),
        evaluating(
            "softmax clean in the kernel",
            "it is counted and not noised",
            skipped(lambda call: call.operator == "_softmax"),
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
