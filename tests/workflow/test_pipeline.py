"""The real pipeline on the smoke study, driven by Snakemake as a user would, against a copy of the package.

The copy allows a test to edit a module or sabotage the noise without changing the sources. Most of the time of so small
a study is imports, so the fast tests fork Snakemake and its jobs from a process that has imported the package. The slow
tests start every process anew, and check that the study has the same bytes.
"""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import zipfile
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from faulted_study import WarmPython, differences, planned_jobs
from replacing import replace_in, substituted

import aqnpipe
from aqnpipe.artifacts.comparisons import MachineDifferenceTable
from aqnpipe.artifacts.diagnoses import SigmaFile
from aqnpipe.artifacts.evaluations import EvaluationTable
from aqnpipe.artifacts.files import read_json, read_table, read_yaml
from aqnpipe.artifacts.runs import TrainingMetrics
from aqnpipe.cli.results import report_on_existing_results
from aqnpipe.cli.study import open_study
from aqnpipe.noise.receipts.receipt import EvaluationReceipts, Receipt

ROOT = Path(__file__).parents[2]
SNAKEMAKE = Path(sys.executable).with_name("snakemake")
STUDY = "config/smoke.yaml"
RESULTS = Path("results/smoke")


@dataclasses.dataclass(frozen=True)
class Checkout:
    """A working copy of the pipeline with its own copy of the package.

    With `python`, Snakemake and its jobs are forked from that process, which has imported a copy of the package itself:
    it does not see edits of this copy's modules.
    """

    folder: Path
    python: WarmPython | None = None

    def snakemake(self, *arguments: str, study: str = STUDY) -> subprocess.CompletedProcess[str]:
        """Run snakemake here; standard output and error come back as one text in `stdout`."""
        if self.python:
            return self.python.snakemake(self.folder, "--configfile", study, *arguments)
        return subprocess.run(
            [SNAKEMAKE, "--configfile", study, *arguments],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(self.folder / "src"), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=900,
            check=False,
        )

    def planned(self, *arguments: str) -> dict[str, int]:
        """Jobs per rule that a dry run would execute."""
        return planned_jobs(self.snakemake("--dry-run", *arguments).stdout)

    def edit_yaml(self, name: str, edit) -> None:
        """Change a YAML file in place."""
        path = self.folder / name
        content = yaml.safe_load(path.read_text())
        edit(content)
        path.write_text(yaml.safe_dump(content))

    def cold(self) -> "Checkout":
        """The same checkout, in which every process is started anew."""
        return dataclasses.replace(self, python=None)


def new_checkout(folder: Path, python: WarmPython | None = None) -> Checkout:
    """Copy the pipeline and the package into a folder."""
    for name in ("config", "workflow", "profiles"):
        shutil.copytree(ROOT / name, folder / name)
    shutil.copy(ROOT / "Snakefile", folder / "Snakefile")
    package = python.source / "aqnpipe" if python else Path(aqnpipe.__file__).parent
    shutil.copytree(package, folder / "src" / "aqnpipe", ignore=shutil.ignore_patterns("__pycache__"))
    return Checkout(folder, python)


@pytest.fixture(scope="module")
def finished(python, made_once):
    """The smoke study, run once from nothing."""

    def run_smoke_study(folder):
        run = new_checkout(folder, python).snakemake()
        assert run.returncode == 0, run.stdout

    return Checkout(made_once("smoke study", run_smoke_study), python)


@pytest.fixture(scope="module")
def finished_cold(made_once):
    """The smoke study, run once from nothing; every process is started anew, as for a user."""

    def run_smoke_study(folder):
        run = new_checkout(folder).snakemake()
        assert run.returncode == 0, run.stdout

    return Checkout(made_once("smoke study from cold", run_smoke_study))


@pytest.fixture
def copy_of(finished, tmp_path):
    """A finished checkout that a test may change; metadata and times are kept."""
    shutil.copytree(finished.folder, tmp_path / "checkout", symlinks=True)
    return Checkout(tmp_path / "checkout", finished.python)


def test_every_stage_left_its_artifacts(finished):
    results = finished.folder / RESULTS
    for arm in ("baseline", "srdd_guided"):
        run = results / "runs" / "base" / arm / "seed0"
        receipt = read_json(run / "receipt.json", Receipt).check()
        assert (receipt.aqn is None) == (arm == "baseline")
        assert len(read_table(run / "metrics.parquet", TrainingMetrics)) == 8
        assert (run / "checkpoints" / "step8" / "model.safetensors").is_file()
        for step in (4, 8):
            table = read_table(results / "eval" / "base" / arm / "seed0" / f"step{step}.parquet", EvaluationTable)
            assert len(table) == 40 * 2
            receipts = read_json(
                results / "eval" / "base" / arm / "seed0" / f"step{step}.receipt.json", EvaluationReceipts
            )
            assert not receipts.problems()
    verdict = json.loads((results / "srdd" / "base" / "target" / "verdict.json").read_text())
    assert (verdict["verdict"], verdict["layer"]) == ("fault", 3)
    assert json.loads((results / "srdd" / "base" / "device" / "verdict.json").read_text())["verdict"] == "healthy"


@pytest.mark.slow
def test_a_study_of_adapters_evaluates_what_it_trained(python, tmp_path):
    """In bfloat16, where merged weights would have lost the update; every stage, the comparison and the report."""
    checkout = new_checkout(tmp_path, python)

    def with_adapters(study):
        study["training"]["lora"] = {"rank": 4, "alpha": 8}
        study["models"]["base"]["dtype"] = "bfloat16"

    checkout.edit_yaml(STUDY, with_adapters)
    run = checkout.snakemake()
    assert run.returncode == 0, run.stdout
    results = tmp_path / RESULTS
    checkpoint = results / "runs" / "base" / "baseline" / "seed0" / "checkpoints" / "step8"
    assert [path.name for path in checkpoint.glob("*.safetensors")] == ["adapters.safetensors"]
    base = results / "models" / "base" / "model.safetensors"
    assert (checkpoint / "adapters.safetensors").stat().st_size < base.stat().st_size / 5
    claims = json.loads((results / "claims.json").read_text())["claims"]
    assert claims
    assert not [claim for claim in claims if claim["verdict"] == "invalid"]


def test_the_guided_arm_used_the_sigmas_of_the_diagnosis(finished):
    results = finished.folder / RESULTS
    sigmas = read_yaml(results / "srdd" / "base" / "target" / "sigmas-published.yaml", SigmaFile).aqn
    receipt = read_json(results / "runs" / "base" / "srdd_guided" / "seed0" / "receipt.json", Receipt)
    expected = {layer: sigma / sigmas.base_sigma for layer, sigma in sigmas.layer_sigmas.items()}
    assert receipt.layer_factors == pytest.approx(expected)
    assert {cell.layer for cell in receipt.weight_cells} == {*expected, None}


def test_the_report_is_one_file_that_loads_nothing(finished):
    class Loads(HTMLParser):
        found: list[str] = []  # noqa: RUF012

        def handle_starttag(self, tag, attributes):
            names = dict(attributes)
            reads = names.get("src") or (names.get("href") if tag != "a" else None)
            leaves = tag == "a" and not str(names.get("href", "#")).startswith("#")
            if tag in ("iframe", "object", "embed", "link") or reads or leaves:
                self.found.append(tag)

    text = (finished.folder / RESULTS / "report.html").read_text()
    parser = Loads()
    parser.feed(text)
    assert parser.found == []
    assert "default-src 'none'" in text
    assert len(text) < 300_000


def test_snakemakes_own_report_holds_page_and_tables(finished, tmp_path):
    archive = tmp_path / "study.zip"
    result = finished.snakemake("--report", str(archive))
    assert result.returncode == 0, result.stdout
    names = {Path(name).name for name in zipfile.ZipFile(archive).namelist()}
    tables = {f"{name}.csv" for name in ("accuracy", "comparisons", "robustness", "training", "layers", "flips")}
    assert {"report.html", "summary.md", *tables} <= names


def test_each_rule_left_a_log_and_a_benchmark(finished):
    logs, benchmarks = (
        {
            p.relative_to(finished.folder / RESULTS / kind).with_suffix("")
            for p in (finished.folder / RESULTS / kind).rglob(f"*.{suffix}")
        }
        for kind, suffix in (("logs", "log"), ("benchmarks", "tsv"))
    )
    assert len(logs) == 16
    assert logs == benchmarks


@pytest.mark.slow
def test_memory_stays_under_4_gb_per_job(finished_cold):
    """Snakemake measures the processes that it started itself, not forked ones."""
    for path in (finished_cold.folder / RESULTS / "benchmarks").rglob("*.tsv"):
        header, values = (line.split("\t") for line in path.read_text().splitlines()[:2])
        peak = values[header.index("max_rss")]
        assert peak in ("-", "NA") or float(peak) < 4096, path


def test_a_second_run_finds_nothing_to_do(finished):
    assert finished.planned() == {}


def test_the_last_line_names_the_report(finished):
    run = finished.snakemake()
    assert run.stdout.splitlines()[-1] == f"report: {RESULTS}/report.html"


@pytest.mark.slow
def test_a_report_on_an_unfinished_study_does_not_stop_it(copy_of, monkeypatch):
    evaluation = RESULTS / "eval" / "base" / "baseline" / "seed0"
    for path in [*copy_of.folder.glob(f"{evaluation}/step8.*"), *copy_of.folder.glob(f"{RESULTS}/*.*")]:
        path.unlink()
    monkeypatch.chdir(copy_of.folder)
    *_, last = report_on_existing_results(open_study([Path(STUDY)]))
    assert last == f"report: {RESULTS}/partial/report.html"
    assert copy_of.planned() == {"evaluate": 1, "compare": 1, "report": 1}
    assert copy_of.snakemake().returncode == 0
    assert (copy_of.folder / RESULTS / "report.html").is_file()
    assert not (copy_of.folder / RESULTS / "partial").exists()


@pytest.mark.parametrize(
    ("deleted", "planned"),
    [
        ("eval/base/baseline/seed0/step8.parquet", {"evaluate": 1, "compare": 1, "report": 1}),
        ("accuracy.csv", {"compare": 1, "report": 1}),
        ("summary.md", {"report": 1}),
    ],
)
def test_a_deleted_result_is_made_again(copy_of, deleted, planned):
    (copy_of.folder / RESULTS / deleted).unlink()
    assert copy_of.planned() == planned


@pytest.mark.slow
def test_one_job_evaluates_all_checkpoints_of_a_run_with_the_same_bytes(copy_of):
    option = ("--set-resources", "evaluate:whole_runs=1")
    results = copy_of.folder / RESULTS
    runs = {
        path: path.read_bytes() for path in results.glob("eval/*/*/seed0/step*.*") if "pretrained" not in path.parts
    }
    assert len(runs) == 2 * 2 * 3
    for path in runs:
        path.unlink()
    assert copy_of.planned(*option) == {"evaluate_run": 2, "compare": 1, "report": 1}
    done = copy_of.snakemake(*option)
    assert done.returncode == 0, done.stdout
    assert {path: path.read_bytes() for path in runs} == runs
    assert not list(results.glob("scratch/evaluate_*"))
    assert copy_of.planned(*option) == {}


def test_an_evaluation_that_is_deleted_is_made_again_with_those_of_its_run(copy_of):
    option = ("--set-resources", "evaluate:whole_runs=1")
    copy_of.snakemake("--touch", *option)
    assert copy_of.planned(*option) == {}
    (copy_of.folder / RESULTS / "eval/base/baseline/seed0/step8.run.json").unlink()
    assert copy_of.planned(*option) == {"evaluate_run": 1, "compare": 1, "report": 1}


@pytest.mark.slow
def test_trained_checkpoints_are_evaluated_on_a_machine_and_what_is_deleted_is_made_again(copy_of):
    """The machine has a simulated fault in a layer, so its answers are others."""
    copy_of.edit_yaml(STUDY, lambda study: (study["evaluation"].update(machines=["target"]), study.update(keep="last")))
    others = {"compare_machines": 1, "compare": 1, "report": 1}
    assert copy_of.planned() == {"evaluate_on_machine": 5, "remove_weights": 2, **others}
    run = copy_of.snakemake()
    assert run.returncode == 0, run.stdout
    results = copy_of.folder / RESULTS
    rows = read_table(results / "machines.parquet", MachineDifferenceTable).rows(named=True)
    assert {(row["arm"], row["trained_on"]) for row in rows} == {
        ("pretrained", None),
        ("baseline", "cpu"),
        ("srdd_guided", "cpu"),
    }
    assert all(row["problem"] is None and row["differs_in"] == "simulated faults" for row in rows)
    assert max(row["flipped"] for row in rows) > 0
    assert not (results / "runs/base/baseline/seed0/checkpoints/step4/model.safetensors").exists()
    assert copy_of.planned() == {}

    (results / "machines.parquet").unlink()
    assert copy_of.planned() == {"compare_machines": 1, "report": 1}
    (results / "eval_on/target/base/baseline/seed0/step8.receipt.json").unlink()
    planned = {"evaluate_on_machine": 1, "remove_weights": 1, "compare_machines": 1, "report": 1}
    assert copy_of.planned() == planned, "weights are removed after every evaluation of their run"


def test_an_unknown_arm_in_a_path_is_one_line_in_a_study_of_many_arms(copy_of):
    """The patterns of rules do not list the arms then, because each file would be compared with all of them."""
    names = [f"arm{number}" for number in range(101)]
    copy_of.edit_yaml(
        "config/arms.yaml", lambda arms: arms["arms"].update(dict.fromkeys(names, arms["arms"]["baseline"]))
    )
    copy_of.edit_yaml(STUDY, lambda study: study["arms"].extend(names))
    run = copy_of.snakemake("--dry-run", str(RESULTS / "runs/base/armX/seed0/run.json"))
    assert run.returncode == 2
    assert (
        "results/smoke/runs/base/armX/seed0/run.json: found arm armX, expected a known name (did you mean arm"
        in run.stdout
    )
    assert "Traceback" not in run.stdout


@pytest.mark.slow
def test_a_folder_may_have_a_space(tmp_path):
    """Also in the path of the interpreter, which Snakemake does not quote."""
    folder = tmp_path / "my clone"
    checkout = new_checkout(folder)
    (folder / ".venv").symlink_to(Path(sys.executable).parents[1])
    (folder / "config" / "my study.yaml").write_text((folder / STUDY).read_text())
    command = [folder / ".venv" / "bin" / "python", "-m", "snakemake", "--configfile", "config/my study.yaml"]
    run = subprocess.run(
        [*command, "--until", "prepare_data"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(checkout.folder / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert (folder / RESULTS / "data" / "test.parquet").is_file()


def test_a_missing_device_is_one_line_before_any_job(copy_of):
    copy_of.edit_yaml(STUDY, lambda study: study.update(device="npu"))
    assert copy_of.snakemake("--dry-run").returncode == 0
    run = copy_of.snakemake()
    assert run.returncode == 2
    (line,) = [line for line in run.stdout.splitlines() if "ERROR" in line]
    assert line.startswith(f"ERROR: {STUDY}: device: requested npu, found none")
    assert "Traceback" not in run.stdout
    assert "rule" not in run.stdout


def test_words_re_train_nothing(copy_of):
    def other_words(study):
        study["description"] = "in other words"
        study["report"]["title"] = "Another title"
        study["comparisons"][0]["claim"] = "The same claim in other words"
        study["machines"]["target"]["description"] = "the same machine"

    copy_of.edit_yaml(STUDY, other_words)
    copy_of.edit_yaml("config/arms.yaml", lambda content: content["arms"]["baseline"].update(description="the same"))
    assert copy_of.planned() == {"compare": 1, "report": 1}


def test_editing_one_arm_re_runs_that_arm_and_what_follows_it(copy_of):
    def halve(content):
        content["arms"]["srdd_guided"]["aqn"]["schedule"]["ranges"][0]["sigma_start"] = 0.025

    copy_of.edit_yaml("config/arms.yaml", halve)
    assert copy_of.planned() == {"train": 1, "evaluate": 2, "compare": 1, "report": 1}


@pytest.mark.slow
def test_a_run_that_was_trained_again_is_evaluated_again_after_an_interruption(copy_of):
    """Snakemake compares small files by their content, and a checkpoint's config.json does not change."""

    def halve(content):
        content["arms"]["srdd_guided"]["aqn"]["schedule"]["ranges"][0]["sigma_start"] = 0.025

    copy_of.edit_yaml("config/arms.yaml", halve)
    run = copy_of.snakemake("--until", "train")
    assert run.returncode == 0, run.stdout
    assert copy_of.planned() == {"evaluate": 2, "compare": 1, "report": 1}


def test_editing_an_arm_outside_the_study_re_runs_nothing(copy_of):
    copy_of.edit_yaml("config/arms.yaml", lambda content: content["arms"]["E5"].update(description="other words"))
    assert copy_of.planned() == {}


@pytest.mark.slow
def test_editing_a_module_re_runs_the_stages_that_use_it(copy_of):
    copy_of = copy_of.cold()
    module = copy_of.folder / "src" / "aqnpipe" / "statistics" / "paired.py"
    module.write_text(module.read_text() + "\nEDITED = True\n")
    assert copy_of.planned() == {"compare": 1, "report": 1}
    module = copy_of.folder / "src" / "aqnpipe" / "machine" / "operators.py"
    module.write_text(module.read_text() + "\nEDITED = True\n")
    planned = copy_of.planned()
    assert (planned["train"], planned["evaluate"]) == (2, 5)
    assert "prepare_data" not in planned


@pytest.mark.slow
def test_weights_that_are_not_kept_go_and_nothing_is_made_again(copy_of):
    """No job is left then, and an evaluation that needs the weights is refused before anything is deleted."""
    copy_of.edit_yaml(STUDY, lambda study: study.update(keep="last"))
    assert copy_of.planned() == {"remove_weights": 2}
    run = copy_of.snakemake()
    assert run.returncode == 0, run.stdout
    runs = copy_of.folder / RESULTS / "runs" / "base" / "baseline" / "seed0"
    assert not (runs / "checkpoints" / "step4" / "model.safetensors").exists()
    assert (runs / "checkpoints" / "step8" / "model.safetensors").is_file()
    record = json.loads((runs / "run.json").read_text())["outputs_sha256"]
    removed = json.loads((runs / "checkpoints" / "step4" / "removed_weights.json").read_text())
    assert removed["files_sha256"] == {"model.safetensors": record["checkpoints/step4/model.safetensors"]}
    assert copy_of.planned() == {}

    evaluations = copy_of.folder / RESULTS / "eval"
    before = {path: path.read_bytes() for path in evaluations.rglob("*") if path.is_file()}
    line = "step4: its weights were removed after their evaluation (keep: last); to get them again, remove "
    assert line in copy_of.snakemake("--dry-run", "--set-resources", "evaluate:whole_runs=1").stdout
    copy_of.edit_yaml(STUDY, lambda study: study["evaluation"].update(max_response_tokens=20))
    assert line in copy_of.snakemake("--dry-run").stdout
    refused = copy_of.snakemake()
    assert refused.returncode != 0
    assert line in refused.stdout
    assert "Traceback" not in refused.stdout
    assert {path: path.read_bytes() for path in evaluations.rglob("*") if path.is_file()} == before
    for run_folder in (runs, runs.parents[1] / "srdd_guided" / "seed0"):
        shutil.rmtree(run_folder)
    planned = copy_of.planned()
    assert (planned["train"], planned["evaluate"], planned["remove_weights"]) == (2, 5, 2)


def test_a_single_rule_can_be_re_run(finished):
    assert finished.planned(f"{RESULTS}/report.html", "-R", "compare") == {"compare": 1, "report": 1}


def test_the_plan_is_readable(finished):
    plan = finished.snakemake("--dry-run", "--forceall").stdout
    for line in (
        "train: base/srdd_guided seed 0",
        "evaluate: base/baseline seed 0 step 8",
        "diagnose: model base on machine target",
        "evaluate: base/pretrained seed 0 step 0",
    ):
        assert line in plan


def artifacts(checkout):
    """Bytes of the results by path, without what holds times: logs, benchmarks and the page's section on them."""
    results = checkout.folder / RESULTS
    found = {
        str(path.relative_to(results)): path.read_bytes()
        for path in results.rglob("*")
        if path.is_file() and path.relative_to(results).parts[0] not in ("logs", "benchmarks", "jobs")
    }
    found["report.html"] = substituted(found["report.html"], rb'(?s)<section id="costs">.*?</section>', b"")
    return found


@pytest.mark.slow
def test_the_same_study_gives_the_same_bytes(finished, finished_cold):
    """Run the study again elsewhere: weights, tables, receipts, records and the page are byte-identical."""
    ours, theirs = artifacts(finished), artifacts(finished_cold)
    assert len([name for name in ours if name.startswith("runs/base/baseline/seed0/")]) > 8
    assert differences(ours, theirs) == []


@pytest.mark.slow
def test_noise_disabled_by_hand_fails_the_run_and_says_where(copy_of):
    """What fooled the original experiments: noise is logged, but never added."""
    copy_of = copy_of.cold()
    module = copy_of.folder / "src" / "aqnpipe" / "noise" / "kernels" / "error_models.py"
    replace_in(module, ("return add_relative_gaussian_(tensor, error.scale, source)", "return tensor"))
    run = RESULTS / "runs" / "base" / "srdd_guided" / "seed0"
    result = copy_of.snakemake("--forcerun", "train", "--", str(run / "run.json"))
    assert result.returncode != 0
    assert "ERROR: receipt invalid" in result.stdout
    assert "values are not the requested ones: they have no error" in result.stdout
    assert "results/smoke/logs/train/base_srdd_guided_seed0.log" in result.stdout
    assert "Traceback" not in (copy_of.folder / RESULTS / "logs/train/base_srdd_guided_seed0.log").read_text()
    assert not list((copy_of.folder / run).glob("**/*.*")), "a failed run must leave nothing"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda c: c["training"].update(learning_rat=1), "config/smoke.yaml: training.learning_rat: unknown key"),
        (lambda c: c.update(arms=["baseline", "E99"]), "config/smoke.yaml: arms.1: found 'E99', expected"),
        (lambda c: c["models"]["base"].update(source="./no/model"), "models.base.source"),
    ],
)
def test_a_wrong_study_is_one_line_before_any_job(python, tmp_path, edit, message):
    checkout = new_checkout(tmp_path, python)
    checkout.edit_yaml(STUDY, edit)
    result = checkout.snakemake()
    assert result.returncode == 2
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("ERROR: ")]
    assert message in line
    assert "Traceback" not in result.stdout
    assert not (tmp_path / "results").exists()
