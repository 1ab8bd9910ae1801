"""An unfinished study has a report too, which names the missing files."""

import shutil

import polars as pl
import pytest

from aqnpipe.artifacts.comparisons import ClaimsFile
from aqnpipe.artifacts.files import read_json
from aqnpipe.comparison.stage import compare
from aqnpipe.config.plan import StudyPlan
from aqnpipe.report.inputs import read_study


@pytest.fixture
def half(make_report, synthetic, tmp_path):
    """Two arms; the second seed of E5 never ran, and the machine `target` was not diagnosed."""
    study = synthetic.study(
        arms=["baseline", "E5"],
        comparisons=[
            {"kind": "arms", "treatment": "E5", "control": "baseline", "expected": "lower", "claim": "Noise costs"},
            {"kind": "levels", "arm": "baseline", "noise_level": 0.1, "claim": "Noise hurts"},
        ],
    )
    built = make_report(tmp_path, study, 60)
    for folder in ("runs/base/E5/seed1", "eval/base/E5/seed1", "srdd/base/target"):
        shutil.rmtree(tmp_path / "results" / folder)
    left = [evaluation for evaluation in built.made.evaluations if evaluation.table.exists()]
    compare(study, left, tmp_path)
    return built


def test_missing_files_are_named_and_the_rest_is_shown(half):
    html = half.build().html
    assert "This study is incomplete." in html
    assert "Missing: 1 of 4 training runs, 1 of 5 evaluations, 1 of 2 diagnoses." in html
    assert "runs/base/E5/seed1/metrics.parquet" in html.split("<section")[0]
    claims = read_json(half.folder / "claims.json", ClaimsFile).claims
    assert claims[0].verdict == "invalid"
    assert '<li class="invalid" id="claim-' in html
    assert "Noise hurts" in html
    assert "> This study is incomplete." in (half.folder / "summary.md").read_text()


def test_nothing_but_the_study_still_gives_a_page(half):
    for path in half.folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    html = half.build().html
    for sentence in (
        "No claim was tested yet.",
        "Missing: 4 of 4 training runs, 5 of 5 evaluations, 2 of 2 diagnoses.",
        "No evaluation was compared yet.",
        "No training run.",
        "No machine was diagnosed.",
        "No job recorded its cost.",
        "There is no pair of arms whose responses could be compared.",
        "No comparison was made yet.",
    ):
        assert sentence in html
    assert pl.read_parquet(half.folder / "flips.parquet").is_empty()


def test_a_complete_study_has_no_note_on_missing_files(built):
    assert "incomplete" not in built.html.split("<main>")[1].split("<section")[0]


def test_paths_come_from_the_plan(tmp_path, synthetic):
    study = synthetic.study(results_dir="results/x", seeds=[0, 3])
    plan, results = StudyPlan(study), tmp_path / "results" / "x"
    data = read_study(plan, tmp_path)
    assert (data.runs, data.evaluations, data.diagnoses, data.published) == ((), (), (), None)
    assert len(data.missing) == 6 + 8 * 3 + len(plan.evaluations()) * 3 + 2 * 3
    assert {
        *(results / name for name in ("claims.json", "comparisons.parquet", "data/test.parquet")),
        results / "runs/base/baseline/seed3/run.json",
        results / "eval/base/pretrained/seed0/step0.parquet",
        results / "srdd/base/target/sigmas-published.yaml",
    } <= {*data.missing}


def test_arms_are_compared_by_their_jobs(built):
    """Synthetic jobs: 60 + seed seconds for the baseline, 90 + seed for the others, 60 steps each."""
    text = built.html.split('data-table="costs"')[1].split("</table>")[0]
    rows = [[cell.split("<")[0].strip() for cell in row.split("<td>")[1:]] for row in text.split("<tr>")[2:]]
    assert rows[0] == ["baseline", "2", "60.5 (60.0 to 61.0)", "1.01", "1.00", "54.5", "812", "12.5"]
    assert rows[1] == ["E5", "2", "90.5 (90.0 to 91.0)", "1.51", "1.50", "81.5", "812", "12.5"]
    minutes = (2 * 60.5 + 6 * 90.5) / 60
    assert f"{minutes:.1f} minutes of training and {9 * 12.5 / 60:.1f} minutes of evaluation" in built.html


def test_without_measurements_the_page_says_so(make_report, synthetic, tmp_path):
    built = make_report(tmp_path, synthetic.study(arms=["baseline"], seeds=[0], comparisons=[]), 20)
    for path in tmp_path.rglob("*.tsv"):
        path.unlink()
    html = built.build().html
    assert "No job recorded its cost." in html
    assert "incomplete" not in html.split("<main>")[1].split("<section")[0]
