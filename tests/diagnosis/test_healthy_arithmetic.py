"""Arithmetic that healthy devices do: other orders of summation, roots and exponentials that are off by an ulp."""

import random
from itertools import pairwise
from types import MethodType

import pytest
import torch
from decoder_families import tiny_model_of
from random_models import random_mixture_of

from aqnpipe.config.diagnosis import DiagnosisConfig
from aqnpipe.diagnosis.exact_probes import run_exact, tokens_needed
from aqnpipe.diagnosis.verdict import judge
from aqnpipe.models.layout import decoder_layers

CONFIG = DiagnosisConfig(exact_repeats=2, intermittent_rate=0.02, miss_probability=0.1)
DTYPES = [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]
SPLITS = [
    (torch.float32, True),
    (torch.bfloat16, True),
    (torch.bfloat16, False),
    pytest.param(torch.float16, True, marks=pytest.mark.slow),
    pytest.param(torch.float16, False, marks=pytest.mark.slow),
]
"""Formats of the model, and whether the parts of a split sum are in float32, which makes no difference in float32."""
LINEAR, RSQRT, SILU = torch.nn.functional.linear, torch.rsqrt, torch.nn.functional.silu


def summed_in_parts(x, weight, num_parts, part_dtype, shuffle=False):
    """Return the product as split-K computes it: parts rounded to `part_dtype` and added one after the other."""
    columns = list(torch.arange(weight.shape[1]).chunk(num_parts))
    if shuffle:
        random.shuffle(columns)
    total = torch.zeros(())
    for chosen in columns:
        part = LINEAR(x[..., chosen].float(), weight[:, chosen].float()).to(part_dtype)
        total = (total + part.float()).to(part_dtype).float()
    return total


def uneven_parts(x, weight, bias=None):
    """Three parts of other lengths, each stored in the dtype."""
    ends = [0, 3 * weight.shape[1] // 8 + 1, 13 * weight.shape[1] // 16 - 1, weight.shape[1]]
    parts = [LINEAR(x[..., s:e].float(), weight[:, s:e].float()).to(x.dtype).float() for s, e in pairwise(ends)]
    return (sum(parts) if bias is None else sum(parts) + bias.float()).to(x.dtype)


def split_k(parts_in_float32, shuffle):
    def linear(x, weight, bias=None):
        total = summed_in_parts(x, weight, 4, torch.float32 if parts_in_float32 else x.dtype, shuffle)
        return (total if bias is None else total + bias.float()).to(x.dtype)

    return linear


def stream_k(x, weight, bias=None):
    """Tiles of 40 rows and 32 channels, each with an order of its own."""

    def tile(rows, columns, number):
        return summed_in_parts(rows, columns, 1 + number % 4, torch.float32)

    rows, columns = x.reshape(-1, x.shape[-1]).split(40), weight.split(32)
    blocks = [torch.cat([tile(r, c, 3 * i + j) for j, c in enumerate(columns)], 1) for i, r in enumerate(rows)]
    total = torch.cat(blocks).reshape(*x.shape[:-1], -1)
    return (total if bias is None else total + bias.float()).to(x.dtype)


def rounded_to_tf32(values):
    return ((values.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def tf32(x, weight, bias=None):
    return LINEAR(rounded_to_tf32(x), rounded_to_tf32(weight), bias)


def narrow_sums(x, weight, bias=None):
    """Add every product in an accumulator of the dtype (bfloat16 for float32)."""
    dtype = torch.bfloat16 if x.dtype == torch.float32 else x.dtype
    total = torch.zeros(*x.shape[:-1], weight.shape[0], dtype=dtype)
    for k in range(weight.shape[1]):
        total = (total.float() + x[..., k : k + 1].float() * weight[:, k].float()).to(dtype)
    return (total if bias is None else total + bias).to(x.dtype)


def inexact_rsqrt(values):
    """One unit off in either direction, another in every call."""
    off = 2.0**-23 * torch.randint(-1, 2, values.shape)
    return RSQRT(values) * (1 + off)


def fast_silu(x, inplace=False):
    y = x.float()
    return (y * (1 / (1 + torch.exp(-y) * (1 + 2.0**-22))) * (1 - 2.0**-23)).to(x.dtype)


@pytest.fixture
def model_of(random_model):
    """Two layers, of which a fault of both is one of the device."""

    def make(architecture="qwen2", dtype=torch.float32):
        return random_model(architecture, dtype, num_layers=2, hidden_size=64, intermediate_size=96, head_dim=16)

    return make


@pytest.fixture
def on_device(monkeypatch):
    """Replace an operation of torch in the body of a test."""

    def replace(**operations):
        for name, operation in operations.items():
            monkeypatch.setattr(torch if name == "rsqrt" else torch.nn.functional, name, operation)

    random.seed(0)
    torch.manual_seed(0)
    return replace


@pytest.mark.parametrize(("dtype", "parts_in_float32"), SPLITS)
def test_split_sums_in_a_fixed_order_are_healthy(model_of, on_device, dtype, parts_in_float32):
    model = model_of(dtype=dtype)
    on_device(linear=split_k(parts_in_float32, shuffle=False))
    result = run_exact(model, CONFIG)
    assert (result.faults, result.reordered) == ((), ())


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_parts_of_16_bits_that_end_anywhere_are_healthy(model_of, on_device, dtype):
    """They cut the blocks of four in which large numbers cancel."""
    model = model_of(dtype=dtype)
    on_device(linear=uneven_parts)
    assert run_exact(model, CONFIG).faults == ()
    mixture = tiny_model_of("qwen2_moe").to(dtype)
    assert run_exact(mixture, CONFIG).faults == ()


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_a_narrow_accumulator_of_one_output_is_a_fault(model_of, on_device, dtype):
    """The nearest fault: what a cut costs a few tokens, it costs all of them."""
    model = model_of(dtype=dtype)

    def linear(x, weight, bias=None):
        own, narrow = uneven_parts(x, weight, bias), narrow_sums(x, weight[5:6], None if bias is None else bias[5:6])
        return torch.cat([own[..., :5], narrow, own[..., 6:]], -1) if weight.shape[0] > 6 else own

    on_device(linear=linear)
    faults = run_exact(model, CONFIG).faults
    assert {fault.scope for fault in faults if fault.site == "down_proj"} == {"device"}
    assert all(5 in fault.faulty_channel_indices for fault in faults if fault.site == "down_proj")


@pytest.mark.parametrize(("dtype", "parts_in_float32"), SPLITS)
def test_split_sums_in_random_order_are_healthy_and_named(model_of, on_device, dtype, parts_in_float32):
    model = model_of("gemma2" if parts_in_float32 else "qwen2", dtype)
    on_device(linear=split_k(parts_in_float32, shuffle=True))
    result = run_exact(model, CONFIG)
    assert result.faults == ()
    assert "q_proj" in result.reordered
    assert judge(result, None, CONFIG).verdict == "healthy"
    # In batches of the default settings: those of the test are smaller, and the largest shapes of a linear are fixed.
    assert result.forward_equivalents * result.num_tokens <= 25 * tokens_needed(DiagnosisConfig(), dtype)


def test_a_site_without_a_known_answer_is_named_where_repeats_cannot_be_compared(on_device):
    """The probability of a miss was divided by the calls of such a site, of which there are none."""
    model = tiny_model_of("ernie4_5_moe")
    on_device(linear=split_k(parts_in_float32=False, shuffle=True))
    result = run_exact(model, CONFIG)
    assert judge(result, None, CONFIG).verdict == "healthy"
    reasons = {untested.part: untested.reason for untested in result.untested}
    assert "no repeats that could be compared on this device" in reasons["mlp_output"]
    assert result.calls_per_site > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_order_that_depends_on_the_tile_is_healthy(model_of, on_device, dtype):
    model = model_of(dtype=dtype)
    on_device(linear=stream_k)
    assert run_exact(model, CONFIG).faults == ()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("architecture", ["qwen3", "gemma2"])
def test_roots_and_exponentials_off_by_an_ulp_are_healthy(model_of, on_device, dtype, architecture):
    model = model_of(architecture, dtype)
    on_device(rsqrt=inexact_rsqrt, silu=fast_silu)
    assert run_exact(model, CONFIG).faults == ()


def fused_layer(rounds_sum=True, gain=1.0):
    """The forward of a decoder layer in which one kernel adds the residual and normalises the unrounded sum."""

    def forward(self, hidden_states, **kwargs):
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        total, norm = hidden_states.float() + attended.float(), self.post_attention_layernorm
        normal = total * RSQRT(total.square().mean(-1, keepdim=True) + norm.variance_epsilon)
        fed = self.mlp((normal * norm.weight.float() * gain).to(attended.dtype))
        return total.to(fed.dtype) + fed if rounds_sum else (total + fed.float()).to(fed.dtype)

    return forward


@pytest.mark.parametrize("rounds_sum", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_and_a_norm_in_one_kernel_are_healthy(model_of, dtype, rounds_sum):
    """The norm is not called as a module, and reads the sum before it is rounded, as in vLLM or compiled code."""
    model = model_of(dtype=dtype)
    for layer in decoder_layers(model):
        layer.forward = MethodType(fused_layer(rounds_sum), layer)
    assert run_exact(model, CONFIG).faults == ()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fault_in_a_kernel_of_a_sum_and_a_norm_is_found(model_of, dtype):
    model = model_of(dtype=dtype)
    gain = 1 + 0.1 * (torch.arange(64) == 5)
    for layer, own in zip(decoder_layers(model), (1.0, gain), strict=True):
        layer.forward = MethodType(fused_layer(gain=own), layer)
    assert {(fault.layers, fault.site) for fault in run_exact(model, CONFIG).faults} == {((1,), "mlp_input")}


@pytest.mark.parametrize("dtype", DTYPES)
def test_flush_to_zero_is_healthy(model_of, dtype):
    torch.set_flush_denormal(True)
    try:
        assert run_exact(model_of(dtype=dtype), CONFIG).faults == ()
    finally:
        torch.set_flush_denormal(False)


def test_tf32_is_healthy_where_torch_allows_it_and_said(model_of, on_device):
    model = model_of()
    torch.set_float32_matmul_precision("high")
    try:
        on_device(linear=tf32)
        result = run_exact(model, CONFIG)
        verdict = judge(result, None, CONFIG)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert (verdict.verdict, result.float32_product_bits) == ("healthy", 11)
    assert "products keep 11 of the 24 bits" in verdict.reason
    assert any("mantissa bits" in gap.part for gap in verdict.untested)


def test_tf32_is_a_fault_of_the_device_where_float32_was_asked_for(model_of, on_device):
    model = model_of()
    on_device(linear=tf32)
    result = run_exact(model, CONFIG)
    assert {(fault.scope, fault.site) for fault in result.faults} >= {("device", "q_proj"), ("device", "down_proj")}
    assert result.float32_product_bits == 11


@pytest.mark.parametrize("dtype", DTYPES)
def test_narrow_accumulators_are_a_fault_of_the_device(model_of, on_device, dtype):
    model = model_of(dtype=dtype)
    on_device(linear=narrow_sums)
    faults = run_exact(model, CONFIG).faults
    assert {fault.scope for fault in faults if fault.site != "lm_head"} == {"device"}  # lm_head is in no layer
    assert all("accumulator" in fault.probes for fault in faults if fault.site in ("q_proj", "up_proj", "down_proj"))


def test_a_sparse_layer_beside_dense_ones_is_healthy():
    result = run_exact(random_mixture_of("deepseek_v3", num_hidden_layers=4, first_k_dense_replace=3), CONFIG)
    assert result.faults == ()
    assert "mlp_output" not in {gap.part for gap in result.untested}
