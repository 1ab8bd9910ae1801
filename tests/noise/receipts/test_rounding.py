"""Gaussian noise after rounding to 16 bits: honest runs pass however long."""

import pytest
import torch
from torch import nn

from aqnpipe.config.noise import (
    AbsoluteGaussian,
    AdaptiveNoise,
    ConstantSigma,
    NoiseSpec,
    OperatorNoise,
    RelativeGaussian,
)
from aqnpipe.machine.machine import NoiseKey
from aqnpipe.noise.aqn import noised_rollout, target_factors
from aqnpipe.noise.injection.phase import phase_noise
from aqnpipe.noise.receipts.recorder import ReceiptRecorder


def noise_spec(scale):
    return NoiseSpec(operator_noise=OperatorNoise(error=RelativeGaussian(scale=scale), phases=("rollout",)))


def with_biases(model, size):
    """Key and query biases as large as those of Qwen2.5."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=size)
    return model


def receipt_of(model, spec, requested=None, steps=24, autocast=False):
    recorder = ReceiptRecorder(requested or spec, expected_phases=("rollout",), num_layers=3, num_norms=7)
    tokens = torch.randint(2, 64, (8, 48), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for step in range(steps):
            with phase_noise(model, spec, "rollout", NoiseKey(seed=0, step=step), recorder):
                model(input_ids=tokens)
    return recorder.receipt()


@pytest.mark.parametrize(
    ("bias", "mixed"),
    [(0.0, False), (20.0, False), (300.0, False), (1.0, True), (300.0, True)],
)
def test_a_model_in_bfloat16_with_large_biases_passes(make_model, bias, mixed):
    model = with_biases(make_model(hidden_size=64, intermediate_size=96), bias)
    model = model if mixed else model.to(torch.bfloat16)
    receipt = receipt_of(model, noise_spec(0.05), autocast=mixed)
    assert receipt.problems() == []
    record = receipt.phases[0]
    assert record.elements > 1000
    assert record.recomputed > 2000
    assert 0.2 < record.largest_deviation <= 1, "rounding to bfloat16 uses much of the allowance"


@pytest.mark.parametrize("installed", [0.045, 0.055])
def test_another_scale_is_refused_in_bfloat16(make_model, installed):
    model = with_biases(make_model(hidden_size=64, intermediate_size=96), 20.0)
    problems = receipt_of(model, noise_spec(installed), noise_spec(0.05), autocast=True, steps=2).problems()
    assert any(f"installed {installed}, requested 0.05" in problem for problem in problems), problems
    assert any("mm in model.layers.0 (bfloat16): " in problem for problem in problems), problems


@pytest.mark.parametrize("sigma", [0.05, 0.005, 0.0005])
def test_small_sigmas_of_aqn_pass_on_norms_in_bfloat16(make_model, sigma):
    model = make_model(hidden_size=512, intermediate_size=64).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.uniform_(parameter, 0.5, 3.0)
    aqn = AdaptiveNoise(schedule=ConstantSigma(sigma=sigma))
    spec = NoiseSpec(aqn=aqn)
    recorder = ReceiptRecorder(
        spec, expected_phases=("rollout",), num_layers=3, num_norms=7, num_steps=40, num_epochs=1
    )
    factors = target_factors(model, aqn, None)
    tokens = torch.randint(2, 64, (2, 8), generator=torch.Generator().manual_seed(0))
    for step in range(40):
        with (
            torch.no_grad(),
            noised_rollout(model, aqn, factors, recorder, sigma=sigma, seed=0, step=step) as hidden,
            phase_noise(model, spec, "rollout", NoiseKey(seed=0, step=step), recorder, hidden_sigmas=hidden),
        ):
            model(input_ids=tokens)
    receipt = recorder.receipt()
    assert receipt.problems() == []
    sync = receipt.weight_syncs[0]
    assert sync.recomputed == 7 * 64
    if sigma < 0.001:
        # Most elements do not change at all: the measured size is far from the requested one, and must not be refused.
        assert abs((sync.sigma_measured / sigma) ** 2 - 1) > 0.1


def test_absolute_noise_on_modules_passes_in_bfloat16(make_model):
    from aqnpipe.config.noise import ModuleNoise

    model = make_model(hidden_size=64, intermediate_size=96).to(torch.bfloat16)
    noise = ModuleNoise(modules="linear", error=AbsoluteGaussian(scale=0.002), phases=("rollout",), point="output")
    assert receipt_of(model, NoiseSpec(module_noise=noise)).problems() == []
