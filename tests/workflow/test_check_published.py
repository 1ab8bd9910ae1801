"""Rule check_published, asked for by name."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "workflow" / "scripts" / "check_published.py"


def test_a_study_without_published_figures_is_one_line(tmp_path):
    log = tmp_path / "check.log"
    code = (
        "import runpy, types\n"
        f"job = types.SimpleNamespace(input=[], output=[{str(tmp_path / 'published.json')!r}], log=[{str(log)!r}])\n"
        f"runpy.run_path({str(SCRIPT)!r}, init_globals={{'snakemake': job}})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "ERROR: statistics.published: the study names no published figures, expected a file" in log.read_text()
    assert not (tmp_path / "published.json").exists()
