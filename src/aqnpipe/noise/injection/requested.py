"""Expectations of an audit about a phase, from what the recorder knows to have been requested."""

from collections.abc import Container, Mapping
from functools import partial

from torch import Tensor

from aqnpipe.config.noise import ModuleNoise, Phase, RelativeGaussian, machine_stream
from aqnpipe.machine.machine import NoiseKey
from aqnpipe.models.layout import layer_of
from aqnpipe.noise.injection.faults import ActiveFaults
from aqnpipe.noise.injection.sites import ModelSites
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
