"""A user's own error model, recomputed from sampled elements: what its kernel used agrees, other numbers do not."""

import numpy as np
import pytest
import torch

from aqnpipe.config.custom_code import CustomError, source_digest
from aqnpipe.noise.audit.expected_values import deviations, expected_values
from aqnpipe.noise.audit.random_numbers import Draws
from aqnpipe.noise.kernels.custom import add_custom_
from aqnpipe.noise.kernels.stream import NoiseStream

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


def deviations_of(clean, used, error, elements):
    draws = Draws.of(5, 3, 1)
    flat, changed = (tensor.double().flatten().numpy()[elements] for tensor in (clean, used))
    expected, allowed = expected_values(flat, error, clean.dtype, draws, elements)
    return deviations(flat, changed, expected, allowed, clean.dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("name", "draws"), [("lognormal", 1), ("steps", 1), ("products", 3)])
def test_every_value_of_the_kernel_is_within_what_rounding_explains(own, name, draws, dtype):
    clean = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0)).to(dtype)
    error = own(name, draws)
    used = add_custom_(clean.clone(), error, NoiseStream(5, 3, 1))
    assert deviations_of(clean, used, error, np.arange(0, clean.numel(), 3)).max() <= 1


@pytest.mark.parametrize("other", [NoiseStream(6, 3, 1), NoiseStream(5, 4, 1), NoiseStream(5, 3, 2)])
def test_numbers_of_another_key_call_or_stream_are_found(own, other):
    clean = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    used = add_custom_(clean.clone(), own("lognormal"), other)
    assert (deviations_of(clean, used, own("lognormal"), np.arange(1024)) > 1).mean() > 0.99


@pytest.mark.parametrize("name", ["rows", "first"])
def test_a_function_that_is_not_elementwise_contradicts_itself(own, name):
    clean = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    used = add_custom_(clean.clone(), own("rows"), NoiseStream(5, 3, 1))
    assert (deviations_of(clean, used, own(name), np.arange(0, 1024, 7)) > 1).mean() > 0.9
