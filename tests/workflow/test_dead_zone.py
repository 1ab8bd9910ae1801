"""The dead-zone study as Snakemake plans it: which jobs, and that its loss study can be requested alone."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SNAKEMAKE = Path(sys.executable).with_name("snakemake")


def planned(folder, *targets):
    """Jobs per rule of a dry run."""
    run = subprocess.run(
        [SNAKEMAKE, "--configfile", "config/dead-zone.yaml", "--dry-run", "--", *targets],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stdout
    return {name: int(count) for name, count in re.findall(r"^(\w+) +(\d+)$", run.stdout, re.MULTILINE)}


@pytest.mark.slow
def test_the_plan_of_the_study_and_of_its_loss_study(tmp_path):
    for name in ("config", "workflow", "profiles"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "Snakefile", tmp_path / "Snakefile")
    jobs = planned(tmp_path)
    assert (jobs["train"], jobs["evaluate"], jobs["srdd_diagnose"]) == (8, 9, 1)
    assert (jobs["loss_study"], jobs["compare_losses"]) == (1, 1)
    alone = planned(tmp_path, "results/dead-zone/loss_study/base/dead_zone.claims.json")
    assert set(alone) - {"total"} == {"prepare_data", "prepare_model", "loss_study", "compare_losses"}
