"""The attention kernel with few sequences: it is chosen by their number, and generation has one."""

import sys

import pytest
import torch
from decoder_families import tiny_model_of

from aqnpipe.diagnosis.probes.attention_operands import KINDS, kind_of
from aqnpipe.diagnosis.probes.sequences import probe_sequences
from aqnpipe.models.layout import decoder_layers, layer_sites


def wrong_places(model):
    with torch.no_grad():
        checks = probe_sequences(model, [layer_sites(layer) for layer in decoder_layers(model)], 0, {})
    return {(check.layer, check.site) for check in checks if check.mismatch}


def with_eager_kernel(model, change, monkeypatch):
    file = sys.modules[type(model).__module__]
    own = file.eager_attention_forward

    def kernel(module, q, k, v, mask, **kwargs):
        output, weights = own(module, q, k, v, mask, **kwargs)
        return (change(output, q, k) if module.layer_idx == 1 else output), weights

    monkeypatch.setattr(file, "eager_attention_forward", kernel)


@pytest.mark.parametrize("is_decode", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 16])
@pytest.mark.parametrize(("family", "dtype"), [("llama", torch.bfloat16), ("gpt2", torch.float32)])
def test_a_kernel_that_is_wrong_for_one_number_of_sequences_is_found(family, count, is_decode, dtype, monkeypatch):
    model = tiny_model_of(family).to(dtype)
    model.set_attn_implementation("eager")

    def change(output, q, k):
        return 0 * output if len(q) == count and (q.shape[2] == 1) == is_decode else output

    with_eager_kernel(model, change, monkeypatch)
    assert (1, "attention_core") in wrong_places(model)


def test_fused_attention_that_is_wrong_for_one_sequence_is_found(monkeypatch):
    model = tiny_model_of("llama").to(torch.bfloat16)
    model.set_attn_implementation("sdpa")
    own = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda q, *args, **kwargs: own(q, *args, **kwargs) * (0.0 if len(q) == 1 else 1.0),
    )
    assert {(0, "attention_core"), (1, "attention_core")} <= wrong_places(model)


def test_a_cache_that_is_wrong_for_one_sequence_is_found():
    model = tiny_model_of("llama")

    def damaged(layer, args, kwargs):
        cache = kwargs["past_key_values"]
        keys = cache.layers[1].keys if cache.layers else None
        if keys is not None and keys.shape[0] == 1:
            keys[:, :, 3:9] = 0

    decoder_layers(model)[1].register_forward_pre_hook(damaged, with_kwargs=True)
    assert (1, "kv_cache") in wrong_places(model)


def test_a_layer_that_is_wrong_for_one_sequence_is_found():
    model = tiny_model_of("llama")
    decoder_layers(model)[1].register_forward_hook(lambda m, a, out: out * 1.1 if len(out) == 1 else out)
    assert (1, "layer_output") in wrong_places(model)


def test_one_sequence_has_every_kind_of_operands_in_some_layer():
    assert {kind_of(0, layer) for layer in range(4)} == set(KINDS)
