"""Formats of a cache: bit for bit torch's float8, the int8 of vLLM's kernel, and the audit's own arithmetic."""

import pytest
import torch

from aqnpipe.errors import ModelError
from aqnpipe.noise.kernels.quantization import round_as_cached
from aqnpipe.proof.kv_cache import _rounded

ALL_BFLOAT16 = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
NORMAL = torch.randn(4, 3, 7, 64, generator=torch.Generator().manual_seed(0))


def bits(values):
    """The bits, one pattern for all NaN."""
    values = values.masked_fill(values.isnan(), torch.nan)
    return values.view({2: torch.int16, 4: torch.int32}[values.dtype.itemsize])


def float8(values):
    return values.float().clamp(-448, 448).to(torch.float8_e4m3fn).to(values.dtype)


def random_float32():
    drawn = torch.randint(-(2**31), 2**31, (2**20,), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    return drawn.view(torch.float32)


def near_the_format():
    """Every number of E4M3, the middles between neighbours, and what is one step of float32 beside them."""
    numbers = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = numbers[~numbers.isnan()].sort().values
    middles = torch.cat([numbers, (numbers[1:] + numbers[:-1]) / 2])
    up, down = middles.nextafter(torch.tensor(torch.inf)), middles.nextafter(torch.tensor(-torch.inf))
    return torch.cat([middles, up, down])


@pytest.mark.parametrize("round_fp8", [round_as_cached, _rounded], ids=["machine", "audit"])
@pytest.mark.parametrize("values", [ALL_BFLOAT16, random_float32(), near_the_format(), NORMAL.half()])
def test_fp8_is_torchs_float8_bit_for_bit(round_fp8, values):
    assert torch.equal(bits(round_fp8(values, "fp8")), bits(float8(values)))


def test_fp8_saturates_and_is_idempotent():
    values = torch.tensor([447.0, 449.0, 1e9, -torch.inf, 0.001])
    rounded = round_as_cached(values, "fp8")
    assert rounded.tolist() == [448, 448, 448, -448, 2**-9]
    assert torch.equal(round_as_cached(rounded, "fp8"), rounded)


def test_int8_has_a_scale_for_each_token_and_head():
    values = torch.tensor([[[127.0, -127.0, 0.4, 0.5, -0.5, 1.5, 2.5]], [[1.27, 0.01, 0.004, 0.0, -0.0, 0.0051, 0.5]]])
    # Ties away from 0, as vLLM's kernel; the second head's step is 0.01.
    assert round_as_cached(values, "int8")[0].tolist() == [[127, -127, 0, 1, -1, 2, 3]]
    assert round_as_cached(values, "int8")[1].flatten().tolist() == pytest.approx([1.27, 0.01, 0, 0, 0, 0.01, 0.5])
    assert not round_as_cached(values, "int8").signbit()[1].any(), "an integer has no negative zero"


def vllm_int8(values):
    """vLLM's kernel for int8_per_token_head, line by line in float32, with what attention multiplies."""
    wide = values.float()
    scale = torch.maximum(wide.abs().amax(-1, keepdim=True) / torch.tensor(127.0), torch.tensor(1e-6))
    quotient = wide * (torch.tensor(1.0) / scale)
    quotient = torch.where(quotient >= 0, quotient + 0.5, quotient - 0.5).clamp(-128.0, 127.0)
    return (quotient.to(torch.int8).float() * scale).to(values.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", [1.0, 1e-8, 300.0])
def test_int8_is_vllms_and_the_audits_bit_for_bit(dtype, factor):
    values = (NORMAL * factor).to(dtype)
    values[0, 0] = 0
    rounded = round_as_cached(values, "int8")
    assert torch.equal(bits(rounded), bits(vllm_int8(values)))
    assert torch.equal(bits(rounded), bits(_rounded(values, "int8")))
    # A head that a token makes NaN is NaN as a whole, and no other.
    values[1, 1, 2, 5] = torch.nan
    for found in (round_as_cached(values, "int8"), _rounded(values, "int8")):
        assert found[1, 1, 2].isnan().all()
        assert found.isnan().sum() == values.shape[-1]


@pytest.mark.parametrize("number_format", ["fp8", "int8"])
def test_gradients_pass_straight_through(number_format):
    values = NORMAL.clone().requires_grad_()
    round_as_cached(values, number_format).backward(NORMAL)
    assert torch.equal(values.grad, NORMAL)
    with pytest.raises(ModelError, match=f"{number_format} cache quantization of torch.float64"):
        round_as_cached(NORMAL.double(), number_format)
