"""Where the noise and the faults of a phase act in a model: its passes, its parts, its modules and the sites of faults.

A transformers model is what it is here. An inference engine that merges or fuses modules has a class of its own, which
says where they are, and what else its machine and audit have to know.

What an audit expects of a phase comes from what the recorder knows to have been requested (`audit_request`).
"""

from collections.abc import Container, Mapping
from contextlib import ExitStack
from functools import cached_property, partial
from typing import Any

from torch import Tensor, nn

from aqnpipe.config.noise import ModuleNoise, Phase, RelativeGaussian, machine_stream
from aqnpipe.machine.machine import Machine, NoiseKey, Request
from aqnpipe.models.layout import decoder_layers, layer_of, output_projection, select_modules, site_module
from aqnpipe.models.parts import ForwardPasses, Replace, num_tokens, parts_of, put_in_front
from aqnpipe.noise.injection.faults import ActiveFaults, SharedSite
from aqnpipe.noise.injection.pass_observation import PassObservation
from aqnpipe.noise.kernels.shards import Shard
from aqnpipe.noise.receipts.recorder import ReceiptRecorder
from aqnpipe.proof.audit import ONE_TOKEN, SEVERAL_TOKENS
from aqnpipe.proof.request import AuditRequest, RequestedFault, RequestedModule, RequestedOutput

HIDDEN_STATES = "aqn.hidden"
"""Name of AQN's noise on hidden states, as an operator and as a stream of keys."""

FORWARD_KINDS = (SEVERAL_TOKENS, ONE_TOKEN)
"""The kinds of forward passes of a batch, in their order."""

FIRST_MODULE = 1 << 16
"""Number of the first place of module noise; that of a layer's hidden states is the layer."""

_HIDDEN_NOISE_PHASES = ("rollout", "evaluation")

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


# -- what an audit expects ------------------------------------------------------------------------------------------


def audit_request(
    sites: ModelSites,
    phase: Phase,
    key: NoiseKey,
    recorder: ReceiptRecorder,
    faults: ActiveFaults,
    *,
    backward: bool,
) -> AuditRequest:
    """Return the request of the audit of a phase; `backward`: gradients have noise too.

    Of `faults` it takes the thresholds that earlier calls left.
    """
    noise, num_layers = recorder.requested.operator_noise_in(phase), len(sites.layers)
    aqn, faulty = recorder.requested.aqn, {fault.layer for fault in recorder.requested.faults}
    phases = (*_HIDDEN_NOISE_PHASES, "actor_forward") if aqn and aqn.actor_forward else _HIDDEN_NOISE_PHASES
    has_hidden = aqn is not None and aqn.targets == "hidden_states" and phase in phases
    sigmas = {
        layer: sites.requested_sigma(recorder, key.step, layer) for layer in range(num_layers if has_hidden else 0)
    }
    modules = module_errors(sites, phase, recorder.requested.module_noise_in(phase), sigmas, faulty)
    request = AuditRequest(
        noise.error if noise is not None else None,
        key.seed,
        (key.step, key.micro_step, key.rank),
        phase,
        None,
        backward,
        elementwise=noise is not None and noise.operators == "all",
        errors=noise.errors_by_part(num_layers) if noise is not None else {},
        modules=modules,
        outputs=_outputs(sites, phase, recorder, faults, modules),
        counts_operations=True,
        # Faults come behind all noise.
        changed_behind=faulty,
        machine=machine_stream(phase),
    )
    return request._replace(**sites.audit_settings())


def hidden_stream(phase: Phase) -> str:
    """Return the stream of AQN's noise on hidden states: the passes of a training step have the rollout's numbers."""
    return f"{HIDDEN_STATES}.actor_forward" if phase == "actor_forward" else HIDDEN_STATES


def module_errors(
    sites: ModelSites,
    phase: Phase,
    noise: ModuleNoise | None,
    sigmas: Mapping[int, float],
    faulty: Container[int] = (),
) -> dict[int, RequestedModule]:
    """Return the errors on modules of a phase by place: AQN's on hidden states with `sigmas` by layer, then `noise`.

    Modules outside of layers are in the part outside of all. `faulty`: layers in which something comes behind.
    """
    found: dict[int, RequestedModule] = {}
    for layer, sigma in sigmas.items():
        if sigma > 0:
            module, where = sites.layer_output(layer), f"AQN: the hidden states of layer {layer}"
            error, stream = RelativeGaussian(scale=sigma), hidden_stream(phase)
            found[layer] = RequestedModule(module, layer, HIDDEN_STATES, where, error, stream, layer not in faulty)
    if noise is None:
        return found
    for ordinal, (name, module) in enumerate(sites.modules(noise).items()):
        of_layer = layer_of(name)
        found[FIRST_MODULE + ordinal] = RequestedModule(
            module,
            len(sites.layers) + 1 if of_layer is None else of_layer,
            f"module.{name.rpartition('.')[2]}",
            f"module {name}",
            noise.error,
            f"module.{phase}",
            is_last=noise.point == "output" and of_layer not in faulty,
            shards=sites.shards_of(module),
        )
    return found


def _outputs(
    sites: ModelSites, phase: Phase, recorder: ReceiptRecorder, active: ActiveFaults, hidden: Container[int]
) -> list[RequestedOutput]:
    """Return the outputs of all layers and of all sites with faults; `hidden`: layers with noise on their output."""
    layers = sites.layers
    faults: dict[tuple[int, str], list[RequestedFault]] = {(layer, "layer_output"): [] for layer in range(len(layers))}
    for number, fault in enumerate(recorder.requested.faults):
        stored = partial(_threshold, active, number)
        faults.setdefault((fault.layer, fault.site), []).append(RequestedFault(number, fault, stored))
    outputs = []
    for (layer, site), of_site in faults.items():
        is_output = site == "layer_output" and layer < len(layers)
        module = sites.layer_output(layer) if is_output else sites.site(sites.model, layer, site)
        # Faults on a share are computed from the whole, which the audit does not have.
        if sites.shards_of(module) is None:
            noise = layer if site == "layer_output" and layer in hidden else None
            where = f"{site} of layer {layer}"
            outputs.append(RequestedOutput(module, layer, where, f"fault.{phase}", tuple(of_site), noise))
    return outputs


def _threshold(active: ActiveFaults, number: int) -> Tensor | None:
    # A run may have other faults than were requested, or none, which its receipt says by itself.
    return active[number].threshold if number < len(active) else None
