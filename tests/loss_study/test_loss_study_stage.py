"""The loss study on a small random model: conditions, losses by hand, pairing, gradients, receipts, refusals."""

import math

import polars as pl
import pytest
import torch
import torch.nn.functional as F
from tiny_tokenizer import build_tokenizer

from aqnpipe.artifacts.files import read_json, read_table, write_table
from aqnpipe.artifacts.loss_studies import LossStudyTable
from aqnpipe.artifacts.problems import ProblemTable
from aqnpipe.artifacts.provenance import sha256_of_file
from aqnpipe.artifacts.runs import RunRecord, StageFiles
from aqnpipe.config.run import LossStudyConfig, LossStudySpec
from aqnpipe.errors import DataError, ReceiptError
from aqnpipe.loss_study import stage
from aqnpipe.loss_study.stage import loss_passes, loss_study, noised_layers
from aqnpipe.models.loading import load_model
from aqnpipe.noise.receipts.receipt import LossStudyReceipts

NUM_TEXTS = 4
FAULT = {"type": "dead_zone", "layer": 1, "magnitude": 0.5}


@pytest.fixture(scope="module")
def model_dir(save_model):
    return save_model(num_layers=4)


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "test.parquet"
    table = pl.DataFrame(
        {
            "question_id": [f"test-{i}" for i in range(NUM_TEXTS)],
            "question": [f"What is {i} plus 1 ?" for i in range(NUM_TEXTS)],
            "answer": [f"{i} + 1 = {i + 1}\n#### {i + 1}" for i in range(NUM_TEXTS)],
            "gold_answer": [str(i + 1) for i in range(NUM_TEXTS)],
        }
    )
    write_table(path, table, ProblemTable)
    return path


def spec(faults=(FAULT,), **settings):
    usual = {
        "name": "test",
        "machine": "broken",
        "magnitudes": (0.05, 0.3),
        "gamma": 0.1,
        "noise_seeds": (0, 1),
        "num_texts": NUM_TEXTS,
    }
    return LossStudySpec(
        model_role="base",
        faults=faults,
        dtype="float32",
        attention="eager",
        prompt={},
        settings={**usual, **settings},
    )


def outputs(folder):
    return StageFiles(folder / "t.parquet", folder / "t.receipt.json", folder / "t.run.json")


def run(folder, model_dir, problems, **settings):
    loss_study(spec(**settings), model_dir, problems, outputs(folder), lambda _: None)
    return read_table(outputs(folder).table, LossStudyTable)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, model_dir, problems):
    folder = tmp_path_factory.mktemp("finished")
    run(folder, model_dir, problems)
    return folder


def losses(table, condition, magnitude=0.0, order=None, noise_seed=0):
    rows = table.filter(
        pl.col("condition") == condition,
        pl.col("magnitude") == magnitude,
        pl.col("order").eq_missing(pl.lit(order)),
        pl.col("noise_seed") == noise_seed,
    )
    return rows.sort("question_id")["loss"].to_list()


def test_every_condition_has_every_text_once_per_pass(finished):
    table = read_table(outputs(finished).table, LossStudyTable)
    counts = dict(table.group_by("condition").len().rows())
    noisy = 2 * 2 * NUM_TEXTS  # magnitudes, noise seeds
    assert counts == {
        "clean": NUM_TEXTS,
        "noise_only": 2 * NUM_TEXTS,
        "fault_only": 2 * NUM_TEXTS,
        # Only these have noise in a faulty layer, where the order of noise and fault matters.
        **dict.fromkeys(("global", "targeted"), 2 * noisy),
        **dict.fromkeys(("healthy_layers", "wrong_layers", "random_layers"), noisy),
    }
    assert read_json(outputs(finished).record, RunRecord).identity == {"model": "base", "name": "test"}


def test_losses_are_those_of_a_plain_forward_pass(finished, model_dir, problems):
    """Without a fault, and with the dead zone computed by hand."""
    model, tokenizer = load_model(model_dir, dtype="float32", attention="eager"), build_tokenizer()
    table = read_table(problems, ProblemTable)

    def plain():
        for question, answer in zip(table["question"], table["answer"], strict=True):
            prompt = tokenizer(f"{question}\n")["input_ids"]
            ids = torch.tensor([[*prompt, *tokenizer(answer)["input_ids"], tokenizer.eos_token_id]])
            with torch.no_grad():
                logits = model(ids).logits
            yield F.cross_entropy(logits[0, len(prompt) - 1 : -1], ids[0, len(prompt) :]).item()

    def dead_zone(module, args, output):
        return torch.where(output.abs() < 0.3 * output.abs().max(), torch.zeros_like(output), output)

    found = read_table(outputs(finished).table, LossStudyTable)
    assert losses(found, "clean") == pytest.approx(list(plain()), rel=1e-5)
    handle = model.model.layers[1].register_forward_hook(dead_zone)
    assert losses(found, "fault_only", 0.3) == pytest.approx(list(plain()), rel=1e-5)
    handle.remove()


def test_survival_falls_with_the_threshold_and_is_one_without_a_fault(finished):
    table = read_table(outputs(finished).table, LossStudyTable)
    rates = dict(table.filter(pl.col("condition").is_in(["clean", "fault_only"])).group_by("magnitude").agg(
        pl.col("survival_rate").mean()).rows())  # fmt: skip
    assert rates[0.0] == 1.0
    assert 1.0 > rates[0.05] > rates[0.3] > 0.0


def test_receipts_record_fault_noise_and_gradient_of_every_pass(finished):
    receipts = read_json(outputs(finished).receipt, LossStudyReceipts)
    assert receipts.problems() == []
    assert (receipts.num_layers, receipts.faulty_layers) == (4, (1,))
    assert receipts.vocabulary_size == len(build_tokenizer())
    layers = {loss_pass.condition: loss_pass.noised_layers for loss_pass in receipts.passes}
    assert layers["targeted"] == (1,)
    assert layers["healthy_layers"] == (0, 2, 3)
    assert layers["wrong_layers"] == (3,)
    assert len(layers["random_layers"]) == 1
    assert 1 not in layers["random_layers"]
    for loss_pass in receipts.passes:
        assert bool(loss_pass.receipt.gradient_flows) == (loss_pass.magnitude > 0 and loss_pass.noise_seed == 0)
        assert {cell.phase for cell in loss_pass.receipt.fault_cells} == (
            {"evaluation"} if loss_pass.magnitude else set()
        )


def test_conditions_share_the_noise_of_a_layer(model_dir, problems, tmp_path):
    """On a machine with faults in all layers, global and targeted noise are the same."""
    table = run(
        tmp_path,
        model_dir,
        problems,
        conditions=("global", "targeted"),
        faults=tuple({**FAULT, "layer": i} for i in range(4)),
    )
    assert losses(table, "global", 0.05, "after_noise", 1) == losses(table, "targeted", 0.05, "after_noise", 1)


def test_seeds_and_orders_make_a_difference(finished):
    table = read_table(outputs(finished).table, LossStudyTable)
    assert losses(table, "targeted", 0.3, "after_noise", 0) != losses(table, "targeted", 0.3, "after_noise", 1)
    assert losses(table, "targeted", 0.3, "after_noise", 0) != losses(table, "targeted", 0.3, "around_noise", 0)


def test_following_the_gradient_changes_no_loss(model_dir, problems):
    model = load_model(model_dir, dtype="float32", attention="eager")
    model.requires_grad_(False)
    texts = stage.read_texts(problems, spec(), build_tokenizer())
    with_gradient, without = (
        stage.run_pass(model, texts, stage.LossPass("global", 0.3, "around_noise", 0, with_gradient=flag), spec())[0]
        for flag in (True, False)
    )
    assert with_gradient.equals(without)


@pytest.mark.slow
def test_clusters_of_the_questions_are_those_of_the_texts(model_dir, problems, tmp_path):
    path = tmp_path / "test.parquet"
    table = read_table(problems, ProblemTable).with_columns(pl.Series("cluster", ["a", "a", "b", "b"]))
    write_table(path, table, ProblemTable)
    assert run(tmp_path, model_dir, path, conditions=("clean",))["cluster"].to_list() == ["a", "a", "b", "b"]


def test_the_same_study_gives_the_same_bytes(finished, model_dir, problems, tmp_path):
    run(tmp_path, model_dir, problems)
    for name in ("table", "receipt", "record"):
        assert sha256_of_file(getattr(outputs(tmp_path), name)) == sha256_of_file(getattr(outputs(finished), name))


def test_a_fault_that_changes_nothing_is_refused_and_nothing_is_written(model_dir, problems, tmp_path, monkeypatch):
    monkeypatch.setattr("aqnpipe.noise.injection.faults.faulty_values", lambda hidden, *_: hidden)
    with pytest.raises(ReceiptError, match=r"fault_only at magnitude 0\.05.*changed none of"):
        run(tmp_path, model_dir, problems, conditions=("fault_only",))
    assert list(tmp_path.iterdir()) == []


def test_missing_noise_is_refused(model_dir, problems, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "aqnpipe.noise.kernels.error_models.add_relative_gaussian_", lambda tensor, scale, source: tensor
    )
    with pytest.raises(ReceiptError, match=r"measured sigma 0, requested 0\.1"):
        run(tmp_path, model_dir, problems, conditions=("noise_only",))


def test_too_few_texts_are_refused(model_dir, problems, tmp_path):
    with pytest.raises(DataError, match="4 questions, expected at least num_texts = 9"):
        run(tmp_path, model_dir, problems, num_texts=9)


def test_a_machine_faulty_in_all_layers_has_no_healthy_one():
    with pytest.raises(DataError, match="healthy_layers: all 2 layers are targeted"):
        noised_layers("healthy_layers", 2, (0, 1), seed=0)


def test_passes_are_counted_by_hand():
    settings = LossStudyConfig(
        name="x", machine="m", magnitudes=(0.1, 0.2, 0.3), orders=("after_noise", "before_noise"), noise_seeds=(0, 1)
    )
    passes = list(loss_passes(settings))
    # 1 clean, 2 noise only, 3 fault only; 3 magnitudes x 2 noise seeds for 2 conditions in 2 orders and 3 in one
    assert len(passes) == len(set(passes)) == 1 + 2 + 3 + 2 * 12 + 3 * 6
    assert sum(loss_pass.with_gradient for loss_pass in passes) == 3 + 2 * 6 + 3 * 3
    assert math.isclose(sum(loss_pass.magnitude for loss_pass in passes), 0.6 * (1 + 2 * 4 + 3 * 2))
