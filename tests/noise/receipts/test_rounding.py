"""Gaussian noise after rounding to 16 bits: what a receipt expects of it, and that honest runs pass however long."""

import numpy as np
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
from aqnpipe.noise.aqn import noised_rollout, relative_sums, target_factors
from aqnpipe.noise.injection.phase import phase_noise
from aqnpipe.noise.receipts.recorder import ReceiptRecorder
from aqnpipe.noise.receipts.rounding import noised_moments, spacing_of


def test_spacing_is_the_distance_to_the_neighbours():
    values = torch.tensor([1.0, 1.5, -3.0, 256.0, 0.0], dtype=torch.bfloat16)
    outward, inward = spacing_of(values)
    # bfloat16 has 7 bits after the point: 2^-7 above 1, 2^-8 below it; at 256 2 and 1.
    assert outward.tolist()[:4] == [2**-7, 2**-7, 2**-6, 2.0]
    assert inward.tolist()[:4] == [2**-8, 2**-7, 2**-6, 1.0]
    for value, away in zip(values[:4].float(), outward[:4], strict=True):
        following = (value.abs() + away).to(torch.bfloat16).float()
        assert following - value.abs() == away, "the next number"
        assert (value.abs() + 0.49 * away).to(torch.bfloat16).float() == value.abs(), "nothing in between"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [0.05, 0.01, 0.003, 0.001, 0.0003])
def test_moments_are_those_of_rounded_noise(dtype, scale):
    generator = torch.Generator().manual_seed(3)
    clean = torch.randn(200_000, generator=generator).to(dtype)
    clean = clean[clean != 0]
    drawn = torch.randn(clean.shape, generator=generator)
    errors = (clean.float() * (1 + scale * drawn)).to(dtype).double() - clean.double()
    mean, variance = noised_moments(clean, scale * clean.double().abs().numpy())
    weights = clean.double().numpy() ** 2
    deviation = (errors.numpy() ** 2 / weights).sum() - (mean / weights).sum()
    assert abs(deviation) <= 5 * np.sqrt((variance / weights**2).sum())


def sums_of(dtype, scale, numel, rounds, seed=0, requested=None):
    """Squares of errors, their number, and the expected squares with their variance, as a long run sums them up."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for _ in range(rounds):
        clean = torch.randn(numel, generator=generator).to(dtype)
        noised = (clean.float() * (1 + scale * torch.randn(numel, generator=generator))).to(dtype)
        samples.append((clean, noised))
    return relative_sums(samples, scale if requested is None else requested)


def deviation_of(sums):
    """Return by how many standard errors the sum of squares is off from what the requested noise gives."""
    squares, _, expected, variance = sums
    return abs(squares - expected) / np.sqrt(variance)


@pytest.mark.parametrize("scale", [0.05, 0.01, 0.002])
def test_a_long_honest_run_in_bfloat16_is_as_expected(scale):
    sums = sums_of(torch.bfloat16, scale, 500_000, 3)
    assert deviation_of(sums) <= 5
    if scale < 0.05:
        squares, count, *_ = sums
        assert abs((squares / count) ** 0.5 / scale - 1) > 5 / np.sqrt(2 * count), "without rounding it is not"


def test_a_scale_that_is_one_percent_off_shows_in_bfloat16():
    assert deviation_of(sums_of(torch.bfloat16, 0.0505, 500_000, 2, requested=0.05)) > 5


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
    if sigma < 0.001:
        # Most elements do not change at all: the ratio is far from 1, and expected to be.
        assert abs(receipt.weight_syncs[0].squared_error_ratio - 1) > 0.1


def test_absolute_noise_on_modules_passes_in_bfloat16(make_model):
    from aqnpipe.config.noise import ModuleNoise

    model = make_model(hidden_size=64, intermediate_size=96).to(torch.bfloat16)
    noise = ModuleNoise(modules="linear", error=AbsoluteGaussian(scale=0.002), phases=("rollout",), point="output")
    assert receipt_of(model, NoiseSpec(module_noise=noise)).problems() == []
