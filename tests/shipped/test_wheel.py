"""The wheel alone: built, installed into an environment of its own, and a study run from an empty folder."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("workflow", "config", "profiles")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built without the network."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    source = copy_of_the_sources(tmp_path_factory.mktemp("source"))
    subprocess.run([*command, "--wheel-dir", folder, source], check=True, timeout=300)
    (built,) = folder.glob("*.whl")
    return built


def copy_of_the_sources(folder: Path) -> Path:
    """Return a copy of what the wheel is built from, because a build leaves files behind."""
    for name in ("src", *PARTS):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    for name in ("Snakefile", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def programs(wheel, tmp_path_factory):
    """The programs of a new environment with the wheel, and the libraries of this one; its path has a space."""
    environment = tmp_path_factory.mktemp("environment") / "a b"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True, timeout=120)
    (packages,) = environment.glob("lib/python*/site-packages")
    # As a line of a .pth file: the .pth files of that folder itself, such as an editable aqnpipe, are not followed.
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    pip = [sys.executable, "-m", "pip", "--python", environment / "bin" / "python", "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", wheel], check=True, timeout=120)
    return environment / "bin"


def run(folder: Path, *command: object) -> str:
    """Run a program in `folder`, without this repository in its path; return what it printed."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.slow
def test_the_wheel_has_the_workflow_as_files(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {info.filename: info for info in archive.infolist()}
    files = [ROOT / "Snakefile", *(path for part in PARTS for path in (ROOT / part).rglob("*") if path.is_file())]
    for path in files:
        if "__pycache__" not in path.parts:
            name = f"aqnpipe/shipped/{path.relative_to(ROOT)}"
            assert names[name].file_size == path.stat().st_size, name


@pytest.mark.slow
def test_a_study_runs_from_the_wheel_in_an_empty_folder(programs, tmp_path):
    folder, results = tmp_path / "my studies", tmp_path / "my results"
    run(tmp_path, programs / "aqnpipe", "init", folder)
    study = (folder / "config" / "smoke.yaml").read_text()
    (tmp_path / "own.yaml").write_text(
        study.replace("results_dir: results/smoke", f"results_dir: {results}").replace(
            "arms_file: arms.yaml", "arms_file: my studies/config/arms.yaml"
        )
    )
    assert "valid" in run(folder, programs / "aqnpipe", "check", "../own.yaml")
    said = run(folder, programs / "aqnpipe", "run", "../own.yaml")
    assert said.splitlines()[-1] == f"report: {results}/report.html"
    assert (results / "report.html").is_file()
    record = (results / "runs" / "base" / "baseline" / "seed0" / "run.json").read_text()
    assert str(ROOT) not in record
    # Plain Snakemake in the folder is the same workflow: it finds everything done.
    plain = run(folder, programs / "python", "-m", "snakemake", "-n", "--configfile", "../own.yaml")
    assert "Nothing to be done" in plain
