"""All checkpoints of a run in one job: the same bytes as one job each, and what an interrupted attempt leaves."""

import os
import shutil
from pathlib import Path

import polars as pl
import pytest
from ray_nodes import two_ray_nodes
from tiny_evaluation import evaluation_spec

from aqnpipe.artifacts.files import write_table
from aqnpipe.artifacts.problems import ProblemTable
from aqnpipe.artifacts.provenance import sha256_of_file
from aqnpipe.artifacts.runs import StageFiles
from aqnpipe.errors import ModelError, RunLockedError
from aqnpipe.evaluation.stage import evaluate
from aqnpipe.runtime import evaluation_workers
from aqnpipe.runtime.evaluation_workers import EvaluatedCheckpoint, evaluate_run
from aqnpipe.runtime.locks import run_lock

STEPS = (4, 8)


@pytest.fixture(scope="module")
def models(save_model):
    return {4: save_model(num_layers=1), 8: save_model(num_layers=2)}


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "test.parquet"
    rows = [(f"test-{number}", f"What is {number} plus 1 ?", "#### 2", "2") for number in range(4)]
    write_table(
        path, pl.DataFrame(rows, ["question_id", "question", "answer", "gold_answer"], orient="row"), ProblemTable
    )
    return path


def checkpoint(step, folder, model, **changes):
    files = (folder / f"step{step}.{suffix}" for suffix in ("parquet", "receipt.json", "run.json"))
    return EvaluatedCheckpoint(evaluation_spec(step=step, **changes), model, StageFiles(*files))


def checkpoints(folder, models, **changes):
    return [checkpoint(step, folder, models[step], **changes) for step in STEPS]


def digests(folder):
    return {path.name: sha256_of_file(path) for path in folder.iterdir()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory, models, problems):
    """The digests of the files when every checkpoint has a job of its own."""
    folder = tmp_path_factory.mktemp("alone")
    for each in checkpoints(folder, models):
        evaluate(each.spec, each.folder, problems, each.outputs, lambda _: None)
    return digests(folder)


def test_the_files_of_a_run_are_those_of_single_evaluations(tmp_path, models, problems, alone):
    lines = []
    evaluate_run(checkpoints(tmp_path / "eval", models), problems, tmp_path / "scratch", say=lines.append)
    assert digests(tmp_path / "eval") == alone
    assert len(alone) == 6
    assert not (tmp_path / "scratch").exists()
    assert [line.split(":")[0] for line in lines] == [f"base/test seed 0 step {step}" for step in (4, 4, 8, 8)]


def test_a_file_system_that_keeps_open_files_fails_no_finished_evaluation(
    tmp_path, models, problems, alone, monkeypatch
):
    """NFS renames the lock, which is open, in place of deleting it: the scratch folder cannot be removed."""
    unlink = os.unlink

    def of_nfs(path, *, dir_fd=None):
        if Path(path).name != "lock":
            unlink(path, dir_fd=dir_fd)
        else:
            os.rename(path, ".nfs1", src_dir_fd=dir_fd, dst_dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", of_nfs)
    evaluate_run(checkpoints(tmp_path / "eval", models), problems, tmp_path / "scratch", say=lambda _: None)
    assert [path.name for path in (tmp_path / "scratch").iterdir()] == [".nfs1"]
    assert digests(tmp_path / "eval") == alone


@pytest.mark.slow
def test_the_same_actors_evaluate_one_checkpoint_after_the_other(tmp_path, models, problems, alone):
    lines = []
    with two_ray_nodes():
        evaluate_run(checkpoints(tmp_path / "eval", models), problems, tmp_path / "scratch", 2, lines.append)
    assert digests(tmp_path / "eval") == alone
    assert sum(line.startswith("2 evaluation workers") for line in lines) == 2


def test_the_next_attempt_takes_over_what_an_interrupted_one_finished(tmp_path, models, problems, alone, monkeypatch):
    evaluated = []

    def ending_at(step):
        def of_stage(spec, *rest):
            if spec.step == step:
                raise KeyboardInterrupt
            evaluated.append(spec.step)
            evaluate(spec, *rest)

        return of_stage

    monkeypatch.setattr(evaluation_workers, "evaluate", ending_at(8))
    with pytest.raises(KeyboardInterrupt):
        evaluate_run(checkpoints(tmp_path / "eval", models), problems, tmp_path / "scratch", say=lambda _: None)
    assert not (tmp_path / "eval").exists()
    monkeypatch.setattr(evaluation_workers, "evaluate", ending_at(None))
    lines = []
    evaluate_run(checkpoints(tmp_path / "eval", models), problems, tmp_path / "scratch", say=lines.append)
    assert evaluated == [4, 8]
    assert lines[0] == "base/test seed 0 step 4: evaluated in an earlier attempt"
    assert digests(tmp_path / "eval") == alone


@pytest.mark.parametrize("change", ["settings", "weights", "config.json", "tokenizer.json", "file"])
def test_what_an_earlier_attempt_left_is_evaluated_again_if_anything_changed(
    tmp_path, models, problems, monkeypatch, change
):
    scratch = tmp_path / "scratch"
    first = checkpoint(4, scratch, models[4])
    evaluate(first.spec, first.folder, problems, first.outputs, lambda _: None)
    changes = {"device": "auto"} if change == "settings" else {}
    folder = models[8] if change == "weights" else models[4]
    if change.endswith(".json"):
        folder = shutil.copytree(folder, tmp_path / "edited")
        (folder / "prepared_model.json").unlink(missing_ok=True)
        (folder / change).write_text((folder / change).read_text() + "\n")
    if change == "file":
        first.outputs.table.write_bytes(first.outputs.table.read_bytes() + b" ")
    again = []
    monkeypatch.setattr(
        evaluation_workers, "evaluate", lambda spec, *rest: (again.append(spec.step), evaluate(spec, *rest))
    )
    evaluate_run([checkpoint(4, tmp_path / "eval", folder, **changes)], problems, scratch, say=lambda _: None)
    assert again == [4]


def test_a_checkpoint_that_fails_writes_no_output_of_the_others(tmp_path, models, problems):
    broken = {**models, 8: Path(tmp_path / "missing")}
    with pytest.raises(ModelError):
        evaluate_run(checkpoints(tmp_path / "eval", broken), problems, tmp_path / "scratch", say=lambda _: None)
    assert not (tmp_path / "eval").exists()


def test_a_run_that_another_process_evaluates_is_refused(tmp_path, models, problems):
    with run_lock(tmp_path / "scratch"), pytest.raises(RunLockedError, match="another process works on this run"):
        evaluate_run(checkpoints(tmp_path / "eval", models), problems, tmp_path / "scratch", say=lambda _: None)
