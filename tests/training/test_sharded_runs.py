"""Training runs of two workers that share the weights (`parallelism: fsdp`), compared with data parallelism."""

import json
import shutil
from functools import partial

import polars as pl
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from tiny_training import AQN, NOISE, training_spec, write_inputs
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM, Gemma2Config, Gemma2ForCausalLM
from two_workers import logs, run_together

from aqnpipe.artifacts.files import read_json
from aqnpipe.artifacts.provenance import sha256_of_file
from aqnpipe.models.loading import load_model
from aqnpipe.models.prepared import ADAPTERS_FILE
from aqnpipe.noise.receipts.receipt import Receipt

pytestmark = pytest.mark.slow

LORA = {"rank": 4, "alpha": 8}
SETTINGS = {"num_workers": 2, "micro_batch_size": 2, "learning_rate": 1e-3, "validation_questions": 3}
WHOLE_UNCLIPPED = {"micro_batch_size": 4, "max_grad_norm": 1e6}
RUNS = {
    "data": {},
    "fsdp": {"parallelism": "fsdp"},
    "fsdp again": {"parallelism": "fsdp"},
    "adapters": {"parallelism": "fsdp", "lora": LORA, "dtype": "bfloat16"},
    "adapters, data": {"lora": LORA, "dtype": "bfloat16"},
    "bfloat16": {"parallelism": "fsdp", "dtype": "bfloat16", "gradient_checkpointing": True},
    "bfloat16, data": {"dtype": "bfloat16", "gradient_checkpointing": True},
    "float16": {"parallelism": "fsdp", "dtype": "float16"},
    "float16, data": {"dtype": "float16"},
    "one micro-batch, unclipped": {"parallelism": "fsdp", **WHOLE_UNCLIPPED},
    "one micro-batch, unclipped, data": WHOLE_UNCLIPPED,
}
# Halves of these widths are whole vectors of the processor: the fused AdamW rounds what lies behind the last otherwise.
FAMILIES = {
    "gemma2": (Gemma2Config, Gemma2ForCausalLM, {"head_dim": 32}),
    "diffllama": (DiffLlamaConfig, DiffLlamaForCausalLM, {"head_dim": 32}),
}
RESUMED = {
    "parallelism": "fsdp",
    "num_steps": 3,
    "checkpoint_every": 2,
    "resume_every": 1,
    "learning_rate_schedule": "linear",
    "warmup_steps": 2,
}


def random_model(family, **settings):
    make_config, make_model, widths = FAMILIES[family]
    torch.manual_seed(0)
    shared = {"hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2}
    layers = settings.pop("num_layers")
    config = make_config(
        **shared, **widths, **settings, num_hidden_layers=layers, bos_token_id=None, attn_implementation="eager"
    )
    return make_model(config).eval()


def job(folder, inputs, settings, **extra):
    spec = training_spec(NOISE, AQN, **{**SETTINGS, **settings})
    return {
        "kind": "train",
        "folder": str(folder),
        "inputs": str(inputs),
        "spec": spec.model_dump(mode="json"),
        **extra,
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory, make_model):
    """Return the folder of finished runs; the processes start once for all, and again after a kill."""
    folder = tmp_path_factory.mktemp("sharded")
    inputs = folder / "inputs"
    inputs.mkdir()
    write_inputs(inputs, make_model)
    # A checkpoint of adapters finds its base beside the runs.
    for name in RUNS:
        shutil.copytree(inputs / "model", folder / name / "models" / "base")
    jobs = [job(folder / name / "runs" / "work", inputs, settings) for name, settings in RUNS.items()]
    for family in FAMILIES:
        (folder / family).mkdir()
        write_inputs(folder / family, partial(random_model, family))
        for name, settings in (("fsdp", {"parallelism": "fsdp"}), ("data", {})):
            work = folder / family / name / "runs" / "work"
            jobs.append(job(work, folder / family, {**WHOLE_UNCLIPPED, **settings}))
    jobs += [job(folder / "whole" / "work", inputs, RESUMED)]
    jobs += [job(folder / "killed" / "work", inputs, RESUMED, kill_after=2)]
    codes = run_together(jobs, folder / "first")
    assert codes[0] == -9, logs(folder / "first")
    codes = run_together([job(folder / "killed" / "work", inputs, RESUMED)], folder / "second")
    assert codes == [0, 0], logs(folder / "second")
    return folder


def run_of(finished, name):
    return finished / name / "runs" / "work" / "run"


def metrics(run):
    return pl.read_parquet(run / "metrics.parquet")


def digests(run):
    return {str(path.relative_to(run)): sha256_of_file(path) for path in run.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("shared", "data"), [("fsdp", "data"), ("bfloat16", "bfloat16, data"), ("float16", "float16, data")]
)
def test_a_run_learns_what_data_parallelism_learns(shared, data, finished):
    """Gradients of several micro-batches are summed in another order: over workers first, or over micro-batches."""
    runs = [run_of(finished, name) for name in (shared, data)]
    mine, theirs = map(metrics, runs)
    for column in ("reward_mean", "loss", "response_tokens_mean", "sigma_measured", "validation_accuracy"):
        values = [table[column].drop_nulls().to_list() for table in (mine, theirs)]
        assert values[0] == pytest.approx(values[1], rel=1e-4, abs=1e-6), column
    weights = [load_file(run / "checkpoints" / "step2" / "model.safetensors") for run in runs]
    assert weights[0].keys() == weights[1].keys()
    assert max(float((weights[0][name] - weights[1][name]).abs().max()) for name in weights[0]) < 2e-4
    receipts = [read_json(run / "receipt.json", Receipt).check() for run in runs]
    places = [{(cell.phase, cell.operator, cell.layer): cell.elements for cell in r.cells} for r in receipts]
    assert places[0] == places[1]
    assert [sync.sigma_measured for sync in receipts[0].weight_syncs] == [
        sync.sigma_measured for sync in receipts[1].weight_syncs
    ]


def test_without_sums_in_another_order_weights_are_those_of_data_parallelism_bit_for_bit(finished):
    """Micro-batches and the norm of all gradients are the only sums whose order differs (decision 26)."""
    names = ("one micro-batch, unclipped", "one micro-batch, unclipped, data", "data")
    mine, theirs, clipped = (
        load_file(run_of(finished, name) / "checkpoints/step2/model.safetensors") for name in names
    )
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []
    assert any(not torch.equal(mine[name], clipped[name]) for name in mine)


@pytest.mark.parametrize("family", FAMILIES)
def test_so_are_those_of_other_families(family, finished):
    mine, theirs = (
        load_file(run_of(finished / family, name) / "checkpoints/step2/model.safetensors") for name in ("fsdp", "data")
    )
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


def test_adapters_learn_what_they_learn_with_data_parallelism(finished):
    runs = [run_of(finished, name) for name in ("adapters", "adapters, data")]
    weights = [load_file(run / "checkpoints" / "step2" / ADAPTERS_FILE) for run in runs]
    assert weights[0].keys() == weights[1].keys()
    assert max(float((weights[0][name] - weights[1][name]).abs().max()) for name in weights[0]) < 2e-4
    assert any("lora_B" in name and bool(weight.any()) for name, weight in weights[0].items())


@pytest.mark.parametrize("name", ["fsdp", "adapters", "bfloat16"])
def test_a_checkpoint_is_one_whole_model_that_computes_what_the_trainers_computed(name, finished):
    dtype = RUNS[name].get("dtype", "float32")
    load_model(run_of(finished, name) / "checkpoints" / "step2", dtype=dtype, attention="eager")
    assert json.loads((run_of(finished, name) / "checkpoints/step2/config.json").read_text())["architectures"] == [
        "Qwen2ForCausalLM"
    ]


def test_a_repeated_run_has_the_same_bytes(finished):
    assert digests(run_of(finished, "fsdp")) == digests(run_of(finished, "fsdp again"))


def test_a_run_that_was_killed_ends_with_the_bytes_of_one_that_was_not(finished):
    """With a learning rate that differs at every step, and both workers' shares."""
    killed, whole = (finished / name / "work" for name in ("killed", "whole"))
    assert json.loads((killed / "held0.json").read_text())["resumed"]
    assert not json.loads((whole / "held0.json").read_text())["resumed"]
    assert digests(killed / "run") == digests(whole / "run")
    assert (whole / "run" / "checkpoints" / "step3").is_dir()


def test_each_worker_writes_its_own_part_of_a_resume_point(finished):
    """Shares of the same weights, and half of the norms, which both have whole."""
    points = sorted((finished / "whole" / "work" / "resume").iterdir())
    assert [point.name for point in points] == ["step1", "step2"]
    for point in points:
        one, two = (set(load_file(point / f"rank{rank}.safetensors")) for rank in (0, 1))
        assert any("norm" in name for name in one ^ two)
        assert not any("norm" in name for name in one & two)
        assert any("q_proj.weight:exp_avg" in name for name in one & two)


def test_each_worker_holds_about_half(finished):
    """Norms are whole on both, and biases of few elements too much to halve; the reference is divided as well."""
    for rank in (0, 1):
        data, shared = (
            json.loads((run_of(finished, name).parent / f"held{rank}.json").read_text())["bytes"]
            for name in ("data", "fsdp")
        )
        for what in ("weights", "moments", "reference"):
            assert 0.5 <= shared[what] / data[what] < 0.52, what


def test_shares_need_several_workers():
    with pytest.raises(ValidationError, match="parallelism is fsdp with num_workers 1, expected several workers"):
        training_spec(parallelism="fsdp")
