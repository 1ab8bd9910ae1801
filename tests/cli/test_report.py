"""`aqnpipe report`: a report on what exists; `aqnpipe export`: files for papers and viewers."""

import json
import shutil
from pathlib import Path

import pytest
import synthetic_evaluations as synthetic
import yaml
from typed import typed

from aqnpipe.artifacts.comparisons import ClaimsFile
from aqnpipe.artifacts.files import read_json
from aqnpipe.artifacts.published import PublishedCheck
from aqnpipe.cli.results import _formats
from aqnpipe.comparison import stage
from aqnpipe.errors import AqnpipeError, ConfigError, DataError

PUBLISHED = Path(__file__).parents[2] / "config" / "published.yaml"


@pytest.fixture
def with_lineage(monkeypatch):
    """Skip the lineage check, because synthetic evaluations have no earlier stages."""
    monkeypatch.setattr(stage, "lineage_problems", lambda plan: dict.fromkeys(plan.evaluations(), ()))


@pytest.fixture
def unfinished(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = synthetic.write_evaluations(tmp_path, synthetic.study())
    made.find("E5", 1).table.unlink()
    config = json.loads(made.study.config.model_dump_json())
    config |= {"arms_file": "arms.yaml", "models": {"base": {"source": "tiny"}}}
    config["statistics"] |= {"published": str(PUBLISHED)}
    Path("study.yaml").write_text(yaml.safe_dump(config))
    Path("arms.yaml").write_text(yaml.safe_dump({"arms": synthetic.ARMS}))


def test_evaluations_without_lineage_are_invalid(unfinished):
    typed("report", "study.yaml", catch_exceptions=False)
    claims = read_json(Path("results/partial/claims.json"), ClaimsFile).claims
    assert {claim.verdict for claim in claims} == {"invalid"}
    assert any("is not what the stage of the record wrote" in (claim.invalid_reason or "") for claim in claims)


def test_existing_evaluations_are_reported_and_missing_ones_named(unfinished, with_lineage):
    result = typed("report", "study.yaml", catch_exceptions=False)
    assert result.stdout.splitlines() == ["compare: 8 of 9 evaluations exist", "report: results/partial/report.html"]
    claims = read_json(Path("results/partial/claims.json"), ClaimsFile)
    assert claims.missing == ("base/E5 seed 1 step 60",)
    verdicts = {claim.comparison_id: claim.verdict for claim in claims.claims}
    assert verdicts["E5b-vs-E5@0"] == "invalid"
    assert verdicts["baseline-vs-pretrained@0"] == "supported"
    assert "base/E5 seed 1 step 60" in Path("results/partial/report.html").read_text()
    assert read_json(Path("results/partial/published.json"), PublishedCheck).claims


def test_what_is_of_no_report_is_not_replaced(unfinished, with_lineage):
    for _ in range(2):
        typed("report", "study.yaml", catch_exceptions=False)
    mine = Path("results/partial/mine.txt")
    mine.write_text("mine")
    with pytest.raises(ConfigError, match=r"partial/mine\.txt: is of no report, and .*partial is replaced"):
        typed("report", "study.yaml", catch_exceptions=False)
    assert mine.read_text() == "mine"
    shutil.rmtree("results/partial")
    Path("results/partial").write_text("mine")
    with pytest.raises(ConfigError, match="partial: found a file"):
        typed("report", "study.yaml", catch_exceptions=False)


def test_nothing_is_written_where_the_study_writes(unfinished, with_lineage):
    before = {path: path.stat().st_mtime_ns for path in Path("results").rglob("*") if path.is_file()}
    typed("report", "study.yaml", catch_exceptions=False)
    after = {path: path.stat().st_mtime_ns for path in Path("results").rglob("*") if path.is_file()}
    assert {path: time for path, time in after.items() if path.parts[1] != "partial"} == before


def test_a_malformed_artifact_leaves_no_half_report(unfinished, with_lineage):
    broken = next(Path("results/eval").rglob("*.parquet"))
    broken.write_bytes(broken.read_bytes()[:100])
    with pytest.raises(DataError, match=broken.name):
        typed("report", "study.yaml", catch_exceptions=False)
    assert not Path("results/partial").exists()
    assert not list(Path("results").glob(".partial*"))


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
        typed("export", "study.yaml", catch_exceptions=False)
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
            typed("export", "study.yaml", "--inspect", *arguments, catch_exceptions=False)
