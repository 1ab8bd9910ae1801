import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from aqnpipe.noise.kernels.gaussian import (
    GROUP,
    ROUNDS,
    NoiseStream,
    _apply_,
    _apply_by_torch_,
    add_absolute_gaussian_,
    add_relative_gaussian_,
    in_memory_order,
    standard_normal,
)

N = 1 << 20
WORD = 1 << 32


def philox(counter, key, rounds=ROUNDS):
    """Philox4x32 in plain Python integers, from the paper's definition."""
    c, k = list(counter), list(key)
    for _ in range(rounds):
        low_high = [divmod(m * word, WORD) for m, word in ((0xD2511F53, c[0]), (0xCD9E8D57, c[2]))]
        (high_0, low_0), (high_1, low_1) = low_high
        c = [high_1 ^ c[1] ^ k[0], low_1, high_0 ^ c[3] ^ k[1], low_0]
        k = [(k[0] + 0x9E3779B9) % WORD, (k[1] + 0xBB67AE85) % WORD]
    return c


def expected_normals(source, groups=1):
    """The first elements by the documented numbering, in double precision."""
    z = np.empty((groups, 4, GROUP // 4))
    key = (source.key % WORD, source.key // WORD)
    for group in range(groups):
        for j in range(GROUP // 4):
            w = philox((group * (GROUP // 4) + j, source.call, source.stream, 0), key)
            for pair in (0, 1):
                radius = math.sqrt(-2 * math.log((w[2 * pair] + 0.5) / WORD))
                signed = w[2 * pair + 1] - WORD if w[2 * pair + 1] >= WORD // 2 else w[2 * pair + 1]
                angle = math.pi * signed / (WORD // 2)
                z[group, 2 * pair, j], z[group, 2 * pair + 1, j] = radius * math.cos(angle), radius * math.sin(angle)
    return torch.from_numpy(z.reshape(-1))


@pytest.mark.parametrize(
    "source", [NoiseStream(0), NoiseStream(2**63 - 1, 7, 3), NoiseStream(123456789012345, 2**32 - 1)]
)
def test_numbers_are_philox_and_box_muller(source):
    z = standard_normal(2 * GROUP, source).double()
    torch.testing.assert_close(z, expected_normals(source, groups=2), rtol=0, atol=3e-6)


def test_the_reference_gives_the_known_answer_of_the_papers_library():
    """Random123's known answers for philox4x32 with ten rounds."""
    assert philox((0, 0, 0, 0), (0, 0), rounds=10) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = (WORD - 1,) * 4
    assert philox(ones, ones[:2], rounds=10) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def test_moments_and_distribution_are_gaussian():
    z = standard_normal(N, NoiseStream(42)).double().numpy()
    bound = 5 / math.sqrt(N)
    assert abs(z.mean()) < bound
    assert abs(z.var() - 1) < bound * math.sqrt(2)
    assert abs(stats.skew(z)) < bound * math.sqrt(6)
    assert abs(stats.kurtosis(z)) < bound * math.sqrt(24)
    assert stats.kstest(z, "norm").pvalue > 1e-6
    # Tails: counts beyond 3 and 4 sigma are binomial.
    for limit in (3.0, 4.0):
        expected = 2 * stats.norm.sf(limit) * N
        assert abs((np.abs(z) > limit).sum() - expected) < 5 * math.sqrt(expected)


def test_squares_of_neighbours_are_independent_too():
    """Box-Muller pairs share a radius and an angle; a wrong pairing shows in the correlation of squares."""
    z = standard_normal(N, NoiseStream(43)).double().numpy()
    for lag in (1, 255, 256, 512, 768, 1023, 1024):
        for values in (z, z**2, np.abs(z)):
            correlation = np.corrcoef(values[:-lag], values[lag:])[0, 1]
            assert abs(correlation) < 5 / math.sqrt(N - lag), lag


@pytest.mark.parametrize(
    "other",
    [NoiseStream(8, 1, 1), NoiseStream(7, 2, 1), NoiseStream(7, 1, 2), NoiseStream(7 + (1 << 32), 1, 1)],
    ids=["key", "call", "stream", "high word of the key"],
)
def test_streams_are_independent_of_each_other(other):
    first, second = (standard_normal(N, source).double().numpy() for source in (NoiseStream(7, 1, 1), other))
    for power in (1, 2):
        assert abs(np.corrcoef(first**power, second**power)[0, 1]) < 5 / math.sqrt(N)


def test_relative_error_is_the_formula():
    y = torch.tensor([2.0, -4.0, 0.0, 8.0])
    z = standard_normal(4, NoiseStream(5))
    torch.testing.assert_close(add_relative_gaussian_(y.clone(), 0.05, NoiseStream(5)), y + 0.05 * y * z)


def test_absolute_error_is_the_formula():
    y = torch.tensor([2.0, -4.0, 0.0, 8.0])
    z = standard_normal(4, NoiseStream(5))
    torch.testing.assert_close(add_absolute_gaussian_(y.clone(), 0.5, NoiseStream(5)), y + 0.5 * z)


@given(numel=st.integers(1, 5000), scale=st.floats(0, 0.9), key=st.integers(0, 2**63 - 1))
@settings(max_examples=50, deadline=None)
def test_length_does_not_change_the_numbers(numel, scale, key):
    y = torch.full((5000,), 3.0)
    whole = add_relative_gaussian_(y.clone(), scale, NoiseStream(key))
    assert torch.equal(add_relative_gaussian_(y[:numel].clone(), scale, NoiseStream(key)), whole[:numel])


@pytest.mark.parametrize("add_", [add_relative_gaussian_, add_absolute_gaussian_])
def test_scale_zero_changes_no_bit(add_):
    y = torch.randn(3000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(add_(y.clone(), 0.0, NoiseStream(1)), y)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_gets_the_error_in_float32_and_one_rounding(dtype):
    n = 70_000  # more than one block
    y = torch.randn(n, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = add_relative_gaussian_(y.float(), 0.05, NoiseStream(2)).to(dtype)
    assert torch.equal(add_relative_gaussian_(y.clone(), 0.05, NoiseStream(2)), expected)


def test_double_precision_keeps_its_digits():
    y = torch.full((2000,), 1 / 3, dtype=torch.float64)
    noised = add_relative_gaussian_(y.clone(), 1e-9, NoiseStream(3))
    error = (noised / y - 1) / 1e-9
    torch.testing.assert_close(error, standard_normal(2000, NoiseStream(3)).double(), rtol=1e-5, atol=1e-5)


def test_a_transposed_tensor_is_noised_in_memory_order_without_a_copy():
    y = torch.ones(50, 40)
    direct = add_relative_gaussian_(y.clone(), 0.05, NoiseStream(4))
    base = y.clone()
    add_relative_gaussian_(base.t(), 0.05, NoiseStream(4))
    assert torch.equal(base, direct)
    assert in_memory_order(base.t()).data_ptr() == base.data_ptr()


def test_a_tensor_with_gaps_is_noised_and_its_surroundings_are_not():
    base = torch.ones(40, 50)
    add_relative_gaussian_(base[:, ::2], 0.05, NoiseStream(4))
    assert (base[:, ::2] != 1).float().mean() > 0.99
    assert (base[:, 1::2] == 1).all()


@settings(deadline=None)
@given(
    rows=st.integers(1, 40),
    left=st.integers(0, 5),
    width=st.sampled_from([1, 3, 64, 300, 1023, 1024, 1025, 2500]),
    right=st.integers(0, 5),
    add_=st.sampled_from([add_relative_gaussian_, add_absolute_gaussian_]),
)
def test_columns_get_the_numbers_of_a_dense_tensor_and_nothing_beside_them_is_touched(rows, left, width, right, add_):
    base = torch.full((rows, left + width + right), 3.0)
    columns = base[:, left : left + width]
    expected = add_(columns.clone(), 0.05, NoiseStream(5, 2))
    assert add_(columns, 0.05, NoiseStream(5, 2)) is columns
    assert torch.equal(columns, expected)
    assert (base[:, :left] == 3).all()
    assert (base[:, left + width :] == 3).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("start", "numel"), [(0, 1), (3, 1023), (1, 1024), (17, 1025), (1024, 4096), (5, 5000)])
def test_nothing_beside_a_part_of_a_buffer_is_touched(dtype, start, numel):
    buffer = torch.ones(8192, dtype=dtype)
    add_relative_gaussian_(buffer[start : start + numel], 0.5, NoiseStream(4))
    assert (buffer[start : start + numel] != 1).float().mean() > 0.95
    assert (buffer[:start] == 1).all()
    assert (buffer[start + numel :] == 1).all()


def test_nan_and_infinity_stay_visible():
    y = torch.tensor([math.nan, math.inf, -math.inf, 1.0])
    noised = add_relative_gaussian_(y.clone(), 0.05, NoiseStream(1))
    assert noised.isnan().tolist() == [True, False, False, False]
    assert noised.isinf().tolist() == [False, True, True, False]


def test_an_empty_tensor_stays_empty():
    assert add_relative_gaussian_(torch.empty(0, 3), 0.05, NoiseStream(1)).shape == (0, 3)


@pytest.mark.parametrize("numel", [1, 1000, 5000, 1_100_000])
@pytest.mark.parametrize("relative", [True, False])
def test_other_devices_compute_the_same_numbers_without_a_kernel(numel, relative):
    source = NoiseStream(2**62 + 12345, 3, 9)
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    by_torch, by_kernel = values.clone(), values.clone()
    _apply_by_torch_(by_torch, 0.5, source, relative)
    _apply_(by_kernel, 0.5, source, relative)
    torch.testing.assert_close(by_torch, by_kernel, rtol=2e-6, atol=2e-5)
    assert not torch.equal(by_torch, values)
