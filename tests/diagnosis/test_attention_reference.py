"""Attention and its gradients on the host: values by hand, and against autograd."""

import math

import pytest
import torch

from aqnpipe.diagnosis.attention_operands import KINDS, known_operands
from aqnpipe.diagnosis.attention_reference import Setting, gradients, reference

CAUSAL = torch.ones(1, 3, 3, dtype=torch.bool).tril()


def operands(*shape):
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randn(*own, generator=generator) for own in shape)


def test_attention_of_two_keys_by_hand():
    q = torch.tensor([[[[0.0], [1.0]]]])
    k = torch.tensor([[[[0.0], [math.log(3.0)]]]])
    v = torch.tensor([[[[8.0], [4.0]]]])
    visible = torch.tensor([[[True, False], [True, True]]])
    expected, bound, weights = reference((q, k, v), Setting(1.0, None, visible))
    torch.testing.assert_close(weights[0, 0], torch.tensor([[1.0, 0.0], [0.25, 0.75]], dtype=torch.float64))
    torch.testing.assert_close(expected[0, 0, :, 0], torch.tensor([8.0, 5.0], dtype=torch.float64))
    assert 0 < bound.max() < 1e-4


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_gradients_are_those_of_autograd(softcap):
    q, k, v = operands((1, 4, 3, 8), (1, 2, 3, 8), (1, 2, 3, 8))
    given = torch.randn(1, 4, 3, 8, generator=torch.Generator().manual_seed(1)).double()
    leaves = [tensor.double().requires_grad_(True) for tensor in (q, k, v)]
    keys, values = (tensor.repeat_interleave(2, 1) for tensor in leaves[1:])
    scores = leaves[0] @ keys.transpose(2, 3) * 0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    output = scores.masked_fill(~CAUSAL.unsqueeze(1), -torch.inf).softmax(-1) @ values
    wanted = torch.autograd.grad(output, leaves, given)
    found = gradients((q, k, v), Setting(0.5, softcap, CAUSAL), given)
    for (gradient, allowed), right in zip(found, wanted, strict=True):
        torch.testing.assert_close(gradient, right)
        assert (allowed < 1e-3).all()


def test_scores_of_the_range_operands_are_exact_and_reach_far_below_the_largest():
    own = tuple(torch.zeros(4, 2, 40, 16, dtype=torch.bfloat16) for _ in range(3))
    visible = torch.ones(4, 40, 40, dtype=torch.bool)
    q, k, v = known_operands(own, 0.25, visible, torch.Generator().manual_seed(0))
    number = KINDS.index("range")
    scores = q[number].double() @ k[number].double().transpose(1, 2) * 0.25
    assert scores.to(torch.bfloat16).double().equal(scores)
    assert scores.min() < -50
    assert (v[number] != 0).sum(-1).eq(1).all()
    expected, bound, _ = reference((q, k, v), Setting(0.25, None, visible))
    # Scores are not rounded, so that 5 % of one exponential is far beyond the error of a healthy device in bfloat16.
    share = (bound / expected.abs())[number][expected[number] != 0]
    assert share.median() < 0.02


def test_an_exponential_that_is_wrong_far_from_the_largest_is_seen():
    own = tuple(torch.zeros(4, 2, 40, 16) for _ in range(3))
    visible = torch.ones(4, 40, 40, dtype=torch.bool)
    q, k, v = known_operands(own, 0.25, visible, torch.Generator().manual_seed(0))
    expected, bound, _ = reference((q, k, v), Setting(0.25, None, visible))
    scores = (q.double() @ k.double().transpose(2, 3)) * 0.25
    shifted = scores - scores.amax(-1, keepdim=True)
    for low, high in ((-2, -1), (-8, -7), (-40, -30)):
        wrong = torch.where((shifted >= low) & (shifted < high), 1.05, 1.0) * shifted.exp()
        found = wrong / wrong.sum(-1, keepdim=True) @ v.double()
        off = ((found - expected).abs() > bound).flatten(1).any(1)
        assert off[KINDS.index("range")], (low, high)
