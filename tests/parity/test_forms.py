import math

import pytest
import torch

from aqnpipe.parity.forms import AttentionForm, LinearForm, RotaryForm, half_ulp
from aqnpipe.parity.sample import Sample, Token, calls, choose_sample, score


def expected(form, *inputs, dtype=torch.float32, start=0):
    """The results of a form at all channels, of one sequence."""
    rows = len(inputs[0])
    width = form.weight.shape[0] if isinstance(form, LinearForm) else inputs[0].shape[1]
    return form.expected(inputs, torch.arange(start, start + rows), torch.arange(width), dtype)


def test_half_an_ulp_of_bfloat16():
    # bfloat16 has 8 significant bits: between 1 and 2 numbers are 2^-7 apart.
    values = torch.tensor([1.5, 3.0, 0.75], dtype=torch.float64)
    assert half_ulp(values, torch.bfloat16).tolist() == [2.0**-8, 2.0**-7, 2.0**-9]


def test_a_linear_by_hand():
    x, weight = torch.tensor([[1.0, -2.0]]), torch.tensor([[3.0, 4.0]])
    found = expected(LinearForm(weight, torch.tensor([0.5])), x)
    assert found.exact.item() == -4.5
    # Sums: gamma(3) of |x||w| + |b| = 11.5; the result: half of 2^-21, the spacing of float32 between 4 and 8.
    unit = 2.0**-24
    assert found.strict.item() == pytest.approx(3 * unit * 11.5 + 2.0**-22, rel=1e-5)
    assert found.strict < found.loose < found.reduced


def test_correct_results_are_within_the_strict_bound_and_wrong_ones_beyond_the_loose():
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=generator).bfloat16() for shape in ((16, 256), (8, 256)))
    found = expected(LinearForm(weight, None), x, dtype=torch.bfloat16)
    right = (x.float() @ weight.float().T).bfloat16().double()
    assert ((right - found.exact).abs() <= found.strict).all()
    assert ((1.5 * right - found.exact).abs() > found.loose).any()


def test_a_rotation_by_hand():
    # One head of two channels at position 1 with frequency pi / 2 is turned by a right angle.
    x, frequency = torch.tensor([[1.0, 0.0]]), torch.tensor([math.pi / 2])
    for interleaved in (False, True):
        found = expected(RotaryForm(frequency, 1.0, 2, interleaved), x, start=1)
        assert found.exact[0].tolist() == pytest.approx([0.0, 1.0], abs=1e-7)


def test_attention_by_hand():
    # Equal scores: each token gets the mean of the values up to its own.
    query = torch.zeros(3, 2)
    value = torch.tensor([[2.0, 0.0], [4.0, 0.0], [9.0, 3.0]])
    found = expected(AttentionForm(1.0, 2), query, query, value)
    assert found.exact.tolist() == [[2.0, 0.0], [3.0, 0.0], [5.0, 1.0]]
    windowed = expected(AttentionForm(1.0, 2, window=1), query, query, value)
    assert windowed.exact.tolist() == [[2.0, 0.0], [4.0, 0.0], [9.0, 3.0]]


def test_a_sample_is_a_prefix_of_the_sequences():
    sample = choose_sample([4, 5, 6], 6)
    assert sample.lengths == (4, 2)
    assert sample.row(1, 1) == 5
    assert sample.row(1, 2) is None
    assert sample.row(2, 0) is None
    assert choose_sample([4, 5], 100).num_rows == 9


def test_padding_is_in_no_call_of_a_batch():
    prefill, decoding = calls([(5, 6, 7, 8), (9, 10)], 0, "left", 1, pad_token=0)
    assert prefill.token_ids.tolist() == [[5, 6, 7], [0, 0, 9]]
    assert prefill.mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    assert prefill.tokens == (Token(0, 0, 0, 0), Token(0, 1, 0, 1), Token(0, 2, 0, 2), Token(1, 2, 1, 0))
    assert decoding.positions.tolist() == [[3], [1]]
    assert decoding.tokens == (Token(0, 0, 0, 3), Token(1, 0, 1, 1))
    sample = Sample((4, 2))
    assert torch.stack(sample.places(prefill.tokens)).T.tolist() == [[0, 0, 0], [0, 1, 1], [0, 2, 2], [1, 2, 4]]
    assert sample.places(decoding.tokens)[2].tolist() == [3, 5]
    assert sample.positions.tolist() == [0, 1, 2, 3, 0, 1]


def test_sequences_of_a_later_batch_keep_their_numbers():
    (call,) = calls([(5, 6)], 3, "right", 0, pad_token=0)
    assert [token.sequence for token in call.tokens] == [3, 3]


def test_scores_are_of_the_tokens_that_follow():
    logits = torch.zeros(1, 2, 4)
    logits[0, 0, 2] = math.log(3.0)
    found = score(logits, [Token(0, 0, 1, 0), Token(0, 1, 1, 1)], [(), (1, 2)])
    assert found.keys() == {(1, 1)}
    assert found[1, 1] == (pytest.approx(math.log(0.5)), 2)


def test_an_interleaved_rotation_is_that_of_halves_with_its_channels_reordered():
    generator = torch.Generator().manual_seed(0)
    x, frequencies = torch.randn(5, 12, generator=generator), torch.tensor([1.0, 0.25])
    order = torch.tensor([0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11])
    halves = expected(RotaryForm(frequencies, 1.0, 6, False), x[:, order])
    pairs = expected(RotaryForm(frequencies, 1.0, 6, True), x)
    assert torch.equal(pairs.exact[:, order], halves.exact)
    assert torch.equal(pairs.loose[:, order], halves.loose)
    # The last two channels of each head are no pair.
    assert torch.equal(pairs.exact[:, [4, 5, 10, 11]], x[:, [4, 5, 10, 11]].double())
