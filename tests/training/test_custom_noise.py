"""A training with an error model and a schedule of one's own: its record has their sources, its receipt proves them."""

import pytest
from on_modules import on_modules
from tiny_training import run, training_spec

from aqnpipe.artifacts.files import read_json
from aqnpipe.artifacts.runs import RunRecord
from aqnpipe.config.custom_code import source_digest
from aqnpipe.errors import ConfigError, ReceiptError
from aqnpipe.noise.receipts.receipt import Receipt, RecorderState
from aqnpipe.noise.schedule import with_custom_sigmas
from aqnpipe.training.noise_plan import NoisePlan

CODE = """
def error(values, normals, *, scale):
    return values * (1 + scale * normals[0])

def sigma(step, num_steps, num_epochs, *, start):
    return start / (1 + step)
"""


@pytest.fixture
def spec(own_module):
    module = own_module(CODE)
    digest = source_digest(f"{module}:error")
    planned = {"kind": "own", "source_sha256": digest}
    error = {**planned, "function": f"{module}:error", "settings": {"scale": 0.05}, "size": 0.05}
    schedule = {**planned, "function": f"{module}:sigma", "settings": {"start": 0.05}, "sigma_max": 0.05}
    return training_spec({"error": error}, {"schedule": schedule})


@pytest.mark.slow
def test_a_run_has_both_and_records_source_and_sigmas(spec, inputs, tmp_path):
    folder = run(spec, inputs, tmp_path / "run")
    arm = read_json(folder / "run.json", RunRecord).config["arm"]
    digest = spec.arm.operator_noise.error.source_sha256
    assert arm["operator_noise"]["error"]["source_sha256"] == arm["aqn"]["schedule"]["source_sha256"] == digest
    # 0.05 / (1 + t)
    assert arm["aqn"]["schedule"]["sigmas"] == pytest.approx([0.05, 0.025, 0.05 / 3])
    receipt = read_json(folder / "receipt.json", Receipt).check()
    assert [sync.sigma for sync in receipt.weight_syncs] == pytest.approx([0.05, 0.025])
    for phase in ("rollout", "actor_forward", "backward"):
        assert receipt.measured_scale(phase)[0] == pytest.approx(0.05, rel=0.1)


@pytest.mark.slow
def test_a_trainer_that_uses_other_sigmas_is_refused(spec, inputs, tmp_path, monkeypatch):
    monkeypatch.setattr(NoisePlan, "sigma", lambda self, step: 0.05)
    with pytest.raises(ReceiptError, match=r"the trainer used sigma 0.05, the schedule gives 0.025"):
        run(spec, inputs, tmp_path / "run")


def test_a_source_that_changed_after_planning_stops_the_run_before_it_starts(spec):
    schedule = spec.arm.aqn.schedule.model_copy(update={"source_sha256": "0" * 64})
    aqn = spec.arm.aqn.model_copy(update={"schedule": schedule})
    changed = spec.model_copy(update={"arm": spec.arm.model_copy(update={"aqn": aqn})})
    with pytest.raises(ConfigError, match="source_sha256 is 0"):
        with_custom_sigmas(changed)


def test_measurements_survive_an_interruption(spec, model):
    with on_modules(model, error=spec.arm.operator_noise.error) as receipt:
        model(model.dummy_inputs["input_ids"] % 50)
    state = receipt.recorder.state()
    restored = RecorderState.model_validate_json(state.model_dump_json())
    assert restored == state
    assert sum(cell.changed for cell in restored.cells) > 0
    before = receipt.content
    receipt.recorder.restore(restored)
    assert receipt.content == before
