"""Noise with `redraw: never`: a machine that makes the same error for the same operands, proven and not mistaken."""

import pytest
import torch
from pydantic import ValidationError
from torch.utils.checkpoint import checkpoint

import aqnpipe
from aqnpipe.config.evaluation import EvaluationNoise
from aqnpipe.config.generation import is_without_vllm
from aqnpipe.config.noise import ModuleNoise, NoiseSpec, OperatorNoise, RelativeGaussian, machine_stream
from aqnpipe.errors import ConfigError, ModelError, ReceiptError
from aqnpipe.machine import machine as machine_module
from aqnpipe.machine.machine import NoiseKey
from aqnpipe.noise.injection.phase import phase_noise
from aqnpipe.noise.kernels import fixed
from aqnpipe.noise.receipts.recorder import ReceiptRecorder

FIXED = RelativeGaussian(scale=0.05, redraw="never")


def logits_on(model, ids, error=FIXED, **arguments):
    with aqnpipe.noisy(model, error=error, **arguments) as receipt, torch.no_grad():
        found = model(input_ids=ids).logits
    receipt.check()
    return found


def gradients_on(model, ids, **arguments):
    model.zero_grad()
    with aqnpipe.noisy(model, error=FIXED, backward=True, **arguments) as receipt:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    receipt.check()
    assert receipt.measured_scale == pytest.approx(0.05, rel=0.01)
    return [parameter.grad.clone() for parameter in model.parameters()]


def test_a_call_has_the_error_of_every_other_call(make_model, ids):
    model = make_model()
    clean = model(input_ids=ids).logits
    found = logits_on(model, ids)
    assert not torch.equal(found, clean)
    assert torch.equal(logits_on(model, ids, step=7), found)
    assert not torch.equal(logits_on(model, ids, seed=1), found)


def test_batch_mates_and_the_order_of_layers_do_not_matter(make_model, ids):
    model, batch = make_model(), torch.cat([ids, ids.flip(1)])
    assert torch.allclose(logits_on(model, batch)[:1], logits_on(model, ids)[:1], atol=1e-6)


def test_a_machine_with_a_number_is_the_same_for_all_seeds(make_model, ids):
    model, numbered = make_model(), RelativeGaussian(scale=0.05, redraw="never", machine=3)
    found = logits_on(model, ids, numbered, seed=0)
    assert torch.equal(logits_on(model, ids, numbered, seed=5), found)
    assert not torch.equal(logits_on(model, ids, numbered.model_copy(update={"machine": 4})), found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_have_it_too_and_layers_that_are_computed_again(make_model, ids, dtype):
    model = make_model().train().to(dtype)
    plain = gradients_on(model, ids)
    assert all(map(torch.equal, plain, gradients_on(model, ids, step=3)))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert all(map(torch.equal, plain, gradients_on(model, ids)))


def test_training_and_evaluations_of_a_study_are_on_different_machines():
    assert machine_stream("evaluation") != machine_stream("rollout")
    assert len({machine_stream(phase) for phase in ("rollout", "reference", "actor_forward", "backward")}) == 1


def phase_receipt(model, ids, phase="evaluation", step=0):
    spec = NoiseSpec(operator_noise=OperatorNoise(error=FIXED, phases=(phase,)))
    recorder = ReceiptRecorder(spec, expected_phases=(phase,), num_layers=model.config.num_hidden_layers, num_norms=0)
    with phase_noise(model, spec, phase, NoiseKey(0, step), recorder), torch.no_grad():
        logits = model(input_ids=ids).logits
    return recorder.receipt(), logits


def test_phases_of_a_study_accept_it_and_know_its_machine(make_model, ids):
    model = make_model()
    receipt, logits = phase_receipt(model, ids)
    receipt.check()
    again, same = phase_receipt(model, ids, step=4)
    again.check()
    assert torch.equal(same, logits)
    other, different = phase_receipt(model, ids, phase="rollout")
    other.check()
    assert not torch.equal(different, logits)


# -- wrong uses --------------------------------------------------------------------------------------------------------


def test_noise_that_is_drawn_anew_in_its_place_is_found(make_model, ids, monkeypatch):
    monkeypatch.setattr(machine_module, "is_fixed", lambda error: False)
    with pytest.raises(ReceiptError, match="recomputed values are not the requested ones"):
        logits_on(make_model(), ids)


def test_a_fixed_machine_in_place_of_new_noise_is_found(make_model, ids, monkeypatch):
    monkeypatch.setattr(machine_module, "is_fixed", lambda error: True)
    with pytest.raises(ReceiptError, match="recomputed values are not the requested ones"):
        logits_on(make_model(), ids, RelativeGaussian(scale=0.05))


@pytest.mark.parametrize("wrong", ["of the row alone", "another machine", "half the size"])
def test_another_error_than_that_of_the_operands_is_found(make_model, ids, monkeypatch, wrong):
    normals = fixed.fixed_normals

    def changed(first, second, key):
        if wrong == "of the row alone":
            return normals(first, second.new_zeros(second.shape), key)
        return normals(first, second, key + 1) if wrong == "another machine" else normals(first, second, key) / 2

    monkeypatch.setattr(fixed, "fixed_normals", changed)
    with pytest.raises(ReceiptError, match="recomputed values are not the requested ones"):
        logits_on(make_model(), ids)


def test_a_product_without_operands_of_its_own_ends_in_one_line(make_model, ids):
    model = make_model()
    model.set_attn_implementation("sdpa")
    with pytest.raises(ModelError, match=r"redraw: never is of products of two matrices.*flash_attention"):
        logits_on(model, ids)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OperatorNoise(error=FIXED, operators="all"), "eager attention: found operators all"),
        (lambda: RelativeGaussian(scale=0.05, redraw="never", machine=2**70), "machine"),
        (lambda: OperatorNoise(error=FIXED, attention="fused"), "eager attention: found attention fused"),
        (lambda: ModuleNoise(modules="minimal", error=FIXED), "a module has no operands"),
        (lambda: RelativeGaussian(scale=0.05, machine=1), "machine: found 1, which needs redraw: never"),
    ],
)
def test_contradictions_are_refused(make, message):
    with pytest.raises(ValidationError, match=message):
        make()


def test_an_evaluation_needs_attention_of_two_products():
    noise = EvaluationNoise.model_validate({"operator_noise": {"error": FIXED}})
    assert noise.spec_for("eager").operator_noise.error == FIXED
    assert noise.is_random
    with pytest.raises(ConfigError, match="found never, the model computes attention sdpa as one operator"):
        noise.spec_for("sdpa")
    numbered = {"operator_noise": {"error": FIXED.model_copy(update={"machine": 0})}}
    assert not EvaluationNoise.model_validate(numbered).is_random


def test_a_function_that_is_computed_again_has_the_same_error(make_model, ids):
    """Outside all parts nothing but the operands could tell which call it is."""
    model, weight = make_model(), torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    inputs = torch.randn(3, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
    results = []

    def product(values):
        results.append((values @ weight).detach())
        return values @ weight

    with aqnpipe.noisy(model, error=FIXED), torch.enable_grad():
        checkpoint(product, inputs, use_reentrant=False).sum().backward()
    assert len(results) == 2
    assert torch.equal(*results)


def test_vllm_cannot_be_a_fixed_machine():
    assert is_without_vllm(FIXED)
    assert not is_without_vllm(RelativeGaussian(scale=0.05))
