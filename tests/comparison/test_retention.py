"""Which weights a study keeps, and what is left of the others."""

from pathlib import Path
from types import SimpleNamespace

import polars as pl
import pytest
import torch
from safetensors.torch import save_file

from aqnpipe.artifacts.files import read_json, write_json
from aqnpipe.artifacts.runs import REMOVED_WEIGHTS_FILE, RetainedRun, RunRecord, read_removed, why_weights_are_gone
from aqnpipe.comparison import retention
from aqnpipe.comparison.evaluations import Refusal
from aqnpipe.comparison.lineage import _Lineage
from aqnpipe.comparison.retention import kept_step, remove_weights
from aqnpipe.config.plan import StudyPlan
from aqnpipe.errors import ModelError
from aqnpipe.models.loading import load_model

DIGESTS = {"checkpoints/step4/model.safetensors": "4" * 64, "checkpoints/step8/model.safetensors": "8" * 64}


def evaluation(step, *accuracies, problems=()):
    """An evaluation with accuracies at ascending noise levels."""
    return SimpleNamespace(
        source=SimpleNamespace(step=step, name=f"step {step}"),
        accuracy=pl.DataFrame({"accuracy": accuracies}),
        problems=[Refusal("receipt", text) for text in problems],
        levels={level: SimpleNamespace() for level in (0.0, 0.05, 0.1)},
    )


@pytest.mark.parametrize(
    ("accuracies", "last", "best"),
    [
        ({4: (0.5, 0.1), 8: (0.4, 0.3), 12: (0.3, 0.2)}, 12, 4),
        ({4: (0.5, 0.1), 8: (0.5, 0.0)}, 8, 8),
        ({8: (0.1,), 4: (0.2,)}, 8, 4),
    ],
)
def test_the_last_is_by_step_and_the_best_by_accuracy_without_noise(accuracies, last, best):
    evaluations = [evaluation(step, *values) for step, values in accuracies.items()]
    assert (kept_step(evaluations, "last"), kept_step(evaluations, "best")) == (last, best)


@pytest.fixture
def run(synthetic, tmp_path, monkeypatch):
    """A run with weights after steps 4 and 8, whose evaluations are replaced by `run.evaluations`."""
    study = synthetic.study(arms=["E5"], seeds=[0], comparisons=[])
    study = study.model_copy(update={"config": study.config.model_copy(update={"results_dir": str(tmp_path)})})
    plan = StudyPlan(study)
    plan.checkpoint_steps = [4, 8]
    folder = tmp_path / "runs" / "base" / "E5" / "seed0"
    weights = {"w": torch.ones(2)}
    for step in (4, 8):
        (folder / "checkpoints" / f"step{step}").mkdir(parents=True)
        (folder / "checkpoints" / f"step{step}" / "config.json").write_text("{}")
        save_file(weights, folder / "checkpoints" / f"step{step}" / "model.safetensors")
    (tmp_path / "models" / "base").mkdir(parents=True)
    save_file(weights, tmp_path / "models" / "base" / "model.safetensors")
    record = {"stage": "train", "identity": {}, "config": {}, "code_digest": "", "inputs_sha256": {}, "versions": {}}
    write_json(folder / "run.json", RunRecord(**record, device="cpu", outputs_sha256=DIGESTS))
    found = SimpleNamespace(plan=plan, folder=folder, evaluations=[evaluation(4, 0.6), evaluation(8, 0.5)], said=[])
    monkeypatch.setattr(retention, "_evaluations", lambda plan: found.evaluations)
    return found


def removed(run, keep) -> RetainedRun:
    remove_weights(run.plan, keep, run.folder / "weights.json", run.said.append)
    return read_json(run.folder / "weights.json", RetainedRun)


def weights_of(run) -> list[str]:
    return sorted(path.parent.name for path in run.folder.glob("checkpoints/*/*.safetensors"))


@pytest.mark.parametrize(("keep", "kept", "gone"), [("last", 8, 4), ("best", 4, 8)])
def test_the_other_weights_go_and_their_digests_stay(run, keep, kept, gone):
    assert removed(run, keep) == RetainedRun(keep=keep, kept_steps=(kept,), removed_steps=(gone,))
    assert weights_of(run) == [f"step{kept}"]
    left = run.folder / "checkpoints" / f"step{gone}"
    assert (left / "config.json").is_file()
    record = read_removed(left)
    assert record.files_sha256 == {"model.safetensors": DIGESTS[f"checkpoints/step{gone}/model.safetensors"]}
    assert record.untrained, "the weights are those of the model"


def test_neither_words_nor_other_runs_are_parameters_of_the_job(synthetic):
    def of_run(**settings):
        study = synthetic.study(comparisons=[], **settings)
        report = study.config.report.model_copy(update={"title": str(settings)})
        config = study.config.model_copy(update={"report": report, "description": str(settings)})
        return StudyPlan(study.model_copy(update={"config": config})).of_run("E5", 0).study_params()

    assert of_run(arms=["E5"], seeds=[0]) == of_run(arms=["baseline", "E5"], seeds=[0, 1])


def test_a_second_job_changes_nothing(run):
    first = removed(run, "last")
    record = (run.folder / "checkpoints" / "step4" / REMOVED_WEIGHTS_FILE).read_bytes()
    assert removed(run, "last") == first
    assert (run.folder / "checkpoints" / "step4" / REMOVED_WEIGHTS_FILE).read_bytes() == record


def test_a_job_that_was_killed_between_record_and_removal_is_completed(run, monkeypatch):
    def killed(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "unlink", killed)
    with pytest.raises(KeyboardInterrupt):
        removed(run, "last")
    monkeypatch.undo()
    monkeypatch.setattr(retention, "_evaluations", lambda plan: run.evaluations)
    assert why_weights_are_gone(run.folder / "checkpoints" / "step4") is None
    removed(run, "last")
    assert weights_of(run) == ["step8"]


def test_weights_stay_if_a_comparison_would_refuse_an_evaluation(run):
    run.evaluations[0] = evaluation(4, 0.6, problems=["receipt invalid: scale"])
    found = removed(run, "last")
    assert found.kept_because == "receipt invalid: scale"
    assert found.kept_steps == (4, 8)
    assert weights_of(run) == ["step4", "step8"]
    assert run.said == ["base/E5 seed 0: all weights are kept: receipt invalid: scale"]


def test_weights_that_another_rule_removed_cannot_be_kept(run):
    removed(run, "best")
    with pytest.raises(ModelError, match=r"keep is last, which keeps step 8: .*removed after their evaluation"):
        removed(run, "last")
    assert weights_of(run) == ["step4"]


def test_loading_removed_weights_is_one_line_that_says_how_to_get_them_again(run):
    removed(run, "last")
    with pytest.raises(ModelError) as caught:
        load_model(run.folder / "checkpoints" / "step4", dtype="float32", attention="eager")
    line = str(caught.value)
    assert "step4: its weights were removed after their evaluation (keep: last)" in line
    assert f"remove {run.folder} and run the study" in line


def test_a_comparison_still_sees_that_nothing_was_learned(run):
    checkpoint = ("base", "E5", 0, 4)
    lineage = _Lineage(run.plan)
    lineage._weights[checkpoint] = "other digest"
    assert not lineage.has_learned(checkpoint)
    removed(run, "last")
    assert not lineage.has_learned(checkpoint)
