"""Kernels stay within the rounding that the audit allows; other distributions of the same size do not.

Of several random numbers, the audit takes those that explain a result.
"""

import numpy as np
import pytest
import torch

from aqnpipe.config.custom_code import CustomError, source_digest
from aqnpipe.config.noise import AbsoluteGaussian, MantissaTruncation, RelativeGaussian, SystematicBias
from aqnpipe.noise.kernels.error_models import apply_error_
from aqnpipe.noise.kernels.gaussian import NoiseStream, standard_normal
from aqnpipe.proof.comparison import best_explained, deviations, expected_values, spacing
from aqnpipe.proof.random_numbers import Draws

SOURCE = NoiseStream(5, 3, 1)
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


def deviations_of(clean, used, error, elements=slice(None)):
    numbers = np.arange(clean.numel())[elements]
    flat, changed = (tensor.double().flatten().numpy()[elements] for tensor in (clean, used))
    expected, allowed = expected_values(flat, error, clean.dtype, Draws.of(*SOURCE), numbers)
    return deviations(flat, changed, expected, allowed, clean.dtype)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: f"{error.kind} {getattr(error, 'scale', '')}")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_value_of_the_kernel_is_within_what_rounding_explains(dtype, error):
    clean = values(dtype)
    used = apply_error_(clean.clone(), error, SOURCE)
    assert deviations_of(clean, used, error).max() <= 1


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
    clean = values(dtype)
    z = standard_normal(clean.numel(), SOURCE)
    other = OTHER_DRAWS[name](z, torch.Generator().manual_seed(1))
    used = (clean.float() * (1 + 0.05 * other)).to(dtype)
    wrong = deviations_of(clean, used, RelativeGaussian(scale=0.05)) > 1
    # The truncated draw differs from the right one in 4.6 % of the elements only.
    assert wrong.mean() > (0.03 if name == "truncated at 2" else 0.3)


def test_a_number_that_cannot_be_compared_is_wrong_unless_it_was_none_before():
    largest = torch.finfo(torch.float16).max
    clean = np.array([1, 1, 1, 1, largest, largest, -largest, np.nan])
    used = np.array([1, 3, np.nan, 1, np.inf, 1, np.inf, np.nan])
    expected = np.array([1, 2, 2, np.nan, largest, largest, -largest, np.nan])
    allowed = np.array([0, 0.5, 0.5, 0.5, np.inf, np.inf, np.inf, np.inf])
    found = deviations(clean, used, expected, allowed, torch.float16)
    assert found.tolist() == [0, 2, np.inf, np.inf, 0, np.inf, np.inf, 0]


@pytest.mark.parametrize(("value", "is_large"), [(1.0, False), (-3.4e38, True), (np.nan, False)])
def test_only_near_the_largest_number_may_a_result_be_infinite(value, is_large):
    draws, elements = Draws.of(5, 3, 1), np.array([0])
    _, allowed = expected_values(np.array([value]), SystematicBias(scale=0.01), torch.float32, draws, elements)
    assert (allowed[0] == np.inf) == is_large


def test_spacing_is_that_of_the_number_format():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert spacing(np.array([1.0, 1.99, 4.0]), dtype).tolist() == [
            torch.finfo(dtype).eps, torch.finfo(dtype).eps, 4 * torch.finfo(dtype).eps,
        ]  # fmt: skip
        assert spacing(np.array([0.0]), dtype)[0] == pytest.approx(
            torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        )


# -- a user's own error: what its kernel used agrees, other numbers do not --------------------------------------------

CODE = """
import torch

def lognormal(values, normals):
    return values * torch.exp(0.3 * normals[0])

def steps(values, normals):
    return values * (1 + torch.floor(20 * torch.special.ndtr(normals[0])) / 100)

def products(values, normals):
    return values + normals[0] * normals[1] * normals[2]

def rows(values, normals):
    return values + values.abs().amax(-1, keepdim=True) * normals[0]

def first(values, normals):
    return values[:1]
"""


@pytest.fixture
def own(own_module):
    module = own_module(CODE)
    return lambda name, draws=1: CustomError(
        function=f"{module}:{name}", draws=draws, size=(0, 10), source_sha256=source_digest(f"{module}:{name}")
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "draws"), [("lognormal", 1), ("steps", 1), ("products", 3)])
def test_every_value_of_a_users_own_error_is_within_what_rounding_explains(own, name, draws, dtype):
    clean = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0)).to(dtype)
    error = own(name, draws)
    used = apply_error_(clean.clone(), error, SOURCE)
    assert deviations_of(clean, used, error, slice(None, None, 3)).max() <= 1


@pytest.mark.parametrize("other", [NoiseStream(6, 3, 1), NoiseStream(5, 4, 1), NoiseStream(5, 3, 2)])
def test_numbers_of_another_key_call_or_stream_are_found(own, other):
    clean = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    used = apply_error_(clean.clone(), own("lognormal"), other)
    assert (deviations_of(clean, used, own("lognormal")) > 1).mean() > 0.99


@pytest.mark.parametrize("name", ["rows", "first"])
def test_a_function_that_is_not_elementwise_contradicts_itself(own, name):
    clean = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    used = apply_error_(clean.clone(), own("rows"), SOURCE)
    assert (deviations_of(clean, used, own(name), slice(None, None, 7)) > 1).mean() > 0.9


# -- several random numbers ----------------------------------------------------------------------------------------


def columns(found_expected, *, wrong=0, requested=1.0, found=1.0):
    return {
        "wrong": wrong,
        "found_expected": found_expected,
        "requested_squares": requested,
        "found_squares": found,
    }


EXACT, NEAR, FAR, WRONG = columns(1.0), columns(0.7), columns(-0.2), columns(1.0, wrong=3)


@pytest.mark.parametrize(
    ("tried", "chosen"),
    [
        ([FAR, NEAR, EXACT, FAR], EXACT),
        ([FAR, NEAR, FAR], NEAR),
        ([WRONG, FAR], FAR),
        ([WRONG, columns(0.5, wrong=1)], WRONG),
        # An error without random numbers has no size to compare.
        ([columns(0.0, requested=0.0), EXACT], columns(0.0, requested=0.0)),
    ],
)
def test_the_numbers_that_explain_a_result_are_taken(tried, chosen):
    assert best_explained(iter(tried)) == chosen


def test_numbers_behind_those_that_explain_it_are_not_tried():
    tried = iter([FAR, EXACT, NEAR])
    best_explained(tried)
    assert next(tried) is NEAR
