"""Experts one by one: healthy mixtures, and faults of one expert or of the sum."""

import pytest
import torch
from random_models import random_mixture_of

from aqnpipe.diagnosis.checks import Bench
from aqnpipe.diagnosis.exact_probes import without_consequences
from aqnpipe.diagnosis.probes.experts import experts_of, probe_experts, probe_router, router_of
from aqnpipe.models.layout import decoder_layers

MIXTURES = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def probed(model):
    checks = []
    with torch.no_grad():
        for index, layer in enumerate(decoder_layers(model)):
            bench = Bench(index, model.dtype, model.device, torch.Generator().manual_seed(index))
            checks += probe_experts(experts_of(layer), 2, bench)
            checks += probe_router(router_of(layer), bench)
    return checks


def places(model):
    return {(check.layer, check.site) for check in without_consequences(probed(model)) if check.mismatch}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", MIXTURES)
def test_healthy_mixtures_give_every_answer(family, dtype):
    checks = probed(random_mixture_of(family).to(dtype))
    assert not [check for check in checks if check.mismatch]
    assert {check.site for check in checks} == {"router", "experts", *(f"experts.{expert}" for expert in range(4))}


def linear_wrong_for(weights, change):
    """F.linear with a wrong result for one slice of the experts' weights, found by its address."""
    own = torch.nn.functional.linear

    def linear(x, weight, bias=None):
        output = own(x, weight, bias)
        is_slice = weight.untyped_storage().data_ptr() == weights().untyped_storage().data_ptr()
        start = weights()[2].storage_offset()
        return change(output) if is_slice and weight.storage_offset() == start else output

    return linear


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_one_channel_of_one_expert_is_found(family, name, dtype, monkeypatch):
    model = random_mixture_of(family).to(dtype)
    experts = experts_of(decoder_layers(model)[1])
    experts.config._experts_implementation = "eager"

    def damaged(output):
        output = output.clone()
        output[..., 7] *= 1.1
        return output

    monkeypatch.setattr(torch.nn.functional, "linear", linear_wrong_for(lambda: getattr(experts, name), damaged))
    assert places(model) == {(1, "experts.2")}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", MIXTURES)
def test_an_expert_that_is_left_out_of_the_sum_is_found(family, dtype):
    model = random_mixture_of(family).to(dtype)
    experts = experts_of(decoder_layers(model)[1])
    lost = torch.tensor([1.0, 0.0])
    experts.register_forward_pre_hook(lambda module, args: (*args[:2], args[2] * lost.to(args[2].dtype)))
    assert places(model) == {(1, "experts")}


@pytest.mark.parametrize("family", MIXTURES)
def test_tokens_sent_to_a_wrong_expert_are_found(family):
    model = random_mixture_of(family)
    experts = experts_of(decoder_layers(model)[0])
    experts.register_forward_pre_hook(lambda module, args: (args[0], torch.where(args[1] == 3, 1, args[1]), args[2]))
    assert places(model) == {(0, "experts.3")}


def test_weights_are_put_back():
    model = random_mixture_of("mixtral")
    before = {name: (value.data_ptr(), value.clone()) for name, value in model.state_dict().items()}
    probed(model)
    for name, value in model.state_dict().items():
        assert value.data_ptr() == before[name][0]
        assert torch.equal(value, before[name][1])


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize(("least", "most"), [(1, 1), (2, 4), (5, 8), (512, 1000)])
def test_experts_that_are_wrong_for_some_numbers_of_tokens_are_found(family, least, most):
    model = random_mixture_of(family)

    def damaged(module, args, output):
        rows = torch.arange(len(output)).unsqueeze(1)
        return torch.where((rows >= len(output) - 2) & (least <= len(output) <= most), 0 * output, output)

    experts_of(decoder_layers(model)[1]).register_forward_hook(damaged)
    assert {layer for layer, _ in places(model)} == {1}


def in_bfloat16(x, weight, every):
    """Return x @ weight in an accumulator that is rounded to bfloat16 after `every` products."""
    total = torch.zeros(len(x), weight.shape[1], dtype=torch.float64)
    for start in range(0, x.shape[1], every):
        part = x[:, start : start + every].double() @ weight[start : start + every].double()
        total = (total + part).bfloat16().double()
    return total.to(x.dtype)


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_a_narrow_accumulator_of_the_experts_is_found(family, name, dtype, every, monkeypatch):
    model = random_mixture_of(family).to(dtype)
    experts = experts_of(decoder_layers(model)[1])
    experts.config._experts_implementation = "eager"
    own = torch.nn.functional.linear

    def linear(x, weight, bias=None):
        is_own = weight.untyped_storage().data_ptr() == getattr(experts, name).untyped_storage().data_ptr()
        return in_bfloat16(x, weight.T, every) if is_own else own(x, weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    assert {layer for layer, _ in places(model)} == {1}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", MIXTURES)
def test_experts_whose_split_sums_have_rounded_parts_are_healthy(family, dtype, monkeypatch):
    model = random_mixture_of(family).to(dtype)
    experts_of(decoder_layers(model)[1]).config._experts_implementation = "eager"
    own = torch.nn.functional.linear

    def linear(x, weight, bias=None):
        cut = weight.shape[1] // 8 * 4
        parts = [own(x[..., :cut].float(), weight[:, :cut].float()), own(x[..., cut:].float(), weight[:, cut:].float())]
        return sum(part.to(x.dtype).float() for part in parts).to(x.dtype)

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    assert not places(model)
