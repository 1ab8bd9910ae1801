"""The table of docs/supported-models.md: noise and AQN on every architecture that it calls tested."""

import pytest
import torch
from random_models import ARCHITECTURES, random_model_of
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

from aqnpipe.config.arm import Arm
from aqnpipe.config.noise import AdaptiveNoise, ConstantSigma, Fault, NoiseSpec, OperatorNoise, RelativeGaussian
from aqnpipe.noise.injection.phase import NoiseKey, phase_noise
from aqnpipe.noise.measure_arm import measure_arm
from aqnpipe.noise.receipts.recorder import ReceiptRecorder

NUM_LAYERS = 2
NOISE_AND_AQN = Arm(
    description="",
    operator_noise=OperatorNoise(error=RelativeGaussian(scale=0.05)),
    aqn=AdaptiveNoise(schedule=ConstantSigma(sigma=0.05)),
)
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


@pytest.mark.xfail(strict=True, reason="grouped products of experts escape unnoticed: docs/supported-models.md")
def test_experts_get_noise_or_their_receipt_is_refused():
    torch.manual_seed(0)
    model = Qwen2MoeForCausalLM(
        Qwen2MoeConfig(
            vocab_size=64, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1, num_experts=4, num_experts_per_tok=2,
            shared_expert_intermediate_size=16, attn_implementation="eager",
        )
    ).eval()  # fmt: skip
    receipt = measure_arm(model, NOISE_AND_AQN, prompt_tokens=16)
    place = ("actor_forward", "linear", 0)
    linears = sum(cell.calls for cell in receipt.cells if (cell.phase, cell.operator, cell.layer) == place)
    outside_experts = 4 + 1 + 3 + 1  # attention, router, shared expert and its gate
    assert receipt.problems() or linears > outside_experts
