"""Which layers and operators explain a part of the distance: one place at a time in an otherwise unchanged pass."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from aqnpipe.artifacts.sampler_distance import ExplainedBy
from aqnpipe.config.noise import NoiseSpec
from aqnpipe.models.layout import decoder_layers, is_norm, layer_of, num_rms_norms, select_modules
from aqnpipe.noise.aqn import noised_rollout
from aqnpipe.noise.injection.phase import NoiseKey, phase_noise
from aqnpipe.noise.receipts.recorder import ReceiptRecorder
from aqnpipe.seeding import derive_seed
from aqnpipe.training.distance.parts import explained, rms
from aqnpipe.training.distance.passes import Drawn, Passes
from aqnpipe.training.noise_plan import NoisePlan

_MAX_BANDS = 4
"""Groups of layers whose noise is measured; a deeper model has several layers in each."""

_ADAPTER_PARTS = ("base_layer", "default")
"""Names of modules inside an adapted linear module; the operator has the name before them."""


@dataclass(frozen=True)
class Band:
    """Decoder layers `first` to `last`; None, None is everything outside the layers."""

    first: int | None
    last: int | None

    def has(self, layer: int | None) -> bool:
        """Return whether `layer` (None: outside the layers) belongs to this band."""
        if layer is None or self.first is None or self.last is None:
            return layer is None and self.first is None
        return self.first <= layer <= self.last


def bands(num_layers: int) -> list[Band]:
    """Return at most `_MAX_BANDS` groups of neighbouring layers of equal size, and the one outside the layers."""
    size = -(-num_layers // _MAX_BANDS)
    groups = [Band(first, min(first + size, num_layers) - 1) for first in range(0, num_layers, size)]
    return [*groups, Band(None, None)]


def noise_by_layers(
    passes: Passes, sequences: Sequence[Drawn], clean: Tensor, plan: NoisePlan, step: int
) -> tuple[float, tuple[ExplainedBy, ...]]:
    """Return the RMS effect of the rollout's noise, drawn anew, and that of its part in every band of layers.

    `clean`: log-probabilities of the sequences in one pass, without noise. `step`: that of the rollout.
    """
    network = passes.network
    everywhere = _noised(passes, sequences, plan.spec, plan.aqn_factors, plan, step) - clean
    found = []
    for band in bands(len(decoder_layers(network))):
        spec, factors = noise_in(network, plan, band)
        if not _is_empty(spec, factors, plan.sigma(step)):
            found.append((band, rms(_noised(passes, sequences, spec, factors, plan, step) - clean)))
    total = sum(size**2 for _, size in found)
    rows = (
        ExplainedBy(first_layer=band.first, last_layer=band.last, rms=size, share=size**2 / total if total else None)
        for band, size in found
    )
    return rms(everywhere), tuple(rows)


def noise_in(network: nn.Module, plan: NoisePlan, band: Band) -> tuple[NoiseSpec, dict[str, float]]:
    """Return the part of the rollout's noise and faults, and of AQN's factors, that is in `band`."""
    spec = plan.spec
    operators, modules = spec.operator_noise_in("rollout"), spec.module_noise_in("rollout")
    if operators is not None:
        every = range(len(decoder_layers(network))) if operators.layers is None else operators.layers
        layers = tuple(layer for layer in every if band.has(layer))
        kept = {layer: scale for layer, scale in operators.layer_scales.items() if layer in layers}
        with_head = operators.include_lm_head and band.has(None)
        changes = {"layers": layers, "layer_scales": kept, "include_lm_head": with_head}
        operators = operators.model_copy(update=changes) if layers or with_head else None
    if modules is not None:
        names = tuple(name for name in select_modules(network, modules.modules) if band.has(layer_of(name)))
        modules = modules.model_copy(update={"modules": names}) if names else None
    faults = tuple(fault for fault in spec.faults if band.has(fault.layer))
    numbers = _layers_of_targets(spec, plan.aqn_factors)
    factors = {name: factor if band.has(numbers[name]) else 0.0 for name, factor in plan.aqn_factors.items()}
    return NoiseSpec(operator_noise=operators, module_noise=modules, aqn=spec.aqn, faults=faults), factors


def rounding_by_operator(
    passes: Passes, sequences: Sequence[Drawn], whole: Tensor, decoded: Tensor
) -> tuple[ExplainedBy, ...]:
    """Return what remains of the difference of decoding, operator kind by operator kind, the largest first.

    Linear modules and norms of one kind are computed one token at a time in the responses, as in decoding, and the rest
    of the pass as it is. `whole`, `decoded`: log-probabilities in one pass, and decoded. What no kind explains is
    attention and its cache.
    """
    difference = decoded - whole
    rows = []
    for operator, modules in operators_of(passes.network).items():
        change = _one_token_at_a_time(passes, sequences, modules) - whole
        rows.append(ExplainedBy(operator=operator, rms=rms(change), share=explained(change, difference)))
    return tuple(sorted(rows, key=lambda row: -row.rms))


def operators_of(network: nn.Module) -> dict[str, list[nn.Module]]:
    """Return the linear modules and norms by the last part of their names, in the order of the model."""
    found: dict[str, list[nn.Module]] = {}
    for name, module in network.named_modules():
        if isinstance(module, nn.Linear) or is_norm(module):
            parts = [part for part in name.split(".") if part not in _ADAPTER_PARTS]
            found.setdefault(parts[-1], []).append(module)
    return found


def _one_token_at_a_time(passes: Passes, sequences: Sequence[Drawn], modules: Collection[nn.Module]) -> Tensor:
    starts = torch.tensor([len(sequence.prompt) for sequence in sequences], device=passes.network.device)
    longest = max(len(sequence.prompt) + len(sequence.response) for sequence in sequences)

    def again(module: Any, args: tuple[Any, ...], output: Tensor) -> Tensor:
        values: Tensor = args[0]
        # The output projection gets the last places only; experts get tokens without their order.
        first = longest - values.shape[1]
        if values.dim() < 3 or len(values) != len(sequences) or not 0 <= first <= int(starts.min()):
            return output
        begin = int(starts.min()) - first
        singles = [module.forward(values[:, place : place + 1]) for place in range(begin, values.shape[1])]
        places = torch.arange(first + begin, longest, device=starts.device)
        in_response = (places >= starts[:, None]).reshape(len(starts), -1, *[1] * (output.dim() - 2))
        tail = torch.where(in_response, torch.cat(singles, dim=1), output[:, begin:])
        return torch.cat([output[:, :begin], tail], dim=1)

    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_hook(again).remove)
        return passes.in_one_pass(sequences)


def _noised(
    passes: Passes,
    sequences: Sequence[Drawn],
    spec: NoiseSpec,
    factors: Mapping[str, float],
    plan: NoisePlan,
    step: int,
) -> Tensor:
    """Return log-probabilities under noise with a key and a recorder of its own: the run's stay as they are."""
    network = passes.network
    recorder = ReceiptRecorder(
        spec,
        expected_phases=("rollout",),
        num_layers=len(decoder_layers(network)),
        num_norms=num_rms_norms(network),
        # The audit of hidden states asks the recorder for their sigma.
        num_steps=plan.num_steps,
        num_epochs=plan.num_epochs,
    )
    key = NoiseKey(seed=derive_seed(plan.seed, "distance parts"), step=step)
    with (
        torch.no_grad(),
        noised_rollout(
            network, spec.aqn, factors, recorder, sigma=plan.sigma(step), seed=key.seed, step=step
        ) as hidden_sigmas,
        phase_noise(network, spec, "rollout", key, recorder, hidden_sigmas=hidden_sigmas),
    ):
        return passes.in_one_pass(sequences)


def _layers_of_targets(spec: NoiseSpec, names: Mapping[str, float]) -> dict[str, int | None]:
    """Return the decoder layer of every target of AQN: of a norm by its name, hidden states in their order."""
    if spec.aqn is not None and spec.aqn.targets == "hidden_states":
        return {name: layer for layer, name in enumerate(names)}
    return {name: layer_of(name) for name in names}


def _is_empty(spec: NoiseSpec, factors: Mapping[str, float], sigma: float) -> bool:
    has_aqn = sigma > 0 and any(factors.values())
    return not (spec.operator_noise or spec.module_noise or spec.faults or has_aqn)
