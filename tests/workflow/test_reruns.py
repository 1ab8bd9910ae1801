"""What runs again: decided by content, never by time.

Every output of the study is an empty file that Snakemake was told is finished (`--touch`): only plans are made.
Where the package itself is edited or moved, Snakemake starts anew; otherwise it is forked, as in `test_pipeline`.
"""

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from faulted_study import ROOT, WarmPython, planned_jobs
from replacing import replace_in

from aqnpipe.config.model import builtin_folder

RESULTS = Path("results/smoke")
STUDY = "config/smoke.yaml"
REPORTED = {"compare": 1, "report": 1}
DIAGNOSED = {"srdd_diagnose": 2, "generate_layer_sigmas": 2}


@dataclasses.dataclass(frozen=True)
class Checkout:
    """A repository with a study that is finished."""

    folder: Path
    python: WarmPython

    def snakemake(self, *arguments: str) -> str:
        done = self.python.snakemake(self.folder, "--configfile", STUDY, *arguments)
        assert done.returncode == 0, done.stdout
        return done.stdout

    def planned(self) -> dict[str, int]:
        return planned_jobs(self.snakemake("--dry-run"))

    def planned_cold(self, source: Path) -> dict[str, int]:
        """Jobs per rule that a dry run with the package in `source` would execute; it imports it anew."""
        done = subprocess.run(
            [Path(sys.executable).with_name("snakemake"), "--configfile", STUDY, "--dry-run"],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return planned_jobs(done.stdout + done.stderr)

    def edit_study(self, edit) -> None:
        path = self.folder / STUDY
        study = yaml.safe_load(path.read_text())
        edit(study)
        path.write_text(yaml.safe_dump(study))

    def finish(self) -> None:
        """Create each missing output as an empty file and tell Snakemake that everything is finished."""
        rows = [line.split("\t") for line in self.snakemake("--summary").splitlines() if "\t" in line]
        for name in (row[0] for row in rows[1:]):
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                path.write_bytes(b"")
        self.snakemake("--touch")


@pytest.fixture(scope="module")
def finished(python, made_once):
    """A study with questions and a model of the user's own."""

    def make(folder):
        for name in ("config", "workflow", "profiles"):
            shutil.copytree(ROOT / name, folder / name)
        shutil.copy(ROOT / "Snakefile", folder)
        shutil.copytree(builtin_folder("tiny"), folder / "own-model")
        questions = [f'{{"question": "{number} + 1?", "answer": "#### {number + 1}"}}\n' for number in range(80)]
        (folder / "own-data").mkdir()
        (folder / "own-data" / "train.jsonl").write_text("".join(questions[:40]))
        (folder / "own-data" / "test.jsonl").write_text("".join(questions[40:]))
        checkout = Checkout(folder, python)

        def own(study):
            sizes = {key: study["dataset"][key] for key in ("num_train", "num_test")}
            study["dataset"] = {"source": "local", "path": "own-data", **sizes}
            study["models"]["base"]["source"] = "./own-model"

        checkout.edit_study(own)
        checkout.finish()

    return Checkout(made_once("finished by name", make), python)


@pytest.fixture
def copy_of(finished, tmp_path):
    """A copy with all times, which a test may change."""
    shutil.copytree(finished.folder, tmp_path / "checkout", symlinks=True)
    return Checkout(tmp_path / "checkout", finished.python)


def files_of(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file() and ".snakemake" not in path.parts)


def rewrite(path, content):
    """Change the content of a file, but not the time of its modification."""
    at = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(at.st_atime_ns, at.st_mtime_ns))


def test_nothing_is_to_be_done(finished):
    assert finished.planned() == {}


@pytest.mark.parametrize("order", [1, -1])
def test_times_of_files_decide_nothing(copy_of, order):
    """Whichever file is the newer one, of repository and results."""
    for number, path in enumerate(files_of(copy_of.folder)[::order]):
        os.utime(path, (1.7e9 + number, 1.7e9 + number))
    assert copy_of.planned() == {}


def test_a_file_touched_just_now_decides_nothing(copy_of):
    for path in files_of(copy_of.folder / "workflow"):
        path.touch()
    assert copy_of.planned() == {}


def test_results_copied_into_a_fresh_clone_are_finished(finished, tmp_path):
    """Without Snakemake's own records, and with times in no order."""
    folder = tmp_path / "elsewhere" / "clone"
    for path in files_of(finished.folder)[::-1]:
        target = folder / path.relative_to(finished.folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    assert Checkout(folder, finished.python).planned() == {}


def test_a_moved_results_folder_trains_nothing(copy_of, tmp_path):
    shutil.move(copy_of.folder / RESULTS, tmp_path / "moved")
    copy_of.edit_study(lambda study: study.update(results_dir=str(tmp_path / "moved")))
    assert copy_of.planned() == REPORTED


def test_another_branch_and_back_repeats_nothing(copy_of):
    def git(*arguments):
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        subprocess.run(["git", *identity, *arguments], cwd=copy_of.folder, check=True, capture_output=True)

    git("init", "--initial-branch", "main")
    git("add", "config", "workflow", "profiles", "Snakefile")
    git("commit", "--message", "first")
    git("checkout", "-b", "other")
    for path in files_of(copy_of.folder / "workflow" / "scripts"):
        path.write_text(path.read_text() + "\nEDITED = True\n")
    git("commit", "--all", "--message", "second")
    planned = copy_of.planned()
    assert planned["train"] == 2
    git("checkout", "main")
    assert copy_of.planned() == {}


@pytest.mark.slow
def test_the_package_in_another_place_repeats_nothing_and_an_edited_one_what_depends_on_it(copy_of, tmp_path):
    source = tmp_path / "installed" / "again"
    shutil.copytree(ROOT / "src" / "aqnpipe", source / "aqnpipe", ignore=shutil.ignore_patterns("__pycache__"))
    for path in files_of(source):
        path.touch()
    assert copy_of.planned_cold(source) == {}
    module = source / "aqnpipe" / "statistics" / "paired.py"
    module.write_text(module.read_text() + "\nEDITED = True\n")
    assert copy_of.planned_cold(source) == REPORTED
    lock = source / "aqnpipe" / "runtime" / "locks.py"
    lock.write_text(lock.read_text() + "\nEDITED = True\n")
    shutil.copy(ROOT / "src" / "aqnpipe" / "statistics" / "paired.py", module)
    for path in source.rglob("*.py"):
        path.write_text(path.read_text().replace('"""', '"""In other words: ', 1) + "\n# a comment\n")
    assert copy_of.planned_cold(source) == {}


def test_a_comment_in_a_workflow_script_repeats_nothing(copy_of):
    for script in (copy_of.folder / "workflow" / "scripts").glob("*.py"):
        script.write_text(script.read_text().replace('"""Adapter', '"""The adapter') + "\n# a comment\n")
    assert copy_of.planned() == {}


def test_an_edited_workflow_script_repeats_its_rule_and_what_follows(copy_of):
    script = copy_of.folder / "workflow" / "scripts" / "compare.py"
    replace_in(script, ("existing_evaluations(plan)", "[*existing_evaluations(plan)]"))
    os.utime(script, (1e9, 1e9))
    assert copy_of.planned() == REPORTED
    script = copy_of.folder / "workflow" / "scripts" / "train.py"
    script.write_text(script.read_text() + "\nprint()\n")
    assert copy_of.planned() == {"train": 2, "evaluate": 4, **REPORTED}


def test_a_setting_repeats_what_depends_on_it(copy_of):
    arms = yaml.safe_load((copy_of.folder / "config" / "arms.yaml").read_text())
    arms["arms"]["srdd_guided"]["aqn"]["schedule"]["ranges"][0]["sigma_start"] = 0.025
    (copy_of.folder / "config" / "arms.yaml").write_text(yaml.safe_dump(arms))
    assert copy_of.planned() == {"train": 1, "evaluate": 2, **REPORTED}


@pytest.mark.parametrize(
    ("path", "planned"),
    [
        ("eval/base/baseline/seed0/step8.parquet", {"evaluate": 1, **REPORTED}),
        pytest.param(
            "runs/base/baseline/seed0/receipt.json",
            {"train": 1, "evaluate": 2, **REPORTED},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "srdd/base/target/sigmas-published.yaml",
            {"generate_layer_sigmas": 1, "train": 1, "evaluate": 2, **REPORTED},
            marks=pytest.mark.slow,
        ),
        pytest.param("accuracy.csv", REPORTED, marks=pytest.mark.slow),
        ("summary.md", {"report": 1}),
    ],
)
def test_a_damaged_or_deleted_result_is_made_again(copy_of, path, planned):
    result = copy_of.folder / RESULTS / path
    content = result.read_bytes()
    rewrite(result, b"damaged")
    assert copy_of.planned() == planned
    rewrite(result, content)
    assert copy_of.planned() == {}
    result.unlink()
    assert copy_of.planned() == planned


@pytest.mark.parametrize(
    ("path", "planned"),
    [
        ("own-data/train.jsonl", {"prepare_data": 1, **DIAGNOSED, "train": 2, "evaluate": 4, **REPORTED}),
        pytest.param(
            "own-data/test.jsonl",
            {"prepare_data": 1, "train": 2, "evaluate": 5, **REPORTED},
            marks=pytest.mark.slow,
        ),
        ("own-model/model.safetensors", {"prepare_model": 1, **DIAGNOSED, "train": 2, "evaluate": 5, **REPORTED}),
    ],
)
def test_files_of_the_user_are_compared_by_content(copy_of, path, planned):
    file = copy_of.folder / path
    content = file.read_bytes()
    os.utime(file, (4e9, 4e9))
    assert copy_of.planned() == {}
    rewrite(file, content.replace(b" + 1?", b" and 1?") if "data" in path else content[:-1] + bytes([content[-1] ^ 1]))
    assert copy_of.planned() == planned


def test_a_result_without_a_record_is_not_trusted(copy_of):
    """Nobody knows what it was made from."""
    record = copy_of.folder / RESULTS / "jobs" / "runs/base/baseline/seed0/metrics.parquet.json"
    record.unlink()
    assert copy_of.planned() == {"train": 1, "evaluate": 2, **REPORTED}
    record.write_text("{}")
    assert copy_of.planned() == {"train": 1, "evaluate": 2, **REPORTED}


def test_a_dry_run_writes_no_record(copy_of):
    (copy_of.folder / RESULTS / "summary.md").unlink()
    assert planned_jobs(copy_of.snakemake("--dry-run", "--rerun-triggers", "mtime")) == {"report": 1}
    before = {path: path.read_bytes() for path in files_of(copy_of.folder)}
    assert copy_of.planned() == {"report": 1}
    assert {path: path.read_bytes() for path in files_of(copy_of.folder)} == before
