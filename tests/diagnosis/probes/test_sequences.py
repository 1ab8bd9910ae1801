"""Kernels over many keys, cache, rotation and residual sums: healthy models, and faults put in by patches."""

import sys
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from decoder_families import tiny_model_of
from random_models import formats_of

from aqnpipe.diagnosis.exact_probes import without_consequences
from aqnpipe.diagnosis.probes import attention
from aqnpipe.diagnosis.probes.attention import Observation
from aqnpipe.diagnosis.probes.elementwise import Norm
from aqnpipe.diagnosis.probes.flow import FAMILIES, observed
from aqnpipe.diagnosis.probes.sequences import probe_sequences
from aqnpipe.models.layout import decoder_layers, layer_sites

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LAYER = 1


def probed(model):
    untested = {}
    layers = [layer_sites(layer) for layer in decoder_layers(model)]
    with torch.no_grad():
        checks = probe_sequences(model, layers, 0, untested)
    return checks, untested


def places(model):
    return {(check.layer, check.site) for check in without_consequences(probed(model)[0]) if check.mismatch}


def model_of(family="qwen2", dtype=torch.float32, attention="eager"):
    model = tiny_model_of(family).to(dtype)
    model.set_attn_implementation(attention)
    return model


@contextmanager
def patched(owner, name, value):
    own = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield own
    finally:
        setattr(owner, name, own)


@pytest.mark.parametrize(
    ("family", "dtype", "attention"),
    [
        pytest.param(*case, marks=[] if case[1] == torch.bfloat16 else [pytest.mark.slow])
        for case in formats_of(FAMILIES, turn=0)
    ],
)
def test_healthy_models_give_every_answer(family, dtype, attention):
    checks, untested = probed(model_of(family, dtype, attention))
    assert not [check for check in checks if check.mismatch]
    named = {family: {"rotary"} for family in ("gpt2", "gpt_bigcode", "opt")}
    named["olmo"] = {"inputs of the final norm and of lm_head"}
    named["deepseek_v3"] = {"compressed keys and values in the cache"}
    assert set(untested) == named.get(family, set())
    probes = {check.probe for check in checks}
    kernels = {"attention_one_hot", "attention_uniform", "attention_ordinary"}
    assert {*kernels, "cache", "residual", "chain", "handoff"} <= probes
    assert "logits" in probes
    assert ("norm_in_model" in probes) == (family != "olmo"), "the norms of OLMo do not show their epsilon"


def test_a_layer_whose_branches_are_not_seen_has_no_check_of_its_sum():
    """A sum that is compared with itself would count as tested."""
    model = model_of()
    layers = [layer_sites(layer) for layer in decoder_layers(model)]
    layers = [replace(sites, attention=torch.nn.Identity()) for sites in layers]
    untested = {}
    with torch.no_grad(), observed(model, layers, Observation(torch.zeros(1).long(), 0), untested) as flow:
        model(torch.zeros(1, 4).long())
    assert untested["residual sums"] == "the branches of a layer were not seen"
    assert "residual" not in {check.probe for check in flow.observation.checks}


def test_a_kernel_without_a_gradient_is_named():
    model = model_of()
    file = sys.modules[type(model).__module__]
    kernel = file.eager_attention_forward

    def without_graph(*args, **kwargs):
        with torch.no_grad():
            return kernel(*args, **kwargs)

    with patched(file, "eager_attention_forward", without_graph):
        checks, untested = probed(model)
    assert untested["attention_core.gradient"] == "its kernel has no gradient"
    assert not [check for check in checks if check.mismatch]


def of_layer(kernel, change):
    """A kernel of which `change` alters the arguments or the result in one layer only."""

    def run(module, *args, **kwargs):
        if module.layer_idx != LAYER:
            return kernel(module, *args, **kwargs)
        return change(kernel, module, *args, **kwargs)

    return run


def scores_too_large(kernel, module, q, k, v, mask, scaling, **kwargs):
    return kernel(module, q, k, v, mask, scaling=scaling * 1.05, **kwargs)


def mask_of_one_key_lost(kernel, module, q, k, v, mask, **kwargs):
    mask = mask.clone() if mask is not None else torch.zeros(1, 1, q.shape[2], k.shape[2], dtype=q.dtype)
    mask[..., 5] = 0
    return kernel(module, q, k, v, mask, **kwargs)


def values_of_neighbours(kernel, module, q, k, v, mask, **kwargs):
    swapped = v.clone()
    swapped[:, :, [20, 21]] = v[:, :, [21, 20]]
    return kernel(module, q, k, swapped, mask, **kwargs)


def one_channel_of_one_head(kernel, module, q, k, v, mask, **kwargs):
    output, weights = kernel(module, q, k, v, mask, **kwargs)
    output = output.clone()
    output[:, :, 2, 3] *= 1.25
    return output, weights


def wrong_beyond_the_first_tile(kernel, module, q, k, v, mask, **kwargs):
    output, weights = kernel(module, q, k, v, mask, **kwargs)
    output = output.clone()
    output[:, 50:] *= 1.5
    return output, weights


def wrong_for_single_tokens(kernel, module, q, k, v, mask, **kwargs):
    output, weights = kernel(module, q, k, v, mask, **kwargs)
    return (output * 1.5 if q.shape[2] == 1 else output), weights


def last_key_of_whole_tiles_lost(kernel, module, q, k, v, mask, **kwargs):
    if k.shape[2] % 16 == 0:
        v = torch.cat([v[:, :, :-1], torch.zeros_like(v[:, :, -1:])], 2)
    return kernel(module, q, k, v, mask, **kwargs)


def fifth_sequence_wrong(kernel, module, q, k, v, mask, **kwargs):
    q = torch.cat([q[:4], 1.1 * q[4:]])
    return kernel(module, q, k, v, mask, **kwargs)


def mask_lost_on_a_filled_cache(kernel, module, q, k, v, mask, **kwargs):
    if 1 < q.shape[2] < k.shape[2]:
        mask = mask.clone()
        mask[..., -1] = 0
    return kernel(module, q, k, v, mask, **kwargs)


CHANGES = [
    mask_lost_on_a_filled_cache,
    last_key_of_whole_tiles_lost,
    fifth_sequence_wrong,
    scores_too_large,
    mask_of_one_key_lost,
    values_of_neighbours,
    one_channel_of_one_head,
    wrong_beyond_the_first_tile,
    wrong_for_single_tokens,
]


@pytest.mark.parametrize(
    ("family", "dtype", "change"),
    [
        (family, DTYPES[(place + turn) % 3], change)  # every change in every format and family
        for place, family in enumerate(["qwen2", "gpt_neox", "deepseek_v3"])
        for turn, change in enumerate(CHANGES)
    ],
)
def test_a_faulty_kernel_is_found_in_its_layer(family, dtype, change):
    model = model_of(family, dtype)
    file = sys.modules[type(model).__module__]
    kernel = file.eager_attention_forward
    with patched(file, "eager_attention_forward", of_layer(kernel, change)):
        assert places(model) == {(LAYER, "attention_core")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_softmax_with_a_wrong_exponential_is_found_in_every_layer(dtype):
    def steep(scores, dim=-1, dtype=None):
        weights = torch.exp(1.05 * (scores.float() - scores.float().amax(dim, keepdim=True)))
        return weights / weights.sum(dim, keepdim=True)

    with patched(torch.nn.functional, "softmax", steep):
        assert places(model_of(dtype=dtype)) == {(0, "attention_core"), (1, "attention_core")}


def test_fused_attention_alone_is_found_faulty():
    own = torch.nn.functional.scaled_dot_product_attention

    def faulty(*args, **kwargs):
        return own(*args, **kwargs) * 1.02

    with patched(torch.nn.functional, "scaled_dot_product_attention", faulty):
        assert places(model_of(attention="sdpa")) == {(0, "attention_core"), (1, "attention_core")}
        assert not places(model_of(attention="eager"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["cohere", "gemma2", "qwen2"])
def test_a_fault_behind_lm_head_is_found(family, dtype):
    model = model_of(family, dtype)

    def damaged(module, args, kwargs, output):
        output.logits = output.logits * 1.05
        return output

    model.register_forward_hook(damaged, with_kwargs=True)
    assert places(model) == {(-1, "lm_head")}


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_head_of_a_norm_of_heads_is_found(dtype):
    model = model_of("qwen3", dtype)

    def damaged(module, args, output):
        return torch.cat([output[..., :1, :], 1.05 * output[..., 1:, :]], -2)

    decoder_layers(model)[LAYER].self_attn.q_norm.register_forward_hook(damaged)
    assert places(model) == {(LAYER, "q_norm")}


def test_a_norm_of_numbers_that_no_device_squares_is_not_compared():
    norm = torch.nn.LayerNorm(4)
    x = torch.tensor([[1e30, 2.0, 3.0, 4.0], [torch.nan, 0.0, 0.0, 0.0], [1.0, 2.0, 3.0, 6.0]])
    seen = norm(x)
    assert Norm.of(norm).in_model(0, "norm", x, seen).mismatch is None
    seen = torch.cat([seen[:2], seen[2:] * 1.001])
    assert Norm.of(norm).in_model(0, "norm", x, seen).mismatch.channels.tolist() == [0, 1, 3]


def test_a_corrupted_cache_is_found_in_its_layer():
    from transformers import DynamicCache

    own = DynamicCache.update

    def update(cache, keys, values, layer, *args, **kwargs):
        keys, values = own(cache, keys, values, layer, *args, **kwargs)
        if layer == LAYER and keys.shape[2] > 1:
            cache.layers[layer].keys = cache.layers[layer].keys.clone()
            cache.layers[layer].keys[..., 3, 0] += 1
        return keys, values

    with patched(DynamicCache, "update", update):
        assert places(model_of()) == {(LAYER, "kv_cache")}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "phi3", "cohere", "stablelm"])
def test_a_wrong_rotation_is_found(family, dtype):
    model = model_of(family, dtype)
    file = sys.modules[type(model).__module__]
    own = file.apply_rotary_pos_emb

    def off_by_one(q, k, cos, sin, *args):
        return own(q, k, cos.roll(1, 1), sin.roll(1, 1), *args)

    with patched(file, "apply_rotary_pos_emb", off_by_one):
        assert places(model) == {(0, "rotary"), (1, "rotary")}


def test_a_wrong_table_of_angles_is_found():
    model = model_of("llama")

    def damaged(module, args, output):
        cos = output[0].clone()
        cos[..., 2] *= 1.01
        return cos, output[1]

    model.model.rotary_emb.register_forward_hook(damaged)
    assert places(model) == {(-1, "rotary_table")}


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "gpt_neox", "opt"])
def test_a_mantissa_bit_of_the_residual_sum_is_found(family):
    model = model_of(family)

    def stuck(module, args, output):
        tensor = output[0] if isinstance(output, tuple) else output
        tensor = (tensor.view(torch.int32) & ~(1 << 12)).view(torch.float32)
        return (tensor, *output[1:]) if isinstance(output, tuple) else tensor

    decoder_layers(model)[LAYER].register_forward_hook(stuck)
    assert places(model) == {(LAYER, "layer_output")}


def test_what_comes_between_two_layers_is_compared():
    model = model_of()
    decoder_layers(model)[1].register_forward_pre_hook(lambda module, args: (args[0] * 1.001, *args[1:]))
    assert places(model) == {(0, "layer_output")}


def test_families_whose_sums_are_not_known_are_named():
    _, untested = probed(model_of("granite"))
    assert "granite" in untested["residual sums and KV cache"]
    assert "granite" in untested["rotary"]


def test_the_lookup_of_kernels_is_restored_after_an_error(monkeypatch):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def fail(*args):
        raise RuntimeError

    monkeypatch.setattr(attention, "reference", fail)
    model = model_of()
    with pytest.raises(RuntimeError):
        probed(model)
    assert "get_interface" not in vars(ALL_ATTENTION_FUNCTIONS)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def of_new_values(change):
    """Let the cache of one layer change the values of new tokens; `past` tokens came before them."""
    from transformers import DynamicCache

    own = DynamicCache.update

    def update(cache, keys, values, layer, *args, **kwargs):
        if layer == LAYER:
            values = change(values.clone(), cache.get_seq_length(layer))
        return own(cache, keys, values, layer, *args, **kwargs)

    return patched(DynamicCache, "update", update)


def lane_in_prefill(values, past):
    return values if past else values.index_fill(-1, torch.tensor([3]), 0)


def narrow_when_decoding(values, past):
    """The new values with one bit less than 8: those of bfloat16 that are stored in a narrower cache."""
    step = 2.0 ** (torch.frexp(values).exponent - 7)
    return ((values / step).round() * step).to(values.dtype) if past and values.shape[2] == 1 else values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("change", [lane_in_prefill, narrow_when_decoding])
@pytest.mark.parametrize("family", ["llama", "phi3", "gpt_neox"])
def test_values_that_change_on_their_way_into_the_cache_are_found(family, change, dtype):
    with of_new_values(change):
        assert places(model_of(family, dtype)) == {(LAYER, "kv_cache")}


@pytest.mark.parametrize(("family", "is_compressed"), [("deepseek_v3", True), ("llama", False)])
def test_a_compressed_cache_is_named_as_untested(family, is_compressed):
    _, untested = probed(model_of(family))
    assert ("compressed keys and values in the cache" in untested) == is_compressed


def test_a_cache_that_spoils_the_first_place_of_a_page_is_found():
    from transformers import DynamicCache

    own = DynamicCache.update

    def update(cache, keys, values, layer, *args, **kwargs):
        keys, values = own(cache, keys, values, layer, *args, **kwargs)
        if layer == LAYER and keys.shape[2] % 16 == 1:
            keys = torch.cat([keys[:, :, :-2], keys[:, :, -1:], keys[:, :, -1:]], 2)
        return keys, values

    with patched(DynamicCache, "update", update):
        assert places(model_of()) == {(LAYER, "kv_cache")}


def test_subnormal_probabilities_that_are_not_small_are_found():
    own = torch.nn.functional.softmax

    def garbled(scores, *args, **kwargs):
        found = own(scores, *args, **kwargs)
        return torch.where((found > 0) & (found < torch.finfo(found.dtype).tiny), 1e-3, found)

    with patched(torch.nn.functional, "softmax", garbled):
        assert places(model_of()) == {(0, "attention_core"), (1, "attention_core")}


@pytest.mark.parametrize("part", ["keys", "values"])
def test_sequences_of_a_batch_that_the_cache_confuses_are_found(part):
    from transformers import DynamicCache

    own = DynamicCache.update

    def update(cache, keys, values, layer, *args, **kwargs):
        before = keys.shape[2]
        keys, values = own(cache, keys, values, layer, *args, **kwargs)
        past = keys.shape[2] - before
        if layer == LAYER and past:
            kept = {"keys": keys, "values": values}[part]
            confused = torch.cat([kept[:, :, :past].roll(1, 0), kept[:, :, past:]], 2)
            keys, values = (confused, values) if part == "keys" else (keys, confused)
        return keys, values

    with patched(DynamicCache, "update", update):
        assert places(model_of()) == {(LAYER, "kv_cache")}
