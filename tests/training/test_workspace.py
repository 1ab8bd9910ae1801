"""Locks, stale workspaces and cleaning of scratch folders; what runs do in them is in test_resume.py."""

import errno
import fcntl
import json
import os
import subprocess
import sys

import pytest
from safetensors import SafetensorError

from aqnpipe.artifacts.durable_files import damage, digests_of
from aqnpipe.artifacts.runs import RunRecord
from aqnpipe.errors import RunLockedError, StorageError
from aqnpipe.runtime.disk_errors import clear_storage_errors
from aqnpipe.training.workspace import locked, open_workspace, promote, remove_scratch


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


def test_the_lock_is_exclusive_and_says_who_has_it(tmp_path):
    with (
        locked(tmp_path / "scratch"),
        pytest.raises(RunLockedError, match=rf"process {os.getpid()} on \S+ since 20\S+"),
        locked(tmp_path / "scratch"),
    ):
        pass
    with locked(tmp_path / "scratch"):
        pass


def test_a_dead_process_has_no_lock(tmp_path):
    code = (
        "import sys, os, pathlib\n"
        "from aqnpipe.training.workspace import locked\n"
        "with locked(pathlib.Path(sys.argv[1])): os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, tmp_path], check=False).returncode == -9
    assert json.loads((tmp_path / "lock").read_text())["pid"] != os.getpid()
    with locked(tmp_path):
        pass


def test_a_lock_whose_file_was_removed_meanwhile_counts_for_nothing(tmp_path, monkeypatch):
    flock = fcntl.flock

    def removed_first(file, operation):
        (tmp_path / "lock").unlink()
        flock(file, operation)

    monkeypatch.setattr("aqnpipe.training.workspace.fcntl.flock", removed_first)
    with pytest.raises(RunLockedError, match="start again"), locked(tmp_path):
        pass


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
    assert (output / "metrics").stat().st_mtime > 1e9, "an output older than its inputs would be made again"
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


def test_cleaning_spares_what_is_in_work_or_interrupted(tmp_path):
    for name, is_finished in (("busy", True), ("idle", True), ("interrupted", False)):
        workspace = tmp_path / "scratch" / name / "key"
        workspace.mkdir(parents=True)
        if is_finished:
            (workspace / "finished.json").touch()
    with locked(tmp_path / "scratch" / "busy"):
        remove_scratch(tmp_path / "scratch")
    assert {path.name for path in (tmp_path / "scratch").iterdir()} == {"busy", "interrupted"}
    remove_scratch(tmp_path / "scratch")
    assert [path.name for path in (tmp_path / "scratch").iterdir()] == ["interrupted"]


def test_digests_already_known_are_not_computed_again(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "file").write_text("")
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert digests_of(tmp_path) == {"sub/file": empty}
    assert digests_of(tmp_path, {"sub/file": "known", "gone": "x"}) == {"sub/file": "known"}
    assert damage(tmp_path, {"sub/file": empty}) is None
    assert damage(tmp_path, {"gone": empty}) == f"{tmp_path / 'gone'} is missing"


def test_a_full_disk_is_known_by_what_each_library_says(tmp_path):
    """torch.save leaves a second error on its way out, which says nothing of the disk."""

    def torch_save():
        try:
            raise RuntimeError("basic_ios::clear: iostream error")
        finally:
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 172800 vs 172688")

    def polars():
        raise OSError(errno.ENOSPC, "No space left on device")

    def safetensors():
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    for writer in (torch_save, polars, safetensors):
        with (
            pytest.raises(StorageError, match=r"^no space left on device for the checkpoint$"),
            clear_storage_errors("the checkpoint"),
        ):
            writer()


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), OSError(errno.EACCES, "Permission denied")])
def test_other_errors_stay_what_they_are(error):
    with pytest.raises(type(error), match=str(error.args[-1])), clear_storage_errors("x"):
        raise error
