"""`aqnpipe run`: what is passed to Snakemake, and what is refused before; `aqnpipe init`: a folder for studies."""

import subprocess
from pathlib import Path

import pytest

from aqnpipe.cli.run import make_study_folder, run, snakemake_arguments, study_among
from aqnpipe.cli.study import open_study
from aqnpipe.errors import ConfigError, StorageError
from aqnpipe.shipped import SNAKEFILE

WORKFLOW = ["--snakefile", str(SNAKEFILE)]


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        (["a b.yaml"], ["--configfile=a b.yaml"]),
        (["study.yaml", "-n", "--config", "seeds=[1]"], ["--configfile=study.yaml", "-n", "--config", "seeds=[1]"]),
        (["study.yaml", "results/report.html", "-n"], ["--configfile=study.yaml", "results/report.html", "-n"]),
        (["-n", "study.yaml"], ["--configfile=study.yaml", "-n"]),
        (
            ["--cores", "2", "-n", "study.yml", "--forceall"],
            ["--configfile=study.yml", "--cores", "2", "-n", "--forceall"],
        ),
        (["--profile", "a100"], ["--profile", "a100"]),
        (["-n", "--configfile=study.yaml"], ["-n", "--configfile=study.yaml"]),
        (["-n", "--configfile", "study.yaml"], ["-n", "--configfile", "study.yaml"]),
    ],
)
def test_a_study_and_options_of_snakemake(tmp_path, monkeypatch, given, passed):
    monkeypatch.chdir(tmp_path)
    assert snakemake_arguments(given, study_among(given)) == [*WORKFLOW, *passed]


@pytest.mark.parametrize("given", [[], ["-n"]])
def test_the_default_study_has_to_be_there(tmp_path, monkeypatch, given):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"config/config\.yaml: no such file, expected .*aqnpipe init"):
        snakemake_arguments(given, study_among(given))
    Path("config").mkdir()
    Path("config", "config.yaml").touch()
    assert snakemake_arguments(given, study_among(given)) == [*WORKFLOW, *given]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["study.yaml", "--coers", "2"], "neither it nor Snakemake has the option --coers (did you mean --cores?)"),
        (["study.yaml", "--restart-times"], "--restart-times/-T: expected one argument"),
        (["a.yaml", "--configfile", "b.yaml"], "found the study a.yaml and --configfile, expected one of them"),
    ],
)
def test_an_option_that_cannot_be_is_one_line(given, says):
    with pytest.raises(ConfigError) as caught:
        snakemake_arguments(given, study_among(given))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_help_of_snakemake_behind_other_options_is_no_error(capsys):
    with pytest.raises(SystemExit) as ended:
        study_among(["-n", "study.yaml", "--help"])
    assert not ended.value.code
    assert "usage:" in capsys.readouterr().out


def test_a_mistake_in_the_study_is_found_before_snakemake_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    started = []
    monkeypatch.setattr("os.execv", lambda *command: started.append(command))
    Path("study.yaml").write_text("study: a\nseedz: [0]\n")
    with pytest.raises(ConfigError, match="seedz"):
        run(["study.yaml", "-n"])
    assert not started
    run(["study.yaml", "--config", "seeds=[1]"])
    assert len(started) == 1, "what --config adds is known to the workflow alone"


def test_an_interrupt_while_snakemake_starts_is_no_traceback(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    started = []
    monkeypatch.setattr("os.execv", lambda program, arguments: started.append(arguments))
    run(["--profile", "none", "-n"])
    package = tmp_path / "snakemake"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text("import sys\nprint(*sys.argv[3:])\nraise KeyboardInterrupt\n")
    done = subprocess.run(started[0], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "--profile none -n\n", "")


def test_the_workflow_is_part_of_the_package():
    assert SNAKEFILE.is_file()


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
