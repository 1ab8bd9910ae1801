"""Keys and values in the number format of a cache: what attention reads, in any pass, and what its proof refuses."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from random_models import ARCHITECTURES, random_layer_norm_model_of, random_mixture_of, random_model_of
from transformers import DynamicCache, StaticCache

from aqnpipe.config.noise import (
    CacheNoise,
    FakeQuantization,
    ModuleNoise,
    NoiseSpec,
    OperatorNoise,
    RelativeGaussian,
)
from aqnpipe.errors import ModelError
from aqnpipe.machine.machine import NoiseKey
from aqnpipe.models.layout import decoder_layers
from aqnpipe.noise.injection import phase as phase_module
from aqnpipe.noise.injection.phase import phase_noise
from aqnpipe.noise.kernels.quantization import round_as_cached
from aqnpipe.noise.receipts.other_checks import cache_error
from aqnpipe.noise.receipts.recorder import ReceiptRecorder

KEY = NoiseKey(seed=0, step=0)
IDS = torch.randint(2, 50, (3, 9), generator=torch.Generator().manual_seed(1))
FORMATS = ("fp8", "int8")


def noise_of(number_format="fp8", phase="evaluation", **others):
    return NoiseSpec(kv_cache=CacheNoise(format=number_format, phases=(phase,)), **others)


def under(model, spec, body, phase="evaluation", requested=None, **settings):
    """Return what `body` returns in a phase under `spec`, and the receipt of `requested`, by default the same."""
    recorder = ReceiptRecorder(
        requested or spec, expected_phases=(phase,), num_layers=len(decoder_layers(model)), num_norms=7
    )
    with torch.set_grad_enabled(bool(settings)), phase_noise(model, spec, phase, KEY, recorder, **settings):
        result = body()
    return result, recorder.receipt()


def decoded(model, cache=None, ids=IDS, prompt=5):
    """Logits of every place, read by a prompt and then token by token."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    parts = [ids[:, :prompt], *ids[:, prompt:].split(1, dim=1)]
    return torch.cat([model(part, past_key_values=cache, use_cache=True).logits for part in parts], dim=1)


class Rounding(DynamicCache):
    """A cache that stores another format by itself."""

    number_format = "fp8"

    def update(self, keys, values, *args, **kwargs):
        keys, values = (round_as_cached(states, self.number_format) for states in (keys, values))
        return super().update(keys, values, *args, **kwargs)


@pytest.mark.parametrize("number_format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_reads_what_such_a_cache_would_store(number_format, dtype, attention):
    model = random_model_of("qwen2", dtype, attn_implementation=attention)
    found, receipt = under(model, noise_of(number_format), lambda: decoded(model))
    receipt.check()
    cache = Rounding(config=model.config)
    cache.number_format = number_format
    with torch.no_grad():
        assert torch.equal(found, decoded(model, cache))
        clean = decoded(model)
    assert not torch.equal(found, clean)
    assert {row.layer: (row.calls, row.wrong, row.escaped) for row in receipt.cache_cells} == dict.fromkeys(
        range(3), (5, 0, 0)
    )
    # New: 9 tokens of 3 rows in 2 heads, twice; read: 5 + 6 + 7 + 8 + 9 of them.
    assert {(row.recomputed, row.elements) for row in receipt.cache_cells} == {(9 * 12, 35 * 12)}
    # A step of E4M3 is 2^-3 of a leading bit, one of int8 1/127 of the largest channel.
    low, high = {"fp8": (0.02, 0.04), "int8": (0.003, 0.01)}[number_format]
    assert low < cache_error(receipt.cache_cells) < high


@pytest.mark.parametrize("number_format", FORMATS)
@pytest.mark.parametrize("phase", ["evaluation", "reference", "validation"])
def test_a_pass_without_a_cache_reads_the_same_keys_and_values(number_format, phase):
    model = random_model_of("qwen3")
    found, receipt = under(model, noise_of(number_format, phase), lambda: model(IDS, use_cache=False).logits, phase)
    receipt.check()
    step_by_step, _ = under(model, noise_of(number_format, phase), lambda: decoded(model), phase)
    torch.testing.assert_close(found, step_by_step, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", sorted(ARCHITECTURES))
def test_families_and_windows_and_static_caches(family):
    window = {"sliding_window": 4} if family == "gemma2" else {}
    model = random_model_of(family, **window)
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=12)):
        _, receipt = under(model, noise_of("int8"), lambda cache=cache: decoded(model, cache))
        receipt.check()
    _, receipt = under(model, noise_of(), lambda: model.generate(IDS, max_new_tokens=4, do_sample=False))
    receipt.check()


@pytest.mark.parametrize(
    "family", ["gpt_neox", "gpt2", "phi", "opt", "stablelm", "starcoder2", "cohere", "bloom", "mpt"]
)
def test_families_with_layer_norms(family):
    model = random_layer_norm_model_of(family)
    _, receipt = under(model, noise_of(), lambda: decoded(model))
    receipt.check()


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "olmoe", "granitemoe"])
def test_mixtures(family):
    model = random_mixture_of(family)
    _, receipt = under(model, noise_of("int8"), lambda: decoded(model))
    receipt.check()


def test_compressed_keys_and_values_are_refused_by_name():
    model = random_mixture_of("deepseek_v3")
    with pytest.raises(
        ModelError, match=r"kv_cache: layer 0 \(DeepseekV3Attention\) stores compressed keys and values"
    ):
        under(model, noise_of(), lambda: decoded(model))


def test_rows_do_not_depend_on_their_batch():
    model = random_model_of()
    together, _ = under(model, noise_of("int8"), lambda: decoded(model))
    alone, _ = under(model, noise_of("int8"), lambda: decoded(model, ids=IDS[1:2]))
    torch.testing.assert_close(alone[0], together[1], rtol=1e-4, atol=1e-4)


OTHERS = {
    "operators": {"operator_noise": OperatorNoise(error=RelativeGaussian(scale=0.05), phases=("evaluation",))},
    "operands": {
        "operator_noise": OperatorNoise(
            error=FakeQuantization(format="fp8", activations=True), phases=("evaluation",), include_lm_head=False
        )
    },
    "modules": {
        "module_noise": ModuleNoise(modules="linear", error=RelativeGaussian(scale=0.01), phases=("evaluation",))
    },
}


@pytest.mark.parametrize("others", OTHERS.values(), ids=OTHERS.keys())
@pytest.mark.parametrize("number_format", FORMATS)
def test_beside_other_noise(others, number_format):
    model = random_model_of()
    both, receipt = under(model, noise_of(number_format, **others), lambda: decoded(model))
    receipt.check()
    other, _ = under(model, NoiseSpec(**others), lambda: decoded(model))
    assert not torch.equal(both, other)


def gradients_of(model, spec, phase="actor_forward"):
    def body():
        model(IDS, labels=IDS, use_cache=False).loss.backward()

    model.zero_grad()
    _, receipt = under(model, spec, body, phase, backward=True)
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}, receipt


@pytest.mark.parametrize("number_format", FORMATS)
def test_gradients_are_straight_through_with_and_without_checkpoints(number_format):
    model = random_model_of()
    found, receipt = gradients_of(model, noise_of(number_format, "actor_forward"))
    receipt.check()
    clean, _ = gradients_of(model, NoiseSpec())
    assert all(gradient.count_nonzero() for name, gradient in found.items() if "k_proj.weight" in name)
    assert not torch.equal(*(each["model.layers.0.self_attn.k_proj.weight"] for each in (found, clean)))
    model.train()
    model.gradient_checkpointing_enable()
    again, receipt = gradients_of(model, noise_of(number_format, "actor_forward"))
    receipt.check()
    assert {row.calls for row in receipt.cache_cells} == {1}
    torch.testing.assert_close(again, found)


def test_an_adapter():
    model = get_peft_model(random_model_of(), LoraConfig(r=2, target_modules=["k_proj", "v_proj"]))
    _, receipt = gradients_of(model, noise_of("fp8", "actor_forward"))
    receipt.check()


def test_everything_is_restored():
    model = random_model_of()
    with torch.no_grad():
        before = decoded(model)
        under(model, noise_of(), lambda: decoded(model))
        assert torch.equal(decoded(model), before)
    assert not any(module._forward_pre_hooks for module in model.modules())


# -- wrong uses --------------------------------------------------------------------------------------------------------


def of_e5m2(values, number_format):
    return values.to(torch.float8_e5m2).to(values.dtype)


def of_another_scale(values, number_format):
    return round_as_cached(values * 0.75, number_format) / 0.75


def of_the_whole_tensor(values, number_format):
    return round_as_cached(values.flatten()[None], "int8").view(values.shape)


def toward_zero(values, number_format):
    rounded = round_as_cached(values, number_format)
    return torch.where(rounded.abs() > values.abs(), round_as_cached(values * 0.9375, number_format), rounded)


def of_the_prompt_alone(values, number_format):
    return values if values.shape[2] == 1 else round_as_cached(values, number_format)


def of_single_tokens_alone(values, number_format):
    return values if values.shape[2] > 1 else round_as_cached(values, number_format)


def of_the_last_row_exact(values, number_format):
    rounded = round_as_cached(values, number_format)
    rounded[-1] = values[-1]
    return rounded


WRONG = (
    of_e5m2,
    of_another_scale,
    of_the_whole_tensor,
    toward_zero,
    of_the_prompt_alone,
    of_single_tokens_alone,
    of_the_last_row_exact,
)


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("number_format", FORMATS)
def test_another_rounding_is_refused(monkeypatch, wrong, number_format):
    monkeypatch.setattr(phase_module, "round_as_cached", wrong)
    model = random_model_of()
    _, receipt = under(model, noise_of(number_format), lambda: decoded(model))
    problems = receipt.problems()
    assert any("keys and values that attention read were not rounded" in problem for problem in problems), problems


def every_other(exact):
    """A rounding that leaves those calls out of every two that `exact` says."""
    calls = []

    def rounded(values, number_format):
        calls.append(1)
        return values if len(calls) % 2 == exact else round_as_cached(values, number_format)

    return rounded


@pytest.mark.parametrize("exact", [0, 1], ids=["only keys", "only values"])
def test_keys_or_values_alone_are_refused(monkeypatch, exact):
    monkeypatch.setattr(phase_module, "round_as_cached", every_other(exact))
    model = random_model_of()
    _, receipt = under(model, noise_of(), lambda: decoded(model))
    assert any("were not rounded" in problem for problem in receipt.problems())


@pytest.mark.parametrize("phase", ["evaluation", "actor_forward"])
def test_a_layer_that_is_left_out_is_named(monkeypatch, phase):
    calls = []

    def rounded(values, number_format):
        calls.append(1)
        # Three layers, keys and values each.
        return values if (len(calls) - 1) % 6 // 2 == 1 else round_as_cached(values, number_format)

    monkeypatch.setattr(phase_module, "round_as_cached", rounded)
    model = random_model_of()
    _, receipt = under(model, noise_of("fp8", phase), lambda: model(IDS, use_cache=False), phase)
    (problem,) = receipt.problems()
    assert problem == (
        f"{phase}: the cache of layer 1: 108 of 108 keys and values that attention read were not rounded; "
        "108 of 108 new ones, rounded, were not read"
    )


class Storing(DynamicCache):
    """Gives the new ones back as they came, and stores others."""

    def update(self, keys, values, *args, **kwargs):
        stored = super().update(keys * 1.01, values * 1.01, *args, **kwargs)
        return tuple(
            torch.cat([old[:, :, : -new.shape[2]], new], 2) for old, new in zip(stored, (keys, values), strict=True)
        )


def test_a_cache_that_stores_other_values_than_it_gives_back_is_refused():
    model = random_model_of()
    _, receipt = under(model, noise_of(), lambda: decoded(model, Storing(config=model.config)))
    assert any("were not rounded" in problem for problem in receipt.problems())


def test_a_cache_that_forgets_new_tokens_is_refused():
    class Forgetful(DynamicCache):
        def update(self, keys, values, *args, **kwargs):
            read = super().update(keys, values, *args, **kwargs)
            return tuple(torch.cat([states[:, :, :-1], states[:, :, :1]], 2) for states in read)

    model = random_model_of()
    _, receipt = under(model, noise_of(), lambda: decoded(model, Forgetful(config=model.config)))
    assert any("new ones, rounded, were not read" in problem for problem in receipt.problems())


def test_no_rounding_at_all_and_one_that_nobody_asked_for():
    model = random_model_of()
    _, receipt = under(model, NoiseSpec(), lambda: decoded(model), requested=noise_of())
    assert any("kv_cache: installed null" in problem for problem in receipt.problems())
    assert any("were not rounded" in problem for problem in receipt.problems())
    _, receipt = under(model, noise_of(), lambda: decoded(model), requested=NoiseSpec())
    assert any("kv_cache: installed" in problem for problem in receipt.problems())


def test_a_phase_that_never_ran_is_refused():
    model = random_model_of()
    _, receipt = under(model, noise_of("fp8", "rollout"), lambda: decoded(model))
    assert receipt.problems() == ["kv_cache was requested in rollout alone, which never ran"]
    assert not receipt.cache_cells


def test_a_layer_without_a_cache_is_refused_by_name():
    model = random_model_of()
    attention = decoder_layers(model)[1].self_attn
    attention.forward = lambda hidden_states, **others: (hidden_states, None)
    with pytest.raises(ModelError, match=r"layer 1 \(Qwen2DecoderLayer\) has no attention with a cache"):
        under(model, noise_of(), lambda: decoded(model))
