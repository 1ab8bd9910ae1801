"""The table of docs/supported-models.md: noise and AQN on every architecture that it calls tested."""

import pytest
import torch
from decoder_families import tiny_model_of
from random_models import (
    ARCHITECTURES,
    LAYER_NORM_ARCHITECTURES,
    random_layer_norm_model_of,
    random_mixture_of,
    random_model_of,
)

from aqnpipe.config.arm import Arm
from aqnpipe.config.noise import AdaptiveNoise, ConstantSigma, Fault, NoiseSpec, OperatorNoise, RelativeGaussian
from aqnpipe.errors import ModelError
from aqnpipe.machine.machine import NoiseKey
from aqnpipe.noise.injection.phase import phase_noise
from aqnpipe.noise.measure_arm import measure_arm
from aqnpipe.noise.receipts.recorder import ReceiptRecorder

NUM_LAYERS = 2
NOISE_AND_AQN = Arm(
    description="",
    operator_noise=OperatorNoise(error=RelativeGaussian(scale=0.05)),
    aqn=AdaptiveNoise(schedule=ConstantSigma(sigma=0.05)),
)
OPERATOR_NOISE = NOISE_AND_AQN.model_copy(update={"aqn": None})
NORMS_PER_LAYER = {"qwen2": 2, "llama": 2, "qwen3": 4, "gemma2": 4}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_matrix_product_and_every_norm_gets_its_noise(architecture):
    model = random_model_of(architecture, num_layers=NUM_LAYERS)
    receipt = measure_arm(model, NOISE_AND_AQN, prompt_tokens=16).check()
    calls = {(cell.operator, cell.layer): cell.calls for cell in receipt.cells if cell.phase == "actor_forward"}
    per_layer = {(name, layer): calls for layer in range(NUM_LAYERS) for name, calls in (("mm", 7), ("bmm", 2))}
    assert calls == {**per_layer, ("mm", None): 1}
    assert receipt.weight_syncs[0].targets == NORMS_PER_LAYER[architecture] * NUM_LAYERS + 1


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_simulated_fault_changes_its_layer(architecture):
    model = random_model_of(architecture, num_layers=NUM_LAYERS)
    spec = NoiseSpec(faults=(Fault(type="dead_zone", layer=1, magnitude=0.3),))
    recorder = ReceiptRecorder(
        spec, expected_phases=("evaluation",), num_layers=NUM_LAYERS, num_norms=0, num_steps=1, num_epochs=1
    )
    tokens = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        clean = model(tokens).logits
        with phase_noise(model, spec, "evaluation", NoiseKey(seed=0, step=0), recorder):
            faulty = model(tokens).logits
    assert not torch.equal(clean, faulty)
    (cell,) = recorder.receipt().check().fault_cells
    assert cell.changed > 0


def check_every_product_has_noise(model, operators=("mm", "bmm"), **sizes):
    """Run all phases of a training step: every product must have noise, whatever the model is made of."""
    receipt = measure_arm(model, OPERATOR_NOISE, **{"prompt_tokens": 16, **sizes}).check()
    shares = {record.phase: record.noised_share for record in receipt.phases if record.calls}
    assert shares == {"rollout": 1.0, "reference": 1.0, "actor_forward": 1.0, "backward": None}
    for phase in ("actor_forward", "backward"):
        assert {cell.operator for cell in receipt.cells if cell.phase == phase} >= set(operators)
    return receipt


@pytest.mark.parametrize("architecture", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "deepseek_v3"])
def test_noise_reaches_every_product_of_a_mixture_of_experts(architecture):
    check_every_product_has_noise(random_mixture_of(architecture), ("mm", "bmm", "_grouped_mm"))


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager"])
def test_noise_reaches_every_expert_whatever_computes_them(implementation):
    model = random_mixture_of("mixtral")
    model.set_experts_implementation(implementation)
    grouped = ("_grouped_mm",) if implementation == "grouped_mm" else ()
    receipt = check_every_product_has_noise(model, ("mm", "bmm", *grouped))
    # Gate, up and down projections of two experts per token: 4 sequences of 16 tokens, 2 layers.
    rollout = next(record for record in receipt.phases if record.phase == "rollout")
    assert rollout.noised_flops > 2 * (3 * 32 * 48) * 2 * 2 * 4 * 16


@pytest.mark.parametrize("architecture", LAYER_NORM_ARCHITECTURES)
def test_an_arm_without_aqn_needs_no_rms_norm(architecture):
    check_every_product_has_noise(random_layer_norm_model_of(architecture))


# JetMoE calls `F.linear` for every expert, also on no rows. The last three multiply outside of their layers.
@pytest.mark.parametrize(
    "family",
    [
        *("gptj", "codegen", "gpt_oss", "llama4_text", "dbrx", "diffllama", "longcat_flash", "falcon"),
        *("falcon with ALiBi", "jetmoe", "gemma3n_text", "gemma4_text", "modernbert-decoder"),
    ],
)
def test_other_ways_to_write_attention_and_experts_are_reached(family):
    check_every_product_has_noise(tiny_model_of(family), batch=2, prompt_tokens=12)


@pytest.mark.parametrize("family", ["opt", "gpt2", "arcee"])
def test_other_activations_under_all_operators_are_refused_with_what_to_do(family):
    noise = OPERATOR_NOISE.operator_noise.model_copy(update={"operators": "all"})
    arm = OPERATOR_NOISE.model_copy(update={"operator_noise": noise})
    problems = measure_arm(tiny_model_of(family), arm, batch=2, prompt_tokens=8).problems()
    assert any("no silu or gelu" in problem for problem in problems)
    assert any("operators: matmul" in problem for problem in problems)


def test_aqn_on_a_model_without_rms_norm_is_refused_in_one_line():
    with pytest.raises(ModelError, match="no RMSNorm matches"):
        measure_arm(random_layer_norm_model_of("gpt_neox"), NOISE_AND_AQN, prompt_tokens=16)
