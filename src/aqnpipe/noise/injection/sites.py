"""Where the noise and the faults of a phase act in a model: its passes, its parts, its modules and the sites of faults.

A transformers model is what it is here. An inference engine that merges or fuses modules has a class of its own, which
says where they are, and what else its machine and audit have to know.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from functools import cached_property
from typing import Any

from torch import nn

from aqnpipe.config.noise import ModuleNoise, Phase
from aqnpipe.machine.machine import Machine, Request
from aqnpipe.models.caches import Replace, put_in_front
from aqnpipe.models.calls import ForwardPasses, num_tokens
from aqnpipe.models.layout import decoder_layers, output_projection, select_modules
from aqnpipe.models.parts import parts_of
from aqnpipe.models.sites import site_module
from aqnpipe.noise.injection.faults import SharedSite
from aqnpipe.noise.injection.pass_observation import PassObservation
from aqnpipe.noise.kernels.shards import Shard
from aqnpipe.noise.receipts.recorder import ReceiptRecorder

_ATTENTION_OF = {"eager": "decomposed", "sdpa": "fused"}
"""How noise must be requested of the attention of a model."""


class ModelSites:
    """The sites of a transformers model. `shared` is for faults on outputs of which this process has a share."""

    shared: SharedSite | None = None
    reads_back_cache = True
    """Whether all keys and values that attention is to read are seen in every pass; otherwise only the new ones."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        # What a phase appends is outside of them.
        self.layers: list[nn.Module] = list(decoder_layers(model))
        self.head: nn.Module = output_projection(model)

    @property
    def roots(self) -> tuple[nn.Module, ...]:
        """The modules of which an outermost call is a pass."""
        return parts_of(self.model).roots

    @cached_property
    def parts(self) -> dict[int, nn.Module]:
        """The decoder layers and the output projection, by number."""
        return dict(enumerate([*self.layers, self.head]))

    @cached_property
    def names(self) -> dict[int, str]:
        """The paths of the parts."""
        paths = {module: name for name, module in self.model.named_modules()}
        return {part: paths[module] for part, module in self.parts.items()}

    @property
    def attention(self) -> str | None:
        """How noise must be requested of the attention; None if any way will do."""
        return _ATTENTION_OF.get(self.kernel)

    @property
    def kernel(self) -> str:
        """The name of the attention kernel."""
        return str(getattr(getattr(self.model, "config", None), "_attn_implementation", None))

    def modules(self, noise: ModuleNoise) -> Mapping[str, nn.Module]:
        """Return the modules that module noise selects, by name."""
        return select_modules(self.model, noise.modules, noise.exclude)

    def site(self, model: nn.Module, layer: int, site: str) -> nn.Module:
        """Return the module whose output is a site of a decoder layer; ModelError if there is none."""
        return site_module(model, layer, site)

    def layer_output(self, layer: int) -> nn.Module:
        """Return the module whose output is what a decoder layer must return if nothing was requested of it."""
        return self.layers[layer]

    def shards_of(self, module: nn.Module) -> tuple[Shard, ...] | None:
        """Return the columns that this process has of the input or output of a module; None if it has all."""
        return None

    def requested_sigma(self, recorder: ReceiptRecorder, step: int, target: int | str) -> float:
        """Return the sigma that AQN requests at `step` of a decoder layer, or of a norm by its name."""
        return recorder.requested_sigma(step, target)

    def reads_one_token(self, number: int, args: Any, kwargs: Mapping[str, Any]) -> bool:
        """Return whether pass `number` of a phase, with these arguments, reads one token of each row."""
        return num_tokens(args, kwargs) == 1

    def observation(self, phase: Phase, *, rounds: bool, rounds_cache: bool) -> Any:
        """Return what observes the passes of a phase; see `PassObservation`."""
        return PassObservation(self.model, phase, rounds=rounds, rounds_cache=rounds_cache)

    def passes(self, enter: Any, leave: Any) -> list[Any]:
        """Call `enter` before and `leave` behind each pass; return the handles."""
        return ForwardPasses(self.model, enter, leave).hooks()

    def put_in_front_of_caches(self, replace: Replace) -> list[Any]:
        """Call `replace` in place of `update` of every cache, see `put_in_front`; return the handles of hooks."""
        return put_in_front(self.layers, replace)

    def request(self, request: Request) -> Request:
        """Return the request to the machine with what it must know of this model."""
        return request

    def audit_settings(self) -> Mapping[str, Any]:
        """Return what the audit must know of this model: fields of `AuditRequest`."""
        return {}

    def install_before(self, stack: ExitStack, machine: Machine) -> None:
        """Prepare the model before the machine has its hooks."""

    def install_behind(self, stack: ExitStack) -> None:
        """Register what comes behind the hooks of the machine and before those of module noise and faults."""
