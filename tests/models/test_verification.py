"""A model in memory is compared with its folder: its weights, and what the trainer's model computed."""

import re

import pytest
import torch
from random_models import (
    ARCHITECTURES,
    LAYER_NORM_ARCHITECTURES,
    random_layer_norm_model_of,
    random_mixture_of,
    random_model_of,
)
from safetensors.torch import load_file, save_file

from aqnpipe.config.training import LoraConfig
from aqnpipe.errors import ModelError
from aqnpipe.models.adapters import adapted_modules, adapter_weights, adapters_off, add_adapters, merged_weights
from aqnpipe.models.loading import load_model
from aqnpipe.models.prepared import Probe
from aqnpipe.models.verification import _compare_weights, probe_problem, take_probe

MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "deepseek_v3")
NAME = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), rf"{NAME} has NaN in its file, expected numbers"),
        (2.0, rf"{NAME} in memory is not the weight of this checkpoint"),
    ],
)
def test_a_weight_that_differs_is_named_with_its_cause(save_model, value, message):
    folder = save_model(2)
    model = load_model(folder, dtype="float32", attention="eager")
    _compare_weights(model, folder, "float32")
    weights = load_file(folder / "model.safetensors")
    weights[NAME][0, 0] = value
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    if value != value:
        model.state_dict()[NAME][0, 0] = torch.nan
    with pytest.raises(ModelError, match=message):
        _compare_weights(model, folder, "float32")


@pytest.mark.parametrize("architecture", MIXTURES)
def test_experts_that_the_loader_fuses_are_compared_with_their_file(architecture, tmp_path):
    random_mixture_of(architecture).save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype="bfloat16", attention="eager")
    _compare_weights(model, tmp_path, "bfloat16")
    experts = next(weight for name, weight in model.named_parameters() if "expert" in name and weight.ndim == 3)
    with torch.no_grad():
        experts[3, 5, 7] += 1
    with pytest.raises(ModelError, match=r"expert.* in memory is not the weight of this checkpoint"):
        _compare_weights(model, tmp_path, "bfloat16")


MODELS = [
    *((random_model_of, name) for name in ARCHITECTURES),
    *((random_mixture_of, name) for name in MIXTURES),
    *((random_layer_norm_model_of, name) for name in LAYER_NORM_ARCHITECTURES),
]


@pytest.mark.parametrize(("make", "name"), MODELS, ids=[name for _, name in MODELS])
def test_every_architecture_is_probed_and_left_as_it_was(make, name):
    model = make(name).to(torch.bfloat16).train()
    model.lm_head.requires_grad_(False)
    parameters, weights = dict(model.named_parameters()), {key: t.clone() for key, t in model.state_dict().items()}
    experts, state = model.config._experts_implementation, torch.random.get_rng_state()
    probe = take_probe(model, "bfloat16")
    assert all(parameters[key] is parameter for key, parameter in model.named_parameters())
    assert all(torch.equal(weights[key], tensor) for key, tensor in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert model.config._experts_implementation == experts
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.get_default_dtype() == torch.float32
    assert probe == take_probe(model, "bfloat16")
    exact = model.to(torch.float32).eval()
    with torch.no_grad():
        logits = exact(torch.tensor([probe.token_ids]), use_cache=False).logits[0, -2:]
    top = logits.gather(-1, torch.tensor(probe.top_tokens))
    torch.testing.assert_close(top, torch.tensor(probe.top_logits), rtol=1e-4, atol=1e-5)


def test_a_record_keeps_every_bit_of_a_probe():
    probe = take_probe(random_model_of(), "float32")
    assert Probe.model_validate_json(probe.model_dump_json()) == probe
    assert len(probe.token_ids) == 16
    assert len(probe.model_dump_json()) < 1000


def rounded(model):
    """Return a model as it is loaded in bfloat16: its weights are rounded, the frequencies of its rope are not."""
    for weight in model.parameters():
        weight.data = weight.data.to(torch.bfloat16)
    return model


def test_rounded_rope_frequencies_are_refused():
    """`model.to(torch.bfloat16)` rounds buffers too. That changes the logits of this small model by 4e-5."""
    stored = take_probe(rounded(random_model_of()), "bfloat16")
    assert "does not compute" in probe_problem(random_model_of(dtype=torch.bfloat16), stored)


@pytest.mark.parametrize("seed", range(3))
def test_weights_that_are_rounded_when_loaded_compute_what_the_trainers_float32_weights_did(seed):
    trainer = random_model_of(seed=seed)
    stored = take_probe(trainer, "bfloat16")
    assert probe_problem(rounded(random_model_of(seed=seed)), stored) is None
    assert probe_problem(trainer, stored) is None
    exact = take_probe(trainer, "float32")
    assert exact.top_logits != stored.top_logits
    # Loaded in a coarser format than that of the checkpoint: only a rough comparison is possible.
    assert probe_problem(rounded(random_model_of(seed=seed)), exact) is None
    assert probe_problem(rounded(random_model_of(seed=seed + 1)), exact) is not None


def _scaled(model):
    model.model.layers[1].mlp.down_proj.weight.data *= 1.01


def _one_sign(model):
    model.model.layers[2].self_attn.o_proj.weight.data[3, 5] *= -1


def _rope(model):
    model.model.rotary_emb.inv_freq *= 1.01


def _head(model):
    model.lm_head.weight = torch.nn.Parameter(model.model.embed_tokens.weight.clone())


def _layers_exchanged(model):
    first, second, third = model.model.layers
    model.model.layers = torch.nn.ModuleList([second, first, third])


def _norm_left_out(model):
    model.model.norm.forward = lambda hidden: hidden


def _attention_scaling(model):
    model.model.layers[0].self_attn.scaling *= 1.05


@pytest.mark.parametrize(
    "change", [_scaled, _one_sign, _rope, _head, _layers_exchanged, _norm_left_out, _attention_scaling]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_weight_buffer_setting_or_code_is_refused(change, dtype):
    model = random_model_of(dtype=dtype, tie_word_embeddings=False)
    stored = take_probe(model, str(dtype).removeprefix("torch."))
    assert probe_problem(model, stored) is None
    change(model)
    assert "does not compute what the trainer's model computed" in probe_problem(model, stored)


LORA = LoraConfig(rank=4, alpha=8)


def adapted(dtype=torch.bfloat16, seed=0, steps=1):
    """A model of bfloat16 whose adapters were trained with a learning rate of 1e-6, by `steps` steps of Adam."""
    model = random_model_of(dtype=dtype, seed=seed)
    add_adapters(model, LORA, seed=0)
    generator = torch.Generator().manual_seed(0)
    for name, weight in adapter_weights(model).items():
        weight.data = weight.data.float()
        for _ in range(steps if "lora_B" in name else 0):
            weight.data += (torch.randint(0, 2, weight.shape, generator=generator) * 2.0 - 1) * 1e-6
    return model


@pytest.mark.parametrize("steps", [0, 1, 100])
def test_adapters_that_changed_by_a_millionth_are_recognised(steps):
    stored = take_probe(adapted(steps=steps), "bfloat16")
    assert probe_problem(adapted(steps=steps), stored) is None
    assert stored.adapter_effects.keys() == set(LORA.target_modules)
    assert all((effect.norm > 0) == (steps > 0) for effect in stored.adapter_effects.values())


def _scaled_alpha(model):
    for module in adapted_modules(model).values():
        module.scaling["default"] *= 0.5


def _one_layer_off(model):
    adapted_modules(model)["model.layers.1.mlp.down_proj"].enable_adapters(False)


def _adapters_of_layers_exchanged(model):
    first, second = (model.model.layers[index].mlp.up_proj for index in (0, 1))
    first.lora_B, second.lora_B = second.lora_B, first.lora_B


def _merged_with_loss(model):
    merged = merged_weights(model, torch.bfloat16)
    plain = random_model_of(dtype=torch.bfloat16)
    plain.load_state_dict(merged)
    return plain


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (_scaled_alpha, r"adapters scaled: those of \w+ have 0.5 times the effect"),
        (_one_layer_off, "the adapters of down_proj have another effect than in training"),
        (_adapters_of_layers_exchanged, "the adapters of up_proj have another effect"),
        (_merged_with_loss, r"adapters not applied to \w+ \(switched off, removed or merged with loss\)"),
        (lambda _: random_model_of(dtype=torch.bfloat16), "adapters not applied to"),
        (lambda _: adapted(steps=19), "the adapters of .* of another step, run or base"),
        (lambda _: adapted(steps=20, seed=1), "the adapters of .* of another step, run or base"),
    ],
)
def test_adapters_not_applied_scaled_merged_or_of_another_step_or_base_are_refused(change, problem):
    model = adapted(steps=20)
    stored = take_probe(model, "bfloat16")
    found = probe_problem(change(model) or model, stored)
    assert found is not None
    assert "\n" not in found
    assert re.search(problem, found), found


def test_adapters_that_are_switched_off_are_refused():
    model = adapted()
    stored = take_probe(model, "bfloat16")
    with adapters_off(model):
        assert "adapters not applied to down_proj" in probe_problem(model, stored)
    assert probe_problem(model, stored) is None


def test_dropout_and_gradients_do_not_reach_a_probe():
    model = random_model_of()
    add_adapters(model, LoraConfig(rank=4, alpha=8, dropout=0.5), seed=0)
    for name, weight in adapter_weights(model).items():
        weight.data += 0.01 if "lora_B" in name else 0.0
    stored = take_probe(model.train(), "float32")
    assert probe_problem(model, stored) is None
    assert all(weight.grad is None for weight in model.parameters())
