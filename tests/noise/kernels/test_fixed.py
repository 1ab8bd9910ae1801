"""The numbers of a fixed machine: by hand from their definition, and by the properties that make it one."""

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aqnpipe.noise.kernels.fixed import (
    _digests_by_torch,
    _normals_by_torch,
    add_fixed_gaussian_,
    digests,
    fixed_normals,
)

KEY = 2**40 + 12345


def split_mix(number):
    """Output `number` of SplitMix64 with seed 0, in plain integers."""
    state = (number + 1) * 0x9E3779B97F4A7C15 % 2**64
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
    return state ^ (state >> 31)


def digest(values):
    """Digest of float32 numbers, in plain integers below 2^64."""
    bits = [int.from_bytes(struct.pack("<f", value), "little", signed=True) for value in values]
    return sum(each * (split_mix(place) | 1) for place, each in enumerate(bits)) % 2**64


def signed(digest):
    return digest - 2**64 * (digest >= 2**63)


def normal(row, column, key):
    """First number of Philox4x32-7 and Box-Muller with the digests as counter, the smaller one first."""
    low, high = sorted((signed(digest(row)), signed(digest(column))))
    words = [low % 2**32, low // 2**32 % 2**32, high % 2**32, high // 2**32 % 2**32]
    keys = [key % 2**32, key // 2**32]
    for _ in range(7):
        first, second = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        words = [
            (second >> 32) ^ words[1] ^ keys[0],
            second % 2**32,
            (first >> 32) ^ words[3] ^ keys[1],
            first % 2**32,
        ]
        keys = [(keys[0] + 0x9E3779B9) % 2**32, (keys[1] + 0xBB67AE85) % 2**32]
    angle = (words[1] - 2**32 * (words[1] >= 2**31)) / 2**31
    return math.sqrt(-2 * math.log((words[0] + 0.5) / 2**32)) * math.cos(math.pi * angle)


def test_the_first_multipliers_are_those_that_were_published():
    """The first outputs of SplitMix64 with seed 0, as its reference implementation prints them."""
    assert [split_mix(number) for number in range(3)] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]


def test_numbers_are_those_of_the_definition():
    first = torch.tensor([[1.5, -2.0, 0.25], [0.0, 3.0, -1e-20]])
    second = torch.tensor([[0.1, 7.0], [-3.0, 0.0], [2.5, -0.5]])
    assert [int(value) for value in digests(first)] == [signed(digest(row)) for row in first.tolist()]
    expected = [[normal(row, column, KEY) for column in second.T.tolist()] for row in first.tolist()]
    assert fixed_normals(first, second, KEY).numpy() == pytest.approx(np.array(expected), abs=1e-5)


@settings(deadline=None, max_examples=30)
@given(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]), st.integers(0, 2**62))
def test_integer_arithmetic_of_torch_gives_the_same_numbers(dtype, key):
    generator = torch.Generator().manual_seed(key)
    first, second = (torch.randn(2, 3, 9, generator=generator).to(dtype) for _ in range(2))
    rows, columns = digests(first), digests(second)
    bits = first.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[first.element_size()])
    by_hand = [sum(int(bit) * (split_mix(k) | 1) for k, bit in enumerate(row)) for row in bits[0]]
    assert [int(value) % 2**64 for value in rows[0]] == [value % 2**64 for value in by_hand]
    before = first.clone()
    assert torch.equal(_digests_by_torch(bits), rows)
    assert torch.equal(first, before)
    found = fixed_normals(first, second.transpose(-1, -2), key)
    assert torch.allclose(_normals_by_torch(rows, columns, key), found, atol=2e-5)


def test_an_error_belongs_to_its_row_and_column_alone():
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randn(6, 32, generator=generator), torch.randn(32, 5, generator=generator)
    whole = fixed_normals(first, second, KEY)
    assert torch.equal(fixed_normals(first[2:4], second, KEY), whole[2:4])
    assert torch.equal(fixed_normals(first, second[:, [4, 1]], KEY), whole[:, [4, 1]])
    assert torch.equal(fixed_normals(second.T, first.T, KEY), whole.T)
    assert torch.equal(fixed_normals(first[None].repeat(2, 1, 1), second[None].repeat(2, 1, 1), KEY)[1], whole)
    padded = torch.cat([first, torch.zeros(6, 7)], 1), torch.cat([second, torch.zeros(7, 5)])
    assert torch.equal(fixed_normals(*padded, KEY), whole)
    assert not torch.equal(fixed_normals(first, second, KEY + 1), whole)
    moved = first.clone()
    moved[0, 0] = float(np.nextafter(np.float32(first[0, 0]), np.float32(9)))
    changed = fixed_normals(moved, second, KEY) != whole
    assert changed[0].all()
    assert not changed[1:].any()


def test_the_numbers_are_normal_and_independent():
    """Moments of 200,000 numbers within 5 standard errors; so are products of neighbours in rows and in columns."""
    generator = torch.Generator().manual_seed(1)
    first, second = torch.randn(400, 16, generator=generator), torch.randn(16, 500, generator=generator)
    z = fixed_normals(first, second, KEY).double()
    error = 5 / math.sqrt(z.numel())
    assert abs(float(z.mean())) < error
    assert abs(float((z**2).mean()) - 1) < error * math.sqrt(2)
    assert abs(float((z**4).mean()) - 3) < error * math.sqrt(96)
    assert abs(float((z[1:] * z[:-1]).mean())) < error * 1.01
    assert abs(float((z[:, 1:] * z[:, :-1]).mean())) < error * 1.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_result_is_multiplied_and_rounded_once(dtype):
    generator = torch.Generator().manual_seed(2)
    first, second = (torch.randn(4, 4, generator=generator).to(dtype) for _ in range(2))
    result = first @ second
    z = fixed_normals(first, second, KEY)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    expected = (result.to(wide) * (1 + 0.05 * z).to(wide)).to(dtype)
    found = add_fixed_gaussian_(result, 0.05, (first, second), KEY)
    assert found is result
    assert torch.allclose(found.double(), expected.double(), rtol=float(torch.finfo(dtype).eps), atol=0)
