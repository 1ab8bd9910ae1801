"""Two workers that share the weights, with a vLLM engine each for the rollouts, on a CPU.

`make test-vllm` runs these tests in a separate environment.
"""

import json
import shutil

import pytest
from safetensors.torch import load_file
from tiny_training import AQN, training_spec, write_inputs
from two_workers import logs, run_together

from aqnpipe.artifacts.files import read_json, read_table
from aqnpipe.artifacts.provenance import sha256_of_file
from aqnpipe.artifacts.runs import TrainingMetrics
from aqnpipe.config.run import TrainingSpec
from aqnpipe.generation.vllm.plugin import is_vllm_installed
from aqnpipe.models.prepared import ADAPTERS_FILE
from aqnpipe.noise.receipts.receipt import Receipt

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_vllm_installed(), reason="vLLM is not installed here: make test-vllm"),
]

NOISE = {"attention": "fused", "phases": ["rollout"], "error": {"kind": "relative_gaussian", "scale": 0.05}}
FAULT = {"type": "saturation", "layer": 1, "magnitude": 0.3, "threshold": "cached"}
NOISED = {"arm": {"operator_noise": NOISE, "aqn": AQN}, "faults": [FAULT]}
SHARED = {"parallelism": "fsdp"}
LORA = {"rank": 4, "alpha": 64.0, "target_modules": ["q_proj", "up_proj"]}

SECONDS = 2400
"""Each run starts two engines, which takes minutes where other tests run beside it."""
SETTINGS = {"num_steps": 3, "num_workers": 2, "resume_every": 1, "checkpoint_every": 3}


def job(folder, inputs, settings, arm=None, faults=(), **extra):
    made = training_spec(**{**SETTINGS, **settings})
    spec = made.model_dump() | {"attention": "sdpa", "generation": {"backend": "vllm"}, "faults": faults}
    spec = TrainingSpec.model_validate(spec | {"arm": made.arm.model_dump() | (arm or {})})
    paths = {"folder": str(folder), "inputs": str(inputs)}
    return {"kind": "train", **paths, "spec": spec.model_dump(mode="json"), **extra}


@pytest.fixture(scope="module")
def finished(tmp_path_factory, make_model):
    """Return the folder of finished runs; the processes start once for all, and again after a kill."""
    folder = tmp_path_factory.mktemp("sharded")
    inputs = folder / "inputs"
    inputs.mkdir()
    write_inputs(inputs, make_model, hidden_size=64, num_attention_heads=2, num_key_value_heads=1)
    # Checkpoints of adapters find their base beside the runs.
    shutil.copytree(inputs / "model", folder / "clean" / "models" / "base")
    clean = folder / "clean" / "runs" / "work"
    jobs = [
        job(folder / "whole", inputs, SHARED, **NOISED),
        job(folder / "data", inputs, {}, **NOISED),
        job(clean, inputs, SHARED | {"lora": LORA, "learning_rate": 0.05, "kl_coefficient": 0.0}),
        job(folder / "killed", inputs, SHARED, **NOISED, kill_after=2),
    ]
    codes = run_together(jobs, folder / "first", SECONDS)
    assert codes[0] == -9, logs(folder / "first")
    codes = run_together([job(folder / "killed", inputs, SHARED, **NOISED)], folder / "second", SECONDS)
    assert codes == [0, 0], logs(folder / "second")
    return folder


def metrics(folder):
    return read_table(folder / "run" / "metrics.parquet", TrainingMetrics)


def digests(folder):
    return {
        str(path.relative_to(folder)): sha256_of_file(path)
        for path in sorted((folder / "run").rglob("*"))
        if path.is_file()
    }


def test_noise_in_the_engines_of_both_workers_is_proven(finished):
    receipt = read_json(finished / "whole" / "run" / "receipt.json", Receipt).check()
    assert receipt.num_workers == 2
    assert [sync.step for sync in receipt.weight_syncs] == [0, 1, 2]
    assert {cell.phase for cell in receipt.cells} == {"rollout"}
    assert {cell.layer for cell in receipt.cells if cell.operator == "mm" and cell.layer is not None} == {0, 1}
    scale, elements = receipt.measured_scale("rollout")
    assert abs(scale / 0.05 - 1) < 5 / (2 * elements) ** 0.5
    assert {cell.phase for cell in receipt.fault_cells} >= {"rollout", "actor_forward", "validation"}


def test_a_run_learns_what_data_parallelism_learns(finished):
    """Each worker has one micro-batch per step, so gradients differ at most by the rounding of their norm."""
    runs = [finished / name for name in ("whole", "data")]
    mine, theirs = map(metrics, runs)
    for column in ("reward_mean", "loss", "response_tokens_mean", "sigma_measured"):
        values = [table[column].drop_nulls().to_list() for table in (mine, theirs)]
        assert values[0] == pytest.approx(values[1], rel=1e-4, abs=1e-6), column
    weights = [load_file(run / "run" / "checkpoints" / "step3" / "model.safetensors") for run in runs]
    assert weights[0].keys() == weights[1].keys()
    assert max(float((weights[0][name] - weights[1][name]).abs().max()) for name in weights[0]) < 2e-4


def test_engines_draw_by_the_weights_that_learn(finished):
    """Without noise; adapters are merged at each sync, and a missing sync would show as a distance."""
    clean = finished / "clean" / "runs" / "work"
    table = metrics(clean)
    adapters = load_file(clean / "run" / "checkpoints" / "step3" / ADAPTERS_FILE)
    # They are 0 before training, and move by the learning rate at each step.
    assert all(weight.abs().max() > 0.05 for name, weight in adapters.items() if "lora_B" in name)
    assert table["logp_difference_max"].max() < 1e-4
    assert table["sampler_kl"].max() < 1e-8


def test_a_run_that_was_killed_ends_with_the_bytes_of_one_that_was_not(finished):
    killed, whole = (finished / name for name in ("killed", "whole"))
    assert json.loads((killed / "held0.json").read_text())["resumed"]
    assert not json.loads((whole / "held0.json").read_text())["resumed"]
    assert digests(killed) == digests(whole)
    assert (whole / "run" / "checkpoints" / "step3").is_dir()
