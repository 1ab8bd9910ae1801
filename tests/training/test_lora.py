"""Low-rank adapters: trained weights, noise on adapters, reference, checkpoints and resume points."""

import shutil

import pytest
import torch
from safetensors.torch import load_file
from tiny_training import AQN, NOISE, run, training_spec
from torch import nn

from aqnpipe.artifacts.files import read_json, read_table
from aqnpipe.artifacts.provenance import sha256_of_file
from aqnpipe.artifacts.runs import TrainingMetrics
from aqnpipe.config.training import LoraConfig
from aqnpipe.errors import ModelError
from aqnpipe.models.adapters import adapter_weights, adapters_off, has_adapters, merged_weights
from aqnpipe.models.layout import norms_sha256
from aqnpipe.models.loading import load_model
from aqnpipe.models.prepared import ADAPTERS_FILE, PREPARED_MODEL_FILE, read_prepared_model
from aqnpipe.noise.receipts.receipt import Receipt
from aqnpipe.training.callbacks import ProgressCallback
from aqnpipe.training.policy import BaseWeights, load_policy
from aqnpipe.training.trainer import NoisyGRPOTrainer

pytestmark = pytest.mark.usefixtures("rewards_that_teach")

LORA = {"rank": 4, "alpha": 8}
TOKENS = torch.arange(2, 50).view(3, 16)


@pytest.fixture
def policy(inputs):
    """Return a policy whose adapters have an effect: B is not zero."""
    policy = load_policy(training_spec(lora=LORA), inputs.model)
    generator = torch.Generator().manual_seed(0)
    for name, weight in policy.named_parameters():
        if "lora_B" in name:
            weight.data = torch.randn(weight.shape, generator=generator) / 10
    return policy


def logits(model):
    with torch.no_grad():
        return model(TOKENS, use_cache=False).logits


def beside_its_base(folder, inputs):
    """Return a folder for runs, beside the model that they train: a checkpoint of adapters finds its base there."""
    shutil.copytree(inputs.model, folder / "models" / "base")
    return folder / "runs"


def test_only_adapters_are_trained_and_they_are_keyed_by_the_runs_seed(inputs):
    torch.randn(3)  # the state of the global generator must not matter
    first, second = (dict(load_policy(training_spec(lora=LORA), inputs.model).named_parameters()) for _ in range(2))
    other = load_policy(training_spec(lora=LORA).model_copy(update={"seed": 1}), inputs.model).state_dict()
    trained = {name for name, weight in first.items() if weight.requires_grad}
    # Seven linears in each of two layers, A and B.
    assert len(trained) == 2 * 7 * 2
    assert all("lora_" in name for name in trained)
    assert all(torch.equal(first[name], second[name]) for name in trained)
    assert all(not torch.equal(first[name], other[name]) for name in trained if "lora_A" in name)


def test_without_adapters_the_policy_is_the_model_it_started_from(inputs, policy):
    start = load_model(inputs.model, dtype="float32", attention="eager")
    adapted = logits(policy)
    with adapters_off(policy):
        assert torch.equal(logits(policy), logits(start))
    assert not torch.allclose(adapted, logits(start), atol=1e-3)
    assert torch.equal(logits(policy), adapted)
    assert any(weight.requires_grad for weight in policy.parameters())
    assert norms_sha256(policy) == norms_sha256(start)


def test_merged_weights_compute_the_same_and_leave_the_policy_alone(inputs, policy):
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    plain = load_model(inputs.model, dtype="float32", attention="eager")
    plain.load_state_dict(merged_weights(policy), strict=True)
    # Float32 sums have another order.
    torch.testing.assert_close(logits(plain), logits(policy), rtol=1e-4, atol=1e-5)
    for name, tensor in policy.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_merged_weights_are_the_formulas(policy):
    projection = policy.model.layers[1].mlp.down_proj
    low_rank = projection.lora_B["default"].weight @ projection.lora_A["default"].weight
    expected = projection.base_layer.weight + low_rank * (LORA["alpha"] / LORA["rank"])
    merged = merged_weights(policy)["model.layers.1.mlp.down_proj.weight"]
    torch.testing.assert_close(merged, expected.detach())
    assert not has_adapters(policy.model.norm)


def test_a_run_trains_adapters_under_noise_and_leaves_only_them(inputs, tmp_path):
    runs = beside_its_base(tmp_path, inputs)
    folder = run(training_spec(NOISE, AQN, lora=LORA, learning_rate=1e-2), inputs, runs / "run")
    receipt = read_json(folder / "receipt.json", Receipt).check()
    linears = {(cell.phase, cell.layer): cell.calls for cell in receipt.cells if cell.operator == "mm"}
    forwards = {record.phase: record.passes for record in receipt.phases}
    for layer in range(2):
        # Seven linears and the two matrices of each one's adapter; the reference has its adapters off.
        assert linears["actor_forward", layer] == 21 * forwards["actor_forward"]
        assert linears["rollout", layer] == 21 * forwards["rollout"]
        assert linears["reference", layer] == 7 * forwards["reference"]
    checkpoint = folder / "checkpoints" / "step2"
    assert [path.name for path in checkpoint.glob("*.safetensors")] == [ADAPTERS_FILE]
    start = load_model(inputs.model, dtype="float32", attention="eager").state_dict()
    adapted = load_model(checkpoint, dtype="float32", attention="eager")
    end = merged_weights(adapted)
    weights = sum(weight.numel() for weight in adapter_weights(adapted).values())
    header_bytes = (checkpoint / ADAPTERS_FILE).stat().st_size - 4 * weights
    assert 0 < header_bytes < 4096
    assert read_prepared_model(checkpoint).num_parameters == weights
    changed = {name for name in start if not torch.equal(start[name], end[name])}
    assert changed == {name for name in start if name.endswith("_proj.weight")}
    for name in changed:
        assert torch.linalg.matrix_rank((end[name] - start[name]).double(), rtol=1e-4) <= LORA["rank"]


def test_the_reference_is_the_policy_with_its_adapters_off(inputs, tmp_path, monkeypatch):
    """No second model is loaded, and the KL from the initial policy is 0 before the first step."""
    built = []
    original = NoisyGRPOTrainer.__init__

    def spied(self, **kwargs):
        original(self, **kwargs)
        built.append(self)

    monkeypatch.setattr(NoisyGRPOTrainer, "__init__", spied)
    monkeypatch.setattr("trl.trainer.grpo_trainer.create_model_from_path", None)
    folder = run(training_spec(lora=LORA, learning_rate=1e-2, kl_coefficient=0.5), inputs, tmp_path / "run")
    (trainer,) = built
    assert isinstance(trainer.ref_model, BaseWeights)
    assert trainer.beta == trainer.args.beta == 0.5
    kl = read_table(folder / "metrics.parquet", TrainingMetrics)["kl"].to_list()
    assert kl[0] == 0.0
    assert kl[1] > 0


def test_without_kl_there_is_no_reference(inputs, tmp_path):
    folder = run(training_spec(lora=LORA, kl_coefficient=0.0, num_steps=1), inputs, tmp_path / "run")
    assert "reference" not in {record.phase for record in read_json(folder / "receipt.json", Receipt).phases}


@pytest.mark.slow
def test_checkpointing_and_dropout_combine_with_adapters(inputs, tmp_path):
    for name, training in (("kept", {}), ("again", {"gradient_checkpointing": True})):
        lora = {**LORA, "dropout": 0.1}
        run(training_spec(NOISE, AQN, lora=lora, **training), inputs, tmp_path / name)
    files = [tmp_path / name / "checkpoints" / "step2" / ADAPTERS_FILE for name in ("kept", "again")]
    assert sha256_of_file(files[0]) == sha256_of_file(files[1])


def test_a_run_with_adapters_and_mini_batches_goes_on_to_the_same_bytes(inputs, tmp_path, monkeypatch):
    spec = training_spec(NOISE, AQN, lora=LORA, num_steps=4, steps_per_rollout=2, prompts_per_step=2, resume_every=2)
    undisturbed = run(spec, inputs, tmp_path / "undisturbed")
    original = ProgressCallback.on_log

    def stopped(self, args, state, control, **kwargs):
        if state.global_step == 3:
            raise KeyboardInterrupt
        original(self, args, state, control, **kwargs)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(ProgressCallback, "on_log", stopped)
        run(spec, inputs, tmp_path / "stopped")
    said = []
    run(spec, inputs, tmp_path / "stopped", said.append)
    assert any("resuming after step 2" in line for line in said)
    files = [f"checkpoints/step{step}/{name}" for step in (3, 4) for name in (ADAPTERS_FILE, PREPARED_MODEL_FILE)]
    for file in (*files, "metrics.parquet"):
        assert sha256_of_file(undisturbed / file) == sha256_of_file(tmp_path / "stopped" / file), file
    receipts = [read_json(folder / "receipt.json", Receipt) for folder in (undisturbed, tmp_path / "stopped")]
    assert receipts[0] == receipts[1]


def test_the_weights_below_stay_in_the_models_format(inputs, tmp_path):
    policy = load_policy(training_spec(lora=LORA, dtype="bfloat16"), inputs.model)
    formats = {(weight.dtype, weight.requires_grad) for weight in policy.parameters()}
    assert formats == {(torch.bfloat16, False), (torch.float32, True)}
    runs = beside_its_base(tmp_path, inputs)
    folder = run(training_spec(NOISE, lora=LORA, dtype="bfloat16", num_steps=1), inputs, runs / "run")
    checkpoint = folder / "checkpoints" / "step1"
    assert {tensor.dtype for tensor in load_file(checkpoint / ADAPTERS_FILE).values()} == {torch.float32}
    loaded = load_model(checkpoint, dtype="bfloat16", attention="eager")
    assert formats == {(weight.dtype, weight.requires_grad) for weight in loaded.parameters()}


def test_targets_that_are_not_there_are_refused(inputs):
    with pytest.raises(ModelError, match=r"target_modules: 'qkv_proj' is no linear module of the layers of this Qwen2"):
        load_policy(training_spec(lora={**LORA, "target_modules": ("q_proj", "qkv_proj")}), inputs.model)


def test_the_output_projection_has_no_adapter():
    with pytest.raises(ValueError, match="lm_head cannot be adapted"):
        LoraConfig(rank=1, alpha=1, target_modules=("lm_head",))
    assert not has_adapters(nn.Linear(2, 2))
