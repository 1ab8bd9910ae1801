import math

import pytest
import torch

from aqnpipe.parity import expected
from aqnpipe.parity.expected import AttentionFacts
from aqnpipe.parity.sample import Batch, Sample, batches_of, choose_sample


def test_half_an_ulp_of_bfloat16():
    # bfloat16 has 8 significant bits: between 1 and 2 numbers are 2^-7 apart.
    values = torch.tensor([1.5, 3.0, 0.75], dtype=torch.float64)
    assert expected.half_ulp(values, torch.bfloat16).tolist() == [2.0**-8, 2.0**-7, 2.0**-9]


def test_a_linear_by_hand():
    x, weight = torch.tensor([[1.0, -2.0]]), torch.tensor([[3.0, 4.0]])
    found = expected.linear(x, weight, torch.tensor([0.5]), torch.float32)
    assert found.exact.item() == -4.5
    # Sums: gamma(3) of |x||w| + |b| = 11.5; the result: half of 2^-21, the spacing of float32 between 4 and 8.
    unit = 2.0**-24
    assert found.strict.item() == pytest.approx(3 * unit * 11.5 + 2.0**-22, rel=1e-5)
    assert found.strict < found.loose < found.reduced


def test_correct_results_are_within_the_strict_bound_and_wrong_ones_beyond_the_loose():
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=generator).bfloat16() for shape in ((16, 256), (8, 256)))
    found = expected.linear(x, weight, None, torch.bfloat16)
    right = (x.float() @ weight.float().T).bfloat16().double()
    assert ((right - found.exact).abs() <= found.strict).all()
    assert ((1.5 * right - found.exact).abs() > found.loose).any()


def test_a_rotation_by_hand():
    # One head of two channels at position 1 with frequency pi / 2 is turned by a right angle.
    x, frequency = torch.tensor([[1.0, 0.0]]), torch.tensor([math.pi / 2])
    for interleaved in (False, True):
        found = expected.rotary(x, torch.tensor([1]), frequency, 1.0, 2, torch.float32, interleaved=interleaved)
        assert found.exact[0].tolist() == pytest.approx([0.0, 1.0], abs=1e-7)


def test_attention_by_hand():
    # Equal scores: each token gets the mean of the values up to its own.
    query = torch.zeros(3, 1, 2)
    value = torch.tensor([[[2.0, 0.0]], [[4.0, 0.0]], [[9.0, 3.0]]])
    found = expected.attention(query, query, value, AttentionFacts(scaling=1.0), torch.float32)
    assert found.exact.tolist() == [[2.0, 0.0], [3.0, 0.0], [5.0, 1.0]]
    windowed = expected.attention(query, query, value, AttentionFacts(1.0, window=1), torch.float32)
    assert windowed.exact.tolist() == [[2.0, 0.0], [4.0, 0.0], [9.0, 3.0]]


def test_a_sample_is_a_prefix_of_the_sequences():
    sample = choose_sample([4, 5, 6], 6)
    assert sample.lengths == (4, 2)
    assert sample.row(1, 1) == 5
    assert sample.row(1, 2) is None
    assert sample.row(2, 0) is None
    assert choose_sample([4, 5], 100).num_rows == 9


def test_padding_is_in_no_call_of_a_batch():
    batch = Batch(0, ((5, 6, 7, 8), (9, 10)), "left")
    prefill, decoding = batch.calls(Sample((4, 2)), 1, pad_token=0)
    assert prefill.token_ids.tolist() == [[5, 6, 7], [0, 0, 9]]
    assert prefill.mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    assert torch.stack(prefill.places).T.tolist() == [[0, 0, 0], [0, 1, 1], [0, 2, 2], [1, 2, 4]]
    assert decoding.positions.tolist() == [[3], [1]]
    assert decoding.places[2].tolist() == [3, 5]
    assert decoding.keys[2].tolist() == [0, 1, 2, 3, 4, 5]


def test_batches_keep_the_order():
    batches = batches_of([[1], [2], [3]], 2, "left")
    assert [batch.first_sequence for batch in batches] == [0, 2]
