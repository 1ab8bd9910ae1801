"""Applies an arm's noise to a model for one step of each training phase, and returns the measurements."""

import torch
from torch import nn

from aqnpipe.config.arm import Arm
from aqnpipe.config.noise import AdaptiveNoise, ConstantSigma, NoiseSpec, Phase
from aqnpipe.machine.machine import NoiseKey
from aqnpipe.models.layout import decoder_layers, num_rms_norms
from aqnpipe.noise.aqn import noised_actor, noised_rollout, target_factors
from aqnpipe.noise.injection.phase import phase_noise
from aqnpipe.noise.receipts.receipt import Receipt
from aqnpipe.noise.receipts.recorder import ReceiptRecorder
from aqnpipe.noise.schedule import max_sigma, sigma_at
from aqnpipe.seeding import derive_seed


def measure_arm(
    model: nn.Module,
    arm: Arm,
    *,
    batch: int = 4,
    prompt_tokens: int = 48,
    seed: int = 0,
) -> Receipt:
    """Run `model` on random tokens through every phase of a training step.

    AQN uses the largest sigma of its schedule. Where its factors by layer come from a diagnosis, it is the same in
    every layer. Raises ConfigError if AQN names layers or norms that the model does not have. The receipt is not
    checked: call `problems()` on it.
    """
    aqn = _undiagnosed(arm.aqn) if arm.aqn else None
    spec = NoiseSpec(operator_noise=arm.operator_noise, module_noise=arm.module_noise, kv_cache=arm.kv_cache, aqn=aqn)
    recorder = ReceiptRecorder(
        spec,
        expected_phases=("rollout", "reference", "actor_forward", "backward", "validation"),
        num_layers=len(decoder_layers(model)),
        num_norms=num_rms_norms(model),
        num_steps=1,
        num_epochs=1,
    )
    device = next(model.parameters()).device
    vocabulary = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    generator = torch.Generator().manual_seed(derive_seed(seed, "noise audit"))
    tokens = torch.randint(vocabulary, (batch, prompt_tokens), generator=generator).to(device)
    key = NoiseKey(seed=seed, step=0)
    sigma = sigma_at(aqn.schedule, 0, 1, 1) if aqn else 0.0
    factors = target_factors(model, aqn, None) if aqn else {}
    with (
        torch.no_grad(),
        noised_rollout(model, aqn, factors, recorder, sigma=sigma, seed=seed, step=0) as hidden_sigmas,
        phase_noise(model, spec, "rollout", key, recorder, hidden_sigmas=hidden_sigmas),
    ):
        cache = model(input_ids=tokens, use_cache=True).past_key_values
        model(input_ids=tokens[:, -1:], past_key_values=cache, use_cache=True)
    phases: tuple[Phase, ...] = ("reference", "validation")
    for phase in phases:
        with torch.no_grad(), phase_noise(model, spec, phase, key, recorder):
            model(input_ids=tokens, use_cache=False)
    with (
        torch.enable_grad(),
        noised_actor(aqn, factors, recorder, sigma) as hidden_sigmas,
        phase_noise(model, spec, "actor_forward", key, recorder, backward=True, hidden_sigmas=hidden_sigmas),
    ):
        logits = model(input_ids=tokens, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
    recorder.add("backward", passes=1)
    model.zero_grad(set_to_none=True)
    return recorder.receipt()


def _undiagnosed(aqn: AdaptiveNoise) -> AdaptiveNoise:
    constant = ConstantSigma(sigma=max_sigma(aqn.schedule))
    return aqn.model_copy(
        update={"schedule": constant, "layer_sigmas_from": None, "layer_sigmas_strategy": "published"}
    )
