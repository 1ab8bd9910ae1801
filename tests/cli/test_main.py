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
