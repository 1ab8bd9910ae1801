"""Checkpoints on tasks of lm-evaluation-harness: graded by the task, again from what is stored, with receipts."""

import json

import polars as pl
import pytest
import yaml
from harness_tasks import NUM_QUESTIONS, TASKS

from aqnpipe.artifacts.evaluations import EvaluationTable
from aqnpipe.artifacts.files import read_json, read_table
from aqnpipe.artifacts.runs import RunRecord, StageFiles
from aqnpipe.comparison.evaluations import EvaluationInput, load_evaluations
from aqnpipe.config.dataset import LmEvalDataset
from aqnpipe.config.model import builtin_folder
from aqnpipe.config.run import EvaluationSpec
from aqnpipe.config.study import load_study
from aqnpipe.data.harness_task import HarnessTask
from aqnpipe.data.loader import load_problems
from aqnpipe.data.stage import prepare_data
from aqnpipe.errors import AqnpipeError, ConfigError, DataError, ReceiptError
from aqnpipe.evaluation.stage import evaluate
from aqnpipe.noise.receipts.receipt import EvaluationReceipts

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.usefixtures("offline")


def dataset(tasks, task, **settings):
    return LmEvalDataset(source="lm_eval", task=task, include_path=str(tasks), **settings)


def evaluated(folder, task, **evaluation):
    """Evaluate the tiny model on a task; return its files."""
    settings = {
        "noise_levels": (0.0, 0.3),
        "noises": {"fp4": "w4a16_nvfp4"},
        "max_response_tokens": 60,
        "batch_size": 4,
        "primary_scorer": "task",
    }
    spec = EvaluationSpec(
        model_role="checkpoints",
        arm_id="tiny",
        seed=0,
        step=0,
        dtype="float32",
        attention="eager",
        prompt={},
        evaluation={**settings, **evaluation},
        task=task,
    )
    prepare_data(task.model_dump(mode="json"), "test", folder / "test.parquet")
    outputs = StageFiles(folder / "t.parquet", folder / "t.receipt.json", folder / "t.run.json")
    evaluate(spec, builtin_folder("tiny"), folder / "test.parquet", outputs, lambda _: None)
    return outputs


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TASKS))
def test_every_pass_of_a_task_has_grades_and_a_receipt(tmp_path, tasks, name):
    task = dataset(tasks, name)
    outputs = evaluated(tmp_path, task)
    table = read_table(outputs.table, EvaluationTable)
    counts = table.group_by("noise_level").len().sort("noise_level").rows()
    assert counts == [(0.0, NUM_QUESTIONS), (0.3, NUM_QUESTIONS), (1.0, NUM_QUESTIONS)]
    assert table["batch"].null_count() == len(table)  # The harness makes its own.
    receipts = read_json(outputs.receipt, EvaluationReceipts)
    assert receipts.problems() == []
    by_level = {each.noise_level: each.receipt for each in receipts.passes}
    assert by_level[0.3].measured_scale("evaluation")[0] == pytest.approx(0.3, rel=0.05)
    assert by_level[1.0].operator_noise.error.format == "nvfp4"
    assert read_json(outputs.record, RunRecord).config["task"]["task"] == name
    # By hand: of choices the most likely one, of texts what the task's pattern finds; the right one is known.
    golds = load_problems(task, "test")["gold_answer"].to_list()
    for row in table.iter_rows(named=True):
        gold = golds[int(row["question_id"].removeprefix("test-"))]
        if name.startswith("choose"):
            values = [value for _, value, _ in json.loads(row["response"])]
            assert row["answer_task"] == str(values.index(max(values)))
            assert row["correct_task"] == (values[0] == max(values))
        else:
            assert row["correct_task"] == (row["answer_task"] == gold)
    responses = {level: part["response"].to_list() for (level,), part in table.group_by("noise_level")}
    assert responses[0.0] != responses[0.3] != responses[1.0]
    # As the comparison reads it.
    source = EvaluationInput(
        **{"model": "checkpoints", "arm": "tiny", "seed": 0, "step": 0},
        **{"table": outputs.table, "receipt": outputs.receipt, "record": outputs.record},
    )
    (loaded,) = load_evaluations([source], "task", 0.05).values()
    assert loaded.problems == ()
    assert loaded.accuracy["accuracy"][0] == pytest.approx(table.filter(noise_level=0.0)["correct_task"].mean())


@pytest.mark.slow
def test_a_grade_that_differs_from_that_of_the_harness_ends_the_evaluation(tmp_path, tasks, monkeypatch):
    grade = HarnessTask.grade
    flipped = lambda self, number, response: grade(self, number, response)._replace(correct=number == 0)  # noqa: E731
    monkeypatch.setattr(HarnessTask, "grade", flipped)
    with pytest.raises(ReceiptError, match=r"the harness gives exact_match \d\.0, graded again it is \d\.0"):
        evaluated(tmp_path, dataset(tasks, "write_solution"))


@pytest.mark.slow
def test_questions_that_are_not_those_of_the_study_end_the_evaluation(tmp_path, tasks, monkeypatch):
    monkeypatch.setattr("aqnpipe.data.loader.HarnessTask.problems", lambda self: _first(HarnessTask, self))
    with pytest.raises(DataError, match="asked 6 questions, the study has 5"):
        evaluated(tmp_path, dataset(tasks, "choose_number"))


@pytest.mark.slow
def test_a_task_that_was_changed_after_its_questions_were_prepared_ends_the_evaluation(tmp_path, tasks, monkeypatch):
    changed = lambda table, *_: table.with_columns(gold_answer=pl.lit("7"))  # noqa: E731
    monkeypatch.setattr("aqnpipe.data.loader._limit", changed)
    with pytest.raises(DataError, match="choose_number: its questions or answers changed after the study"):
        evaluated(tmp_path, dataset(tasks, "choose_number"))


_problems = HarnessTask.problems


def _first(_: type, task: HarnessTask) -> pl.DataFrame:
    return _problems(task).head(NUM_QUESTIONS - 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"task": "choose_nmber"},
            "dataset.task: found 'choose_nmber' (did you mean choose_number?), expected a task in",
        ),
        ({"metric": "f1"}, "dataset.metric: found f1, expected one of those of task choose_number"),
        ({"filter": "strict"}, "dataset.filter: found 'strict', expected one of none, which task choose_number has"),
        ({"num_test": 99}, "99"),
    ],
)
def test_a_mistake_is_one_line(tasks, settings, message):
    with pytest.raises(AqnpipeError) as refused:
        load_problems(dataset(tasks, **{"task": "choose_number"} | settings), "test")
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_task_that_cannot_be_loaded_is_one_line(tmp_path):
    files = {"data_files": {"test": str(tmp_path / "nowhere.jsonl")}}
    broken = TASKS["choose_number"] | {"task": "broken", "dataset_path": "json", "dataset_kwargs": files}
    (tmp_path / "broken.yaml").write_text(yaml.safe_dump(broken | {"test_split": "test"}))
    with pytest.raises(DataError, match=r"task broken cannot be loaded \(FileNotFoundError: .*\)$"):
        HarnessTask.load(dataset(tmp_path, "broken"))


@pytest.mark.parametrize(
    ("metric", "responses", "best"),
    [
        ("acc", [-3.0, -2.0, -4.0], 1),
        ("acc_norm", [-3.0, -2.0, -2.5], 2),
        ("acc_mutual_info", [-3.0, -2.0, -4.0, -9.0, -3.0, -4.5], 0),
    ],
)
def test_the_answer_is_the_choice_that_the_metric_ranks_first(tmp_path, metric, responses, best):
    row = {"question": "q", "choices": ["ab", "c", "defg"], "label": best}
    (tmp_path / "questions.jsonl").write_text(json.dumps(row))
    files = {"data_files": {"test": str(tmp_path / "questions.jsonl")}, "cache_dir": str(tmp_path / "cache")}
    task = TASKS["choose_number"] | {
        **{"task": "ranked", "dataset_path": "json", "dataset_kwargs": files, "test_split": "test"},
        "metric_list": [{"metric": metric}],
    }
    (tmp_path / "ranked.yaml").write_text(yaml.safe_dump(task))
    ranked = HarnessTask.load(dataset(tmp_path, "ranked", metric=metric))
    stored = ranked.response_of(0, [(value, False) for value in responses])
    assert ranked.grade(0, stored) == (str(best), True)


def content(**changes):
    return {
        "study": "mine",
        "checkpoints": {"a": "tiny", "b": "tiny-large"},
        "dataset": {"source": "lm_eval", "task": "arc_easy"},
        "evaluation": {"max_response_tokens": 8, "batch_size": 20},
        "report": {"title": "t", "question": "q"},
    } | changes


def test_the_task_grades_by_itself():
    assert load_study(content()).config.evaluation.primary_scorer == "task"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"evaluation": {"max_response_tokens": 8, "batch_size": 2, "primary_scorer": "strict"}},
            "evaluation.primary_scorer: found 'strict', expected no primary_scorer: a task",
        ),
        (
            {"evaluation": {"max_response_tokens": 8, "batch_size": 2, "primary_scorer": "my:own"}},
            "evaluation.primary_scorer: found 'my:own', expected no primary_scorer: a task",
        ),
        (
            {
                "dataset": {"source": "generated"},
                "evaluation": {"max_response_tokens": 8, "batch_size": 2, "primary_scorer": "task"},
            },
            "evaluation.primary_scorer: found 'task', expected a scorer of answers",
        ),
        (
            {
                "evaluation": {
                    "max_response_tokens": 8,
                    "batch_size": 2,
                    "sampling": {"temperature": 1.0, "num_samples": 2},
                }
            },
            "evaluation.sampling: found sampling, expected none: the task says how responses are sampled",
        ),
        (
            {"prompt": {"layout": "question_answer"}},
            "prompt.layout: found 'question_answer', expected 'bare': the task makes its prompts",
        ),
        ({"generation": {"backend": "vllm"}}, "generation.backend: found 'vllm', expected transformers or auto"),
        ({"dataset": {"source": "lm_eval", "taks": "arc_easy"}}, "dataset.taks: unknown key (did you mean task?)"),
    ],
)
def test_settings_that_do_not_fit_a_task_are_refused(changes, message):
    with pytest.raises(ConfigError) as refused:
        load_study(content(**changes))
    assert message in str(refused.value)
