"""Every mistake of `mistakes.yaml` through every door: exit code 2, the expected line, nothing written."""

import copy
import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from faulted_study import WarmPython

from aqnpipe.cli.main import main

ROOT = Path(__file__).parents[2]
TABLE = yaml.safe_load(Path(__file__).with_name("mistakes.yaml").read_text(encoding="utf-8"))
STUDY = yaml.safe_load((ROOT / "config" / "smoke.yaml").read_text(encoding="utf-8"))
ARMS = {name: yaml.safe_load((ROOT / "config" / "arms.yaml").read_text())["arms"][name] for name in ("baseline", "E5")}


@dataclasses.dataclass(frozen=True)
class Mistake:
    """One row of the table, with the files that it needs."""

    name: str
    says: list[str] = dataclasses.field(default_factory=list)
    """Parts of the line; a `$` at the end of one is the end of the line."""

    study: str = "study.yaml"
    set: dict[str, Any] = dataclasses.field(default_factory=dict)
    remove: str = ""
    rename: dict[str, str] = dataclasses.field(default_factory=dict)
    arms: dict[str, Any] = dataclasses.field(default_factory=dict)
    files: dict[str, str] = dataclasses.field(default_factory=dict)
    dataset: dict[str, str] = dataclasses.field(default_factory=dict)
    overrides: list[str] = dataclasses.field(default_factory=list)
    arguments: list[str] = dataclasses.field(default_factory=list)

    def write(self, folder: Path) -> None:
        """Write the study with this mistake."""
        study = copy.deepcopy(STUDY) | {"arms_file": "arms.yaml", "arms": ["baseline", "E5"], "results_dir": "results"}
        study["comparisons"][0].update(treatment="E5")
        # Refused where it is more than the few questions of a row.
        del study["training"]["validation_questions"]
        arms = {"arms": copy.deepcopy(ARMS)}
        if self.dataset:
            study["dataset"] = {"source": "local", "path": "questions", "num_train": 4, "num_test": 1}
        for path, value in self.set.items():
            place(study, path)[key(path)] = value
        for old, new in self.rename.items():
            place(study, old)[key(new)] = place(study, old).pop(key(old))
        if self.remove:
            del place(study, self.remove)[key(self.remove)]
        for path, value in self.arms.items():
            if path.startswith("../"):
                arms["arms"][path] = value
            else:
                place(arms["arms"], path)[key(path)] = value
        (folder / "study.yaml").write_text(yaml.safe_dump(study))
        (folder / "arms.yaml").write_text(yaml.safe_dump(arms))
        for name, text in self.files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text)
        for name, text in self.dataset.items():
            (folder / "questions").mkdir(exist_ok=True)
            (folder / "questions" / name).write_text(f"{text}\n")


def key(path: str) -> str | int:
    last = path.split(".")[-1]
    return int(last) if last.isdigit() else last


def place(content: Any, path: str) -> Any:
    for part in path.split(".")[:-1]:
        content = content[int(part) if part.isdigit() else part]
    return content


CONFIG = [Mistake(**row) for row in TABLE["studies"]]
DATA = [Mistake(**row) for row in TABLE["data"]]
RIGHT = [Mistake(**row) for row in TABLE["right"]]
COMMANDS = [Mistake(name=" ".join(row["arguments"]), **row) for row in TABLE["commands"]]


def names(mistakes: list[Mistake]) -> list[str]:
    return [mistake.name for mistake in mistakes]


def test_the_table_is_large_and_names_nothing_twice():
    assert len(CONFIG) + len(DATA) + len(COMMANDS) >= 90
    assert len(set(names(CONFIG + DATA))) == len(CONFIG + DATA)


@pytest.fixture
def door(tmp_path, monkeypatch, capsys):
    """Return a function that gives arguments to the command line and returns its one line."""
    monkeypatch.chdir(tmp_path)

    def answer(*arguments: str) -> str:
        before = files_in(tmp_path)
        monkeypatch.setattr(sys, "argv", ["aqnpipe", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        assert (ended.value.code, said.out) == (2, "")
        assert files_in(tmp_path) == before
        return the_line(said.err)

    return answer


def files_in(folder: Path) -> dict[Path, int]:
    ignored = {".snakemake", "__pycache__"}
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if ignored.isdisjoint(path.parts)}


def the_line(said: str) -> str:
    """Return the line of an error; the only one that is not about profiles."""
    (line,) = [line for line in said.splitlines() if not line.startswith("Using workflow specific profile")]
    assert line.startswith("ERROR: ")
    assert line.isprintable()
    assert "Traceback" not in line
    assert not any(leaked in line for leaked in ("Input should", "Value error", "pydantic", "more)"))
    return line


def expect(line: str, mistake: Mistake) -> None:
    for part in mistake.says:
        assert line.endswith(part[:-1]) if part.endswith("$") else part in line, line


@pytest.mark.parametrize("command", ["check", "report"])
@pytest.mark.parametrize("mistake", [each for each in CONFIG if not each.overrides], ids=lambda each: each.name)
def test_a_wrong_study(tmp_path, door, mistake, command):
    mistake.write(tmp_path)
    (tmp_path / "workflow").mkdir()
    expect(door(command, mistake.study), mistake)


@pytest.mark.parametrize("mistake", DATA, ids=lambda each: each.name)
def test_something_missing_outside_the_study(tmp_path, door, mistake):
    mistake.write(tmp_path)
    expect(door("check", mistake.study), mistake)


@pytest.mark.parametrize("mistake", COMMANDS, ids=lambda each: each.name)
def test_a_wrong_command_line(tmp_path, door, mistake):
    mistake.write(tmp_path)
    expect(door(*mistake.arguments), mistake)


@pytest.mark.parametrize("study", [Mistake("none"), *RIGHT], ids=lambda each: each.name)
def test_a_study_without_a_mistake_is_valid(tmp_path, monkeypatch, capsys, study):
    study.write(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["aqnpipe", "check", "study.yaml"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code, capsys.readouterr().err
    assert "study.yaml: valid" in capsys.readouterr().out


def one_of_each_section() -> list[Mistake]:
    """The mistakes of studies with overrides, and the first one of each section of a study, of arms and of files."""
    first: dict[object, Mistake] = {}
    for mistake in CONFIG:
        paths = [*mistake.set, *mistake.rename, *mistake.arms, mistake.remove]
        places = (mistake.study, bool(mistake.arms), next(iter(paths)).split(".")[0], bool(mistake.files))
        first.setdefault(mistake.name if mistake.overrides else places, mistake)
    return list(first.values())


@pytest.mark.slow
def test_snakemake_gives_the_line_of_check(python, tmp_path, monkeypatch, capsys, door):
    """Of a part of the mistakes: Snakemake loads a study by the same function as `aqnpipe check`."""
    failures = []
    for mistake in [*one_of_each_section(), *DATA]:
        folder = tmp_path / "study"
        for name in ("workflow", "profiles"):
            shutil.copytree(ROOT / name, folder / name)
        shutil.copy(ROOT / "Snakefile", folder)
        mistake.write(folder)
        monkeypatch.chdir(folder)
        before = files_in(folder)
        done = dry_run(python, folder, mistake)
        try:
            assert done.returncode == 2
            assert files_in(folder) == before
            line = the_line(done.stdout)
            expect(line, mistake)
            if not mistake.overrides:
                assert line == door("check", mistake.study)
        except (AssertionError, ValueError) as error:
            failures.append(f"{mistake.name}: {error}: {done.stdout[-500:]}")
        shutil.rmtree(folder)
    assert not failures, "\n".join(failures)


def dry_run(python: WarmPython, folder: Path, mistake: Mistake) -> subprocess.CompletedProcess[str]:
    overrides = ["--config", *mistake.overrides] if mistake.overrides else []
    return python.snakemake(folder, "-n", "--configfile", mistake.study, *overrides, timeout=60)
