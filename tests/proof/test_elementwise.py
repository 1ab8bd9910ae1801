"""Recomputed results of softmax, activations and norms against torch's own."""

import numpy as np
import pytest
import torch

from aqnpipe.proof.elementwise import ELEMENTWISE
from aqnpipe.proof.operations import arguments_of
from aqnpipe.proof.recompute import Draw

aten = torch.ops.aten


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def cases(dtype):
    x, gradient = random(5, 3, 16, dtype=dtype), random(5, 3, 16, dtype=dtype, seed=1)
    weight, bias = random(16, dtype=dtype), random(16, dtype=dtype, seed=3)
    masked = torch.where(torch.arange(5)[:, None, None] > 3, float("-inf"), x)
    _, mean, scale = aten.native_layer_norm(x, [16], weight, bias, 1e-5)
    yield "_softmax", (x, -1, False)
    yield "_softmax", (x.transpose(0, 1), 1, False)
    yield "_safe_softmax", (masked, -1)
    yield "silu", (x * 3,)
    yield "gelu", (x.transpose(0, 2),)
    yield "gelu", (x,), {"approximate": "tanh"}
    yield "silu_backward", (gradient, x * 3)
    yield "gelu_backward", (gradient, x)
    yield "gelu_backward", (gradient, x), {"approximate": "tanh"}
    yield "native_layer_norm", (x, [16], weight, bias, 1e-5)
    yield "native_layer_norm", (x, [3, 16], None, None, 1e-5)
    yield "native_layer_norm_backward", (gradient, x, [16], mean, scale, weight, bias, [True, True, True])
    yield "native_layer_norm_backward", (gradient, x, [16], mean, scale, weight, bias, [True, False, True])


def sampled(operator, operands, named, count=64):
    function = getattr(aten, operator).default
    result = function(*operands, **named)
    arguments = arguments_of(function, operands, named, copies_first=False)
    return ELEMENTWISE[operator](arguments, result, Draw(np.random.default_rng(0), count)), result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_recomputed_values_are_those_of_torch(dtype):
    for operator, operands, *named in cases(dtype):
        found, _ = sampled(operator, operands, *(named or [{}]))
        for one in found:
            assert (np.abs(one.found - one.exact) <= one.slack).all(), operator
            # The bound is no excuse: noise of 5 % is beyond it.
            size = np.median(np.abs(one.exact) * 0.05 / (one.slack + 1e-13))
            assert size > (20 if dtype != torch.bfloat16 else 0.3), operator
        assert len(found) == (sum(operands[-1]) if operator == "native_layer_norm_backward" else 1)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_the_gradient_of_a_softmax_is_known_from_its_forward_pass(dim):
    x, gradient = random(4, 6, 8), random(4, 6, 8, seed=1)
    (forward,), result = sampled("_softmax", (x, dim, False), {})
    assert len(forward.exact) % forward.row == 0
    found, _ = sampled("_softmax_backward_data", (gradient, result, dim, torch.float32), {})
    assert (np.abs(found[0].found - found[0].exact) <= found[0].slack).all()
    assert sampled("_softmax_backward_data", (gradient, result.clone(), dim, torch.float32), {})[0] == [None]
