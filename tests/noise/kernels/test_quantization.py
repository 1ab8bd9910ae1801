from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from safetensors.torch import load_file

from aqnpipe.errors import ConfigError, ModelError
from aqnpipe.noise.kernels.quantization import (
    MANTISSA_BITS,
    fake_quantize,
    round_to_e2m1,
    truncate_mantissa_,
)

TORCHAO_REFERENCE = load_file(Path(__file__).with_name("torchao_reference.safetensors"))
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FORMATS = ["mxfp4", "nvfp4"]
ALL_FORMATS = [*FORMATS, "fp8", "fp8_block"]
MXFP4_EXPONENTS = [(torch.float32, (-149, 128)), (torch.bfloat16, (-133, 128)), (torch.float16, (-24, 16))]
NVFP4_EXPONENTS = [(torch.float32, (-105, 128)), (torch.bfloat16, (-105, 128)), (torch.float16, (-24, 16))]
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

in_mxfp4, in_nvfp4, in_fp8, in_fp8_block = (partial(fake_quantize, number_format=name) for name in ALL_FORMATS)

finite_blocks = arrays(np.float32, (2, 32), elements=st.floats(width=32, allow_nan=False, allow_infinity=False))
tame_blocks = arrays(np.float32, (2, 32), elements=st.floats(-1e6, 1e6, width=32))


def truncate_mantissa(tensor, mantissa_bits):
    return truncate_mantissa_(tensor.clone(), mantissa_bits)


def bits(tensor):
    return tensor.view(INTEGERS[tensor.dtype.itemsize])


def assert_same_bits(actual, expected):
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert torch.equal(bits(actual), bits(expected))


def block(*values, length=32, dtype=torch.float32):
    tensor = torch.zeros(length, dtype=dtype)
    tensor[: len(values)] = torch.tensor(values)
    return tensor


def random_tensor(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# Mantissa truncation


@pytest.mark.parametrize(
    ("value", "mantissa_bits", "expected"),
    [
        (1.75, 1, 1.5),
        (-1.75, 1, -1.5),
        (1.75, 0, 1.0),
        (1.99, 0, 1.0),
        (6.9, 2, 6.0),
        (-0.1, 3, -0.09375),  # -1.6 * 2^-4 -> -1.5 * 2^-4
        (1.5, 1, 1.5),
        (0.0, 0, 0.0),
        (float("inf"), 0, float("inf")),
        (float("-inf"), 3, float("-inf")),
    ],
)
@pytest.mark.parametrize("dtype", MANTISSA_BITS)
def test_truncation_of_hand_computed_values(dtype, value, mantissa_bits, expected):
    assert truncate_mantissa(torch.tensor(value, dtype=dtype), mantissa_bits).item() == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_truncation_of_every_16_bit_number_to_every_length(dtype):
    # Reference: arithmetic on significands and exponents in float64. Every number is a multiple of its ulp 2^(e - own
    # bits), e at least the least normal exponent; truncation keeps the multiples of 2^(e - kept bits).
    tensor = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    finite = tensor[tensor.isfinite()]
    values = finite.double().numpy()
    exponent = np.maximum(np.frexp(values)[1] - 1, np.log2(torch.finfo(dtype).smallest_normal).astype(int))
    for mantissa_bits in range(MANTISSA_BITS[dtype]):
        expected = np.ldexp(np.trunc(np.ldexp(values, mantissa_bits - exponent)), exponent - mantissa_bits)
        assert_same_bits(truncate_mantissa(finite, mantissa_bits), torch.from_numpy(expected).to(dtype))
        truncated = truncate_mantissa(tensor, mantissa_bits)
        assert torch.equal(truncated.isnan(), tensor.isnan())
        assert torch.equal(truncated.isinf(), tensor.isinf())


@settings(deadline=None)
@given(finite_blocks, st.integers(0, 22))
def test_truncation_shrinks_by_less_than_one_unit_of_what_is_kept(values, mantissa_bits):
    tensor = torch.from_numpy(values)
    truncated = truncate_mantissa(tensor, mantissa_bits)
    exponent = np.maximum(np.frexp(values)[1] - 1, -126)
    loss = (tensor.double().abs() - truncated.double().abs()).numpy()
    assert (loss >= 0).all()
    assert (loss < np.ldexp(1.0, exponent - mantissa_bits)).all()
    assert torch.equal(truncated.signbit(), tensor.signbit())
    assert_same_bits(truncate_mantissa(truncated, mantissa_bits), truncated)
    assert_same_bits(truncate_mantissa(-tensor, mantissa_bits), -truncated)


@settings(deadline=None)
@given(finite_blocks, st.integers(0, 22), st.integers(0, 22))
def test_truncating_twice_is_truncating_to_the_shorter(values, first, second):
    tensor = torch.from_numpy(values)
    twice = truncate_mantissa(truncate_mantissa(tensor, first), second)
    assert_same_bits(twice, truncate_mantissa(tensor, min(first, second)))


def test_float64_truncated_to_the_bits_of_float32_is_float32_where_exact():
    values = random_tensor(1000).double()
    assert_same_bits(truncate_mantissa(values, 23), values)


def test_truncation_changes_a_strided_view_in_place_and_nothing_else():
    tensor = torch.full((4, 4), 1.75)
    column = tensor[:, 1]
    assert truncate_mantissa_(column, 0) is column
    assert torch.equal(tensor, torch.tensor([1.75, 1.0, 1.75, 1.75]).expand(4, 4))


def test_truncation_passes_the_gradient_straight_through():
    tensor = random_tensor(8).requires_grad_()
    weight = random_tensor(8, seed=1)
    (truncate_mantissa(tensor, 2) * weight).sum().backward()
    assert torch.equal(tensor.grad, weight)


def test_truncating_what_autograd_saved_is_an_error():
    saved = torch.ones(3, requires_grad=True).exp()
    truncate_mantissa_(saved, 2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()


@pytest.mark.parametrize(("dtype", "mantissa_bits"), [(torch.float32, 23), (torch.bfloat16, 7), (torch.float16, -1)])
def test_truncation_to_no_fewer_bits_is_refused(dtype, mantissa_bits):
    with pytest.raises(ConfigError, match=f"mantissa_bits is {mantissa_bits}, expected 0 to"):
        truncate_mantissa_(torch.ones(1, dtype=dtype), mantissa_bits)


def test_truncation_of_integers_is_refused():
    with pytest.raises(ModelError, match=r"torch\.int64, expected one of torch\.float64"):
        truncate_mantissa_(torch.ones(1, dtype=torch.int64), 1)


# Elements


@pytest.mark.parametrize(
    ("tie", "expected"),
    [(0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0)],
)
@pytest.mark.parametrize("sign", [1, -1])
def test_every_tie_of_e2m1_goes_to_the_even_mantissa(sign, tie, expected):
    grid = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    below = max(value for value in grid if value < tie)
    above = min(value for value in grid if value > tie)
    values = sign * torch.tensor([np.nextafter(np.float32(tie), 0), tie, np.nextafter(np.float32(tie), 9)])
    assert_same_bits(round_to_e2m1(values), sign * torch.tensor([below, expected, above]))


def test_e2m1_saturates_and_keeps_nan_and_the_sign_of_zero():
    values = torch.tensor([6.0, 7.0, 1e30, float("inf"), -7.0, float("-inf"), -0.0, -0.2, float("nan")])
    expected = torch.tensor([6.0, 6.0, 6.0, 6.0, -6.0, -6.0, -0.0, -0.0])
    assert_same_bits(round_to_e2m1(values)[:-1], expected)
    assert round_to_e2m1(values)[-1].isnan()


def test_e2m1_rounds_as_ml_dtypes_does():
    steps = torch.arange(-8192, 8193) / 1024  # every tie, and all else between -8 and 8 on a grid of 2^-10
    exponents = torch.randint(-149, 128, (20000,), generator=torch.Generator().manual_seed(1))
    spread = random_tensor(20000) * torch.exp2(exponents)
    values = torch.cat([steps, spread[spread.isfinite()]])
    expected = values.numpy().astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert_same_bits(round_to_e2m1(values), torch.from_numpy(expected))


# Formats: values worked out by hand


@pytest.mark.parametrize("dtype", DTYPES)
def test_mxfp4_of_hand_computed_blocks(dtype):
    # max 7: scale 2^(2-2) = 1, and 7 saturates. max 8: scale 2. max 0.5: scale 2^(-1-2) = 1/8.
    blocks = torch.stack(
        [
            block(7, 5, 3.5, 2.5, -1.75, 0.25, 0.3125, -0.75),
            block(8, 7, 5, -3.5, 0.5, 0.625),
            block(-0.5, 0.25, 0.03125, 0.046875),
        ]
    )
    expected = torch.stack(
        [
            block(6, 4, 4, 2, -2, 0, 0.5, -1),
            block(8, 8, 4, -4, 0, 1),
            block(-0.5, 0.25, 0, 0.0625),
        ]
    )
    assert_same_bits(in_mxfp4(blocks.to(dtype)), expected.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nvfp4_of_hand_computed_blocks(dtype):
    # max|tensor| = 2688 = 448 * 6: tensor scale 1. Block scales max/6: 448; 1; 1.0625, which E4M3 rounds to 1, so 6.375
    # saturates; 1.1875, a tie that goes to 1.25; 2^-7, which stays at E4M3's least normal number 2^-6.
    blocks = torch.stack(
        [
            block(2688, 1000, -224, length=16),
            block(6, 5, -2.5, 0.25, length=16),
            block(6.375, 1.0, length=16),
            block(7.125, -5.0, length=16),
            block(0.046875, 0.0078125, 0.00390625, length=16),
        ]
    )
    expected = torch.stack(
        [
            block(2688, 896, -224, length=16),
            block(6, 4, -2, 0, length=16),
            block(6, 1, length=16),
            block(7.5, -5, length=16),
            block(0.046875, 0.0078125, 0, length=16),
        ]
    )
    assert_same_bits(in_nvfp4(blocks.to(dtype)), expected.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_of_hand_computed_tensors(dtype):
    # max 448: scale 1. Spacing 32 from 256 (304 and 336 are ties), 1/8 from 1, 2^-9 below 2^-6; half of that is a tie.
    tensor = block(448, -304, 336, 17, 1.0625, 0.0078125, -0.0009765625, length=8, dtype=dtype)
    expected = block(448, -320, 320, 16, 1.0, 0.0078125, -0.0, length=8, dtype=dtype)
    assert_same_bits(in_fp8(tensor), expected)
    # Twice the numbers have twice the scale.
    assert_same_bits(in_fp8(2 * tensor), 2 * expected)


def test_blocks_of_fp8_are_rows_of_activations_and_squares_of_weights():
    tensor = torch.full((130, 130), 1.0625)
    tensor[0, 0], tensor[129, 129] = 448.0, 4.48
    # Where 448 is the largest number, 1.0625 is a tie that goes to 1.
    assert (in_fp8(tensor) == 1).sum() == 130 * 130 - 2
    ones = in_fp8_block(tensor) == 1
    assert (ones.sum(), ones[0, 1:128].sum()) == (127, 127)
    ones = in_fp8_block(tensor, is_weight=True) == 1
    assert (ones.sum(), ones[:128, :128].sum()) == (128 * 128 - 1, 128 * 128 - 1)
    each = in_fp8(torch.stack([tensor, tensor[1:, 1:].new_full((130, 130), 1.0625)]), of_each_matrix=True)
    assert torch.equal(each[0], in_fp8(tensor))
    torch.testing.assert_close(each[1], torch.full((130, 130), 1.0625))


def test_a_larger_value_elsewhere_in_the_tensor_changes_only_the_scales_of_nvfp4():
    tensor = torch.stack([block(1.0, 0.3), block(1e5)])
    assert torch.equal(in_mxfp4(tensor)[0], in_mxfp4(tensor[0]))
    assert not torch.equal(in_nvfp4(tensor)[0], in_nvfp4(tensor[0]))


@pytest.mark.parametrize("number_format", ALL_FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_stay_zeros_with_their_signs(dtype, number_format):
    zeros = torch.zeros(2, 64, dtype=dtype)
    zeros[1] = -0.0
    assert_same_bits(fake_quantize(zeros, number_format), zeros)


@pytest.mark.parametrize("number_format", ALL_FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_and_the_smallest_numbers_stay_finite(dtype, number_format):
    info = torch.finfo(dtype)
    for extreme in (info.max, info.smallest_normal, info.smallest_normal * info.eps):
        tensor = torch.full((1, 32), extreme, dtype=dtype)
        quantized = fake_quantize(tensor, number_format).double()
        assert quantized.isfinite().all()
        assert (quantized >= 0).all()
        assert (quantized <= extreme * (1 + info.eps)).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_are_never_hidden(value):
    tensor = random_tensor(2, 64)
    tensor[0, 3:6] = torch.tensor([value, 2.0**125, 2.0**124])
    mxfp4, nvfp4 = in_mxfp4(tensor), in_nvfp4(tensor)
    assert nvfp4.isnan().all()
    if np.isnan(value):
        assert mxfp4[0, :32].isnan().all()
    else:
        # scale 2^126: half of it is the least element, a quarter is a tie that goes to 0
        assert torch.equal(mxfp4[0, :32], block(0, 0, 0, value, 2.0**125))
    assert_same_bits(mxfp4[1], in_mxfp4(tensor[1]))
    assert_same_bits(mxfp4[0, 32:], in_mxfp4(tensor[0, 32:]))


# Formats: independent references


def mxfp4_reference(values):
    """MXFP4 in exact float64 arithmetic with the casts of ml_dtypes."""
    blocks = values.astype(np.float64).reshape(-1, 32)
    largest = np.abs(blocks).max(-1, keepdims=True)
    # 2^-127 is the least E8M0 number
    exponent = np.where(largest > 0, np.maximum(np.frexp(largest)[1] - 1 - 2, -127), -127)
    scale = np.ldexp(1.0, exponent).astype(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    elements = (blocks / scale).astype(np.float32).astype(ml_dtypes.float4_e2m1fn)
    return (elements.astype(np.float64) * scale).reshape(values.shape)


def nvfp4_reference(values):
    """NVFP4 in numpy's float32 with the casts of ml_dtypes."""
    blocks = values.astype(np.float32).reshape(-1, 16)
    largest = np.abs(blocks).max(-1, keepdims=True)
    tensor_scale = largest.max() / np.float32(448 * 6)
    block_scale = np.clip(largest / np.float32(6) / tensor_scale, np.float32(2**-6), np.float32(448))
    block_scale = block_scale.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    elements = (blocks * (np.float32(1) / tensor_scale / block_scale)).astype(ml_dtypes.float4_e2m1fn)
    return (elements.astype(np.float32) * (tensor_scale * block_scale)).reshape(values.shape)


def tensors_of_many_scales(dtype, smallest_exponent, largest_exponent):
    """Yield tensors whose blocks are alike, of mixed scales, of mixed elements, and partly zero."""
    generator = torch.Generator().manual_seed(1)
    limit = torch.finfo(dtype).max
    for exponent in range(smallest_exponent, largest_exponent, 7):
        normal = torch.randn(24, 64, generator=generator).double()
        per_block = torch.exp2(-torch.randint(0, 30, (24, 2), generator=generator).double()).repeat_interleave(32, -1)
        per_element = torch.exp2(-torch.randint(0, 12, (24, 64), generator=generator).double())
        normal[:8] *= per_block[:8]
        normal[8:16] *= per_element[8:16]
        normal[20, :32] = 0
        yield (normal * 2.0**exponent).clamp(-limit, limit).to(dtype)


@pytest.mark.parametrize(("dtype", "exponents"), MXFP4_EXPONENTS)
def test_mxfp4_is_bit_for_bit_what_ml_dtypes_gives_at_every_scale(dtype, exponents):
    for tensor in tensors_of_many_scales(dtype, *exponents):
        expected = torch.from_numpy(mxfp4_reference(tensor.float().numpy()))
        assert torch.equal(expected.to(dtype).double(), expected)  # exact in the dtype
        assert_same_bits(in_mxfp4(tensor), expected.to(dtype))


@pytest.mark.parametrize(("dtype", "exponents"), NVFP4_EXPONENTS)
def test_nvfp4_is_bit_for_bit_what_ml_dtypes_gives_down_to_its_smallest_tensor_scale(dtype, exponents):
    for tensor in tensors_of_many_scales(dtype, *exponents):
        expected = torch.from_numpy(nvfp4_reference(tensor.float().numpy())).to(dtype)
        assert_same_bits(in_nvfp4(tensor), expected)


def cast_by_ml_dtypes(values):
    return values.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)


def cast_by_torch(values):
    return torch.from_numpy(values).to(torch.float8_e4m3fn).float().numpy()


def fp8_reference(values, cast, size, rows=1):
    """FP8 in numpy's float32 with a library's cast, with a scale for blocks of `rows` x `size`."""
    found = np.empty_like(values)
    for top in range(0, values.shape[0], rows):
        for left in range(0, values.shape[1], size):
            block = values[top : top + rows, left : left + size]
            scale = np.maximum(np.abs(block).max() / np.float32(448), np.float32(2**-126))
            elements = np.clip(block * (np.float32(1) / scale), -448, 448)
            found[top : top + rows, left : left + size] = cast(elements) * scale
    return found


@pytest.mark.parametrize("cast", [cast_by_ml_dtypes, cast_by_torch])
@pytest.mark.parametrize("shape", [(3, 32), (150, 300), (128, 256)])
@pytest.mark.parametrize("exponent", [-120, -20, 0, 100])
def test_fp8_is_bit_for_bit_what_libraries_give(shape, exponent, cast):
    tensor = random_tensor(*shape) * torch.logspace(-6, 3, shape[1]) * 2.0**exponent
    for found, expected in (
        (in_fp8(tensor), fp8_reference(tensor.numpy(), cast, shape[1], shape[0])),
        (in_fp8_block(tensor), fp8_reference(tensor.numpy(), cast, 128)),
        (in_fp8_block(tensor, is_weight=True), fp8_reference(tensor.numpy(), cast, 128, 128)),
    ):
        assert_same_bits(found, torch.from_numpy(expected))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_makes_its_scale_nan(value):
    tensor = random_tensor(130, 130)
    tensor[0, 0] = value
    assert in_fp8(tensor).isnan().all()
    assert in_fp8_block(tensor).isnan().sum() == 128
    assert in_fp8_block(tensor, is_weight=True).isnan().sum() == 128 * 128


@pytest.mark.parametrize("number_format", FORMATS)
@pytest.mark.parametrize("key", sorted(key.removesuffix(".input") for key in TORCHAO_REFERENCE if "input" in key))
def test_formats_are_bit_for_bit_those_of_torchao(key, number_format):
    quantized = fake_quantize(TORCHAO_REFERENCE[f"{key}.input"], number_format)
    assert_same_bits(quantized, TORCHAO_REFERENCE[f"{key}.{number_format}"])


# Formats: properties


@settings(deadline=None)
@given(finite_blocks)
def test_mxfp4_is_idempotent_odd_and_within_its_spacing(values):
    tensor = torch.from_numpy(values)
    quantized = in_mxfp4(tensor)
    assert_same_bits(in_mxfp4(quantized), quantized)
    assert_same_bits(in_mxfp4(-tensor), -quantized)
    # Saturation loses less than a quarter (8 -> 6), rounding at most a fifth (5 -> 4) or half of the spacing 0.5
    exact, largest = tensor.double(), tensor.double().abs().amax(-1, keepdim=True)
    scale = (largest / 4).clamp_min(2.0**-127)
    assert ((quantized.double() - exact).abs() <= torch.maximum(exact.abs() / 4, scale / 4)).all()


@settings(deadline=None)
@given(tame_blocks, st.integers(-20, 20))
def test_mxfp4_scales_with_powers_of_two(values, exponent):
    tensor = torch.from_numpy(values)
    tensor = torch.where(tensor.abs() < 2.0**-80, torch.zeros_like(tensor), tensor)
    assert torch.equal(in_mxfp4(tensor * 2.0**exponent), in_mxfp4(tensor) * 2.0**exponent)


@settings(deadline=None)
@given(finite_blocks)
def test_nvfp4_is_odd_within_its_spacing_and_almost_idempotent(values):
    tensor = torch.from_numpy(values)
    quantized = in_nvfp4(tensor)
    assert_same_bits(in_nvfp4(-tensor), -quantized)
    # E4M3 moves a block's scale by at most 1/16, so saturation loses at most 1/17, less than rounding (5 -> 4). float32
    # arithmetic adds a few of its own roundings, absolute ones where numbers are subnormal.
    exact = tensor.double()
    tensor_scale = (exact.abs().max() / 2688).clamp_min(2.0**-121)
    block_max = exact.unflatten(-1, (-1, 16)).abs().amax(-1).repeat_interleave(16, -1)
    scale = torch.maximum(block_max / 6 * 17 / 16, tensor_scale * 2.0**-6)
    bound = torch.maximum(exact.abs() / 5, scale / 4) * (1 + 2.0**-20) + 2.0**-147
    assert ((quantized.double() - exact).abs() <= bound).all()
    # The tensor's scale is found again but for float32 rounding; each element keeps its code.
    again = in_nvfp4(quantized)
    torch.testing.assert_close(again, quantized, rtol=2.0**-20, atol=2.0**-147)


@pytest.mark.parametrize("number_format", ALL_FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_float32_rounded_once(dtype, number_format):
    tensor = random_tensor(16, 64, dtype=dtype)
    assert_same_bits(fake_quantize(tensor, number_format), fake_quantize(tensor.float(), number_format).to(dtype))


@pytest.mark.parametrize("number_format", ALL_FORMATS)
def test_layout_does_not_matter_and_the_input_is_kept(number_format):
    tensor = random_tensor(64, 3, 128)
    kept = tensor.clone()
    strided = tensor.transpose(0, 2)
    assert_same_bits(fake_quantize(strided, number_format), fake_quantize(strided.contiguous(), number_format))
    assert_same_bits(
        fake_quantize(tensor.flatten(), number_format).view_as(tensor), fake_quantize(tensor, number_format)
    )
    assert_same_bits(tensor, kept)
    assert fake_quantize(torch.empty(0, 64), number_format).shape == (0, 64)


def test_a_last_block_with_fewer_elements_has_a_scale_of_its_own():
    # 0.07 is 4.48 times 2^-6; in the scale of its neighbours, 1, it would be 0.
    found = in_mxfp4(torch.tensor([6.0] * 32 + [0.07]))
    assert found.tolist() == [6.0] * 32 + [0.0625]
    # 0.5 / 6 is 37.3 times the scale of the tensor, 6 / 2688, and 36 is the nearest number of E4M3.
    found = in_nvfp4(torch.tensor([6.0] * 16 + [0.5]))
    assert found.tolist() == pytest.approx([6.0] * 16 + [6 * 36 * 6 / 2688], rel=1e-6)
    with pytest.raises(ModelError, match="MXFP4 quantization of a tensor without dimensions"):
        in_mxfp4(torch.ones(()))


def test_unknown_formats_and_dtypes_are_refused():
    with pytest.raises(ConfigError, match="unknown number format 'fp4', expected one of mxfp4, nvfp4, fp8, fp8_block"):
        fake_quantize(torch.ones(32), "fp4")
    with pytest.raises(ModelError, match=r"torch\.float64, expected one of torch\.float32"):
        in_mxfp4(torch.ones(32, dtype=torch.float64))


# Straight-through gradients


def quantized_linear(inputs, weight, bias, number_format, quantize_weight, quantize_activation):
    """A linear layer on fake-quantized operands, as the injection computes it."""
    used_inputs = fake_quantize(inputs, number_format) if quantize_activation else inputs
    used_weight = fake_quantize(weight, number_format) if quantize_weight else weight
    return F.linear(used_inputs, used_weight, bias)


@pytest.mark.parametrize("number_format", ALL_FORMATS)
def test_the_gradient_passes_straight_through_the_quantizer(number_format):
    tensor, gradient = random_tensor(4, 64).requires_grad_(), random_tensor(4, 64, seed=1)
    fake_quantize(tensor, number_format).backward(gradient)
    assert torch.equal(tensor.grad, gradient)


def test_a_hand_computed_linear_layer_differentiates_with_the_quantized_weight():
    # weight 7, 5 -> 6, 4 (scale 1); activation 1.1, -2 -> 1, -2 (scale 1/2)
    weight, inputs = block(7.0, 5.0)[None].requires_grad_(), block(1.1, -2.0)[None].requires_grad_()
    options = {"quantize_weight": True, "quantize_activation": True}
    output = quantized_linear(inputs, weight, torch.tensor([0.5]), "mxfp4", **options)
    assert output.item() == 6 * 1 + 4 * -2 + 0.5
    output.backward(torch.tensor([[2.0]]))
    assert torch.equal(inputs.grad[0], block(12.0, 8.0))
    assert torch.equal(weight.grad[0], block(2.0, -4.0))


@pytest.mark.parametrize("number_format", ALL_FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("quantize_weight", "quantize_activation"), [(True, False), (False, True), (True, True)])
def test_gradients_are_those_of_the_product_that_was_computed(
    dtype, quantize_weight, quantize_activation, number_format
):
    inputs, weight = random_tensor(2, 5, 64, dtype=dtype), random_tensor(48, 64, dtype=dtype, seed=1)
    bias, gradient = random_tensor(48, dtype=dtype, seed=2), random_tensor(2, 5, 48, dtype=dtype, seed=3)
    leaves = [tensor.clone().requires_grad_() for tensor in (inputs, weight, bias)]
    options = {"quantize_weight": quantize_weight, "quantize_activation": quantize_activation}
    output = quantized_linear(*leaves, number_format, **options)
    output.backward(gradient)

    used_inputs = fake_quantize(inputs, number_format) if quantize_activation else inputs
    used_weight = fake_quantize(weight, number_format) if quantize_weight else weight
    rows = gradient.view(10, 48)
    assert torch.equal(output, F.linear(used_inputs, used_weight, bias))
    assert torch.equal(leaves[0].grad, (rows @ used_weight).view(2, 5, 64))
    assert torch.equal(leaves[1].grad, rows.T @ used_inputs.view(10, 64))
    if quantize_weight:
        assert not torch.equal(leaves[0].grad, (rows @ weight).view(2, 5, 64))
