import pytest
import torch
from torch.utils.flop_counter import flop_registry

from aqnpipe.proof.operations import operations_of

ATEN = torch.ops.aten
B, H, L, S, E, V = 2, 6, 5, 7, 8, 4


def attention_inputs(key_heads: int = H) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty(B, H, L, E), torch.empty(B, key_heads, S, E), torch.empty(B, key_heads, S, V)


@pytest.mark.parametrize("kernel", ["flash_attention", "efficient_attention", "cudnn_attention"])
def test_attention_is_counted_as_torch_counts_it(kernel):
    forward = getattr(ATEN, f"_scaled_dot_product_{kernel}")
    backward = getattr(ATEN, f"_scaled_dot_product_{kernel}_backward")
    query, key, value = inputs = attention_inputs()
    gradient = torch.empty(B, H, L, V)
    assert operations_of(forward.default, inputs, {}, None) == flop_registry[forward](*inputs, out_val=None)
    assert operations_of(backward.default, (gradient, *inputs), {}, None) == flop_registry[backward](
        gradient, query, key, value, out_val=(query, key, value)
    )


def test_attention_on_a_cpu_is_two_products():
    # Scores: B*H*L*S sums of E products; output: B*H*L*V sums of S products.
    expected = 2 * (B * H * L * S * E + B * H * L * V * S)
    assert operations_of(ATEN._scaled_dot_product_flash_attention_for_cpu.default, attention_inputs(), {}, None) == (
        expected
    )


def test_heads_that_share_keys_are_counted_by_query():
    # A CUDA device gets the keys as they are; torch before 2.12 raised an AssertionError in its formula.
    op = ATEN._scaled_dot_product_flash_attention.default
    assert operations_of(op, attention_inputs(key_heads=2), {}, None) == operations_of(op, attention_inputs(), {}, None)


def test_the_composite_attention_is_counted_by_its_parts():
    assert operations_of(ATEN._scaled_dot_product_attention_math.default, attention_inputs(), {}, None) == 0


def test_an_outer_product_sums_nothing():
    assert operations_of(ATEN.mm.default, (torch.empty(4, 1), torch.empty(1, 5)), {}, torch.empty(4, 5)) == 0
    assert operations_of(ATEN.mm.default, (torch.empty(4, 3), torch.empty(3, 5)), {}, torch.empty(4, 5)) == 2 * 60
