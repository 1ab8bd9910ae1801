"""Expectations of an audit about a phase, from what the recorder knows to have been requested."""

from collections.abc import Container
from functools import partial

from torch import Tensor

from aqnpipe.config.noise import Phase, RelativeGaussian, machine_stream
from aqnpipe.models.layout import layer_of
from aqnpipe.noise.audit.random_numbers import Position
from aqnpipe.noise.injection.faults import ActiveFaults
from aqnpipe.noise.injection.sites import ModelSites
from aqnpipe.noise.receipts.recorder import ReceiptRecorder
from aqnpipe.proof.audit import ONE_TOKEN, SEVERAL_TOKENS
from aqnpipe.proof.modules import RequestedModule
from aqnpipe.proof.outputs import RequestedFault, RequestedOutput
from aqnpipe.proof.request import AuditRequest

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
    position: Position,
    recorder: ReceiptRecorder,
    faults: ActiveFaults,
    *,
    backward: bool,
) -> AuditRequest:
    """Return the request of the audit of a phase; `backward`: gradients have noise too.

    Of `faults` it takes the thresholds that earlier calls left.
    """
    noise, num_layers = recorder.requested.operator_noise_in(phase), len(sites.layers)
    hidden = _hidden_states(sites, phase, position, recorder)
    request = AuditRequest(
        noise.error if noise is not None else None,
        position.seed,
        (position.step, position.micro_step, position.rank),
        phase,
        None,
        backward,
        elementwise=noise is not None and noise.operators == "all",
        errors=noise.errors_by_part(num_layers) if noise is not None else {},
        modules=hidden | _modules(sites, phase, recorder, num_layers + 1),
        outputs=_outputs(sites, phase, recorder, faults, hidden),
        counts_operations=True,
        changed_behind=_faulty_layers(recorder),
        machine=machine_stream(phase),
    )
    return request._replace(**sites.audit_settings())


def hidden_stream(phase: Phase) -> str:
    """Return the stream of AQN's noise on hidden states: the passes of a training step have the rollout's numbers."""
    return f"{HIDDEN_STATES}.actor_forward" if phase == "actor_forward" else HIDDEN_STATES


def _hidden_states(
    sites: ModelSites, phase: Phase, position: Position, recorder: ReceiptRecorder
) -> dict[int, RequestedModule]:
    """Return AQN's noise on the hidden states of every layer that should have some in a phase."""
    aqn = recorder.requested.aqn
    phases = (*_HIDDEN_NOISE_PHASES, "actor_forward") if aqn and aqn.actor_forward else _HIDDEN_NOISE_PHASES
    if aqn is None or aqn.targets != "hidden_states" or phase not in phases:
        return {}
    faulty, found = _faulty_layers(recorder), {}
    for layer in range(len(sites.layers)):
        if sigma := sites.requested_sigma(recorder, position.step, layer):
            where, error = f"AQN: the hidden states of layer {layer}", RelativeGaussian(scale=sigma)
            found[layer] = RequestedModule(
                sites.layer_output(layer),
                layer,
                HIDDEN_STATES,
                where,
                error,
                hidden_stream(phase),
                is_last=layer not in faulty,
            )
    return found


def _modules(sites: ModelSites, phase: Phase, recorder: ReceiptRecorder, outside: int) -> dict[int, RequestedModule]:
    """Return the module noise of a phase; modules outside of layers are in the part `outside`."""
    noise = recorder.requested.module_noise_in(phase)
    if noise is None:
        return {}
    faulty, found = _faulty_layers(recorder), {}
    for ordinal, (name, module) in enumerate(sites.modules(noise).items()):
        layer, operator = layer_of(name), f"module.{name.rpartition('.')[2]}"
        found[FIRST_MODULE + ordinal] = RequestedModule(
            module,
            outside if layer is None else layer,
            operator,
            f"module {name}",
            noise.error,
            f"module.{phase}",
            is_last=noise.point == "output" and layer not in faulty,
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


def _faulty_layers(recorder: ReceiptRecorder) -> set[int]:
    """Return the layers with simulated faults, which come behind all noise."""
    return {fault.layer for fault in recorder.requested.faults}
