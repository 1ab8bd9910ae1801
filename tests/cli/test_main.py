import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
AQNPIPE = Path(sys.executable).with_name("aqnpipe")


def aqnpipe(*arguments):
    return subprocess.run([AQNPIPE, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def test_check_says_what_a_study_would_run():
    result = aqnpipe("check", "config/smoke.yaml")
    assert result.returncode == 0
    assert "2 runs (baseline, srdd_guided; seeds 0) of 8 steps, 5 evaluations, 2 diagnoses" in result.stdout


def test_a_mistake_is_one_line_and_exit_2(tmp_path):
    result = aqnpipe("check", str(tmp_path / "missing.yaml"))
    assert result.returncode == 2
    assert result.stderr == f"ERROR: {tmp_path}/missing.yaml: no such file\n"


def test_schema_prints_the_committed_schema():
    assert aqnpipe("schema").stdout == (ROOT / "config" / "schema.json").read_text()


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
    assert commands == "9"


def test_the_help_lists_the_commands():
    result = aqnpipe("--help")
    assert result.returncode == 0
    for command in ("check", "check-published", "diagnose", "doctor", "measure-noise", "report", "score", "sigmas"):
        assert f" {command} " in result.stdout
