"""`aqnpipe.noisy` with `operators="all"`: softmax, activations and norms too, forward and backward."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from random_models import random_layer_norm_model_of
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import aqnpipe
from aqnpipe.config.noise import AbsoluteGaussian, NoiseSpec, OperatorNoise, RelativeGaussian
from aqnpipe.errors import ReceiptError
from aqnpipe.machine.machine import NoiseKey
from aqnpipe.machine.norms import NormKernels
from aqnpipe.noise.injection.phase import phase_noise
from aqnpipe.noise.receipts.recorder import ReceiptRecorder

GENERATION = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
OF_LAYERS = {"_softmax", "silu", "norm"}
OF_GRADIENTS = {"_softmax_backward_data", "silu_backward", "norm_gradient"}


def step(model, ids, **arguments):
    model.zero_grad()
    with aqnpipe.noisy(model, scale=0.05, operators="all", backward=True, **arguments) as receipt:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return receipt


def recomputed(receipt):
    return {cell.operator for cell, seen in receipt.cells.items() if seen.recomputed}


# -- right uses --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_noise_of_results_is_that_of_studies(make_model, ids, attention):
    model = make_model(attn_implementation=attention)
    noise = OperatorNoise(
        error=RelativeGaussian(scale=0.05),
        phases=("evaluation",),
        operators="all",
        attention="fused" if attention == "sdpa" else "decomposed",
    )
    spec = NoiseSpec(operator_noise=noise)
    recorder = ReceiptRecorder(spec, expected_phases=("evaluation",), num_layers=4, num_norms=9)
    settings = {**GENERATION, "output_logits": True, "return_dict_in_generate": True}
    with torch.no_grad(), phase_noise(model, spec, "evaluation", NoiseKey(seed=3, step=2), recorder):
        expected = model.generate(ids, **settings).logits
    with torch.no_grad(), aqnpipe.noisy(model, scale=0.05, operators="all", seed=3, step=2) as receipt:
        found = model.generate(ids, **settings).logits
    assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))
    assert recomputed(receipt.check()) >= OF_LAYERS - ({"_softmax"} if attention == "sdpa" else set())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators_and_their_gradients_are_recomputed(make_model, ids, dtype):
    receipt = step(make_model(attn_implementation="eager").to(dtype), ids).check()
    assert recomputed(receipt) >= OF_LAYERS | OF_GRADIENTS
    assert receipt.measured_scale == pytest.approx(0.05, rel=0.02)


def test_layer_norms(ids):
    receipt = step(random_layer_norm_model_of("phi"), ids).check()
    assert recomputed(receipt) >= {"native_layer_norm", "native_layer_norm_backward"}


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu(make_model, ids, approximate):
    model = make_model()
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.GELU(approximate=approximate)
    assert recomputed(step(model, ids).check()) >= {"gelu", "gelu_backward"}


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_compute_again_with_the_same_noise(make_model, ids, reentrant):
    model = make_model(attn_implementation="eager").train()

    def gradients():
        step(model, ids).check()
        return [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]

    stored = gradients()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    again = gradients()
    assert all(torch.equal(*pair) for pair in zip(stored, again, strict=True))


def test_adapters_and_inference_mode(make_model, ids):
    model = make_model()
    outer = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "up_proj"]))
    step(outer, ids).check()
    with torch.inference_mode(), aqnpipe.noisy(outer, scale=0.05, operators="all") as receipt:
        outer.eval().generate(input_ids=ids, **GENERATION)
    receipt.check()


@pytest.mark.parametrize("trained", ["layers.2.mlp.down_proj", "layers.1.self_attn.q_proj", "lm_head"])
def test_gradients_of_frozen_weights_are_not_expected(make_model, ids, trained):
    model = make_model(tie_word_embeddings=False)
    for name, weight in model.named_parameters():
        weight.requires_grad_(trained in name)
    step(model, ids).check()


def test_attention_with_masked_rows_by_its_definition(make_model, ids):
    model = make_model(attn_implementation="sdpa")
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with sdpa_kernel(SDPBackend.MATH), aqnpipe.noisy(model, scale=0.05, operators="all", backward=True) as receipt:
        loss = model(input_ids=ids, attention_mask=mask, labels=ids).loss
        loss.backward()
    assert torch.isfinite(loss)
    assert "_safe_softmax" in recomputed(receipt.check())


def test_another_error_and_operators_in_place(make_model, ids):
    model = make_model()
    model.model.layers[1].mlp.act_fn = nn.SiLU(inplace=True)
    error = AbsoluteGaussian(scale=0.01)
    with torch.no_grad(), aqnpipe.noisy(model, error=error, operators="all", layers=[1]) as receipt:
        model(input_ids=ids)
    assert {cell.path for cell, seen in receipt.check().cells.items() if seen.recomputed and cell.operator == "silu"}


def test_a_softmax_that_draws_tokens_is_exact(model, ids):
    with torch.no_grad(), aqnpipe.noisy(model, scale=0.05, operators="all") as receipt:
        model.generate(ids, **(GENERATION | {"do_sample": True}))
    assert receipt.check().without_error()["outside the layers"] >= 4


def test_a_second_backward_pass_behind_the_context_is_exact_and_runs(model, ids):
    with aqnpipe.noisy(model, scale=0.05, operators="all", backward=True) as receipt:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward(retain_graph=True)
    receipt.check()
    loss.backward()


# -- wrong uses --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operator", sorted(OF_LAYERS | OF_GRADIENTS))
@pytest.mark.parametrize("actual", [0.0, 0.06])
def test_noise_of_another_size_on_one_operator_is_refused(make_model, ids, monkeypatch, operator, actual):
    machine = aqnpipe.machine.machine
    on_result, apply, seen = machine.Machine._on_result, machine.apply_error_, []

    def noted(self, name, *arguments):
        seen.append(name)
        return on_result(self, name, *arguments)

    def wrong(values, error, source):
        is_chosen = seen[-1] == operator
        return apply(values, error.model_copy(update={"scale": actual}) if is_chosen else error, source)

    monkeypatch.setattr(machine.Machine, "_on_result", noted)
    monkeypatch.setattr(machine, "apply_error_", wrong)
    problems = step(make_model(attn_implementation="eager"), ids).problems()
    assert any(f": {operator} in model.layers." in problem for problem in problems)


@pytest.mark.parametrize("left_out", ["_before", "_after"])
def test_a_norm_that_is_left_out_in_one_layer_is_refused(model, ids, monkeypatch, left_out):
    original, chosen = getattr(NormKernels, left_out), model.model.layers[1].input_layernorm

    def skip(self, module, args, other):
        if module is chosen:
            return None if left_out == "_before" else other
        return original(self, module, args, other)

    monkeypatch.setattr(NormKernels, left_out, skip)
    with pytest.raises(ReceiptError, match=r"a norm in model.layers.1|the gradient of a norm's input"):
        step(model, ids).check()


def test_a_gradient_of_a_noised_softmax_is_refused(make_model, ids, monkeypatch):
    model = make_model(attn_implementation="eager")
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda kept: kept.clone(), lambda kept: kept)
    with aqnpipe.noisy(model, scale=0.05, operators="all", backward=True) as receipt:
        with hooks:
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    with pytest.raises(ReceiptError, match="a softmax's gradient, of whose result a copy was kept"):
        receipt.check()


def test_a_model_without_such_operators_is_refused():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    with torch.no_grad(), aqnpipe.noisy(model, scale=0.05, operators="all") as receipt:
        model(torch.randn(3, 4))
    with pytest.raises(ReceiptError, match="no softmax, activation or norm had the requested error"):
        receipt.check()
