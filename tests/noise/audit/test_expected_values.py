"""Kernels stay within the rounding that the audit allows; other distributions of the same size do not."""

import numpy as np
import pytest
import torch

from aqnpipe.config.noise import AbsoluteGaussian, MantissaTruncation, RelativeGaussian, SystematicBias
from aqnpipe.noise.audit.expected_values import expected_values, spacing
from aqnpipe.noise.audit.random_numbers import Draws
from aqnpipe.noise.kernels.error_models import apply_error_
from aqnpipe.noise.kernels.stream import NoiseStream

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
ERRORS = [
    RelativeGaussian(scale=0.05),
    RelativeGaussian(scale=0.9),
    RelativeGaussian(scale=1e-5),
    AbsoluteGaussian(scale=0.01),
    AbsoluteGaussian(scale=10.0),
    SystematicBias(scale=0.01),
    MantissaTruncation(mantissa_bits=3),
]


def values(dtype, numel=1 << 18, seed=0):
    """Numbers of very different sizes, as products have."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.exp(3 * torch.randn(numel, dtype=torch.float64, generator=generator))
    return (torch.randn(numel, dtype=torch.float64, generator=generator) * size).clamp(-3e4, 3e4).to(dtype)


def deviations(clean, used, error, key=5):
    draws = Draws(*(np.array(value, np.uint64) for value in (key, 3, 1)))
    expected, allowed = expected_values(clean.double().numpy(), error, clean.dtype, draws, np.arange(clean.numel()))
    difference = np.abs(used.double().numpy() - expected)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where((difference == 0) | (allowed == np.inf), 0.0, difference / allowed)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: f"{error.kind} {getattr(error, 'scale', '')}")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_value_of_the_kernel_is_within_what_rounding_explains(dtype, error):
    clean = values(dtype)
    used = apply_error_(clean.clone(), error, NoiseStream(5, 3, 1))
    assert deviations(clean, used, error).max() <= 1


def uniform(z, generator):
    return (torch.rand(z.shape, generator=generator) - 0.5) * 12**0.5


OTHER_DRAWS = {
    "another Gaussian": lambda z, g: torch.randn(z.shape, generator=g),
    "uniform": uniform,
    "signs": lambda z, g: z.sign(),
    "truncated at 2": lambda z, g: z.clamp(-2, 2),
    "half of it": lambda z, g: z / 2,
    "other sign": lambda z, g: -z,
    "neighbour's": lambda z, g: z.roll(1),
    "one per 64": lambda z, g: z[::64].repeat_interleave(64),
    "16 levels": lambda z, g: (z * 4).round() / 4,
}


@pytest.mark.parametrize("name", OTHER_DRAWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_other_numbers_of_the_same_size_are_outside(dtype, name):
    from aqnpipe.noise.kernels.gaussian import standard_normal

    clean = values(dtype)
    z = standard_normal(clean.numel(), NoiseStream(5, 3, 1))
    other = OTHER_DRAWS[name](z, torch.Generator().manual_seed(1))
    used = (clean.float() * (1 + 0.05 * other)).to(dtype)
    wrong = deviations(clean, used, RelativeGaussian(scale=0.05)) > 1
    # The truncated draw differs from the right one in 4.6 % of the elements only.
    assert wrong.mean() > (0.03 if name == "truncated at 2" else 0.3)


def test_spacing_is_that_of_the_number_format():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert spacing(np.array([1.0, 1.99, 4.0]), dtype).tolist() == [
            torch.finfo(dtype).eps, torch.finfo(dtype).eps, 4 * torch.finfo(dtype).eps,
        ]  # fmt: skip
        assert spacing(np.array([0.0]), dtype)[0] == pytest.approx(
            torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        )
