"""Fixtures: the report of the synthetic study, built once, and a browser."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import polars as pl
import pytest
import synthetic_study
from checksum_files import write_parquet_with_checksum

from aqnpipe.artifacts.comparisons import ClaimsFile
from aqnpipe.artifacts.diagnoses import Verdict
from aqnpipe.artifacts.files import read_json, write_json
from aqnpipe.artifacts.runs import RunRecord
from aqnpipe.comparison.stage import compare
from aqnpipe.config.study import Study
from aqnpipe.report.stage import build_report


@pytest.fixture(scope="session")
def synthetic():
    """The module that generates studies and their artifacts."""
    return synthetic_study


@dataclass(frozen=True)
class Built:
    """A synthetic study with its artifacts and its report."""

    study: object
    made: object
    folder: Path

    @property
    def page(self) -> Path:
        """The path of the page."""
        return self.folder / "report.html"

    @property
    def html(self) -> str:
        """The page as text."""
        return self.page.read_text(encoding="utf-8")

    def build(self, study=None, data=None, into=None) -> "Built":
        """Build the report again, from another study or other data; the same artifacts otherwise."""
        folder = into or self.folder
        build_report(study or self.study, data or self.made.report_data(self.folder, study), folder)
        return Built(study or self.study, self.made, folder)


def make(synthetic, folder, study, num_questions=200) -> Built:
    """Write the artifacts of `study`, compare them and build the report."""
    made = synthetic.write_study(folder, study, num_questions)
    compare(study, made.evaluations, folder)
    return Built(study, made, folder).build()


@pytest.fixture(scope="session")
def make_report(synthetic):
    """Function (folder, study, num_questions) -> Built."""
    return lambda folder, study, num_questions=200: make(synthetic, folder, study, num_questions)


@pytest.fixture(scope="session")
def built(synthetic, tmp_path_factory):
    """The report of the synthetic study. Tests must not change its folder."""
    return make(synthetic, tmp_path_factory.mktemp("report"), synthetic.study())


HOSTILE = (
    "</title></style><script>alert(1)</script>\"><img src=x onerror=alert(2)>' onload=alert(3) "
    "\u202egnp.exe\u202c\u2066 \x1b[31mred\x1b[0m\x07 {{ 7 * 7 }} {% raw %} javascript:alert(4) &lt;b&gt; ]]>-->"
    + "Z\u0301\u0302\u0303"
    * 60
)


@pytest.fixture(scope="session")
def hostile(synthetic, tmp_path_factory):
    """A report in which every text from outside the catalogue is hostile, and responses are very long."""
    folder = tmp_path_factory.mktemp("hostile")
    built = make(synthetic, folder, synthetic.study(arms=["baseline", "E5"], seeds=[0], comparisons=[]), 60)
    claims = read_json(folder / "claims.json", ClaimsFile)
    refusal = {"claim": HOSTILE, "invalid_kind": "record", "invalid_reason": HOSTILE}
    changed = [claim.model_copy(update=refusal) for claim in claims.claims]
    write_json(folder / "claims.json", claims.model_copy(update={"claims": tuple(changed), "tables_sha256": {}}))
    _overwrite(folder / "comparisons.parquet", family=HOSTILE)
    _overwrite(folder / "robustness.parquet", problem=HOSTILE)
    _overwrite(built.made.test_problems, question=HOSTILE * 30, gold_answer=HOSTILE)
    for evaluation in built.made.evaluations:
        _overwrite(evaluation.table, response=HOSTILE + "x" * 100_000)
    for run in built.made.runs:
        record = read_json(run.record, RunRecord)
        update = {"device": HOSTILE, "versions": {HOSTILE: HOSTILE}, "inputs_sha256": {HOSTILE: HOSTILE}}
        write_json(run.record, record.model_copy(update=update))
    for path in built.made.verdicts:
        verdict = read_json(path, Verdict)
        write_json(path, verdict.model_copy(update={"reason": HOSTILE}))
    content = built.study.model_dump()
    content["config"]["report"] |= {"title": HOSTILE, "question": HOSTILE}
    content["arms"]["E5"]["description"] = HOSTILE
    return built.build(study=Study.model_validate(content))


def _overwrite(path, **texts):
    table = pl.read_parquet(path)
    write_parquet_with_checksum(path, table.with_columns(pl.lit(text).alias(name) for name, text in texts.items()))


@pytest.fixture(scope="session")
def browser():
    """Headless Chromium; skips the test if it is not installed."""
    playwright = pytest.importorskip("playwright.sync_api")
    executable = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if executable is None:
        pytest.skip("no Chromium on this machine; on Debian: apt-get install chromium")
    as_root = hasattr(os, "geteuid") and os.geteuid() == 0
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=executable, args=["--no-sandbox"] if as_root else [])
        yield chromium
        chromium.close()
