"""The table of docs/supported-models.md: noise and AQN on every architecture that it calls tested."""

import pytest
import torch
from random_models import ARCHITECTURES, random_mixture_of, random_model_of

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
