"""The wheel alone: built, installed into an environment of its own, and used from an empty folder."""

import os
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from replacing import replaced

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
    install(environment / "bin", wheel)
    return environment / "bin"


def install(programs: Path, wheel: Path) -> None:
    """Install the wheel, also where it is installed already: all its files are new then."""
    pip = [sys.executable, "-m", "pip", "--python", programs / "python", "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", "--force-reinstall", wheel], check=True, timeout=120)


def ended(folder: Path, *command: object) -> subprocess.CompletedProcess[str]:
    """Run a program in `folder`, without this repository in its path; its standard error is part of `stdout`."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
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


def run(folder: Path, *command: object) -> str:
    """Run a program in `folder` and return what it printed; it must succeed."""
    done = ended(folder, *command)
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
def test_a_study_runs_from_the_wheel_in_an_empty_folder(wheel, programs, tmp_path):
    folder, results = tmp_path / "my studies", tmp_path / "my results"
    run(tmp_path, programs / "aqnpipe", "init", folder)
    study = (folder / "config" / "smoke.yaml").read_text()
    (tmp_path / "own.yaml").write_text(
        replaced(
            replaced(study, "results_dir: results/smoke", f"results_dir: {results}"),
            "arms_file: arms.yaml",
            "arms_file: my studies/config/arms.yaml",
        )
    )
    assert "valid" in run(folder, programs / "aqnpipe", "check", "../own.yaml")
    planned = run(folder, programs / "python", "-m", "snakemake", "-n", "--configfile", "../own.yaml")
    assert re.search(r"^train +2$", planned, re.MULTILINE)
    said = run(folder, programs / "aqnpipe", "run", "../own.yaml")
    assert said.splitlines()[-1] == f"report: {results}/report.html"
    assert (results / "report.html").is_file()
    record = (results / "runs" / "base" / "baseline" / "seed0" / "run.json").read_text()
    assert str(ROOT) not in record
    # Plain Snakemake in the folder is the same workflow: it finds everything done, also with the wheel installed again.
    for _ in range(2):
        plain = run(folder, programs / "python", "-m", "snakemake", "-n", "--configfile", "../own.yaml")
        assert "Nothing to be done" in plain
        install(programs, wheel)


@pytest.fixture(scope="module")
def new_study(programs, tmp_path_factory):
    """What `aqnpipe init my-study` makes in an empty folder."""
    folder = tmp_path_factory.mktemp("empty")
    assert "my-study" in run(folder, programs / "aqnpipe", "init", "my-study")
    return folder / "my-study"


def files_in(folder: Path) -> dict[str, bytes]:
    """Files by path, without Snakemake's own."""
    files = [path for path in folder.rglob("*") if path.is_file() and ".snakemake" not in path.parts]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.slow
def test_a_new_study_is_checked_and_planned_and_nothing_is_written(programs, new_study):
    before = files_in(new_study)
    for study in ("config", "smoke", "checkpoints", "qwen2.5-7b"):
        assert "valid" in run(new_study, programs / "aqnpipe", "check", f"config/{study}.yaml")
    assert "base/srdd_guided" in run(new_study, programs / "aqnpipe", "run", "-n", "config/smoke.yaml")
    assert files_in(new_study) == before


STUDY = {"study.yaml": "study: a\nsedds: [0]\n", "tab.yaml": "study: a\ntraining:\n\tepochs: 1\n", "list.yaml": "- a\n"}
MISTAKES = {
    "no such command": (["chek"], "No such command 'chek'. Did you mean 'check'"),
    "no study": (["check"], "Missing argument 'study'"),
    "a study that is not there": (["check", "config/smok.yaml"], "no such file (did you mean smoke.yaml?)"),
    "a tab": (["check", "tab.yaml"], "tab.yaml:3:1: not valid YAML"),
    "a misspelled key": (["check", "study.yaml"], "sedds: unknown key (did you mean seeds?)"),
    "the same through run": (["run", "study.yaml"], "sedds: unknown key (did you mean seeds?)"),
    "a list": (["run", "list.yaml"], "list.yaml: found no keys, expected the keys of a study"),
    "a study that is not there, run": (["run", "-n", "config/smok.yaml"], "no such file (did you mean smoke.yaml?)"),
    "a misspelled option": (["run", "config/smoke.yaml", "--coers", "2"], "--coers (did you mean --cores?)"),
    "a folder that is not empty": (["init", "."], "expected a new or an empty folder"),
    "no such diagnosis": (["sigmas", "missing.json"], "missing.json: no such file"),
    "no such model": (["robustness", "./gone"], "model 'gone': found no such folder"),
    "no such answers": (["score", "missing.jsonl"], "missing.jsonl: no such file, expected JSON Lines"),
    "a level that is no number": (["robustness", "tiny", "--levels", "0,five"], "--levels '0,five': found 'five'"),
}


@pytest.fixture(scope="module")
def limit(programs, tmp_path_factory):
    """Three seconds of a core; on a busy machine, where everything takes longer, as often the start of Snakemake."""
    spent = seconds_of_children()
    run(tmp_path_factory.mktemp("nothing"), programs / "python", "-m", "snakemake", "--version")
    return max(3, 3 * (seconds_of_children() - spent))


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_through_the_installed_command_is_one_line_within_three_seconds(
    programs, new_study, limit, tmp_path, name
):
    arguments, message = MISTAKES[name]
    folder = tmp_path / "study"
    shutil.copytree(new_study, folder)
    for file, text in STUDY.items():
        (folder / file).write_text(text)
    before, spent = files_in(folder), seconds_of_children()
    done = ended(folder, programs / "aqnpipe", *arguments)
    assert seconds_of_children() - spent < limit
    lines = [line for line in done.stdout.splitlines() if not line.startswith("Using workflow specific profile")]
    assert (done.returncode, len(lines)) == (2, 1), done.stdout
    assert lines[0].startswith("ERROR: ")
    assert message in lines[0]
    assert files_in(folder) == before


def seconds_of_children() -> float:
    """Return the processor time of all processes that this one started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
