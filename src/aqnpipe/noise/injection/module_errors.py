"""Adds noise to the input or the output of whole modules, by forward hooks."""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from torch import Tensor, nn

from aqnpipe.config.noise import ModuleNoise
from aqnpipe.models.layout import layer_of, select_modules
from aqnpipe.noise.injection.hooks import keep, on_input, on_output
from aqnpipe.noise.injection.operators import straight_through
from aqnpipe.noise.injection.phase_state import PhaseState
from aqnpipe.noise.kernels.shards import Shard
from aqnpipe.noise.kernels.stream import NoiseStream

# Above the stream numbers of operators and hidden states, which use the same keys.
_FIRST_MODULE = 16


class ModuleErrors:
    """The modules selected by `noise`, and its error; `names` are their qualified names if already known."""

    def __init__(self, state: PhaseState, noise: ModuleNoise, names: Sequence[str] | None = None) -> None:
        self._state = state
        self._noise = noise
        selected = select_modules(state.model, noise.modules, noise.exclude) if names is None else names
        self._ordinals = {name: ordinal for ordinal, name in enumerate(selected)}
        state.recorder.expect_modules(len(self._ordinals))

    def install(self, stack: ExitStack, module: nn.Module, name: str, shard: Shard | None = None) -> None:
        """Register noise on `module` (qualified name `name`) if it is selected.

        `shard`: the columns that a tensor-parallel worker has of the whole input or output.
        """
        if name not in self._ordinals:
            return
        noised = partial(self._noised, name, self._ordinals[name], shard)
        if self._noise.point == "input":
            keep(stack, module.register_forward_pre_hook(partial(on_input, noised)))
        else:
            keep(stack, module.register_forward_hook(partial(on_output, noised)))

    def _noised(self, name: str, ordinal: int, shard: Shard | None, tensor: Tensor) -> Tensor:
        """Return a noised copy of the input or output `tensor` of the module `name`."""
        state, place = self._state, self._state.place
        state.refuse_outside_forward(f"module {name}")
        place.module_calls[ordinal] += 1
        source = NoiseStream(place.key, ordinal, _FIRST_MODULE + place.module_calls[ordinal])
        operator = f"module.{name.rsplit('.', 1)[-1]}"
        noised = tensor.detach().clone()
        error, layer = self._noise.error, layer_of(name)
        state.put_error(state.phase, operator, layer, error, source, noised, repeats=True, shard=shard)
        state.recorder.count_module(state.phase, name)
        return straight_through(tensor, noised)
