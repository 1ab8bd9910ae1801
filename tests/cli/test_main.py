import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from aqnpipe.cli import main as program
from aqnpipe.cli.main import main

ROOT = Path(__file__).parents[2]
AQNPIPE = Path(sys.executable).with_name("aqnpipe")


def aqnpipe(*arguments):
    return subprocess.run([AQNPIPE, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def test_check_says_what_a_study_would_run(command_line, monkeypatch):
    monkeypatch.chdir(ROOT)
    result = command_line("check", "config/smoke.yaml")
    assert result.returncode == 0
    assert "2 runs (baseline, srdd_guided; seeds 0) of 8 steps, 5 evaluations, 2 diagnoses" in result.stdout


def test_a_mistake_is_one_line_and_exit_2(tmp_path):
    """In a process of its own, as users start it."""
    result = aqnpipe("check", str(tmp_path / "missing.yaml"))
    assert result.returncode == 2
    assert result.stderr == f"ERROR: {tmp_path}/missing.yaml: no such file\n"


def test_schema_prints_the_committed_schema(command_line):
    assert command_line("schema").stdout == (ROOT / "config" / "schema.json").read_text()


HEAVY = ("torch", "transformers", "numpy", "polars", "pandera", "pandas", "scipy", "altair")


def test_the_help_of_every_command_needs_no_heavy_library():
    code = (
        "import sys; from aqnpipe.cli.main import app\n"
        f"print(*sorted(set({HEAVY!r}) & set(sys.modules)))\n"
        "print(len(app.registered_commands))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported, commands = result.stdout.splitlines()
    assert imported == ""
    assert int(commands) >= 9


def test_the_help_lists_the_commands(command_line):
    result = command_line("--help")
    assert result.returncode == 0
    for command in ("check", "check-published", "diagnose", "doctor", "measure-noise", "report", "score", "sigmas"):
        assert f" {command} " in result.stdout


def test_the_help_has_groups_and_offers_completion(command_line):
    said = command_line("--help").stdout
    titles = [line.strip("╭─╮ ") for line in said.splitlines() if line.startswith("╭")]
    assert titles == [
        "Options",
        "Studies",
        "Models and programs under noise",
        "Machines",
        "Answers and published figures",
    ]
    assert "--install-completion" in said


@pytest.mark.parametrize(
    ("command", "panels"),
    [
        ("robustness", ["Data and responses", "Noise and faults", "Computation", "Results"]),
        ("diagnose", ["Noise and faults", "Computation", "Results", "Data and responses", "Several devices"]),
        ("parity", ["Without files"]),
        ("plan", []),
    ],
)
def test_many_options_are_in_groups_and_a_paragraph_is_broken_where_the_terminal_ends(command_line, command, panels):
    said = command_line(command, "--help").stdout
    titles = [line.strip("╭─╮ ") for line in said.splitlines() if line.startswith("╭")]
    assert titles == ["Arguments", "Options", *panels]
    paragraphs = [part.strip().splitlines() for part in re.split(r"\n\s*\n", said.partition("╭")[0])]
    assert all(len(line.strip()) > 60 for paragraph in paragraphs for line in paragraph[:-1])


def test_every_grouped_option_is_one_of_a_command():
    commands = typer.main.get_command(program.app).commands.values()
    known = {option.name for command in commands for option in command.params}
    assert set(program._PANEL_OF) <= known


def test_the_shell_completes_commands(monkeypatch, command_line):
    monkeypatch.setenv("_AQNPIPE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "aqnpipe rob")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert command_line().stdout.split() == ["robustness"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["chek"], "No such command 'chek'. Did you mean 'check', 'schema'? (`aqnpipe --help` lists what there is)"),
        (["check"], "Missing argument 'study' (`aqnpipe check --help` lists what there is)"),
        (["check", "--tflops", "x", "a"], "--tflops: found 'x', expected a number (`aqnpipe check --help` lists what"),
        (["check", "--tflops", "0", "a"], "--tflops: found '0', expected at least 0.001 (`aqnpipe check --help` lists"),
        (["measure-noise", "tiny", "--arm", "E55"], "--arm: found 'E55', expected a known name (did you mean E5?)"),
    ],
)
def test_a_wrong_command_line_is_one_line(arguments, line, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["aqnpipe", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"ERROR: {line}")


def test_without_arguments_the_commands_are_listed(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["aqnpipe"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert " check " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("number", "is_of_the_disk"), [(errno.EROFS, True), (errno.ENOSPC, True), (errno.EBADF, False)]
)
def test_a_read_only_or_full_disk_is_one_line(number, is_of_the_disk, monkeypatch, capsys):
    def write(**_):
        raise OSError(number, os.strerror(number), "/results/paper")

    monkeypatch.setattr("aqnpipe.cli.main.app", write)
    with pytest.raises(SystemExit if is_of_the_disk else OSError) as ended:
        main()
    if is_of_the_disk:
        assert ended.value.code == 2
        assert capsys.readouterr().err == f"ERROR: /results/paper: {os.strerror(number)}\n"
