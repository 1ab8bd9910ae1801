"""Profiles and dry runs in which one job evaluates all checkpoints of a run."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yte
from replacing import replace_in, replaced

ROOT = Path(__file__).parents[2]
SNAKEMAKE = Path(sys.executable).with_name("snakemake")


def resources(profile, chosen):
    """The resources of each rule with `evaluate_whole_runs` as chosen."""
    text = (ROOT / "profiles" / profile / "config.yaml").read_text()
    edited = replaced(text, "\n  evaluate_whole_runs: false", f"\n  evaluate_whole_runs: {chosen}")
    return yte.process_yaml(edited, require_use_yte=True)["set-resources"]


@pytest.mark.parametrize("profile", ["a100", "ascend", "workstation"])
def test_both_rules_of_evaluations_get_the_same_resources(profile):
    default, chosen = resources(profile, "false"), resources(profile, "true")
    assert default["evaluate"] == default["evaluate_run"]
    assert chosen["evaluate"] == chosen["evaluate_run"] == {**default["evaluate"], "whole_runs": 1}
    assert {name: found for name, found in chosen.items() if "evaluate" not in name} == {
        name: found for name, found in default.items() if "evaluate" not in name
    }


@pytest.fixture
def study(tmp_path):
    """A copy of the workflow, whose profile `workstation` evaluates whole runs."""
    for name in ("config", "workflow", "profiles"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "Snakefile", tmp_path)
    path = tmp_path / "profiles" / "workstation" / "config.yaml"
    replace_in(path, ("evaluate_whole_runs: false", "evaluate_whole_runs: true"))
    return tmp_path


def dry_run(folder, *arguments, code=0):
    done = subprocess.run(
        [SNAKEMAKE, "--dry-run", *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_every_run_is_one_job_and_the_pretrained_model_another(study):
    plan = dry_run(study, "--profile", "profiles/workstation", "--configfile", "config/smoke.yaml")
    assert set(re.findall(r"(?m)^Job \d+: (evaluate: .*)$", plan)) == {
        "evaluate: base/pretrained seed 0 step 0 (devices 1, workers 1)",
        "evaluate: base/baseline seed 0, 2 checkpoints (devices 1, workers 1)",
        "evaluate: base/srdd_guided seed 0, 2 checkpoints (devices 1, workers 1)",
    }


@pytest.mark.slow
def test_a_profile_without_resources_for_whole_runs_is_one_line(study):
    """As those of an earlier version, to which a user adds `whole_runs`."""
    path = study / "profiles" / "workstation" / "config.yaml"
    replace_in(path, ('"evaluate_run", ', ""))
    output = dry_run(study, "--profile", "profiles/workstation", "--configfile", "config/smoke.yaml", code=2)
    expected = "found no devices, workers, expected the resources of evaluate"
    assert f"ERROR: set-resources: evaluate_run: {expected}" in output
    assert "Traceback" not in output


@pytest.mark.slow
def test_a_value_that_is_no_number_is_one_line(study):
    output = dry_run(study, "--configfile", "config/smoke.yaml", "--set-resources", "evaluate:whole_runs=yes", code=2)
    assert "ERROR: set-resources: evaluate: whole_runs: found 'yes', expected a whole number" in output
    assert "Traceback" not in output
