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
from aqnpipe.noise.injection.phase import NoiseKey, phase_noise
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
    per_layer = {(name, layer): calls for layer in range(NUM_LAYERS) for name, calls in (("linear", 7), ("matmul", 2))}
    assert calls == {**per_layer, ("linear", None): 1}
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
    assert cell.affected_elements > 0


@pytest.mark.parametrize("architecture", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "deepseek_v3"])
def test_noise_reaches_every_product_of_a_mixture_of_experts(architecture):
    model = random_mixture_of(architecture)
    receipt = measure_arm(model, OPERATOR_NOISE, prompt_tokens=16).check()
    shares = {record.phase: record.noised_share for record in receipt.phases if record.noised_calls}
    assert shares == {"rollout": 1.0, "reference": 1.0, "actor_forward": 1.0, "backward": None}
    assert {cell.operator for cell in receipt.cells if cell.phase == "actor_forward"} >= {
        "linear",
        "matmul",
        "grouped_mm",
    }


@pytest.mark.parametrize("architecture", LAYER_NORM_ARCHITECTURES)
def test_an_arm_without_aqn_needs_no_rms_norm(architecture):
    model = random_layer_norm_model_of(architecture)
    receipt = measure_arm(model, OPERATOR_NOISE, prompt_tokens=16).check()
    shares = {record.phase: record.noised_share for record in receipt.phases if record.noised_calls}
    assert shares == {"rollout": 1.0, "reference": 1.0, "actor_forward": 1.0, "backward": None}


@pytest.mark.parametrize("family", ["gptj", "codegen", "gpt_oss", "llama4_text", "dbrx", "diffllama", "longcat_flash"])
def test_other_ways_to_write_attention_and_experts_are_reached(family):
    receipt = measure_arm(tiny_model_of(family), OPERATOR_NOISE, batch=2, prompt_tokens=8).check()
    shares = {record.phase: record.noised_share for record in receipt.phases if record.noised_calls}
    assert shares == {"rollout": 1.0, "reference": 1.0, "actor_forward": 1.0, "backward": None}


def test_matrices_outside_the_layers_are_refused_by_name_unless_the_arm_names_its_layers():
    with pytest.raises(ModelError, match=r"does not reach model\.per_layer_model_projection\.weight.*name the noised"):
        measure_arm(tiny_model_of("gemma4_text"), OPERATOR_NOISE, prompt_tokens=8)
    noise = OPERATOR_NOISE.operator_noise.model_copy(update={"layers": (0, 1)})
    measure_arm(tiny_model_of("gemma4_text"), OPERATOR_NOISE.model_copy(update={"operator_noise": noise})).check()


@pytest.mark.parametrize("family", ["falcon", "falcon with ALiBi"])
def test_linear_modules_written_as_matmul_are_accepted(family):
    """Every product of Falcon has noise: `FalconLinear` computes `input @ weight.T`. Only the list of kinds objects."""
    receipt = measure_arm(tiny_model_of(family), OPERATOR_NOISE, batch=2, prompt_tokens=8)
    assert {record.noised_share for record in receipt.phases if record.noised_calls} == {1.0, None}
    receipt.check()


@pytest.mark.parametrize("family", ["gemma3n_text", "gemma4_text", "modernbert-decoder"])
def test_a_share_below_the_requested_one_is_refused_in_every_phase(family):
    model = tiny_model_of(family)
    spec = NoiseSpec(operator_noise=OPERATOR_NOISE.operator_noise)
    recorder = ReceiptRecorder(spec, expected_phases=("rollout",), num_layers=2, num_norms=0)
    with torch.no_grad(), phase_noise(model, spec, "rollout", NoiseKey(seed=0, step=0), recorder):
        model(input_ids=torch.arange(3, 15).reshape(2, 6))
    (record,) = recorder.receipt().phases
    assert record.noised_share < 1
    assert any("outside the decoder layers" in problem for problem in recorder.receipt().problems())


def test_experts_without_a_token_are_accepted():
    """JetMoE calls `F.linear` for every expert, also on no rows: there is nothing to noise and nothing to verify."""
    measure_arm(tiny_model_of("jetmoe"), OPERATOR_NOISE, batch=2, prompt_tokens=12).check()


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


def test_a_sum_with_a_product_gets_its_noise_on_the_product_alone():
    """addmm(b, x, w, beta, alpha) with an exact product of 0: the sum that is added carries no noise."""
    model = random_layer_norm_model_of("gpt2")
    spec = NoiseSpec(operator_noise=OPERATOR_NOISE.operator_noise)
    recorder = ReceiptRecorder(spec, expected_phases=("rollout",), num_layers=NUM_LAYERS, num_norms=0)
    seen = {}

    class Probe(torch.nn.Module):
        def forward(self, x):
            added, zeros = torch.full((4, 5), 3.0), torch.zeros(4, 6)
            seen["sum"] = torch.addmm(added, zeros, torch.ones(6, 5), beta=2, alpha=7)
            seen["named"] = torch.baddbmm(added[None], batch1=zeros[None], batch2=torch.ones(1, 6, 5), beta=0.5)
            seen["product"] = torch.addmm(added, torch.ones(4, 6), torch.ones(6, 5), alpha=10)
            return x

    model.transformer.h[0].attn.register_module("probe", Probe())
    attention = model.transformer.h[0].attn
    forward = attention.forward
    attention.forward = lambda *args, **kwargs: (attention.probe(args[0]), forward(*args, **kwargs))[1]
    with torch.no_grad(), phase_noise(model, spec, "rollout", NoiseKey(seed=0, step=0), recorder):
        model(input_ids=torch.arange(12).reshape(2, 6))
    assert torch.equal(seen["sum"], torch.full((4, 5), 6.0))
    assert torch.equal(seen["named"], torch.full((1, 4, 5), 1.5))
    relative = (seen["product"] - 3) / 60 - 1
    assert 0.02 < relative.std() < 0.1
