"""Settings have their effect in a real run: checkpointing, mini-batches, number formats, lengths, trackers."""

import os

import polars as pl
import pytest
import torch
from safetensors.torch import load_file
from tiny_training import AQN, NOISE, run, training_spec, write_inputs
from torch import nn
from transformers import modeling_utils

from aqnpipe.artifacts.files import read_json, read_table
from aqnpipe.artifacts.provenance import sha256_of_file
from aqnpipe.artifacts.runs import TrainingMetrics
from aqnpipe.config.run import TrainingSpec
from aqnpipe.errors import ConfigError, DataError
from aqnpipe.models.loading import load_model
from aqnpipe.noise.receipts.receipt import Receipt
from aqnpipe.training import reporting
from aqnpipe.training.trainer import NoisyGRPOTrainer

pytestmark = pytest.mark.usefixtures("rewards_that_teach")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory, make_model):
    return write_inputs(tmp_path_factory.mktemp("inputs"), make_model, num_problems=16)


def metrics(folder) -> pl.DataFrame:
    return read_table(folder / "metrics.parquet", TrainingMetrics)


@pytest.mark.parametrize("operators", ["all", pytest.param("matmul", marks=pytest.mark.slow)])
def test_gradient_checkpointing_changes_no_byte(inputs, tmp_path, operators):
    noise = {**NOISE, "operators": operators}
    kept = run(training_spec(noise, AQN), inputs, tmp_path / "kept")
    again = run(training_spec(noise, AQN, gradient_checkpointing=True), inputs, tmp_path / "again")
    for file in ("metrics.parquet", "checkpoints/step2/model.safetensors"):
        assert sha256_of_file(kept / file) == sha256_of_file(again / file), file
    # An observed backward pass sees the recomputed layers too, so the receipts differ in what was audited.
    calls = [
        [(cell.where, cell.calls, cell.elements) for cell in read_json(folder / "receipt.json", Receipt).cells]
        for folder in (kept, again)
    ]
    assert calls[0] == calls[1]


def test_gradient_checkpointing_computes_layers_again(inputs, tmp_path, monkeypatch):
    calls = 0
    original = modeling_utils.checkpoint

    def counted(*args, **kwargs):
        nonlocal calls
        calls += 1
        assert kwargs["use_reentrant"] is False
        return original(*args, **kwargs)

    monkeypatch.setattr(modeling_utils, "checkpoint", counted)
    run(training_spec(gradient_checkpointing=True, num_steps=1), inputs, tmp_path / "run")
    # Two micro-batches through two layers; no rollout, no reference.
    assert calls == 4


def test_mini_batches_share_a_rollout_and_its_sigma(inputs, tmp_path, monkeypatch):
    """Four steps from two rollouts; at the second step of a rollout the policy differs from the sampler."""
    seen = []
    original = NoisyGRPOTrainer._phase

    def spied(self, model, phase, micro_step, *, backward=False):
        seen.append((self.state.global_step, phase, backward, micro_step))
        return original(self, model, phase, micro_step, backward=backward)

    monkeypatch.setattr(NoisyGRPOTrainer, "_phase", spied)
    folder = run(
        training_spec(NOISE, AQN, num_steps=4, steps_per_rollout=2, learning_rate=1e-2), inputs, tmp_path / "run"
    )
    table = metrics(folder)
    sigmas = [0.05, 0.05, 0.03, 0.03]  # linear from 0.05 to 0.01 over 4 steps, at steps 0 and 2
    assert table["sigma_requested"].to_list() == pytest.approx(sigmas)
    assert table["sigma_measured"].to_list() == pytest.approx(sigmas, rel=0.2)
    assert table["reward_mean"].to_list() == [0.5] * 4
    receipt = read_json(folder / "receipt.json", Receipt).check()
    assert [sync.step for sync in receipt.weight_syncs] == [0, 2]
    # Only without noise is the ratio exactly 1 at the first step of a rollout; at the second step it must be clipped.
    assert max(table["clip_fraction"][1], table["clip_fraction"][3]) > 0
    # Old log-probabilities of the whole batch (4 micro-batches of 4) before the first step of each rollout have their
    # own noise: their micro-step numbers differ from those of the actor.
    old = [(step, micro) for step, phase, grad, micro in seen if phase == "actor_forward" and not grad]
    assert old == [(step, 2 + index) for step in (0, 2) for index in range(4)]
    actor = [(step, micro) for step, phase, grad, micro in seen if phase == "actor_forward" and grad]
    assert actor == [(step, micro) for step in range(4) for micro in range(2)]


def test_mini_batches_without_noise_start_on_policy(inputs, tmp_path):
    """At the first step of a rollout old and new log-probabilities have the same weights, so nothing is clipped."""
    spec = training_spec(num_steps=4, steps_per_rollout=2, learning_rate=1e-2, clip_ratio=1e-5)
    clipped = metrics(run(spec, inputs, tmp_path / "run"))["clip_fraction"]
    assert clipped[0] == clipped[2] == 0.0
    assert min(clipped[1], clipped[3]) > 0.2


@pytest.mark.parametrize(
    ("dtype", "weights_dtype"),
    [("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("float16", "float32"), ("float16", "bfloat16")],
)
def test_forward_passes_compute_in_the_models_format_on_weights_in_their_own(
    inputs, tmp_path, monkeypatch, dtype, weights_dtype
):
    formats = set()
    handle = nn.modules.module.register_module_forward_hook(
        # The probe of a checkpoint computes in double precision.
        lambda module, args, output: (
            formats.add(output.dtype) if isinstance(module, nn.Linear) and output.dtype != torch.float64 else None
        )
    )
    try:
        spec = training_spec(NOISE, AQN, dtype=dtype, weights_dtype=weights_dtype)
        folder = run(spec, inputs, tmp_path / "run")
    finally:
        handle.remove()
    assert formats == {getattr(torch, dtype)}
    weights = load_file(folder / "checkpoints" / "step2" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {getattr(torch, weights_dtype)}
    assert metrics(folder)["kl"][1] > 0


@pytest.mark.parametrize(("variable", "dtype"), [("no", "float32"), ("bf16", "bfloat16")])
def test_a_mixed_precision_in_the_shell_that_the_study_has_too_is_no_problem(
    inputs, tmp_path, monkeypatch, variable, dtype
):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", variable)
    run(training_spec(num_steps=1, dtype=dtype), inputs, tmp_path / "run")


@pytest.mark.parametrize(("variable", "value"), [("ONEDNN_DEFAULT_FPMATH_MODE", "BF16"), ("NVIDIA_TF32_OVERRIDE", "1")])
def test_a_variable_that_rounds_products_is_refused_before_the_first_step(
    inputs, tmp_path, monkeypatch, variable, value
):
    monkeypatch.setenv(variable, value)
    with pytest.raises(
        ConfigError, match=f"^environment: {variable} is '{value}', .* expected it unset or '(strict|0)'"
    ):
        run(training_spec(num_steps=1), inputs, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_small_steps_are_lost_in_bfloat16_weights_and_not_in_float32(inputs, tmp_path):
    """Why float32 is the default: at the published learning rates an update is far below the spacing of bfloat16."""
    changed = {}
    start = load_model(inputs.model, dtype="bfloat16", attention="eager").state_dict()
    for dtype in ("float32", "bfloat16"):
        folder = run(training_spec(dtype="bfloat16", weights_dtype=dtype, learning_rate=5e-7), inputs, tmp_path / dtype)
        end = load_model(folder / "checkpoints/step2", dtype=dtype, attention="eager").state_dict()
        pairs = [(start[name].float(), end[name].float()) for name in start if "proj.weight" in name]
        changed[dtype] = sum((a != b).sum().item() for a, b in pairs) / sum(a.numel() for a, _ in pairs)
    assert changed["float32"] > 0.9
    assert changed["bfloat16"] < 0.1


def test_a_prompt_longer_than_allowed_is_refused_at_the_start(inputs, tmp_path):
    with pytest.raises(DataError, match=r"max_prompt_tokens is 5: \d+ of 16 prompts are longer; .* question train-\d+"):
        run(training_spec(max_prompt_tokens=5), inputs, tmp_path / "run")
    run(training_spec(max_prompt_tokens=50, num_steps=1), inputs, tmp_path / "fits")


def test_the_loss_scale_keeps_small_gradients_of_float16(inputs, tmp_path, monkeypatch):
    """Against those of float32; without a scale, gradients below 3e-8 vanish in float16."""
    found = {}
    clip = NoisyGRPOTrainer._clip_grad_norm

    def noted(self, model):
        norm = clip(self, model)
        found[name] = torch.cat([weight.grad.flatten() for weight in model.model.layers.parameters()])
        return norm

    monkeypatch.setattr(NoisyGRPOTrainer, "_clip_grad_norm", noted)
    for name, settings in {
        "float32": {},
        "default": {"dtype": "float16"},
        "none": {"dtype": "float16", "loss_scale": 1},
    }.items():
        run(training_spec(num_steps=1, kl_coefficient=0.0, **settings), inputs, tmp_path / name)
    exact = found.pop("float32")
    small = (exact != 0) & (exact.abs() < exact.abs().median() / 100)
    errors = {name: ((values - exact).abs() / exact.abs())[small].median().item() for name, values in found.items()}
    assert errors["none"] > 4 * errors["default"]


def test_tensorboard_gets_the_sigmas_beside_the_run_and_changes_nothing_in_it(inputs, tmp_path, monkeypatch):
    loader = pytest.importorskip("tensorboardX.proto.event_pb2")
    monkeypatch.delenv("TENSORBOARD_LOGGING_DIR", raising=False)
    plain = run(training_spec(aqn=AQN), inputs, tmp_path / "plain")
    tracked = run(training_spec(aqn=AQN, report_to=("tensorboard",)), inputs, tmp_path / "tracked")
    monkeypatch.delenv("TENSORBOARD_LOGGING_DIR")
    for file in ("metrics.parquet", "receipt.json", "checkpoints/step2/model.safetensors"):
        assert sha256_of_file(plain / file) == sha256_of_file(tracked / file)
    (events,) = (tmp_path / "tracked.logs" / "tensorboard").iterdir()
    scalars = scalars_of(events.read_bytes(), loader.Event)
    assert scalars["train/sigma_requested"] == pytest.approx([0.05, 0.03])
    assert scalars["train/sigma_measured"] == pytest.approx(metrics(plain)["sigma_measured"].to_list())
    assert "train/reward" in scalars


def scalars_of(content: bytes, event_type) -> dict[str, list[float]]:
    """Scalars of a TensorBoard file: records of (length: 8 bytes, checksum: 4, event, checksum: 4)."""
    scalars: dict[str, list[float]] = {}
    while content:
        length = int.from_bytes(content[:8], "little")
        for value in event_type.FromString(content[12 : 12 + length]).summary.value:
            if value.HasField("simple_value"):
                scalars.setdefault(value.tag, []).append(value.simple_value)
        content = content[16 + length :]
    return scalars


def test_a_missing_tracker_is_one_line_with_the_command_that_installs_it(inputs, tmp_path, monkeypatch):
    monkeypatch.setattr(reporting, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"training\.report_to: wandb is not installed \(pip install wandb\)"):
        run(training_spec(report_to=("wandb",)), inputs, tmp_path / "run")


def test_wandb_stays_offline_unless_the_user_sets_it(tmp_path, monkeypatch):
    monkeypatch.setattr(reporting, "find_spec", lambda name: object())
    monkeypatch.setattr(os, "environ", {"WANDB_PROJECT": "mine"})
    reporting.prepare_reporting(("wandb",), tmp_path / "logs", "E5 seed 0")
    expected = {"PROJECT": "mine", "MODE": "offline", "NAME": "E5 seed 0", "DIR": str(tmp_path / "logs")}
    assert os.environ == {f"WANDB_{name}": value for name, value in expected.items()}


@pytest.mark.parametrize(
    "training", [{"steps_per_rollout": 0}, {"lora": {"rank": 0, "alpha": 1}}, {"report_to": ("mlflow",)}]
)
def test_settings_out_of_range_are_refused(training):
    with pytest.raises(ValueError, match="validation error"):
        training_spec(**training)


def test_the_number_of_steps_follows_whole_rollouts():
    spec: TrainingSpec = training_spec(prompts_per_step=32, steps_per_rollout=4, rollouts_per_prompt=5, epochs=2)
    # The published 1.5B runs: batches of 128 prompts, 58 of them in 7,473 questions, 4 updates each.
    assert spec.training.num_steps(7473) == 2 * 58 * 4


def test_wandb_writes_a_run_offline_and_changes_nothing_in_it(inputs, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    for name in ("PROJECT", "MODE", "NAME", "DIR"):
        monkeypatch.setenv(f"WANDB_{name}", "")
        monkeypatch.delenv(f"WANDB_{name}")
    plain = run(training_spec(aqn=AQN), inputs, tmp_path / "plain")
    tracked = run(training_spec(aqn=AQN, report_to=("wandb",)), inputs, tmp_path / "tracked")
    logged = dict(wandb.run.summary)
    assert wandb.run.offline
    wandb.finish()
    for file in ("metrics.parquet", "receipt.json", "checkpoints/step2/model.safetensors"):
        assert sha256_of_file(plain / file) == sha256_of_file(tracked / file)
    assert logged["train/sigma_requested"] == pytest.approx(0.03)
    assert logged["train/sigma_measured"] == pytest.approx(metrics(plain)["sigma_measured"].to_list()[-1])
    (folder,) = (tmp_path / "tracked.logs" / "wandb").glob("offline-run-*")
    assert list(folder.glob("*.wandb"))
