"""The train stage on a tiny random model: phases, receipts, checkpoints, determinism, refusals."""

import pytest
import torch
from tiny_training import AQN, NOISE, run, teach, training_spec

from aqnpipe.artifacts.files import read_json, read_table
from aqnpipe.artifacts.provenance import sha256_of_file
from aqnpipe.artifacts.runs import RunRecord, TrainingMetrics
from aqnpipe.config.run import TrainingSpec
from aqnpipe.errors import ReceiptError, TrainingError
from aqnpipe.noise.injection.faults import FaultInjection
from aqnpipe.noise.receipts.receipt import Receipt


def test_a_run_leaves_its_artifacts_and_a_receipt_that_passes_its_check(inputs, tmp_path):
    said = []
    run(training_spec(NOISE, AQN), inputs, tmp_path / "run", said.append)
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        "checkpoints", "metrics.parquet", "receipt.json", "run.json",
    ]  # fmt: skip
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == ["step1", "step2"]
    receipt = read_json(tmp_path / "run" / "receipt.json", Receipt).check()
    noised = {record.phase: record.calls > 0 for record in receipt.phases}
    assert noised == {
        "rollout": True, "reference": True, "actor_forward": True, "backward": True, "validation": False,
    }  # fmt: skip
    assert [sync.step for sync in receipt.weight_syncs] == [0, 1]
    metrics = read_table(tmp_path / "run" / "metrics.parquet", TrainingMetrics)
    assert metrics["step"].to_list() == [1, 2]
    assert metrics["sigma_requested"].to_list() == pytest.approx([0.05, 0.03])
    assert metrics["validation_accuracy"].is_null().to_list() == [True, False]
    record = read_json(tmp_path / "run" / "run.json", RunRecord)
    assert record.identity["arm"] == "test"
    assert record.device == "cpu"
    assert record.config["training"]["learning_rate"] == 1e-3
    assert any("step 2/2" in line for line in said)


def test_the_same_run_gives_the_same_bytes(inputs, tmp_path):
    for name in ("first", "second"):
        torch.randn(7)  # the state of the global generator must not matter
        run(training_spec(NOISE, AQN), inputs, tmp_path / name)
    files = [p.relative_to(tmp_path / "first") for p in sorted((tmp_path / "first").rglob("*")) if p.is_file()]
    assert len(files) > 6
    for file in files:
        assert sha256_of_file(tmp_path / "first" / file) == sha256_of_file(tmp_path / "second" / file), file


def test_arms_that_differ_in_noise_only_share_their_first_prompts_and_sampling(inputs, tmp_path):
    """Noise that is too small to change a token must not change the first rollout."""
    small = {"operators": "matmul", "error": {"kind": "relative_gaussian", "scale": 1e-5}}
    run(training_spec(num_steps=1), inputs, tmp_path / "clean")
    run(training_spec(small, num_steps=1), inputs, tmp_path / "noisy")
    clean, noisy = (read_table(tmp_path / n / "metrics.parquet", TrainingMetrics) for n in ("clean", "noisy"))
    assert clean["response_tokens_mean"][0] == noisy["response_tokens_mean"][0]
    assert clean["entropy"][0] == pytest.approx(noisy["entropy"][0], rel=1e-4)


def test_a_seed_offset_gives_the_draws_of_another_seed_and_keeps_the_runs_name(inputs, tmp_path):
    plain = training_spec(NOISE, num_steps=1)
    offset = plain.model_copy(update={"arm": plain.arm.model_copy(update={"seed_offset": 7})})
    other_seed = plain.model_copy(update={"seed": 7})
    for name, spec in (("offset", offset), ("other_seed", other_seed), ("plain", plain)):
        run(spec, inputs, tmp_path / name)
    digests = {name: sha256_of_file(tmp_path / name / "metrics.parquet") for name in ("offset", "other_seed", "plain")}
    assert digests["offset"] == digests["other_seed"] != digests["plain"]
    assert read_json(tmp_path / "offset" / "run.json", RunRecord).identity["seed"] == 0


def test_without_kl_there_is_no_reference_phase(inputs, tmp_path):
    run(training_spec(kl_coefficient=0.0), inputs, tmp_path / "run")
    receipt = read_json(tmp_path / "run" / "receipt.json", Receipt)
    assert "reference" not in {record.phase for record in receipt.phases}


def test_noise_disabled_by_hand_fails_the_run_and_leaves_nothing(inputs, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "aqnpipe.noise.kernels.error_models.add_relative_gaussian_", lambda tensor, scale, source: tensor
    )
    with pytest.raises(ReceiptError, match="receipt invalid"):
        run(training_spec(NOISE), inputs, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_aqn_forgotten_by_the_trainer_fails_the_run(inputs, tmp_path, monkeypatch):
    monkeypatch.setattr("aqnpipe.training.noise_plan.NoisePlan.sigma", lambda self, step: 0.0)
    with pytest.raises(ReceiptError, match="AQN"):
        run(training_spec(aqn=AQN), inputs, tmp_path / "run")


def test_broken_weights_stop_the_run(inputs, tmp_path, monkeypatch):
    def alternating(completions, **_):
        return [float(index % 2) for index in range(len(completions))]

    teach(monkeypatch, alternating)
    with pytest.raises(TrainingError, match=r"base/test seed 0: \S+ is not finite after step 1, run stopped"):
        run(training_spec(learning_rate=1e38, max_grad_norm=1e30), inputs, tmp_path / "run")
    assert not (tmp_path / "run").exists()


DEAD_ZONE = {"type": "dead_zone", "layer": 1, "magnitude": 0.2}
HIDDEN_AQN = {**AQN, "targets": "hidden_states"}


def on_a_faulty_machine(*faults, **changes):
    whole = training_spec(aqn=HIDDEN_AQN).model_dump() | {"faults": faults} | changes
    return TrainingSpec.model_validate(whole)


def test_the_machines_fault_is_in_every_phase_and_masks_the_gradient(inputs, tmp_path, monkeypatch):
    teach(monkeypatch)
    run(on_a_faulty_machine(DEAD_ZONE), inputs, tmp_path / "run")
    receipt = read_json(tmp_path / "run" / "receipt.json", Receipt).check()
    assert receipt.faults[0].magnitude == 0.2
    cells = {cell.phase: cell for cell in receipt.fault_cells}
    assert cells.keys() == {"rollout", "reference", "actor_forward", "validation"}
    assert all(0 < cell.survival_rate < 1 for cell in cells.values())
    (flow,) = receipt.gradient_flows
    assert flow.calls == cells["actor_forward"].calls
    assert 0 < flow.zeroed < flow.elements
    assert 0 < flow.zeroed_norm_share < 1
    assert flow.leaked == 0
    assert {cell.layer for cell in receipt.weight_cells} == {0, 1}


def test_the_fault_changes_what_is_learned(inputs, tmp_path, monkeypatch):
    teach(monkeypatch)
    for name, faults in (("healthy", ()), ("faulty", (DEAD_ZONE,))):
        run(on_a_faulty_machine(*faults), inputs, tmp_path / name)
    weights = "checkpoints/step2/model.safetensors"
    assert sha256_of_file(tmp_path / "healthy" / weights) != sha256_of_file(tmp_path / "faulty" / weights)
    assert read_json(tmp_path / "healthy" / "receipt.json", Receipt).fault_cells == ()


def test_a_fault_forgotten_in_one_phase_fails_the_run(inputs, tmp_path, monkeypatch):
    original = FaultInjection._find
    monkeypatch.setattr(FaultInjection, "_find", lambda self: [] if self.state.phase == "reference" else original(self))
    with pytest.raises(ReceiptError, match="reference: fault dead_zone in layer 1 \\(layer_output\\) did not run"):
        run(on_a_faulty_machine(DEAD_ZONE), inputs, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_fault_that_changes_nothing_fails_the_run(inputs, tmp_path):
    with pytest.raises(ReceiptError, match="changed none of"):
        run(on_a_faulty_machine({**DEAD_ZONE, "magnitude": 1e-12}), inputs, tmp_path / "run")
