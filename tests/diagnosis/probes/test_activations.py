"""Activations with few rows: a decode of one to eight sequences has a kernel of its own."""

import pytest
import torch
from decoder_families import tiny_model_of

from aqnpipe.diagnosis.probes.activations import activation_name, activation_of, activation_sweep, gated_sweep
from aqnpipe.models.layout import decoder_layers, layer_sites

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def wrong_sites(model, dtype):
    layer = decoder_layers(model)[1]
    name, generator = activation_name(model.config), torch.Generator().manual_seed(0)
    with torch.no_grad():
        checks = activation_sweep(activation_of(layer), name, 1, dtype, torch.device("cpu"), generator)
        checks += gated_sweep(layer_sites(layer), name, 1, dtype, generator)
    return {check.site for check in checks if check.mismatch}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "gemma", "phi3", "gpt2", "phi", "opt"])
def test_healthy_activations(family, dtype):
    assert not wrong_sites(tiny_model_of(family).to(dtype), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 4, 8])
@pytest.mark.parametrize("family", ["llama", "gemma", "phi3", "gpt2"])
def test_an_activation_that_is_wrong_for_few_rows_is_found(family, rows, dtype):
    model = tiny_model_of(family).to(dtype)
    activation = activation_of(decoder_layers(model)[1])
    activation.register_forward_hook(lambda m, a, out: out * 1.2 if out.numel() // out.shape[-1] == rows else out)
    assert "activation" in wrong_sites(model, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 4, 8])
def test_a_product_with_the_gate_that_is_wrong_for_few_rows_is_found(rows, dtype):
    model = tiny_model_of("llama").to(dtype)
    down = layer_sites(decoder_layers(model)[1]).linears["down_proj"]
    down.register_forward_pre_hook(lambda m, a: (a[0] * 1.2,) if len(a[0]) == rows else None)
    assert wrong_sites(model, dtype) == {"mlp_core"}
