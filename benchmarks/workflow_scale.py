"""Measure how long Snakemake takes to plan a large study, and to find nothing to do in a finished one.

    python benchmarks/workflow_scale.py
    python benchmarks/workflow_scale.py --arms 1000 --seeds 10 --rounds 1 --plan-only --whole-runs --empty

The second is 10,000 runs. A study of 100 arms, 5 seeds and 3 checkpoints gets a dry run; with `--empty` a workflow of
as many jobs, each with one output, one input and a shell command, gets one right after it: what Snakemake itself needs.
Then the outputs of the default study are created as empty files and marked as finished (`--touch`), and a run that
finds nothing to do is measured. All run in a copy of the workflow. Prints wall and processor seconds and the peak
memory of Snakemake.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from smallest import parse

ROOT = Path(__file__).parents[1]
SNAKEMAKE = Path(sys.executable).with_name("snakemake")
NUM_CHECKPOINTS = 3


EMPTY = """
rule all:
    input: [f"evaluated/{{run}}/{{number}}" for run in range({runs}) for number in range({evaluations})]
rule evaluate:
    input: "trained/{{run}}"
    output: "evaluated/{{run}}/{{number}}"
    shell: "true"
rule train:
    output: "trained/{{run}}"
    shell: "true"
"""
"""Snakefile of as many training and evaluation jobs as the large study has, and nothing else."""


@dataclass(frozen=True)
class Usage:
    """Resources used by one process and its children: seconds, seconds, MiB."""

    wall: float
    processor: float
    peak_mb: float

    def __str__(self) -> str:
        return f"{self.wall:.1f} s, {self.processor:.1f} s of processor time, {self.peak_mb:.0f} MB"


def large_study(folder: Path, num_arms: int, num_seeds: int) -> None:
    """Write config/large.yaml and its arms: copies of the default study's arms, 3 checkpoints each."""
    study: dict[str, Any] = yaml.safe_load((folder / "config" / "config.yaml").read_text(encoding="utf-8"))
    known = yaml.safe_load((folder / "config" / "arms.yaml").read_text(encoding="utf-8"))["arms"]
    arms = {f"arm{number:03}": known[study["arms"][number % len(study["arms"])]] for number in range(num_arms)}
    names = dict(zip(study["arms"], arms, strict=False))
    for key in ("comparisons", "loss_studies"):
        study.pop(key, None)
    study["report"].pop("explore", None)
    steps = study["training"]["epochs"] * (study["dataset"]["num_train"] // study["training"]["prompts_per_step"])
    study["training"]["checkpoint_every"] = -(-steps // NUM_CHECKPOINTS)
    arms = {name: {**arm, "aa_control_of": names.get(arm.get("aa_control_of"))} for name, arm in arms.items()}
    study |= {"study": "large", "results_dir": "results/large", "arms_file": "large-arms.yaml"}
    study |= {"arms": list(arms), "seeds": list(range(num_seeds))}
    (folder / "config" / "large-arms.yaml").write_text(yaml.safe_dump({"arms": arms}), encoding="utf-8")
    (folder / "config" / "large.yaml").write_text(yaml.safe_dump(study), encoding="utf-8")


def snakemake(folder: Path, *arguments: str) -> str:
    """Run Snakemake in `folder`; returns its standard output."""
    done = subprocess.run([SNAKEMAKE, *arguments], cwd=folder, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return done.stdout


def timed(folder: Path, *arguments: str) -> Usage:
    """Run Snakemake in `folder` and return what it used."""
    started = time.perf_counter()
    with (folder / "out.txt").open("w", encoding="utf-8") as out:
        process = subprocess.Popen([SNAKEMAKE, *arguments], cwd=folder, stdout=out, stderr=out)  # noqa: S603
        _, status, used = os.wait4(process.pid, 0)
    if status:
        sys.exit((folder / "out.txt").read_text(encoding="utf-8"))
    return Usage(time.perf_counter() - started, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)


def measured_empty(folder: Path, num_runs: int, num_evaluations: int) -> Usage:
    """Return what a dry run of an empty workflow needs: a training job and `num_evaluations` jobs for each run."""
    apart = folder / "empty"
    apart.mkdir(exist_ok=True)
    (apart / "Snakefile").write_text(EMPTY.format(runs=num_runs, evaluations=num_evaluations), encoding="utf-8")
    return timed(apart, "-n")


def create_empty_results(folder: Path) -> None:
    """Create every output of the default study as an empty file, and let Snakemake record it as finished."""
    rows = [line.split("\t") for line in snakemake(folder, "--summary").splitlines() if "\t" in line]
    for name in (row[0] for row in rows[1:]):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    snakemake(folder, "--touch")


def main() -> None:
    """Measure both, `--rounds` times each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", type=int, default=100, help="arms of the large study (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=5, help="seeds of the large study (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions of each measurement (default: %(default)s)")
    parser.add_argument("--plan-only", action="store_true", help="measure no finished study")
    parser.add_argument("--whole-runs", action="store_true", help="one job evaluates all checkpoints of a run")
    parser.add_argument("--empty", action="store_true", help="measure an empty workflow of as many jobs beside it")
    arguments = parse(parser, arms=4, seeds=2, rounds=1, plan_only=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("config", "workflow", "profiles"):
            shutil.copytree(ROOT / part, folder / part)
        shutil.copy(ROOT / "Snakefile", folder)
        large_study(folder, arguments.arms, arguments.seeds)
        options = ["--set-resources", "evaluate:whole_runs=1"] if arguments.whole_runs else []
        num_runs, num_evaluations = arguments.arms * arguments.seeds, 1 if arguments.whole_runs else NUM_CHECKPOINTS
        for _ in range(arguments.rounds):
            used = timed(folder, "-n", "--configfile", "config/large.yaml", *options)
            print(f"dry run, large study: {used}")  # noqa: T201
            if arguments.empty:
                print(f"dry run, empty workflow: {measured_empty(folder, num_runs, num_evaluations)}")  # noqa: T201
        lines = (folder / "out.txt").read_text(encoding="utf-8").splitlines()
        print(next(line for line in reversed(lines) if line.startswith("total")))  # noqa: T201
        if arguments.plan_only:
            return
        create_empty_results(folder)
        for _ in range(arguments.rounds):
            print(f"nothing to do, default study: {timed(folder)}")  # noqa: T201
        if "Nothing to be done" not in (folder / "out.txt").read_text(encoding="utf-8"):
            sys.exit((folder / "out.txt").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
