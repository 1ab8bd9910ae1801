"""GRPO with vLLM rollouts on a CPU: noise, AQN and faults in the vLLM workers, the same bytes after a kill.

`make test-vllm` runs these tests in a separate environment.
"""

import os
import signal
import subprocess
import sys

import psutil
import pytest
import torch
from safetensors.torch import load_file
from tiny_training import AQN, run, teach, training_spec, write_builtin_inputs, write_inputs

from aqnpipe.artifacts.files import read_json, read_table
from aqnpipe.artifacts.provenance import sha256_of_file
from aqnpipe.artifacts.runs import RunRecord, TrainingMetrics
from aqnpipe.config.run import TrainingSpec
from aqnpipe.errors import ReceiptError
from aqnpipe.generation.vllm.plugin import is_vllm_installed
from aqnpipe.models.prepared import ADAPTERS_FILE
from aqnpipe.noise.receipts.receipt import Receipt

pytestmark = pytest.mark.skipif(not is_vllm_installed(), reason="vLLM is not installed here: make test-vllm")

NOISE = {"attention": "fused", "phases": ["rollout"], "error": {"kind": "relative_gaussian", "scale": 0.05}}
FAULT = {"type": "saturation", "layer": 1, "magnitude": 0.3, "threshold": "cached"}
LORA = {"rank": 4, "alpha": 64.0, "target_modules": ["q_proj", "up_proj"]}


def spec(backend="vllm", num_steps=3, arm=None, faults=(), **training):
    made = training_spec(num_steps=num_steps, prompts_per_step=4, resume_every=1, **training)
    data = made.model_dump() | {"attention": "sdpa", "generation": {"backend": backend}, "faults": faults}
    return TrainingSpec.model_validate(data | {"arm": made.arm.model_dump() | (arm or {})})


@pytest.fixture(scope="module")
def inputs(tmp_path_factory, make_model):
    shape = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    return write_inputs(tmp_path_factory.mktemp("inputs"), make_model, num_problems=16, **shape)


@pytest.fixture
def _rewards_that_teach(monkeypatch):
    """Only for runs in this process, not for runs with several workers."""
    teach(monkeypatch)


def metrics(folder):
    return read_table(folder / "metrics.parquet", TrainingMetrics)


def digests(folder):
    return {str(path.relative_to(folder)): sha256_of_file(path) for path in sorted(folder.rglob("*")) if path.is_file()}


KILLED = """
import os, signal, sys
from pathlib import Path

import psutil
from tiny_training import run, scattered_rewards

import aqnpipe.training.run
from aqnpipe.config.run import TrainingSpec
from aqnpipe.generation.vllm.engine import VllmEngine
from aqnpipe.training.audit import rollouts
from aqnpipe.training.run import TrainingInputs

end_pass, ended = VllmEngine.end_pass, []


def killed(engine):
    if len(ended) == 2:
        print("processes", *(child.pid for child in psutil.Process().children(recursive=True)), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    ended.append(None)
    return end_pass(engine)


VllmEngine.end_pass = killed
aqnpipe.training.run.reward_correct = scattered_rewards
rollouts.strict_rewards = lambda texts, golds: scattered_rewards(texts)
spec, folder, *inputs = sys.argv[1:]
run(TrainingSpec.model_validate_json(spec), TrainingInputs(*map(Path, inputs)), Path(folder))
"""
"""A training run that is killed in its third rollout, while its engine's workers have noise installed."""


def kill_in_third_rollout(requested, inputs, folder, tmp_path):
    """Kill a run in its third rollout; return the process ids of its engine."""
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    paths = [str(path) for path in (inputs.model, inputs.train_problems, inputs.test_problems)]
    found = subprocess.run(
        [sys.executable, str(script), requested.model_dump_json(), str(folder), *paths],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        check=False,
    )
    assert found.returncode == -signal.SIGKILL
    (line,) = (line for line in found.stdout.splitlines() if line.startswith("processes"))
    return [int(pid) for pid in line.split()[1:]]


@pytest.mark.usefixtures("_rewards_that_teach")
def test_a_run_with_all_noise_is_proven_and_survives_a_kill_byte_for_byte(inputs, tmp_path):
    requested = spec(
        arm={"operator_noise": NOISE, "aqn": AQN, "importance_sampling": {"mode": "token_truncate"}}, faults=[FAULT]
    )
    whole = run(requested, inputs, tmp_path / "whole")
    orphans = kill_in_third_rollout(requested, inputs, tmp_path / "resumed", tmp_path)
    assert len(orphans) >= 2
    alive = [psutil.Process(pid) for pid in orphans if psutil.pid_exists(pid)]
    assert psutil.wait_procs(alive, timeout=30)[1] == []
    said = []
    resumed = run(requested, inputs, tmp_path / "resumed", said.append)
    # The point of step 2 is published at the end of step 3.
    assert "resuming after step 1" in said[0]
    assert digests(whole) == digests(resumed)

    record = read_json(whole / "run.json", RunRecord)
    assert record.generation["backend"] == "vllm"
    assert record.generation["enforce_eager"] is True
    assert record.generation["batch_invariant"] is False
    assert record.generation["why_not_batch_invariant"] == "generation.rollout_batch_invariance is false"
    receipt = read_json(whole / "receipt.json", Receipt).check()
    assert [sync.step for sync in receipt.weight_syncs] == [0, 1, 2]
    scale, elements = receipt.measured_scale("rollout")
    assert abs(scale / 0.05 - 1) < 5 / (2 * elements) ** 0.5
    assert {cell.phase for cell in receipt.cells} == {"rollout"}
    assert {cell.phase for cell in receipt.fault_cells} >= {"rollout", "actor_forward", "validation"}
    assert metrics(whole)["importance_ratio_mean"].null_count() == 0


@pytest.mark.usefixtures("_rewards_that_teach")
def test_without_noise_vllm_draws_by_the_weights_that_learn(inputs, tmp_path):
    """Adapters are merged at each weight sync; a missing sync would show as a growing distance."""
    folder = run(spec(lora=LORA, learning_rate=0.05, kl_coefficient=0.0), inputs, tmp_path / "run")
    table = metrics(folder)
    assert table["logp_difference_max"].max() < 1e-4
    assert table["sampler_kl"].max() < 1e-8
    steps = [load_file(tmp_path / "run" / f"checkpoints/step{step}" / ADAPTERS_FILE) for step in (1, 3)]
    name = "model.layers.0.self_attn.q_proj.lora_B.weight"
    assert not torch.allclose(steps[0][name], steps[1][name], atol=1e-3)


@pytest.mark.usefixtures("_rewards_that_teach")
def test_an_engine_whose_weights_would_lose_the_first_update_ends_the_run(inputs, tmp_path):
    """In bfloat16 merged weights are those before training; vLLM would draw every rollout from them."""
    rounded = spec(lora=LORA, learning_rate=1e-6, checkpoint_every=None, dtype="bfloat16")
    with pytest.raises(ReceiptError, match=r"in bfloat16 weights \d+% of their update is lost .*backend: transformers"):
        run(rounded, inputs, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("_rewards_that_teach")
def test_an_engine_that_loses_the_noise_fails_the_run(inputs, tmp_path, monkeypatch):
    from aqnpipe.generation.vllm.engine import VllmEngine

    original = VllmEngine.call_workers
    monkeypatch.setattr(
        VllmEngine,
        "call_workers",
        lambda self, name, *args: [{}] if name == "aqnpipe_begin_batch" else original(self, name, *args),
    )
    with pytest.raises(ReceiptError, match="measured 0 forward passes, the responses took at least"):
        run(spec(num_steps=1, arm={"operator_noise": NOISE}), inputs, tmp_path / "run")
    assert not (tmp_path / "run").exists()


WITH_TWO_WORKERS = {
    **{"rollouts_per_prompt": 4, "micro_batch_size": 4, "max_response_tokens": 24},
    **{"learning_rate": 1e-4, "checkpoint_every": 3, "validation_questions": 5, "num_workers": 2},
}


@pytest.fixture(scope="module")
def builtin_inputs(tmp_path_factory):
    return write_builtin_inputs(tmp_path_factory.mktemp("builtin"))


def test_two_workers_with_an_engine_each_learn_what_one_does(builtin_inputs, tmp_path):
    """Draws are keyed by the row in the batch of all workers, and each engine has the weights of both workers."""
    requested = {workers: spec(**{**WITH_TWO_WORKERS, "num_workers": workers}) for workers in (1, 2)}
    alone, together = (run(requested[workers], builtin_inputs, tmp_path / f"{workers}") for workers in (1, 2))
    assert metrics(alone)["reward_mean"].n_unique() > 1
    for column in ("reward_mean", "reward_std", "response_tokens_mean", "validation_accuracy"):
        assert metrics(alone)[column].to_list() == metrics(together)[column].to_list(), column
    assert (metrics(alone)["loss"] - metrics(together)["loss"]).abs().max() < 1e-6
    assert metrics(together)["logp_difference_max"].max() < 1e-4
    assert read_json(together / "receipt.json", Receipt).check().num_workers == 2


def test_each_of_two_engines_proves_noise_of_its_own(builtin_inputs, tmp_path):
    requested = spec(arm={"operator_noise": NOISE, "aqn": AQN}, faults=[FAULT], **WITH_TWO_WORKERS)
    once, again = (run(requested, builtin_inputs, tmp_path / name) for name in ("once", "again"))
    assert digests(once) == digests(again)
    receipt = read_json(once / "receipt.json", Receipt).check()
    assert receipt.num_workers == 2
    assert [sync.step for sync in receipt.weight_syncs] == [0, 1, 2]
    scale, elements = receipt.measured_scale("rollout")
    assert abs(scale / 0.05 - 1) < 5 / (2 * elements) ** 0.5
