"""Every benchmark answers --help, and does nothing else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path for path in (ROOT / "benchmarks").glob("*.py") if '__name__ == "__main__"' in path.read_text())
IMPORT_IN_SECONDS = {"compare_results", "long_studies", "pipeline_faults", "scorers", "workflow_scale"}
"""The others import transformers or TRL, or polars and statsmodels besides torch."""


def script_parameter(path: Path):
    return pytest.param(path, id=path.stem, marks=() if path.stem in IMPORT_IN_SECONDS else pytest.mark.slow)


def results_in(folder: Path):
    """Size and time of the files that benchmarks write beside themselves."""
    files = (path for path in folder.iterdir() if path.is_file() and path.suffix != ".py")
    return {path.name: (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


def test_the_list_of_scripts_is_complete():
    assert {path.stem for path in SCRIPTS} >= {*IMPORT_IN_SECONDS, "detection", "kill_trials", "noise_overhead_cuda"}


@pytest.mark.parametrize("script", map(script_parameter, SCRIPTS))
def test_help_shows_the_usage_and_does_nothing(script, tmp_path):
    before = results_in(script.parent)
    # Whatever a script wrote by mistake would be in one of these folders.
    environment = dict(os.environ) | {name: str(tmp_path) for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME")}
    environment |= {"PYTHONPATH": f"{ROOT / 'tests' / 'support'}:{ROOT / 'tests'}", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, script, "--help"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: {script.name}")
    assert "--help" in done.stdout
    assert done.stderr == ""
    assert results_in(script.parent) == before
    # torch makes an empty folder for its compiler as soon as it is imported.
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
