import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aqnpipe.diagnosis.probes.patterns import (
    NORM_INPUT_SCALE,
    Selection,
    accumulating_product,
    exponent_ladder,
    full_mantissa_square,
    integer_product,
    latin_square,
    mantissas,
    norm_gains,
    norm_input,
    selection,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@given(st.integers(1, 200), st.integers(2, 40))
def test_every_channel_carries_every_value_with_both_signs(num_channels, length):
    ladder = 2.0 ** torch.arange(length, dtype=torch.float64)
    square = latin_square(2 * length, num_channels, ladder)
    wanted = torch.cat([-ladder.flip(0), ladder])
    assert torch.equal(square.sort(0).values, wanted.unsqueeze(1).expand(-1, num_channels))


def test_too_few_tokens_are_refused():
    with pytest.raises(ValueError, match="5 tokens cannot hold 3 values with both signs"):
        latin_square(5, 4, torch.ones(3))


@pytest.mark.parametrize("dtype", DTYPES)
def test_ladders_survive_their_dtype(dtype):
    ladder = exponent_ladder(dtype)
    assert torch.equal(ladder.to(dtype).double(), ladder)
    # the MLP probe multiplies by 16 (float16) and divides again
    assert ladder.max() * 16 < torch.finfo(dtype).max
    assert ladder.min() / 16 >= torch.finfo(dtype).tiny


@given(st.integers(1, 300), st.integers(2, 300), st.integers(0, 1))
def test_selection_stays_in_range_and_spreads_evenly(out_features, in_features, skip):
    found = selection(out_features, in_features, skip=skip)
    chosen, signs = found.chosen, found.factors
    assert chosen.min() >= skip
    assert chosen.max() < in_features
    # each input is copied as often as any other, within one
    counts = torch.bincount(chosen, minlength=in_features)[skip:]
    assert counts.max() - counts.min() <= 1
    assert set(signs.tolist()) <= {1.0, -1.0}


def test_selection_weight_by_hand():
    weight = Selection(torch.tensor([2, 0]), torch.tensor([-1.0, 0.5])).weight(torch.empty(2, 3))
    assert weight.tolist() == [[0.0, 0.0, -1.0], [0.5, 0.0, 0.0]]


@given(st.integers(1, 4000), st.integers(1, 6))
def test_norm_inputs_have_their_mean_square_exactly(num_channels, num_tokens):
    x = norm_input(num_tokens, num_channels).float()
    assert (x.square().mean(-1) == NORM_INPUT_SCALE**2).all()


def test_norm_channels_carry_the_largest_and_the_smallest_value():
    x = norm_input(120, 100).abs() / NORM_INPUT_SCALE
    assert (x.amax(0) == 4.0).all()
    assert (x.amin(0) == 2.0**-5).all()


def test_three_turns_give_every_channel_every_gain():
    gains = torch.stack([norm_gains(7, turn) for turn in range(3)])
    assert torch.equal(gains.sort(0).values, torch.tensor([[2.0**-8], [1.0], [2.0**8]]).double().expand(3, 7))


def operands(product):
    weight = product.weight.weight(torch.zeros(product.weight.num_outputs, product.x.shape[1]).double())
    return product.x, weight, product.weight.product(product.x)


def cancelling(in_features, dtype):
    """Return x, weight and result of the first half of the rows of sums that need wide accumulators."""
    made = accumulating_product(24, 6, in_features, dtype, torch.Generator().manual_seed(0))
    x, weight, result = operands(made)
    return x[:12], weight, result[:12]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_features", [5, 96, 1000])
def test_integer_products_are_exact_in_the_dtype_and_not_trivial(dtype, in_features):
    x, weight, product = operands(integer_product(20, 30, in_features, dtype, torch.Generator().manual_seed(0)))
    assert torch.equal(product, x @ weight.T)
    assert torch.equal(product.to(dtype).double(), product)
    # partial sums are bounded by the sum of magnitudes
    assert (x.abs() @ weight.abs().T).max() <= {torch.bfloat16: 256, torch.float16: 2048}.get(dtype, 2**24)
    # float32 sums do not fit fewer bits
    if dtype == torch.float32:
        assert not torch.equal(product.bfloat16().double(), product)


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float32, 24), (torch.bfloat16, 8), (torch.float16, 11)])
def test_mantissas_use_every_bit_and_no_more(dtype, bits):
    values = mantissas((2000,), bits, torch.Generator().manual_seed(0))
    assert torch.equal(values.to(dtype).double(), values)
    fractions = ((values - 1) * 2 ** (bits - 1)).long()
    for bit in range(bits - 1):
        # a fair coin thrown 2000 times, six standard deviations
        assert ((fractions >> bit) & 1).double().mean() == pytest.approx(0.5, abs=0.067)


def test_full_mantissa_squares_keep_the_largest_value_on_every_channel():
    ladder = exponent_ladder(torch.float32)
    square = full_mantissa_square(4 * len(ladder), 30, ladder, 24, seed=0)
    assert (square.abs().amax(0) == ladder.max()).all()
    assert torch.equal(square[: len(ladder)].abs(), latin_square(2 * len(ladder), 30, ladder)[: len(ladder)].abs())
    odd = square[len(ladder) : 2 * len(ladder)].abs()
    assert (odd.log2() != odd.log2().round()).double().mean() > 0.9


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_features", [8, 97, 1000, 18944])
def test_cancelling_sums_need_wide_accumulators_only(dtype, in_features):
    x, weight, product = cancelling(in_features, dtype)
    assert torch.equal(product, x @ weight.T)
    assert torch.equal(product.to(dtype).double(), product)
    # in any order: no partial sum exceeds the sum of magnitudes, and all are integers
    assert (x.abs() @ weight.abs().T).max() < 2**24
    terms = (x * weight[0]).to(dtype)
    narrow = torch.zeros(12, dtype=torch.bfloat16 if dtype == torch.float32 else dtype)
    for k in range(in_features):
        narrow = (narrow.float() + terms[:, k].float()).to(narrow.dtype)
    assert not torch.equal(narrow.double(), product[:, 0])


def test_parts_of_whole_blocks_of_a_cancelling_sum_are_small():
    x, weight, _ = cancelling(96, torch.bfloat16)
    parts = (x * weight[0]).reshape(12, 4, 24).sum(-1)
    assert torch.equal(parts.bfloat16().double(), parts)
