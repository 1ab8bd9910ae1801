"""Linears with one, few and many rows: healthy ones, and kernels that are wrong for one shape only."""

import pytest
import torch
from decoder_families import tiny_model_of

from aqnpipe.config.diagnosis import DiagnosisConfig
from aqnpipe.diagnosis.exact_probes import run_exact
from aqnpipe.diagnosis.probes.linears import LARGE, selecting_in_model
from aqnpipe.models.layout import decoder_layers
from aqnpipe.models.sites import layer_sites

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CONFIG = DiagnosisConfig(exact_repeats=2, intermittent_rate=0.05, miss_probability=0.1, seed=1)


def places(model):
    return {(fault.layers, fault.site) for fault in run_exact(model, CONFIG).faults}


def damaged_in(model, name, wrong):
    layer_sites(decoder_layers(model)[1]).linears[name].register_forward_hook(wrong)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["qwen2", "gpt_neox", "deepseek_v3"])
def test_healthy_linears_give_every_answer(family, dtype):
    assert not places(tiny_model_of(family).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [range(1, 2), range(4, 5), range(64, 128), range(1024, 1300), range(LARGE, LARGE + 1)])
def test_a_kernel_that_is_wrong_for_some_shapes_is_found(rows, dtype):
    """The largest batch runs in layer 1 with the seed of the test."""
    model = tiny_model_of("qwen2").to(dtype)

    def damaged(module, args, output):
        if output[..., 0].numel() not in rows:
            return output
        output = output.clone()
        output[..., -1, 4] *= 1.01
        return output

    damaged_in(model, "down_proj", damaged)
    assert places(model) == {((1,), "down_proj")}


def test_a_mantissa_bit_lost_for_single_tokens_is_found():
    model = tiny_model_of("qwen2")

    def stuck(module, args, output):
        return (output.view(torch.int32) & ~4).view(torch.float32) if output[..., 0].numel() == 1 else output

    damaged_in(model, "q_proj", stuck)
    assert places(model) == {((1,), "q_proj")}


def test_weights_come_back_after_an_error():
    model = tiny_model_of("qwen2")
    sites = layer_sites(decoder_layers(model)[1])
    linear = sites.linears["q_proj"]
    own = linear.weight.data_ptr()
    checks = []
    with pytest.raises(RuntimeError), selecting_in_model({1: sites}, checks.append):
        linear(torch.zeros(1, linear.in_features))
        assert linear.weight.data_ptr() == own
        linear(torch.zeros(1, linear.in_features + 1))
    assert linear.weight.data_ptr() == own
    assert [(check.layer, check.site, check.mismatch) for check in checks] == [(1, "q_proj", None)]
    assert not linear._forward_hooks
    assert not linear._forward_pre_hooks
