"""Sabotage of AQN: the noise of the rollout policy's norm weights or hidden states, and its restoration."""

import itertools
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from hold import replaced, state, took_effect, watching
from sabotage import COMPARE, EVALUATE, TRAIN, Apply, Sabotage, of_group
from torch import Tensor

from aqnpipe.models.layout import rms_norms, weight_of
from aqnpipe.noise import aqn
from aqnpipe.noise.kernels.gaussian import NoiseStream, standard_normal

_AFTER_TRAINING = (("evaluate", "guided", 0, 1), *EVALUATE, *COMPARE)
_KERNEL = "aqnpipe.noise.aqn.add_absolute_gaussian_"
_NORMS = "aqnpipe.noise.aqn._noised_norm_weights"
_STREAM = "aqnpipe.noise.aqn.NoiseStream"
_HIDDEN = "aqnpipe.noise.injection.phase._RunningPhase.noised_hidden"
_ROLL_OUT = "aqnpipe.generation.rollout_engines.TransformersRolloutEngine.roll_out"


def _put(change: Callable[..., None]) -> Apply:
    """Norm weights get `change(weights, sigma, stream, number of the call, original)`."""

    def make(original: Any) -> Any:
        numbers = itertools.count()

        def add(tensor: Tensor, sigma: float, source: Any) -> Tensor:
            took_effect()
            change(tensor, sigma, source, next(numbers), original)
            return tensor

        return add

    return replaced((_KERNEL, make))


def _drawn(law: Callable[[Tensor], Tensor]) -> Apply:
    """Norm weights get sigma times `law(numbers that are due)`."""
    return _put(lambda t, sigma, source, n, o: t.add_(sigma * law(standard_normal(t.numel(), source))))


def _stream(change: Callable[[int, int], tuple[int, int]]) -> Apply:
    def make(original: Any) -> Any:
        def stream(key: int, call: int = 0, stream: int = 0) -> Any:
            took_effect()
            return original(*change(key, call), stream)

        return stream

    return replaced((_STREAM, make))


def _derived(change: Callable[[int, str, int], tuple[int, str, int]]) -> Apply:
    def make(original: Any) -> Any:
        def derive(seed: int, stream: str, step: int) -> int:
            took_effect()
            return int(original(*change(seed, stream, step)))

        return derive

    return replaced(("aqnpipe.noise.aqn.derive_seed", make))


def _relative(t: Tensor, sigma: float, source: Any, number: int, original: Any) -> None:
    t.mul_(1 + sigma * standard_normal(t.numel(), source))


def _every_second_norm(t: Tensor, sigma: float, source: Any, number: int, original: Any) -> None:
    if number % 2:
        original(t, sigma, source)


def _not_the_last_norm(t: Tensor, sigma: float, source: Any, number: int, original: Any) -> None:
    if number % 13 != 12:
        original(t, sigma, source)


def _every_second_channel(t: Tensor, sigma: float, source: Any, number: int, original: Any) -> None:
    noise = standard_normal(t.numel(), source) * 2**0.5
    noise[::2] = 0
    t.add_(sigma * noise)


def _one_number(t: Tensor, sigma: float, source: Any, number: int, original: Any) -> None:
    t.add_(sigma * standard_normal(t.numel(), source)[0])


def _on_a_copy(t: Tensor, sigma: float, source: Any, number: int, original: Any) -> None:
    original(t.clone(), sigma, source)


def _norms(act: Callable[[Any, Any], Any]) -> Apply:
    """`act(model, noised)` is a context in which the rollout runs; `noised` is the original context."""

    def make(original: Any) -> Any:
        @contextmanager
        def context(model: Any, *args: Any) -> Any:
            took_effect()
            with act(model, lambda: original(model, *args)):
                yield

        return context

    return replaced((_NORMS, make))


def _changed(model: Any, change: Callable[[str, Tensor], Tensor]) -> Any:
    """A context in which the norm weights of `model` are changed."""

    @contextmanager
    def context() -> Any:
        before = {name: weight_of(norm).detach().clone() for name, norm in rms_norms(model).items()}
        with torch.no_grad():
            for name, norm in rms_norms(model).items():
                weight_of(norm).copy_(change(name, before[name]))
        try:
            yield
        finally:
            with torch.no_grad():
                for name, norm in rms_norms(model).items():
                    weight_of(norm).copy_(before[name])

    return context()


@contextmanager
def _clean_during_the_rollout(model: Any, noised: Any) -> Any:
    """A fresh copy of the clean weights is what rolls out."""
    clean = {name: weight_of(norm).detach().clone() for name, norm in rms_norms(model).items()}
    with noised(), _changed(model, lambda name, weight: clean[name]):
        yield


@contextmanager
def _clean_after_the_prompt(model: Any, noised: Any) -> Any:
    """A hook puts the clean weights back after the first forward."""
    clean = {name: weight_of(norm).detach().clone() for name, norm in rms_norms(model).items()}

    def after(*_: Any) -> None:
        with torch.no_grad():
            for name, norm in rms_norms(model).items():
                weight_of(norm).copy_(clean[name])

    with noised():
        handle = model.register_forward_hook(after)
        try:
            yield
        finally:
            handle.remove()


@contextmanager
def _redrawn_in_each_forward(model: Any, noised: Any) -> Any:
    clean = {name: weight_of(norm).detach().clone() for name, norm in rms_norms(model).items()}
    numbers = itertools.count()

    def before(*_: Any) -> None:
        number = next(numbers)
        if number:
            with torch.no_grad():
                for index, (name, norm) in enumerate(rms_norms(model).items()):
                    own = sigmas[name] * standard_normal(clean[name].numel(), NoiseStream(number, index))
                    weight_of(norm).copy_(clean[name] + own)

    with noised():
        sigmas = {n: (weight_of(norm).detach() - clean[n]).std() for n, norm in rms_norms(model).items()}
        handle = model.register_forward_pre_hook(before)
        try:
            yield
        finally:
            handle.remove()


@contextmanager
def _added_twice(model: Any, noised: Any) -> Any:
    clean = {name: weight_of(norm).detach().clone() for name, norm in rms_norms(model).items()}
    with noised(), _changed(model, lambda name, weight: 2 * weight - clean[name]):
        yield


@contextmanager
def _rounded(model: Any, noised: Any) -> Any:
    with noised(), _changed(model, lambda name, weight: weight.bfloat16().float()):
        yield


@contextmanager
def _restored_rounded(model: Any, noised: Any) -> Any:
    with noised():
        yield
    with torch.no_grad():
        for norm in rms_norms(model).values():
            weight_of(norm).copy_(weight_of(norm).bfloat16())


@contextmanager
def _subtracted(model: Any, noised: Any) -> Any:
    """The noise is kept in float16 and subtracted after the rollout in place of restoring: rounding errors remain."""
    clean = {name: weight_of(norm).detach().clone() for name, norm in rms_norms(model).items()}
    with noised():
        whole = {name: weight_of(norm).detach().clone() for name, norm in rms_norms(model).items()}
        yield
    with torch.no_grad():
        for name, norm in rms_norms(model).items():
            weight_of(norm).copy_(whole[name] - (whole[name] - clean[name]).half())


def _sigma(change: Callable[[Any, int, Any], float]) -> Apply:
    def make(original: Any) -> Any:
        def sigma(self: Any, step: int) -> float:
            took_effect()
            return change(self, step, original)

        return sigma

    return replaced(("aqnpipe.training.noise_plan.NoisePlan.sigma", make))


def _factors(change: Callable[[dict[str, float]], dict[str, float]]) -> Apply:
    def make(original: Any) -> Any:
        def factors(*args: Any) -> dict[str, float]:
            took_effect()
            return change(original(*args))

        return factors

    return replaced(("aqnpipe.training.noise_plan.target_factors", make))


def _reversed(factors: dict[str, float]) -> dict[str, float]:
    return dict(zip(factors, reversed(factors.values()), strict=True))


def _in_the_actor_too() -> Apply:
    """The actor has noised norms. The backward pass reads them too, so they are restored only after it."""

    def make(original: Any) -> Any:
        @contextmanager
        def running(self: Any, model: Any, phase: str, *args: Any, **settings: Any) -> Any:
            with original(self, model, phase, *args, **settings) as called:
                if phase != "actor_forward":
                    yield called
                    return
                took_effect()
                with _changed(self.policy, lambda name, weight: weight + 0.02 * torch.randn_like(weight)):
                    yield called

        return running

    return replaced(("aqnpipe.training.trainer.NoisyGRPOTrainer._phase", make))


def _hidden(act: Callable[..., Tensor]) -> Apply:
    """Hidden states become `act(phase, layer, sigma, hidden, original)`."""

    def make(original: Any) -> Any:
        def noised(self: Any, layer: int, sigma: float, hidden: Tensor) -> Tensor:
            took_effect()
            return act(self, layer, sigma, hidden, lambda s=sigma, h=hidden: original(self, layer, s, h))

        return noised

    return watching((_HIDDEN, make))


def _hidden_one_layer_clean(self: Any, layer: int, sigma: float, hidden: Tensor, noised: Any) -> Tensor:
    whole = noised()
    return hidden if layer == 2 else whole


def _hidden_prompt_alone(self: Any, layer: int, sigma: float, hidden: Tensor, noised: Any) -> Tensor:
    whole = noised()
    return hidden if state().reads_one_token else whole


def _hidden_absolute(self: Any, layer: int, sigma: float, hidden: Tensor, noised: Any) -> Tensor:
    relative = noised() / hidden - 1
    return hidden + relative.nan_to_num(0) * hidden.square().mean().sqrt()


def _hidden_same_for_each_token(self: Any, layer: int, sigma: float, hidden: Tensor, noised: Any) -> Tensor:
    with mock.patch.object(self._module_errors, "passed", return_value=0):
        return noised()


def _hidden_on_a_copy(self: Any, layer: int, sigma: float, hidden: Tensor, noised: Any) -> Tensor:
    noised()
    return hidden


def _norms_in_place_of_hidden_states(original: Any) -> Any:
    @contextmanager
    def context(model: Any, recorder: Any, factors: Any, sigma: float, step: int) -> Any:
        took_effect()
        with (
            original(model, recorder, factors, sigma, step),
            _changed(model, lambda name, weight: weight + sigma * torch.randn_like(weight)),
        ):
            yield {}

    return context


def _hidden_states_in_place_of_norms() -> Apply:
    """The rollout adds relative noise to the hidden states, and none to the norms."""

    @contextmanager
    def act(model: Any, noised: Any) -> Any:
        clean = {name: weight_of(norm).detach().clone() for name, norm in rms_norms(model).items()}
        handles = [
            layer.register_forward_hook(lambda m, a, output: output * (1 + 0.05 * torch.randn_like(output)))
            for layer in model.model.layers
        ]
        try:
            with noised(), _changed(model, lambda name, weight: clean[name]):
                yield
        finally:
            for handle in handles:
                handle.remove()

    return _norms(act)


@contextmanager
def _kept_between_steps(_: Any) -> Any:
    """The clean weights are remembered once, so the second step restores those of the first."""
    first: dict[str, Tensor] = {}
    whole = aqn._noised_norm_weights

    @contextmanager
    def context(model: Any, *args: Any) -> Any:
        took_effect()
        if not first:
            first.update({name: weight_of(norm).detach().clone() for name, norm in rms_norms(model).items()})
        with whole(model, *args):
            yield
        with torch.no_grad():
            for name, norm in rms_norms(model).items():
                weight_of(norm).copy_(first[name])

    with mock.patch.object(aqn, "_noised_norm_weights", context):
        yield


def _first_half_of_the_rows() -> Apply:
    """The rollout is split in two, and the second half runs after the noise has been removed."""
    import dataclasses

    def make(original: Any) -> Any:
        def roll_out(self: Any, policy: Any, recorder: Any, rollout: Any) -> Any:
            took_effect()
            half = len(rollout.prompts) // 2
            whole = original(self, policy, recorder, rollout)
            sampling = dataclasses.replace(rollout.sampling, first_row=half, num_rows=len(rollout.prompts))
            from aqnpipe.generation.transformers_backend import TransformersBackend

            rest = TransformersBackend(policy, self._tokenizer).generate(rollout.prompts[half:], sampling)
            return [*whole[:half], *rest]

        return roll_out

    return replaced((_ROLL_OUT, make))


def training(name: str, what: str, apply: Any, **settings: Any) -> Sabotage:
    """A sabotage of a training run with AQN on norm weights."""
    return Sabotage(name, what, apply, TRAIN, _AFTER_TRAINING, **settings)


def hiding(name: str, what: str, apply: Any, **settings: Any) -> Sabotage:
    """A sabotage of a training run with AQN on hidden states."""
    return training(name, what, apply, variant="hidden", **settings)


SABOTAGES = of_group(
    "AQN",
    r"(AQN|sigma|norm)",
    (
        training("AQN drawn once", "each step adds the same numbers", _derived(lambda s, n, step: (s, n, 0))),
        training(
            "AQN's key without the seed", "every run adds the numbers of seed 7", _derived(lambda s, n, t: (7, n, t))
        ),
        training(
            "AQN's stream renamed", "the numbers of another purpose", _derived(lambda s, n, step: (s, "rollout", step))
        ),
        training("AQN's key without the norm", "all norms get the same numbers", _stream(lambda key, call: (key, 0))),
        training(
            "AQN of the next norm", "each norm has the numbers of the next", _stream(lambda key, call: (key, call + 1))
        ),
        training("AQN redrawn in each forward", "each token sees other norms", _norms(_redrawn_in_each_forward)),
        training("AQN on half of the norms", "every second norm stays clean", _put(_every_second_norm)),
        training("AQN not on the last norm", "the norm before the output stays clean", _put(_not_the_last_norm)),
        training("AQN on every second channel", "noise times sqrt 2, the others clean", _put(_every_second_channel)),
        training("AQN one number per norm", "a norm is shifted as a whole", _put(_one_number)),
        training("AQN on a copy", "the noise is added to a copy of the weights", _put(_on_a_copy)),
        training("AQN added twice", "the weights are noised again after the measurement", _norms(_added_twice)),
        training("AQN subtracted", "minus the numbers", _drawn(lambda z: -z)),
        training("AQN uniform", "the same standard deviation", _drawn(lambda z: torch.erf(z / 2**0.5) * 3**0.5)),
        training("AQN biased", "all weights grow", _drawn(torch.abs)),
        training("AQN relative", "weights are multiplied", _put(_relative)),
        training("AQN sigma squared", "sigma^2 in place of sigma", _sigma(lambda p, step, o: o(p, step) ** 2)),
        training(
            "AQN not in the second epoch",
            "sigma is 0 from then on",
            _sigma(lambda p, step, o: o(p, step) if step < 1 else 0.0),
        ),
        training("AQN of the step before", "sigma lags by a step", _sigma(lambda p, step, o: o(p, max(0, step - 1)))),
        training("AQN in reverse order", "the norms have each other's sigmas", _factors(_reversed)),
        training(
            "AQN's sigmas squared",
            "the factors of layers are squared",
            _factors(lambda f: {k: v * v for k, v in f.items()}),
        ),
        training(
            "AQN on restored weights",
            "the clean weights are back before the rollout",
            _norms(_clean_during_the_rollout),
        ),
        training(
            "AQN on the prompt alone",
            "the clean weights are back after the first forward",
            _norms(_clean_after_the_prompt),
        ),
        training(
            "AQN on half of the rows",
            "the second half rolls out with clean weights",
            _first_half_of_the_rows(),
            # Its responses are none that the noised network has read.
            cause=r"AQN|a step read .* tokens, expected one of every row",
        ),
        training("AQN rounded to bfloat16", "noised weights lose their digits", _norms(_rounded)),
        training("AQN restored in bfloat16", "clean weights lose their digits", _norms(_restored_rounded)),
        training(
            "AQN restored by subtraction", "of noise kept in float16: rounding errors remain", _norms(_subtracted)
        ),
        training("AQN restores the first weights", "the norms never learn", _kept_between_steps),
        training("AQN in the actor too", "the forward pass of the actor has noised norms", _in_the_actor_too()),
        training("AQN on hidden states", "in place of norm weights", _hidden_states_in_place_of_norms()),
        hiding(
            "hidden AQN on norms",
            "norm weights in place of hidden states",
            replaced(("aqnpipe.noise.aqn._noised_hidden_states", _norms_in_place_of_hidden_states)),
        ),
        hiding(
            "hidden AQN without a layer", "layer 2 stays clean after the measurement", _hidden(_hidden_one_layer_clean)
        ),
        hiding(
            "hidden AQN on the prompt alone",
            "single tokens stay clean after the measurement",
            _hidden(_hidden_prompt_alone),
        ),
        hiding("hidden AQN absolute", "with the same root mean square", _hidden(_hidden_absolute)),
        hiding(
            "hidden AQN the same for each token", "the forward is not in the key", _hidden(_hidden_same_for_each_token)
        ),
        hiding("hidden AQN on a copy", "the model continues with clean states", _hidden(_hidden_on_a_copy)),
        hiding(
            "hidden AQN twice", "noised after the noise", _hidden(lambda i, layer, s, h, noised: noised(s, noised()))
        ),
    ),
)
