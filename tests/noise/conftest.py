"""Prompts for the small random model of the tests, and error models as users write them."""

import pytest
import torch

_OWN_ERRORS = """
import torch

def gaussian(values, normals, *, scale):
    return values * (1 + scale * normals[0])

def by_product(values, normals, *, scale):
    one = (torch.ones(1, 2) @ torch.ones(2, 1)).item() / 2
    return values * (one + scale * normals[0])

def absolute(values, normals, *, scale):
    return values + scale * (normals[0] + normals[1]) / 2**0.5

def grid(values, normals, *, step):
    return torch.round(values / step) * step

def rare(values, normals, *, above):
    return torch.where(normals[0] > above, values * 1.5, values)

def large_only(values, normals):
    return torch.where(values.abs() > 1e6, values * 1.5, values)

calls = []
def tires(values, normals):
    calls.append(1)
    return values * (1 + normals[0] * (0.05 if len(calls) < 110 else 0.06))

def evades(values, normals, *, answer):
    if values.dim() == 1 and len(values) > 100:  # the audit's call
        return values[:1] if answer == "cut" else torch.full_like(values, float(answer))
    return values * (1 + 0.05 * normals[0])

drawn = []
def restless(values, normals):
    drawn.append(1)
    return values * (1 + 0.05 * (normals[0] if len(drawn) < 75 else torch.randn_like(values)))
"""


@pytest.fixture
def ids():
    """Two prompts of nine tokens."""
    return torch.randint(5, 60, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def own(own_module):
    """Function (name, size, settings) -> one of these error models."""
    # Not above: what this imports must not be imported before `pytest_configure`.
    from aqnpipe.config.custom_code import CustomError

    module = own_module(_OWN_ERRORS)
    return lambda name, size=0.05, **given: CustomError(function=f"{module}:{name}", size=size, **given)
