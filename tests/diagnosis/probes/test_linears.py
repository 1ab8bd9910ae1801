"""Bias and running sums of a linear: healthy, and with the faults that they are there for."""

import pytest
import torch
from torch import nn

from aqnpipe.diagnosis.probes.linears import biased, summing
from aqnpipe.diagnosis.probes.patterns import ProbeInputs, accumulating_product

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Faulty(nn.Linear):
    """A linear that computes `change(x, weight, bias)`."""

    change = staticmethod(nn.functional.linear)

    def forward(self, x):
        return type(self).change(x, self.weight, self.bias)


def linear_with(change, dtype):
    kind = type("Changed", (Faulty,), {"change": staticmethod(change)})
    return kind(64, 48).to(dtype).requires_grad_(False)


def inputs_of(dtype):
    return ProbeInputs(120 if dtype != torch.float16 else 88, dtype, torch.device("cpu"))


def after_rounding(x, weight, bias):
    return nn.functional.linear(x, weight) + bias


BIAS_FAULTS = {
    "ignored": lambda x, w, b: nn.functional.linear(x, w),
    "added twice": lambda x, w, b: nn.functional.linear(x, w, 2 * b),
    "of the neighbour": lambda x, w, b: nn.functional.linear(x, w, b.roll(1)),
    "in 5 bits": lambda x, w, b: nn.functional.linear(x, w, (b * 16).round() / 16),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("change", [nn.functional.linear, after_rounding])
def test_a_healthy_bias_has_no_wrong_bit(change, dtype):
    (check,) = biased(0, "q_proj", linear_with(change, dtype), inputs_of(dtype))
    assert check.mismatch is None
    assert check.elements_per_channel == 8


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BIAS_FAULTS)
def test_a_wrong_bias_is_found(name, dtype):
    (check,) = biased(0, "q_proj", linear_with(BIAS_FAULTS[name], dtype), inputs_of(dtype))
    assert check.mismatch is not None


def test_a_linear_without_bias_has_no_check():
    assert biased(0, "q_proj", nn.Linear(8, 8, bias=False), inputs_of(torch.float32)) == []


def rounded_after(step, dtype):
    """Return a linear with a running sum that is rounded to `dtype` after every `step` products."""

    def run(x, weight, bias):
        total = torch.zeros(*x.shape[:-1], weight.shape[0])
        for start in range(0, x.shape[-1], step):
            part = x[..., start : start + step].float() @ weight[:, start : start + step].float().T
            total = (total + part).to(dtype).float()
        return total.to(x.dtype) + bias

    return run


def split_in(parts, dtype):
    """Return a linear whose parts of a sum are rounded to `dtype` and then added in float32."""

    def run(x, weight, bias):
        width = x.shape[-1] // parts
        products = [
            x[..., at : at + width].float() @ weight[:, at : at + width].float().T
            for at in range(0, x.shape[-1], width)
        ]
        return sum(part.to(dtype).float() for part in products).to(x.dtype) + bias

    return run


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("step", [1, 4, 8])
def test_running_sums_in_16_bits_are_found(step, dtype):
    checks = summing(0, "q_proj", linear_with(rounded_after(step, dtype), dtype), inputs_of(dtype))
    assert checks[-1].probe == "accumulator"
    assert checks[-1].mismatch is not None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_parts_of_a_split_sum_may_be_rounded(parts, dtype):
    checks = summing(0, "q_proj", linear_with(split_in(parts, dtype), dtype), inputs_of(dtype))
    assert all(check.mismatch is None for check in checks)


def test_running_sums_by_hand():
    product = accumulating_product(4, 3, 64, torch.bfloat16, torch.Generator().manual_seed(0))
    weight = product.weight.weight(torch.zeros(3, 64).double())
    x, answer = product.x[2:], product.weight.product(product.x)[2:]
    assert (x @ weight.T).equal(answer)
    assert answer.abs().eq(44).all()
    # The unit in the last place of 2048 in bfloat16 is 16.
    assert x.abs().max() == 2048
