"""A folder for studies: complete or untouched, and valid from every door."""

from pathlib import Path

import pytest

from aqnpipe.cli.run import make_study_folder
from aqnpipe.cli.study import open_study
from aqnpipe.errors import StorageError


def test_every_shipped_study_is_valid_there(tmp_path, monkeypatch):
    make_study_folder(tmp_path / "a b" / "studies")
    monkeypatch.chdir(tmp_path / "a b" / "studies")
    assert sorted(path.name for path in Path().iterdir()) == [
        *("Snakefile", "a100", "ascend", "config", "profiles", "workstation")
    ]
    studies = [path for path in Path("config").glob("*.yaml") if path.name not in ("arms.yaml", "published.yaml")]
    assert len(studies) >= 10
    for path in studies:
        open_study([path], look_outside=False)
    assert Path("a100", "config.yaml").read_text() == Path("profiles", "a100", "config.yaml").read_text()


def test_an_empty_folder_is_filled(tmp_path):
    make_study_folder(tmp_path)
    assert (tmp_path / "config" / "config.yaml").is_file()
    assert not list(tmp_path.glob(".init-*"))


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(StorageError, match=r"found notes\.txt, expected a new or an empty folder"):
        make_study_folder(tmp_path)
    with pytest.raises(StorageError, match=r"notes\.txt: cannot be written \(Not a directory\)"):
        make_study_folder(tmp_path / "notes.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_folder_that_could_not_be_filled_is_not_left_behind(tmp_path, monkeypatch):
    def full_disk(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("aqnpipe.cli.run.shutil.copytree", full_disk)
    with pytest.raises(StorageError, match="No space left on device"):
        make_study_folder(tmp_path / "new")
    assert not list(tmp_path.iterdir())
