"""The router of a mixture: healthy choices with and without groups, and faults of logits, choice and shares."""

import pytest
import torch
from random_models import random_mixture_of

from aqnpipe.diagnosis.checks import Bench
from aqnpipe.diagnosis.exact_probes import model_checks
from aqnpipe.diagnosis.probes.experts import probe_router, router_of
from aqnpipe.models.layout import decoder_layers, layer_sites

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
GROUPS = {"n_routed_experts": 16, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}
MIXTURES = {
    "mixtral": ("mixtral", {}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen3_moe, shares with sum 1": ("qwen3_moe", {"norm_topk_prob": True}),
    "olmoe of 24 experts": ("olmoe", {"num_experts": 24, "num_experts_per_tok": 8}),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3, shares as they are": ("deepseek_v3", {"norm_topk_prob": False}),
    "deepseek_v3 with groups": ("deepseek_v3", GROUPS),
}


def router(name, dtype=torch.float32):
    family, settings = MIXTURES[name]
    return router_of(decoder_layers(random_mixture_of(family, **settings).to(dtype))[1])


def bench_of(module, seed=0):
    return Bench(1, module.weight.dtype, module.weight.device, torch.Generator().manual_seed(seed))


def wrong(module, seed=0):
    with torch.no_grad():
        checks = probe_router(module, bench_of(module, seed))
    assert checks
    assert {(check.layer, check.site) for check in checks} == {(1, "router")}
    return [check for check in checks if check.mismatch]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MIXTURES)
def test_healthy_routers_give_every_answer_and_keep_their_weights(name, dtype):
    module = router(name, dtype)
    before = {key: (value.data_ptr(), value.clone()) for key, value in module.state_dict().items()}
    for seed in range(3):
        assert not wrong(module, seed)
    for key, value in module.state_dict().items():
        assert value.data_ptr() == before[key][0]
        assert torch.equal(value, before[key][1])


@pytest.mark.parametrize("name", MIXTURES)
def test_a_choice_is_compared_for_nearly_every_token(name):
    with torch.no_grad():
        checks = probe_router(router(name), bench_of(router(name)))
    choices = checks[1:15:3]
    assert sum(check.elements_per_channel for check in choices) > 0.95 * (513 + 96 + 1 + 4 + 8)


def test_logits_are_not_taken_for_shares_where_every_expert_is_chosen():
    module = router("mixtral")
    module.top_k = module.num_experts
    assert not wrong(module)


@pytest.mark.parametrize("name", MIXTURES)
def test_a_logit_one_percent_off_is_found(name):
    module = router(name)
    module.register_forward_hook(lambda m, a, out: (torch.cat([out[0][:, :1] * 1.01, out[0][:, 1:]], 1), *out[1:]))
    assert wrong(module)


@pytest.mark.parametrize("rows", [1, 4, 8, 96, 513])
@pytest.mark.parametrize("name", MIXTURES)
def test_a_wrong_choice_is_found_also_for_one_number_of_tokens_alone(name, rows):
    module = router(name)

    def next_expert(m, args, output):
        logits, shares, index = output
        return (logits, shares, (index + 1) % len(m.weight)) if len(args[0]) == rows else output

    module.register_forward_hook(next_expert)
    assert wrong(module)


@pytest.mark.parametrize("number", [-1, 10**6])
def test_experts_that_do_not_exist_are_a_fault_and_no_error(number):
    module = router("mixtral")
    module.register_forward_hook(lambda m, a, out: (*out[:2], torch.full_like(out[2], number)))
    assert wrong(module)


@pytest.mark.parametrize("name", MIXTURES)
def test_shares_that_are_normalised_against_the_setting_are_found(name):
    module = router(name)
    scores = torch.sigmoid if "deepseek" in name else lambda logits: logits.float().softmax(-1)
    is_normalised = getattr(module, "norm_topk_prob", True)
    factor = getattr(module, "routed_scaling_factor", 1.0)

    def other(m, args, output):
        logits, shares, index = output
        own = scores(logits).gather(1, index)
        own = own if is_normalised else own / own.sum(-1, keepdim=True)
        return logits, (own * factor).to(shares.dtype), index

    module.register_forward_hook(other)
    assert wrong(module)


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3"])
def test_shares_that_are_nan_for_one_token_are_found(name):
    module = router(name)
    module.register_forward_hook(lambda m, a, out: (out[0], out[1] * torch.nan, out[2]) if len(a[0]) == 1 else out)
    assert wrong(module)


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v3 with groups"])
def test_a_correction_of_the_next_expert_is_found(name):
    module = router(name)

    def shift(m, args):
        m.held = m.e_score_correction_bias
        m.e_score_correction_bias = m.held.roll(1)

    def put_back(m, args, output):
        m.e_score_correction_bias = m.held

    module.register_forward_pre_hook(shift)
    module.register_forward_hook(put_back)
    assert wrong(module)


def test_groups_that_are_not_masked_are_found():
    module = router("deepseek_v3 with groups")
    own = torch.Tensor.masked_fill
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "masked_fill", lambda x, mask, value: x if value < 0 else own(x, mask, value))
        assert wrong(module)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3"])
def test_accumulators_of_bfloat16_are_found(name, dtype, monkeypatch):
    module = router(name, dtype)

    def narrow(x, weight, bias=None):
        total = torch.zeros(len(x), len(weight), dtype=torch.bfloat16)
        for column in range(x.shape[1]):
            total = (total.double() + x[:, column : column + 1].double() * weight[:, column].double()).bfloat16()
        return total.to(x.dtype)

    monkeypatch.setattr(torch.nn.functional, "linear", narrow)
    assert wrong(module)


def gaps_of(model):
    with torch.no_grad():
        _, untested = model_checks(model, [layer_sites(layer) for layer in decoder_layers(model)], 0)
    return [gap.layers for gap in untested if gap.part == "router"]


def test_a_router_of_another_form_is_named_as_untested():
    model = random_mixture_of("deepseek_v3", **GROUPS)
    assert not gaps_of(model)
    module = router_of(decoder_layers(model)[1])
    module.register_forward_hook(lambda m, a, out: out[:2] if len(a[0]) == 513 else out)
    assert gaps_of(model) == [(1,)]
