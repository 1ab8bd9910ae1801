"""Evaluation of a checkpoint of adapters: they are applied, and get the noise that they had in training."""

import shutil

import pytest
from tiny_training import NOISE, run, training_spec, write_builtin_inputs

from aqnpipe.artifacts.files import read_json
from aqnpipe.artifacts.provenance import sha256_of_file
from aqnpipe.artifacts.runs import RunRecord, StageFiles
from aqnpipe.config.run import EvaluationSpec
from aqnpipe.errors import ModelError
from aqnpipe.evaluation.stage import evaluate
from aqnpipe.models.prepared import ADAPTERS_FILE
from aqnpipe.noise.receipts.receipt import EvaluationReceipts, Receipt

LORA = {"rank": 4, "alpha": 8}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The results of a study: the prepared model, the questions and a run that trained adapters."""
    results = tmp_path_factory.mktemp("results")
    inputs = write_builtin_inputs(results)
    shutil.copytree(inputs.model, results / "models" / "base")
    spec = training_spec(NOISE, dtype="bfloat16", lora=LORA, learning_rate=1e-4, num_steps=1, max_response_tokens=24)
    return results, run(spec, inputs, results / "runs" / "base" / "test" / "seed0")


def evaluated(results, run_folder, output, **evaluation):
    """Evaluate the last checkpoint of a run; return the files that were written."""
    settings = {
        "noise_levels": (0.0, 0.05),
        "noise_seeds": (0,),
        "max_response_tokens": 24,
        "batch_size": 4,
    }
    spec = EvaluationSpec(
        model_role="base",
        arm_id="test",
        seed=0,
        step=1,
        dtype="bfloat16",
        attention="eager",
        prompt={},
        evaluation={**settings, **evaluation},
    )
    output.mkdir()
    outputs = StageFiles(output / "t.parquet", output / "t.receipt.json", output / "t.run.json")
    evaluate(spec, run_folder / "checkpoints" / "step1", results / "test.parquet", outputs, lambda _: None)
    return outputs


def linears_per_forward(receipt, phase):
    """Return the noised linear products of each layer per forward pass."""
    (forwards,) = (record.passes for record in receipt.phases if record.phase == phase)
    cells = [cell for cell in receipt.cells if cell.phase == phase and cell.operator == "mm"]
    return {cell.layer: cell.calls / forwards for cell in cells if cell.layer is not None}


def noised_share(receipt, phase):
    """Return the part of the operations of a forward pass that has noise."""
    (share,) = (record.noised_flops / record.flops for record in receipt.phases if record.phase == phase)
    return share


@pytest.mark.slow
def test_trainer_and_evaluation_put_noise_on_the_same_operators(made, tmp_path):
    """Seven linears of a layer, and the two matrices of each one's adapter."""
    results, run_folder = made
    outputs = evaluated(results, run_folder, tmp_path / "eval")
    trained = read_json(run_folder / "receipt.json", Receipt).check()
    clean, noisy = (single.receipt.check() for single in read_json(outputs.receipt, EvaluationReceipts).passes)
    expected = dict.fromkeys(range(6), 21.0)
    assert linears_per_forward(trained, "rollout") == linears_per_forward(trained, "actor_forward") == expected
    assert linears_per_forward(noisy, "evaluation") == expected
    assert not clean.cells
    assert noised_share(noisy, "evaluation") == pytest.approx(noised_share(trained, "rollout"), rel=0.02)


def test_the_record_has_the_digest_of_adapters_and_base(made, tmp_path):
    results, run_folder = made
    record = read_json(evaluated(results, run_folder, tmp_path / "eval", noise_levels=(0.0,)).record, RunRecord)
    trained = read_json(run_folder / "run.json", RunRecord).outputs_sha256
    assert record.inputs_sha256["weights"] == trained[f"checkpoints/step1/{ADAPTERS_FILE}"]
    assert record.inputs_sha256["weights"] == sha256_of_file(run_folder / "checkpoints" / "step1" / ADAPTERS_FILE)


def test_without_its_base_nothing_is_written(made, tmp_path):
    _, run_folder = made
    alone = tmp_path / "alone"
    shutil.copytree(run_folder, alone)
    with pytest.raises(ModelError, match=r"adapters only, trained on 'tiny' with weights 32be7f68b597") as refused:
        evaluated(made[0], alone, tmp_path / "eval")
    assert (refused.value.exit_code, "\n" in str(refused.value)) == (2, False)
    assert not list((tmp_path / "eval").iterdir())
