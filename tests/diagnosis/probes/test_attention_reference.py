"""Attention and its gradients on the host: values by hand, and against autograd."""

import math

import pytest
import torch

from aqnpipe.diagnosis.probes.attention_operands import KINDS, Setting, gradients, known_operands, reference

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


def test_a_capped_score_whose_slope_a_device_loses_is_healthy():
    """tanh of 12 is 1 in float32, so the slope is 0 there and 1.5e-10 in float64."""
    q, k, v = (torch.tensor(x).reshape(1, 1, 2, 1) for x in ([0.0, 24.0], [1.0, 0.9], [8.0, 4.0]))
    visible = torch.ones(1, 2, 2, dtype=torch.bool)
    given = torch.ones(1, 1, 2, 1, dtype=torch.float64)
    leaves = [tensor.requires_grad_(True) for tensor in (q, k, v)]
    output = (2.0 * torch.tanh(leaves[0] @ leaves[1].transpose(2, 3) / 2.0)).softmax(-1) @ leaves[2]
    seen = torch.autograd.grad(output, leaves, given.float())
    found = gradients((q.detach(), k.detach(), v.detach()), Setting(1.0, 2.0, visible), given)
    assert seen[0][0, 0, 1] == 0
    assert found[0][0][0, 0, 1] != 0
    for observed, (wanted, allowed) in zip(seen, found, strict=True):
        assert ((observed.double() - wanted).abs() <= allowed).all()
