"""Every benchmark runs in its smallest size to its printed table, and writes nothing into the repository.

The scripts fork from one process that has the imports of a study made, which are most of their time.
"""

import json
import os
import subprocess
import tempfile
from pathlib import Path

import polars as pl
import pytest
import torch
from faulted_study import WarmPython
from smallest import NOT_HERE

ROOT = Path(__file__).parents[2]
SCRIPTS = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if '__name__ == "__main__"' in path.read_text()}
VLLM = "not on this machine: vLLM (`make vllm`)\n"
CUDA = "not on this machine: a CUDA device that torch finds\n"
NOT_ON_A_CPU = {
    ("vllm_speed", ()): VLLM,
    ("parity", ("--with-vllm",)): VLLM,
    ("decoding_cuda", ()): CUDA,
    ("noise_overhead_cuda", ()): CUDA,
}
"""What these commands print where the environment is that of `make test`."""

COMMANDS = {
    ("architectures", ()): "| llama | ",
    ("builtin_models", ("tiny", "--output", "made")): '"model": "tiny",',
    ("compare_results", ("before", "after")): "tables: 1 files, 1 differ\n",
    ("detection", ()): "# Detection",
    ("detection_simulated", ()): "# Detection of simulated faults",
    ("evaluation_speed", ()): "| tiny, 0-shot | transformers | ",
    ("job_memory", ()): "| smoke, train | ",
    ("judged_answers", ("judge", str(ROOT / "config" / "decide.yaml"), str(ROOT / "docs" / "decide"))): (
        " looks, 0 numbers are not as recorded\n"
    ),
    ("kill_trials", ()): " SIGKILLs in 1 runs. ",
    ("long_studies", ("training",)): "40 optimiser steps in ",
    ("long_studies", ("evaluation",)): "700 answers in ",
    ("long_studies", ("artifacts",)): '{"evaluations": 20, ',
    ("machine_overhead", ()): "| generation, batch 1 | ",
    ("measured_noise", ()): "tiny: bfloat16 ",
    ("noise_overhead", ()): "peak of all tensors",
    ("packing", ()): "largest difference of an output",
    ("parity", ()): "| tiny | bfloat16, the same twice | equal | ",
    (
        "pipeline_faults",
        ("--folder", "faults"),
    ): "| read-only disk | 1 | 1 | 0 | `snakemake`, which does not start | ",
    ("ragged_batches", ()): "ratio by rollout",
    ("rehearsal", (str(ROOT / "config" / "qwen2.5-1.5b.yaml"), "--questions", "questions", "--output", "made")): (
        "exit code 0 after "
    ),
    ("report_speed", ()): "page: ",
    ("scorers", ()): "| scorer | ",
    ("sensitivity", ()): "| tiny | ",
    ("sequential", ()): "| arms | questions | run SD",
    ("statistics_power", ("--csv", "power.csv")): "equal Design(",
    ("statistics_speed", ()): " comparisons (",
    ("training_overhead", ()): "CPU time of the parts of a step",
    ("workflow_scale", ()): "dry run, large study: ",
}
"""A piece of the table that each command prints."""


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    server = WarmPython(tmp_path_factory.mktemp("warm"), source=ROOT / "src")
    yield server
    server.close()


def repository():
    """Size and time of the files that a benchmark could write by mistake."""
    files = (path for folder in ("benchmarks", "docs", "config") for path in (ROOT / folder).rglob("*"))
    # Not folders: another test may write the bytecode of an import into one.
    kept = (path for path in files if path.is_file() and "__pycache__" not in path.parts)
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in kept}


def run(python, name, arguments, folder):
    """Run a benchmark in its smallest size in a folder from which it sees the configuration of the repository."""
    (folder / "config").symlink_to(ROOT / "config")
    paths = (ROOT / "tests" / "support", ROOT / "tests", ROOT / "benchmarks")
    before = repository()
    done = subprocess.run(
        [python.stand_in, ROOT / "benchmarks" / f"{name}.py", *arguments, "--smallest"],
        cwd=folder,
        env={
            **python.environment,
            "PYTHONPATH": os.pathsep.join(map(str, (*paths, ROOT / "src"))),
            "AQNPIPE_WARM_PIDS": tempfile.mkdtemp(dir=python.folder),
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert repository() == before
    return done


def test_every_script_is_run():
    assert {name for name, _ in (*COMMANDS, *NOT_ON_A_CPU)} == SCRIPTS


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arguments"), COMMANDS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_benchmark_runs_to_its_table(name, arguments, python, tmp_path):
    if name == "pipeline_faults" and os.geteuid() != 0:
        pytest.skip("mounting a disk needs the rights of root")
    prepare(tmp_path)
    done = run(python, name, arguments, tmp_path)
    assert done.returncode == (1 if name == "compare_results" else 0), done.stdout + done.stderr
    assert COMMANDS[name, arguments] in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arguments"), NOT_ON_A_CPU, ids=lambda value: value if isinstance(value, str) else "")
def test_a_benchmark_that_lacks_something_names_it_in_one_line(name, arguments, python, tmp_path):
    if "CUDA" in NOT_ON_A_CPU[name, arguments] and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    done = run(python, name, arguments, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (NOT_HERE, "", NOT_ON_A_CPU[name, arguments])


def prepare(folder):
    """Write what commands read: questions, and two folders of results that differ."""
    (folder / "questions").mkdir()
    for split, kind in (("train", "trees"), ("test", "birds")):
        rows = [{"question": f"Of {n} {kind} {n % 9} stay?", "answer": f"#### {n % 9}"} for n in range(20)]
        (folder / "questions" / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for name, value in (("before", 1), ("after", 2)):
        (folder / name).mkdir()
        pl.DataFrame({"value": [value]}).write_parquet(folder / name / "table.parquet")
