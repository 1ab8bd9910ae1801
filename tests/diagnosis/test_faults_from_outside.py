"""Faults put in by hooks and patches, through the whole diagnosis: found in their place, also where all share them."""

import sys
from functools import partial

import pytest
import torch
from decoder_families import tiny_model_of
from random_models import formats_of

from aqnpipe.config.diagnosis import DiagnosisConfig
from aqnpipe.diagnosis.exact_probes import run_exact
from aqnpipe.diagnosis.probes.flow import FAMILIES
from aqnpipe.diagnosis.verdict import judge
from aqnpipe.models.layout import decoder_layers
from aqnpipe.models.loading import load_model

CONFIG = DiagnosisConfig(exact_repeats=2, intermittent_rate=0.05, miss_probability=0.1)


def found_in(model, **options):
    result = run_exact(model, CONFIG, **options)
    return {(fault.scope, fault.layers, fault.site) for fault in result.faults}


@pytest.mark.slow
@pytest.mark.parametrize(("family", "dtype", "attention"), formats_of(FAMILIES, turn=1))
def test_healthy_models_are_healthy(family, dtype, attention):
    model = tiny_model_of(family).to(dtype)
    model.set_attn_implementation(attention)
    assert judge(run_exact(model, CONFIG), None, CONFIG).verdict == "healthy"


def change(module, function):
    module.register_forward_hook(lambda m, args, output: function(output))


def some_channels(output):
    output = output.clone()
    output[..., :3] *= 1.5
    return output


def same(output):
    return output


def first_changed(output, function):
    return (function(output[0]), *output[1:]) if isinstance(output, tuple) else function(output)


def through_a_closure(own, function):
    def forward(*args, **kwargs):
        return first_changed(own(*args, **kwargs), function)

    return forward


def through_a_partial(own, function):
    return partial(lambda forward, *args, **kwargs: first_changed(forward(*args, **kwargs), function), own)


@pytest.mark.parametrize("patch", [through_a_closure, through_a_partial])
@pytest.mark.parametrize(
    ("path", "site"), [("mlp", "mlp_output"), ("self_attn", "attention_output"), ("", "layer_output")]
)
def test_a_forward_that_a_user_patched(path, site, patch):
    """A closure computes with the layer of the model: on the copy that decides whether a probe fits, it crashed."""
    model = tiny_model_of("qwen2").to(torch.bfloat16)
    module = decoder_layers(model)[1].get_submodule(path)
    own = module.forward
    module.forward = patch(own, some_channels)
    assert found_in(model) == {("layer", (1,), site)}
    module.forward = patch(own, same)
    assert found_in(model) == set()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("path", "site"), [("model.embed_tokens", "embedding"), ("model.norm", "final_norm"), ("lm_head", "lm_head")]
)
def test_the_ends_of_the_model(path, site, dtype):
    model = tiny_model_of("llama").to(dtype)
    change(model.get_submodule(path), some_channels)
    assert found_in(model) == {("model", (), site)}


def test_gpt2_is_probed_in_part():
    """Its linears have transposed weights and no known answer; norms, ends of the blocks and kernels have one."""
    model = tiny_model_of("gpt2")
    change(model.transformer.h[1].mlp, some_channels)
    assert ("layer", (1,), "mlp_output") in found_in(model)
    model = tiny_model_of("gpt2")
    change(model.transformer.h[0].ln_2, some_channels)
    assert found_in(model) == {("layer", (0,), "ln_2")}


def test_a_table_of_silu_in_one_layer_and_in_all():
    model = tiny_model_of("llama")
    change(decoder_layers(model)[1].mlp.act_fn, lambda output: output * 1.05)
    assert found_in(model) == {("layer", (1,), "activation")}
    change(decoder_layers(model)[0].mlp.act_fn, lambda output: output * 1.05)
    assert found_in(model) == {("device", (0, 1), "activation")}


@pytest.mark.parametrize("layers", [(1,), (0, 1)])
def test_a_mask_that_is_not_applied(monkeypatch, layers):
    model = tiny_model_of("llama")
    file = sys.modules[type(model).__module__]
    own = file.eager_attention_forward

    def unmasked(module, q, k, v, mask, **kwargs):
        return own(module, q, k, v, None if module.layer_idx in layers else mask, **kwargs)

    monkeypatch.setattr(file, "eager_attention_forward", unmasked)
    assert found_in(model) == {("layer" if len(layers) == 1 else "device", layers, "attention_core")}


def test_a_decode_kernel():
    model = tiny_model_of("qwen2")

    def wrong(module, args, output):
        return output * 1.1 if args[0].numel() == module.in_features else output

    decoder_layers(model)[0].mlp.up_proj.register_forward_hook(wrong)
    assert found_in(model) == {("layer", (0,), "up_proj")}


def test_a_linear_is_reported_once_although_its_gradients_are_wrong_too():
    model = tiny_model_of("llama")
    change(decoder_layers(model)[1].mlp.up_proj, some_channels)
    assert found_in(model) == {("layer", (1,), "up_proj")}


def test_weights_that_changed_in_memory(tmp_path):
    tiny_model_of("qwen2").save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype="bfloat16", attention="eager")
    assert found_in(model, weights=tmp_path) == set()
    model.model.layers[1].mlp.down_proj.weight.data.view(torch.int16)[4, 7] ^= 1 << 9
    assert found_in(model) == set()
    assert found_in(model, weights=tmp_path) == {("layer", (1,), "down_proj")}


def test_a_weight_that_changes_during_the_probes():
    model = tiny_model_of("qwen2")
    weight = model.model.layers[0].self_attn.k_proj.weight
    calls = []

    def disturb(module, args):
        calls.append(1)
        if len(calls) == 1:
            weight.data[2, 3] += 1

    model.model.layers[1].register_forward_pre_hook(disturb)
    assert ("layer", (0,), "k_proj") in found_in(model)
