"""The same checkpoint on several machines: paired over questions, and refused where more differs than the machine."""

import shutil
from pathlib import Path

import polars as pl
import pytest

from aqnpipe.artifacts.comparisons import MachineDifferenceTable
from aqnpipe.artifacts.evaluations import evaluation_files
from aqnpipe.artifacts.files import read_json, read_table, write_json
from aqnpipe.artifacts.runs import RunRecord, StageFiles
from aqnpipe.comparison.machines import compare_machines
from aqnpipe.config.plan import StudyPlan
from aqnpipe.config.run import EvaluationSpec
from aqnpipe.config.study import load_study
from aqnpipe.data.stage import prepare_data
from aqnpipe.evaluation.stage import evaluate
from aqnpipe.models.loading import prepare_model
from aqnpipe.report.machines import machine_parts
from aqnpipe.report.words import load_words

pytestmark = pytest.mark.slow

CHECKPOINT = ("checkpoints", "small", 0, 0)
STUDY = {
    "study": "machines",
    "results_dir": "results",
    "device": "cpu",
    "checkpoints": {"small": "tiny", "large": "tiny-large"},
    "machines": {
        "bf16": {"counterpart": {"dtype": "bfloat16"}},
        "dead": {"device": "cpu", "faults": [{"type": "dead_zone", "layer": 1, "magnitude": 0.9, "sparsity": 1.0}]},
    },
    "dataset": {"source": "generated", "seed": 0, "num_test": 16, "max_steps": 1, "distractor_probability": 0.0},
    "evaluation": {
        "noise_levels": [0.0, 0.1],
        "max_response_tokens": 24,
        "batch_size": 16,
        "machines": ["bf16", "dead"],
    },
    "report": {"title": "Machines", "question": "Does the machine matter?"},
}


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """A folder in which the small checkpoint was evaluated by the study and on both machines; the large one never."""
    folder = tmp_path_factory.mktemp("study")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        plan = StudyPlan(load_study(STUDY))
        prepare_data(plan.study.config.dataset.model_dump(mode="json"), "test", Path("results/data/test.parquet"))
        prepare_model(plan.study.models()["small"], Path("results/models/small"))
        for machine in (None, "bf16", "dead"):
            own = plan if machine is None else plan.on(machine)
            spec = EvaluationSpec.model_validate(
                own.evaluation_spec(model="checkpoints", arm="small", seed="0", step="0")
            )
            files = evaluation_files(Path("results"), *CHECKPOINT, machine)
            outputs = StageFiles(files.table, files.receipt, files.record)
            evaluate(spec, Path("results/models/small"), Path("results/data/test.parquet"), outputs)
    return folder


@pytest.fixture
def study(evaluated, tmp_path, monkeypatch):
    shutil.copytree(evaluated / "results", tmp_path / "results")
    monkeypatch.chdir(tmp_path)
    return StudyPlan(load_study(STUDY))


def compared(plan):
    compare_machines(plan, Path("results/machines.parquet"))
    return read_table(Path("results/machines.parquet"), MachineDifferenceTable)


def rows_of(plan, machine, arm="small"):
    return compared(plan).filter((pl.col("machine") == machine) & (pl.col("arm") == arm)).to_dicts()


def correct(machine, level):
    rows = pl.read_parquet(evaluation_files(Path("results"), *CHECKPOINT, machine).table)
    return rows.filter(pl.col("noise_level") == level).sort("question_id")["correct_strict"].to_list()


def test_the_difference_is_paired_over_questions_and_says_what_differs(study):
    for machine, differs in (("bf16", "dtype"), ("dead", "simulated faults")):
        for row in rows_of(study, machine):
            here, there = correct(None, row["noise_level"]), correct(machine, row["noise_level"])
            assert row["problem"] is None
            assert row["accuracy_here"] == sum(here) / 16
            assert row["accuracy_there"] == sum(there) / 16
            assert row["difference"] == pytest.approx((sum(there) - sum(here)) / 16)
            assert row["flipped"] == sum(a != b for a, b in zip(here, there, strict=True)) / 16
            assert row["ci_low"] <= row["difference"] <= row["ci_high"]
            assert (row["num_questions"], row["num_seeds"]) == (16, 1)
            assert (row["device_here"], row["device_there"], row["trained_on"]) == ("cpu", "cpu", None)
            assert row["differs_in"] == differs


def test_a_machine_with_a_fault_is_really_another_machine(study):
    (clean, _) = rows_of(study, "dead")
    assert clean["accuracy_there"] < clean["accuracy_here"]


def test_an_evaluation_that_does_not_exist_is_named(study):
    assert {row["problem"] for row in rows_of(study, "bf16", "large")} == {
        "missing evaluation by the study itself: checkpoints/large seed 0 step 0"
    }


def test_the_evaluation_of_another_machine_in_its_place_is_refused(study):
    there, swapped = (evaluation_files(Path("results"), *CHECKPOINT, name) for name in ("bf16", "dead"))
    for name in ("table", "receipt", "record"):
        shutil.copy(getattr(there, name), getattr(swapped, name))
    assert {"made with" in row["problem"] for row in rows_of(study, "dead")} == {True}


def test_another_version_of_the_code_is_refused(study):
    path = evaluation_files(Path("results"), *CHECKPOINT, "bf16").record
    write_json(path, read_json(path, RunRecord).model_copy(update={"code_digest": "0" * 64}))
    for row in rows_of(study, "bf16"):
        assert "evaluated differently: code_digest is" in row["problem"]


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_report_names_devices_and_what_differs(study, language):
    sentences, table = (part.content for part in machine_parts(study.study, compared(study), load_words(language)))
    assert "cpu" in sentences[0]
    assert any("dtype" in sentence for sentence in sentences)
    assert len(table.rows) == 8  # two machines, two checkpoints, two levels
    assert sum(row.alert for row in table.rows) == 4
    assert machine_parts(study.study, pl.DataFrame(), load_words(language)) == ()
