"""The evaluate stage on a tiny random model: rows, receipts, common noise, refusals."""

import polars as pl
import pytest

import aqnpipe.generation.backend_choice as choice
from aqnpipe.artifacts.evaluations import EvaluationTable
from aqnpipe.artifacts.files import read_json, read_table, write_table
from aqnpipe.artifacts.problems import ProblemTable
from aqnpipe.artifacts.provenance import sha256_of_file
from aqnpipe.artifacts.runs import RunRecord, StageFiles
from aqnpipe.config.model import builtin_folder
from aqnpipe.config.run import EvaluationSpec
from aqnpipe.errors import ReceiptError
from aqnpipe.evaluation.stage import evaluate
from aqnpipe.noise.receipts.receipt import EvaluationReceipts

NUM_QUESTIONS = 7


@pytest.fixture(scope="module")
def model_dir(save_model):
    return save_model(num_layers=2)


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "test.parquet"
    table = pl.DataFrame(
        {
            "question_id": [f"test-{i}" for i in range(NUM_QUESTIONS)],
            "question": ["What is 1 plus 1 ?" + " More words ." * i for i in range(NUM_QUESTIONS)],
            "answer": ["#### 2"] * NUM_QUESTIONS,
            "gold_answer": ["2"] * NUM_QUESTIONS,
        }
    )
    write_table(path, table, ProblemTable)
    return path


def spec(**evaluation):
    settings = {"noise_levels": (0.0, 0.2), "noise_seeds": (0, 1), "max_response_tokens": 5, "batch_size": 3}
    return EvaluationSpec(
        model_role="base",
        arm_id="test",
        seed=0,
        step=1,
        dtype="float32",
        attention="eager",
        prompt={},
        evaluation={**settings, **evaluation},
    )


def outputs(folder):
    return StageFiles(folder / "t.parquet", folder / "t.receipt.json", folder / "t.run.json")


def run(folder, model_dir, problems, **evaluation):
    folder.mkdir(exist_ok=True)
    evaluate(spec(**evaluation), model_dir, problems, outputs(folder), lambda _: None)
    return read_table(outputs(folder).table, EvaluationTable)


def responses(table, level, seed):
    return table.filter(noise_level=level, noise_seed=seed).sort("question_id")["response"].to_list()


def test_a_row_per_question_and_pass(tmp_path, model_dir, problems):
    table = run(tmp_path, model_dir, problems)
    counts = table.group_by("noise_level", "noise_seed").len().sort("noise_level", "noise_seed").rows()
    assert counts == [(0.0, 0, NUM_QUESTIONS), (0.2, 0, NUM_QUESTIONS), (0.2, 1, NUM_QUESTIONS)]
    assert read_json(outputs(tmp_path).record, RunRecord).identity["step"] == 1


def test_the_noise_of_each_pass_is_measured(tmp_path, model_dir, problems):
    run(tmp_path, model_dir, problems)
    receipts = read_json(outputs(tmp_path).receipt, EvaluationReceipts)
    assert receipts.problems() == []
    clean, noisy, _ = receipts.passes
    assert clean.receipt.phases[0].calls == 0
    assert clean.receipt.phases[0].largest_difference == 0.0
    scale, elements = noisy.receipt.measured_scale("evaluation")
    assert abs(scale / 0.2 - 1) < 5 / (2 * elements) ** 0.5


def test_noise_changes_responses_and_another_seed_changes_them_again(tmp_path, problems):
    table = run(tmp_path, builtin_folder("tiny"), problems)
    assert responses(table, 0.0, 0) != responses(table, 0.2, 0)
    assert responses(table, 0.2, 0) != responses(table, 0.2, 1)


def test_same_bytes_again(tmp_path, model_dir, problems):
    for name in ("one", "two"):
        run(tmp_path / name, model_dir, problems)
    first, second = outputs(tmp_path / "one"), outputs(tmp_path / "two")
    for field in ("table", "receipt", "record"):
        assert sha256_of_file(getattr(first, field)) == sha256_of_file(getattr(second, field))


def test_clean_responses_do_not_depend_on_the_batch_size(tmp_path, model_dir, problems):
    singly = run(tmp_path / "singly", model_dir, problems, noise_levels=(0.0,), batch_size=1)
    all_at_once = run(tmp_path / "all", model_dir, problems, noise_levels=(0.0,), batch_size=NUM_QUESTIONS)
    assert responses(singly, 0.0, 0) == responses(all_at_once, 0.0, 0)


def test_the_batch_of_every_question_is_in_the_table(tmp_path, model_dir, problems):
    """Prompts grow with the number of the question: batches of 3 in this order, in every pass."""
    table = run(tmp_path, model_dir, problems)
    for part in table.partition_by("noise_level", "noise_seed"):
        assert part.sort("question_id")["batch"].to_list() == [index // 3 for index in range(NUM_QUESTIONS)]


def test_an_engine_that_makes_its_own_batches_has_none_in_the_table(tmp_path, model_dir, problems, monkeypatch):
    monkeypatch.setattr("aqnpipe.evaluation.stage.MAKES_OWN_BATCHES", ("transformers",))
    assert run(tmp_path, model_dir, problems, noise_levels=(0.0,))["batch"].to_list() == [None] * NUM_QUESTIONS


def test_the_subset_is_the_first_questions(tmp_path, model_dir, problems):
    table = run(tmp_path, model_dir, problems, num_questions=2, noise_levels=(0.0,))
    assert table["question_id"].to_list() == ["test-0", "test-1"]


def test_the_model_is_loaded_once(tmp_path, model_dir, problems, monkeypatch):
    loads = []
    original = choice.load_model
    monkeypatch.setattr(choice, "load_model", lambda *args, **kwargs: loads.append(1) or original(*args, **kwargs))
    run(tmp_path, model_dir, problems)
    assert loads == [1]


def test_noise_absent_in_the_evaluation_is_refused_and_nothing_is_written(tmp_path, model_dir, problems, monkeypatch):
    monkeypatch.setattr(
        "aqnpipe.noise.kernels.error_models.add_relative_gaussian_", lambda tensor, scale, source: tensor
    )
    with pytest.raises(
        ReceiptError, match=r"evaluation: mm in .*: 64 of 64 recomputed values are not the requested ones"
    ):
        run(tmp_path, model_dir, problems)
    assert list(tmp_path.iterdir()) == []


def test_noise_left_on_in_the_clean_pass_is_refused(tmp_path, model_dir, problems, monkeypatch):
    original = choice.load_model

    def patched(*args, **kwargs):
        model = original(*args, **kwargs)
        projection = model.model.layers[0].mlp.down_proj
        clean = projection.forward
        projection.forward = lambda x: clean(x) * 1.001
        return model

    monkeypatch.setattr(choice, "load_model", patched)
    with pytest.raises(ReceiptError, match="other code computes in its place"):
        run(tmp_path, model_dir, problems, noise_levels=(0.0,))


def on_a_faulty_machine(magnitude, **evaluation):
    fault = {"type": "dead_zone", "layer": 0, "magnitude": magnitude}
    return EvaluationSpec.model_validate(spec(**evaluation).model_dump() | {"faults": (fault,)})


def test_the_machines_fault_is_in_every_pass(tmp_path, model_dir, problems):
    faulty = on_a_faulty_machine(0.3)
    evaluate(faulty, model_dir, problems, outputs(tmp_path), lambda _: None)
    receipts = read_json(outputs(tmp_path).receipt, EvaluationReceipts)
    assert receipts.problems() == []
    for measured in receipts.passes:
        (cell,) = measured.receipt.fault_cells
        assert (cell.phase, measured.receipt.faults) == ("evaluation", faulty.faults)
        assert 0 < cell.survival_rate < 1
    assert read_json(outputs(tmp_path).record, RunRecord).config["faults"][0]["magnitude"] == 0.3


def test_a_fault_changes_responses(tmp_path, problems):
    model = builtin_folder("tiny")
    healthy = run(tmp_path / "healthy", model, problems, noise_levels=(0.0,))
    evaluate(on_a_faulty_machine(0.6, noise_levels=(0.0,)), model, problems, outputs(tmp_path), lambda _: None)
    assert responses(read_table(outputs(tmp_path).table, EvaluationTable), 0.0, 0) != responses(healthy, 0.0, 0)


def test_a_fault_that_changes_nothing_is_refused(tmp_path, model_dir, problems):
    with pytest.raises(ReceiptError, match="changed none of"):
        evaluate(on_a_faulty_machine(1e-12), model_dir, problems, outputs(tmp_path), lambda _: None)


def test_a_scorer_of_ones_own_grades_every_response_and_its_source_is_in_the_record(
    tmp_path, model_dir, problems, own_module
):
    source = "def even(response, gold_answer):\n    return response[:3], len(response) % 2 == 0\n"
    scorer = f"{own_module(source)}:even"
    settings = spec(primary_scorer=scorer).evaluation.planned()
    table = run(tmp_path / "out", model_dir, problems, primary_scorer=scorer, scorer_sha256=settings.scorer_sha256)
    assert table["correct_own"].to_list() == [len(response) % 2 == 0 for response in table["response"]]
    assert table["answer_own"].to_list() == [response[:3] for response in table["response"]]
    record = read_json(outputs(tmp_path / "out").record, RunRecord).config["evaluation"]
    assert (record["primary_scorer"], record["scorer_sha256"]) == (scorer, settings.scorer_sha256)


def test_a_scorer_that_is_not_the_same_when_graded_again_is_refused(tmp_path, model_dir, problems, own_module):
    source = (
        "import itertools\ncalls = itertools.count()\ndef moody(response, gold):\n    return next(calls) % 3 == 0\n"
    )
    scorer = f"{own_module(source)}:moody"
    digest = spec(primary_scorer=scorer).evaluation.planned().scorer_sha256
    with pytest.raises(ReceiptError, match="evaluation invalid: "):
        run(tmp_path / "out", model_dir, problems, primary_scorer=scorer, scorer_sha256=digest)
