"""Recomputed results of every operator against torch's own, and elements numbered as they lie in memory."""

import numpy as np
import pytest
import torch

from aqnpipe.proof.operations import arguments_of
from aqnpipe.proof.recompute import RECOMPUTED, Draw, numbered_in_order

aten = torch.ops.aten


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def attention(dtype, heads=4, shared=2, **named):
    q, k, v = (random(2, number, 12, 16, dtype=dtype) for number in (heads, shared, shared))
    return (q, k, v, 0.0, True), named


def cases(dtype):
    offsets = torch.tensor([3, 3, 8], dtype=torch.int32)
    mask = torch.zeros(12, 12).masked_fill(torch.ones(12, 12).triu(1).bool(), float("-inf")).to(dtype)
    yield "mm", (random(5, 7, dtype=dtype), random(7, 3, dtype=dtype)), {}
    yield "mm", (random(7, 5, dtype=dtype).T, random(3, 7, dtype=dtype).T), {}
    yield "bmm", (random(2, 5, 7, dtype=dtype), random(2, 7, 3, dtype=dtype)), {}
    yield "mv", (random(5, 7, dtype=dtype), random(7, dtype=dtype)), {}
    yield "dot", (random(7, dtype=dtype), random(7, dtype=dtype, seed=1)), {}
    yield (
        "addmm",
        (random(3, dtype=dtype), random(5, 7, dtype=dtype), random(7, 3, dtype=dtype)),
        {"alpha": 2, "beta": 3},
    )
    yield "baddbmm", (random(2, 5, 3, dtype=dtype), random(2, 5, 7, dtype=dtype), random(2, 7, 3, dtype=dtype)), {}
    yield "_grouped_mm", (random(8, 16, dtype=dtype), random(3, 16, 8, dtype=dtype)), {"offs": offsets}
    yield (
        "convolution",
        (random(2, 4, 9, 8, dtype=dtype), random(6, 2, 3, 2, dtype=dtype), random(6, dtype=dtype)),
        {
            "stride": [2, 1],
            "padding": [1, 0],
            "dilation": [1, 2],
            "transposed": False,
            "output_padding": [0, 0],
            "groups": 2,
        },
    )
    if dtype != torch.float64:
        operands, _ = attention(dtype)
        yield "_scaled_dot_product_flash_attention_for_cpu", operands, {}
        yield "_scaled_dot_product_flash_attention_for_cpu", (*operands[:4], False), {"attn_mask": mask}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_recomputed_values_are_those_of_torch(dtype):
    rng = np.random.default_rng(0)
    for operator, operands, named in cases(dtype):
        if operator == "_grouped_mm" and dtype == torch.float64:
            continue
        function = getattr(aten, operator).default
        result = function(*operands, **named)
        arguments = arguments_of(function, operands, named, copies_first=False)
        (found,) = RECOMPUTED[operator](arguments, result, Draw(rng, 64))
        assert (np.abs(found.found - found.exact) <= found.slack + found.after).all(), operator
        # The bound is no excuse: noise of 5 % is far beyond it in float32, and beyond it on average in bfloat16.
        size = np.median(np.abs(found.exact) * 0.05 / (found.slack + found.after))
        assert size > (20 if dtype != torch.bfloat16 else 0.5), operator


@pytest.mark.parametrize("flushed", [False, True])
def test_a_sum_whose_operands_are_below_the_smallest_normal_number_may_be_zero(flushed):
    """Processors with products of 16 bits flush them; gradients of a loss on a faulty machine were refused for it."""
    one, other = 2e-38 * random(64, 256), random(256, 64, dtype=torch.bfloat16)
    one = one.bfloat16()
    result = torch.where(one.abs() < 1.2e-38, 0.0, one) @ other if flushed else one @ other
    (found,) = RECOMPUTED["mm"]({"self": one, "mat2": other}, result, Draw(np.random.default_rng(0), 4096))
    assert (np.abs(found.found - found.exact) <= found.slack + found.after).all()
    assert found.slack.max() < 1e-35


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shared", [4, 2])
@pytest.mark.parametrize("scale", [1.0, 3.0, 8.0, 40.0])
def test_gradients_of_attention_are_those_of_torch(dtype, shared, scale):
    """With large queries and keys one key has all the weight: gradients are sums of weights that may underflow."""
    (q, k, v, dropout, causal), _ = attention(dtype, shared=shared)
    q, k = scale * q, scale * k
    output, sums = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout, causal)
    gradient = random(2, 4, 12, 16, dtype=dtype, seed=5)
    function = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    operands = (gradient, q, k, v, output, sums, dropout, causal)
    result = function(*operands)
    arguments = arguments_of(function, operands, {}, copies_first=False)
    for _ in range(4):
        recompute = RECOMPUTED["_scaled_dot_product_flash_attention_for_cpu_backward"]
        found = recompute(arguments, result, Draw(np.random.default_rng(0), 32))
        assert len(found) == 3
        for sampled in found:
            assert (np.abs(sampled.found - sampled.exact) <= sampled.slack).all()
    # For scores of the usual size the bound is no excuse for another error.
    values = found[2]
    large = np.abs(values.exact) > 0.1
    share = np.median(np.abs(values.exact[large]) / values.slack[large])
    assert scale > 3 or share > (20 if dtype != torch.bfloat16 else 2)


def test_elements_are_numbered_as_they_lie_in_memory():
    first, second = random(5, 7), random(7, 3)
    transposed = (second.T @ first.T).T
    (found,) = RECOMPUTED["mm"]({"self": first, "mat2": second}, transposed, Draw(np.random.default_rng(0), 64))
    assert np.allclose(transposed.T.reshape(-1).double().numpy()[found.numbers], found.found)
    ordered = numbered_in_order(found, transposed)
    assert np.allclose(transposed.reshape(-1).double().numpy()[ordered.numbers], found.found)


def test_every_known_operator_exists():
    for operator in RECOMPUTED:
        assert hasattr(aten, operator)
