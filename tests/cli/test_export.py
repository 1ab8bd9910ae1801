"""`aqnpipe export`: mistakes are one line; the files themselves are tested with the report."""

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from aqnpipe.cli.main import app
from aqnpipe.cli.results import _formats
from aqnpipe.errors import AqnpipeError, ConfigError

CONFIG = Path(__file__).parents[2] / "config"


def test_formats_are_a_list_with_commas():
    assert _formats("--figures", "svg, pdf,svg", ("pdf", "svg")) == ["svg", "pdf"]
    assert _formats("--figures", "", ("pdf", "svg")) == []
    with pytest.raises(ConfigError, match="--figures: found 'png', expected pdf, svg"):
        _formats("--figures", "png", ("pdf", "svg"))


def test_a_study_that_was_not_run_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    study = yaml.safe_load((CONFIG / "config.yaml").read_text())
    (tmp_path / "arms.yaml").write_text((CONFIG / "arms.yaml").read_text())
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study | {"arms_file": "arms.yaml"}))
    with pytest.raises(ConfigError, match=r"claims\.json: no such file, expected a study that was run to its report"):
        CliRunner().invoke(app, ["export", "study.yaml"], catch_exceptions=False)
    assert not list(tmp_path.rglob("paper"))


def test_logs_for_inspect_need_evaluations_and_no_formats(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    study = yaml.safe_load((CONFIG / "config.yaml").read_text())
    (tmp_path / "arms.yaml").write_text((CONFIG / "arms.yaml").read_text())
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study | {"arms_file": "arms.yaml"}))
    for arguments, message in (
        ([], "found no evaluations in eval/, expected the results folder of a study"),
        (["--tables", "csv"], "--tables: found with --inspect, which writes no tables; leave one out"),
        (["--output", "study.yaml"], "--output study.yaml: found a file, expected a folder"),
    ):
        with pytest.raises(AqnpipeError, match=message):
            CliRunner().invoke(app, ["export", "study.yaml", "--inspect", *arguments], catch_exceptions=False)
