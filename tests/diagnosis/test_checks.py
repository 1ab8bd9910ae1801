"""Tolerances of checks and error bounds, with values worked out by hand."""

import pytest
import torch

from aqnpipe.diagnosis.checks import compare
from aqnpipe.diagnosis.classify import tile_place
from aqnpipe.error_bounds import few_roundings, gamma, linear_bound


def differs(expected, observed, **tolerance):
    return compare("linear", 0, "o_proj", expected, observed, **tolerance).mismatch is not None


def test_without_a_tolerance_one_bit_is_a_mismatch():
    one = torch.ones(3, 2)
    assert not differs(one, one.clone())
    assert not differs(torch.zeros(1, 2), -torch.zeros(1, 2))
    assert differs(one, one + 2.0**-23)


def test_only_elements_beyond_their_bound_count():
    expected, observed = torch.tensor([[1.0, 1.0]]), torch.tensor([[1.25, 1.25]])
    allowed = torch.tensor([[0.25, 0.2]])
    mismatch = compare("monomial", 0, "o_proj", expected, observed, allowed=allowed).mismatch
    assert mismatch.channels.tolist() == [1]
    assert not differs(expected, observed, allowed=0.25)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_are_within_no_tolerance(value):
    assert differs(torch.ones(1, 1), torch.full((1, 1), value), allowed=1e30)


def test_a_quarter_is_never_within_the_tolerance_of_a_norm():
    expected = torch.ones(1, 4, dtype=torch.float64)
    for dtype, largest in ((torch.float32, 5e-7), (torch.float16, 1.1e-3), (torch.bfloat16, 9e-3)):
        assert float(few_roundings(expected, dtype).max()) < largest


def test_gamma_by_hand():
    assert gamma(2, 0.25) == 1.0
    assert gamma(1000) == pytest.approx(1000 * 2**-24, rel=1e-4)
    with pytest.raises(ValueError, match="no bound for 4 terms"):
        gamma(4, 0.25)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_in_any_order_are_within_the_bound(dtype):
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(size, generator=generator).to(dtype) for size in ((5, 300), (7, 300)))
    exact = x.double() @ weight.double().T
    bound = linear_bound(x, weight, None)
    for _ in range(20):
        order = torch.randperm(300, generator=generator)
        total = torch.zeros(5, 7)
        for k in order:
            total = total + x[:, k : k + 1].float() * weight[:, k].float()
        assert ((total.to(dtype).double() - exact).abs() <= bound).all()
    magnitudes = x.double().abs() @ weight.double().abs().T
    assert (bound < 0.01 * magnitudes).all()


def test_tiles_by_hand():
    assert (tile_place([3, 19, 35], 48).width, tile_place([3, 19, 35], 48).offsets) == (16, (3,))
    assert tile_place([3, 35], 64).width == 32
    assert tile_place([3], 48) is None
    assert tile_place(list(range(48)), 48) is None
