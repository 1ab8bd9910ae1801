"""Stale workspaces, promotion and damage of finished runs; what runs do in their workspaces is in test_resume.py."""

import os

import pytest

from aqnpipe.artifacts.files import damage, digests_of
from aqnpipe.artifacts.runs import RunRecord
from aqnpipe.training.workspace import open_workspace, promote


def record(**changes):
    fields = {
        "stage": "train",
        "identity": {"arm": "E5"},
        "config": {"learning_rate": 1e-4},
        "code_digest": "0",
        "inputs_sha256": {},
        "versions": {"torch": "2"},
        "device": "cpu",
    }
    return RunRecord(**{**fields, **changes})


@pytest.fixture
def finished(tmp_path):
    """A finished workspace with two files and a resume point."""
    (tmp_path / "scratch").mkdir()
    workspace = open_workspace(tmp_path / "scratch", record())
    (workspace.run / "checkpoints").mkdir(parents=True)
    (workspace.run / "checkpoints" / "weights").write_text("w")
    (workspace.run / "metrics").write_text("m")
    (workspace.resume / "step1").mkdir(parents=True)
    workspace.finish()
    return workspace


@pytest.mark.parametrize(
    "change",
    [
        {"config": {"learning_rate": 2e-4}},
        {"code_digest": "1"},
        {"inputs_sha256": {"model": "0"}},
        {"versions": {"torch": "3"}},
        {"device": "cuda: 1 x A"},
    ],
)
def test_a_workspace_is_of_one_state_of_everything_and_removes_those_of_others(change, tmp_path):
    first = open_workspace(tmp_path, record())
    assert open_workspace(tmp_path, record()) == first
    other = open_workspace(tmp_path, record(**change))
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [other.folder]
    assert other != first


def test_promotion_replaces_what_is_there_and_keeps_links_only(finished, tmp_path):
    output = tmp_path / "runs" / "seed0"
    (output / "checkpoints").mkdir(parents=True)
    (output / "of an earlier run").write_text("")
    os.utime(finished.run / "metrics", (0, 0))
    promote(finished, output)
    assert digests_of(output) == digests_of(finished.run)
    assert (output / "metrics").samefile(finished.run / "metrics")
    assert (output / "metrics").stat().st_mtime > 1e9, "Snakemake would repeat a job with outputs older than inputs"
    assert {path.name for path in finished.folder.iterdir()} == {"run", "finished.json"}


def test_promotion_without_hard_links_copies(finished, tmp_path, monkeypatch):
    def refuse(source, target):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("aqnpipe.training.workspace.os.link", refuse)
    promote(finished, tmp_path / "out")
    assert digests_of(tmp_path / "out") == digests_of(finished.run)
    assert not (tmp_path / "out" / "metrics").samefile(finished.run / "metrics")


@pytest.mark.parametrize("harm", ["change", "remove", "manifest"])
def test_a_finished_run_that_was_damaged_is_not_finished(harm, finished):
    assert finished.is_finished()
    match harm:
        case "change":
            (finished.run / "metrics").write_text("n")
        case "remove":
            (finished.run / "metrics").unlink()
        case "manifest":
            (finished.folder / "finished.json").write_text("{")
    assert not finished.is_finished()


def test_digests_are_of_every_file_and_damage_names_the_first(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "file").write_text("")
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert digests_of(tmp_path) == {"sub/file": empty}
    assert damage(tmp_path, {"sub/file": empty}) is None
    assert damage(tmp_path, {"gone": empty}) == f"{tmp_path / 'gone'} is missing"
