"""Linears with one, few and many rows: healthy ones, and kernels that are wrong for one shape only."""

import pytest
import torch
from decoder_families import tiny_model_of

from aqnpipe.diagnosis.checks import Bench
from aqnpipe.diagnosis.probes.linears import LARGE, SMALL, probe_shapes, rows_of_layer
from aqnpipe.models.layout import decoder_layers, layer_sites

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def places(model, seed=0):
    layers = decoder_layers(model)
    found = set()
    with torch.no_grad():
        for index, layer in enumerate(layers):
            for name, module in layer_sites(layer).linears.items():
                rows = rows_of_layer(index, len(layers), seed)
                bench = Bench(index, model.dtype, model.device, torch.Generator().manual_seed(index))
                checks = probe_shapes(name, module, rows, bench)
                found |= {(check.layer, check.site) for check in checks if check.mismatch}
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["qwen2", "gpt_neox", "deepseek_v3"])
def test_healthy_linears_give_every_answer(family, dtype):
    assert not places(tiny_model_of(family).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [*SMALL, LARGE])
def test_a_kernel_that_is_wrong_for_one_shape_is_found(rows, dtype):
    model = tiny_model_of("qwen2").to(dtype)
    seed = 1  # the large batch runs in layer 1

    def damaged(module, args, output):
        if args[0].shape[1] != rows:
            return output
        output = output.clone()
        output[..., -1, 4] *= 1.01
        return output

    layer_sites(decoder_layers(model)[1]).linears["down_proj"].register_forward_hook(damaged)
    assert places(model, seed) == {(1, "down_proj")}


def test_a_mantissa_bit_lost_for_single_tokens_is_found():
    model = tiny_model_of("qwen2")

    def stuck(module, args, output):
        return (output.view(torch.int32) & ~4).view(torch.float32) if args[0].shape[1] == 1 else output

    layer_sites(decoder_layers(model)[0]).linears["q_proj"].register_forward_hook(stuck)
    assert places(model) == {(0, "q_proj")}


def test_every_layer_runs_every_shape_over_the_seeds():
    for num_layers in (1, 3, 28):
        assert all(set(SMALL) <= set(rows_of_layer(layer, num_layers, 0)) for layer in range(num_layers))
        for layer in range(num_layers):
            seen = {rows for seed in range(num_layers) for rows in rows_of_layer(layer, num_layers, seed)}
            assert seen == {*SMALL, LARGE}
        assert sum(LARGE in rows_of_layer(layer, num_layers, 5) for layer in range(num_layers)) == 1
