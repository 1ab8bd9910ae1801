"""Where sabotages take hold of the product: functions replaced for the duration of a job, and proof that they ran."""

import multiprocessing
import pkgutil
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

KERNEL = "aqnpipe.noise.kernels.error_models.add_relative_gaussian_"
PUT_ERROR = "aqnpipe.noise.injection.phase_state.PhaseState.put_error"
SEED = "aqnpipe.noise.injection.phase_state.PhaseState.seed"
OPERATOR_STREAM = "aqnpipe.noise.injection.operator_errors.NoiseStream"
OPERATOR_CALL = "aqnpipe.noise.injection.operator_errors.OperatorErrors.call"
LINEAR = "aqnpipe.noise.injection.operator_watch.OperatorWatch._linear"
TRAINER_KEY = "aqnpipe.training.trainer.NoisyGRPOTrainer._key"
EVALUATION_KEY = "aqnpipe.evaluation.shards.NoiseKey"

Make = Callable[[Any], Any]
Apply = Callable[[Any], AbstractContextManager[Any]]

# Shared with forked processes.
_effects = multiprocessing.get_context("fork").Value("q", 0)


def took_effect() -> None:
    """Note that a sabotage changed something."""
    with _effects.get_lock():
        _effects.value += 1


def effects() -> int:
    """Return how often a sabotage took effect so far."""
    return int(_effects.value)


def replaced(*changes: tuple[str, Make]) -> Apply:
    """A sabotage that replaces each target, by its dotted name, by what `make(original)` returns.

    AttributeError if a target does not exist. State of a sabotage belongs into `make`, which is called for each try.
    """

    @contextmanager
    def apply(_: Any) -> Any:
        with ExitStack() as stack:
            for target, make in changes:
                stack.enter_context(mock.patch(target, make(pkgutil.resolve_name(target))))
            yield

    return apply


def together(*parts: Apply) -> Apply:
    """Several sabotages at once."""

    @contextmanager
    def apply(study: Any) -> Any:
        with ExitStack() as stack:
            for part in parts:
                stack.enter_context(part(study))
            yield

    return apply


def with_result(target: str, change: Callable[[Any], Any]) -> Apply:
    """A sabotage that changes the result of a function."""

    def make(original: Any) -> Any:
        def changed(*args: Any, **kwargs: Any) -> Any:
            took_effect()
            return change(original(*args, **kwargs))

        return changed

    return replaced((target, make))


@dataclass(frozen=True)
class Call:
    """One call that puts an error on a tensor."""

    state: Any
    phase: str
    operator: str
    layer: int | None
    tensor: Tensor
    number: int


def _calls(act: Callable[[Call, Callable[[], None]], None]) -> Make:
    """Replacement of `put_error` by `act(call, put)`; `put` does what the original does."""

    def make(original: Any) -> Any:
        count = 0

        def put_error(
            self: Any, phase: Any, operator: str, layer: Any, error: Any, source: Any, tensor: Tensor, **settings: Any
        ) -> None:
            nonlocal count
            count += 1
            call = Call(self, phase, operator, layer, tensor, count)
            act(call, lambda: original(self, phase, operator, layer, error, source, tensor, **settings))

        return put_error

    return make


def not_put(when: Callable[[Call], bool]) -> Apply:
    """Calls `when` true get no error at all: they are neither noised nor counted."""

    def act(call: Call, put: Callable[[], None]) -> None:
        if when(call):
            took_effect()
        else:
            put()

    return replaced((PUT_ERROR, _calls(act)))


def undone(when: Callable[[Call], bool]) -> Apply:
    """Calls `when` true are noised and measured, and then get their clean values back."""

    def act(call: Call, put: Callable[[], None]) -> None:
        if not when(call):
            put()
            return
        took_effect()
        clean = call.tensor.detach().clone()
        put()
        call.tensor.detach().copy_(clean)

    return replaced((PUT_ERROR, _calls(act)))


def put_twice(when: Callable[[Call], bool]) -> Apply:
    """Calls `when` true are noised twice."""

    def act(call: Call, put: Callable[[], None]) -> None:
        put()
        if when(call):
            took_effect()
            put()

    return replaced((PUT_ERROR, _calls(act)))


def kernel(change: Callable[..., None], when: Callable[[Call], bool] = lambda call: True) -> Apply:
    """The kernel of relative noise does `change(tensor, scale, source, original)` in the calls `when` true."""
    current: list[Call] = []

    def act(call: Call, put: Callable[[], None]) -> None:
        current[:] = [call]
        put()

    def make(original: Any) -> Any:
        def noised(tensor: Tensor, scale: float, source: Any) -> Tensor:
            if not current or when(current[0]):
                took_effect()
                change(tensor.detach(), scale, source, original)
            else:
                original(tensor, scale, source)
            return tensor

        return noised

    return replaced((PUT_ERROR, _calls(act)), (KERNEL, make))


def skipped(when: Callable[[Call], bool] = lambda call: True) -> Apply:
    """The kernel does nothing in the calls `when` true, which are counted and measured as if it did."""
    return kernel(lambda tensor, scale, source, original: None, when)


def clean_modules(when: Callable[[str, Any], bool]) -> Apply:
    """Linear modules `when(name, state)` true compute past the noise."""

    def make(original: Any) -> Any:
        names: dict[int, dict[int, str]] = {}

        def linear(self: Any, module: Any, input: Tensor) -> Tensor:
            model = self._state.model
            known = names.setdefault(id(model), {})
            if id(module) not in known:
                known.update({id(other): name for name, other in model.named_modules()})
            if not when(known[id(module)], self._state):
                return original(self, module, input)  # type: ignore[no-any-return]
            took_effect()
            with torch._C.DisableTorchFunction():
                return torch.nn.functional.linear(input, module.weight, module.bias)

        return linear

    return replaced((LINEAR, make))


def seeds(change: Callable[..., int]) -> Apply:
    """Keys of places are `change(original, state, stream, *counters)`."""

    def make(original: Any) -> Any:
        def seed(self: Any, stream: str, *counters: int) -> int:
            took_effect()
            return change(lambda *args: original(self, *args), self, stream, *counters)

        return seed

    return replaced((SEED, make))


def streams(change: Callable[[int, int, int], tuple[int, int, int]]) -> Apply:
    """Operators draw from the stream `change(key, call, stream)`."""

    def make(original: Any) -> Any:
        def stream(key: int, call: int = 0, stream: int = 0) -> Any:
            took_effect()
            return original(*change(key, call, stream))

        return stream

    return replaced((OPERATOR_STREAM, make))
