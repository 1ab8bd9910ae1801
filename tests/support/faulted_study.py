"""The smallest study with every stage, run by Snakemake in its own folder, and the faults to inject meanwhile."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import warm_python
import yaml
from random_models import random_model_of
from replacing import substituted
from tiny_tokenizer import build_tokenizer

import aqnpipe

ROOT = Path(__file__).parents[2]
_NOISE = {"operators": "matmul", "error": {"kind": "relative_gaussian", "scale": 0.05}}
_RANGES = [{"sigma_start": 0.05, "sigma_end": 0.01}]
STUDY: dict[str, Any] = {
    "study": "faults",
    "results_dir": "results",
    "arms_file": "arms.yaml",
    "models": {"base": {"source": "./model"}},
    "machines": {"target": {"faults": [{"type": "dead_zone", "layer": 1, "magnitude": 0.05}]}},
    "dataset": {"source": "generated", "num_train": 4, "num_test": 6, "max_steps": 2},
    "arms": ["guided"],
    "seeds": [0],
    "training": {
        "epochs": 2,
        "prompts_per_step": 2,
        "rollouts_per_prompt": 2,
        "micro_batch_size": 4,
        "learning_rate": 2e-4,
        "max_response_tokens": 6,
        "resume_every": 1,
        "validation_questions": 2,
    },
    "diagnosis": {"num_prompts": 3},
    "evaluation": {"noise_levels": [0.0, 0.1], "noise_seeds": [0], "max_response_tokens": 6, "batch_size": 6},
    "statistics": {"published": "config/published.yaml"},
    "loss_studies": [
        {
            "name": "loss",
            "machine": "target",
            "magnitudes": [0.3],
            "conditions": ["clean", "fault_only", "targeted"],
            "noise_seeds": [0, 1],
            "num_texts": 2,
        }
    ],
    "comparisons": [{"kind": "levels", "arm": "guided", "noise_level": 0.1, "claim": "noise hurts"}],
    "report": {"title": "Faults", "question": "Does it finish with the same bytes?"},
}
ARMS = {
    "guided": {
        "description": "noise, and AQN by the diagnosis",
        "operator_noise": _NOISE,
        "aqn": {"schedule": {"kind": "epoch_ranges", "ranges": _RANGES * 2}, "layer_sigmas_from": "target"},
    }
}
_COSTS = re.compile(rb'<section id="costs">.*?</section>', re.DOTALL)
_TIMED = ("logs", "benchmarks", "jobs")
_STARTS = 5


class WarmPython:
    """Forks Snakemake and its jobs from a process that has already imported a copy of the package."""

    def __init__(
        self,
        folder: Path,
        environment: dict[str, str] | None = None,
        source: Path | None = None,
        modules: tuple[str, ...] = warm_python.STUDIES,
    ) -> None:
        self.folder = folder
        self.stand_in = folder / "python"
        self.source = source or folder / "src"
        if source is None:
            # The copy includes the compiled kernels, so that they are not compiled again.
            shutil.rmtree(self.source, ignore_errors=True)
            shutil.copytree(Path(aqnpipe.__file__).parent, self.source / "aqnpipe")
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(self.source),
            "OMP_NUM_THREADS": "1",
            "TRITON_INTERPRET": "1",
            **(environment or {}),
        }
        self._clocked: WarmPython | None = None
        (folder / "socket").unlink(missing_ok=True)
        # Under libfaketime a sleep in Python sometimes fails (EINVAL), also during imports.
        for _ in range(_STARTS):
            self._server = subprocess.Popen(
                [sys.executable, warm_python.__file__, folder / "socket", self.stand_in, *modules],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=self.environment,
                text=True,
            )
            assert self._server.stdout
            if self._server.stdout.readline() == "ready\n":
                return
            self._server.wait()
        raise RuntimeError("the warm Python did not start")

    def snakemake(
        self, folder: Path, *arguments: str, timeout: float = 900, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run the command `snakemake` in a folder to its end; standard output and error are one text in `stdout`."""
        return subprocess.run(
            [self.stand_in, "-m", "snakemake", *arguments],
            cwd=folder,
            env={
                **self.environment,
                "AQNPIPE_WARM_PIDS": tempfile.mkdtemp(dir=self.folder, prefix="pids"),
                **environment,
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )

    def set_clock(self, seconds: int) -> "WarmPython":
        """Return a server whose clock is `seconds` ahead of the machine's clock (or behind it) from now on."""
        folder = self.folder / "clocked"
        folder.mkdir(exist_ok=True)
        (folder / "clock.new").write_text(f"{seconds:+d}\n")
        (folder / "clock.new").rename(folder / "clock")
        if self._clocked is None:
            self._clocked = WarmPython(
                folder,
                {
                    "LD_PRELOAD": str(next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))),
                    "FAKETIME_TIMESTAMP_FILE": str(folder / "clock"),
                    "FAKETIME_NO_CACHE": "1",
                    "FAKETIME_DONT_FAKE_MONOTONIC": "1",
                    "NO_FAKE_STAT": "1",
                },
                self.source,
            )
        return self._clocked

    def close(self) -> None:
        """End the server."""
        if self._clocked is not None:
            self._clocked.close()
        assert self._server.stdin
        self._server.stdin.close()
        self._server.wait()


@dataclass(frozen=True)
class Run:
    """A Snakemake process and its jobs."""

    process: subprocess.Popen[bytes]
    pids: Path
    output: Path

    def processes(self) -> dict[int, str]:
        """Return the running processes by process id: `snakemake`, and jobs by the name of their script."""
        found = {}
        for path in self.pids.iterdir():
            name = path.read_text()
            with contextlib.suppress(psutil.NoSuchProcess):
                if name and psutil.Process(int(path.name)).status() != psutil.STATUS_ZOMBIE:
                    found[int(path.name)] = name
        return found

    def jobs(self) -> dict[int, str]:
        """Return the rules of the running jobs by process id; the name of a script ends with its rule."""
        return {pid: name.split(".")[-2] for pid, name in self.processes().items() if name != "snakemake"}

    def kill(self, pid: int) -> bool:
        """Kill a process; return whether it still ran."""
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    def kill_all(self) -> None:
        """Kill Snakemake, then its shells and jobs, until no process is left."""
        while found := self.processes():
            for pid, name in sorted(found.items(), key=lambda process: process[1] != "snakemake"):
                with contextlib.suppress(ProcessLookupError):
                    (os.killpg if name == "snakemake" else os.kill)(pid, signal.SIGKILL)
            time.sleep(0.02)
        self.process.wait()

    def kill_snakemake(self) -> None:
        """Kill Snakemake only; its jobs continue as orphans."""
        for pid, name in self.processes().items():
            if name == "snakemake":
                self.kill(pid)
        self.process.wait()

    def wait(self, seconds: float = 300) -> int:
        """Wait until the process ends and return its exit code."""
        return self.process.wait(seconds)

    def said(self) -> str:
        """Return the output on the terminal."""
        return self.output.read_text(encoding="utf-8", errors="replace")


class FaultedStudy:
    """A study in its own folder, on its own disk if requested (in memory; needs root)."""

    def __init__(self, python: WarmPython, folder: Path, disk: bool = False) -> None:
        self.python = python
        self.folder = folder
        self.runs: list[Run] = []
        self._has_disk = disk
        folder.mkdir(parents=True)
        if disk:
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1g", "none", folder], check=True)
        for name in ("workflow", "profiles"):
            shutil.copytree(ROOT / name, folder / name)
        shutil.copy(ROOT / "Snakefile", folder)
        write_model(folder / "model")
        (folder / "config").mkdir()
        shutil.copy(ROOT / "config" / "published.yaml", folder / "config")
        (folder / "config" / "config.yaml").write_text(yaml.safe_dump(STUDY), encoding="utf-8")
        (folder / "config" / "arms.yaml").write_text(yaml.safe_dump({"arms": ARMS}), encoding="utf-8")

    @property
    def results(self) -> Path:
        """Folder of the artifacts."""
        return self.folder / "results"

    def start(self, *arguments: str, python: WarmPython | None = None, **environment: str) -> Run:
        """Start the command `snakemake`."""
        python = python or self.python
        pids = Path(tempfile.mkdtemp(dir=python.folder, prefix="pids"))
        output = pids.with_name(f"{pids.name}.out")
        with output.open("wb") as file:
            process = subprocess.Popen(
                [python.stand_in, "-m", "snakemake", *arguments],
                cwd=self.folder,
                env={**python.environment, "AQNPIPE_WARM_PIDS": str(pids), **environment},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self.runs.append(Run(process, pids, output))
        return self.runs[-1]

    def run(self, *arguments: str, **environment: str) -> tuple[int, str]:
        """Run the command `snakemake` to its end; return the exit code and the output on the terminal."""
        run = self.start(*arguments, **environment)
        return run.wait(), run.said()

    def disk(self, options: str) -> None:
        """Remount the disk of the study with other options (size=64m, ro, rw)."""
        subprocess.run(["mount", "-o", f"remount,{options}", self.folder], check=True)

    def shift_times(self, seconds: int, since: float) -> None:
        """Shift the times of all files written since `since`, as a wrong clock would have done."""
        for path in self.folder.rglob("*"):
            status = path.lstat()
            if status.st_mtime >= since:
                os.utime(path, (status.st_atime + seconds, status.st_mtime + seconds), follow_symlinks=False)

    def close(self) -> None:
        """Kill all remaining processes and unmount the disk, which deletes its contents."""
        for run in self.runs:
            run.kill_all()
        if self._has_disk:
            # The kernel may still close the files of processes that were killed.
            until = time.monotonic() + 30
            while subprocess.run(["umount", self.folder], check=time.monotonic() > until).returncode:
                time.sleep(0.2)

    def bytes_of_results(self) -> dict[str, bytes]:
        """Return every file of the results by its path, hidden and unexpected files included, without timings.

        Logs, Snakemake's benchmarks and the section of the page that shows these benchmarks are left out.
        """
        found = {}
        for path in sorted(self.results.rglob("*")):
            name = str(path.relative_to(self.results))
            if name.split("/")[0] in _TIMED:
                continue
            found[name] = path.read_bytes() if path.is_file() else b""
        if "report.html" in found:
            found["report.html"] = substituted(found["report.html"], _COSTS, b"")
        return found


def write_model(folder: Path) -> None:
    """Write a random model of two layers with the built-in tokenizer: a third of the time of the smallest built-in one.

    Nothing here asks whether an answer is right.
    """
    tokenizer = build_tokenizer()
    settings = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "max_position_embeddings": 256}
    model = random_model_of(num_layers=2, eos_token_id=tokenizer.eos_token_id, **settings)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def tally(kind: str, *faults: tuple[str, str]) -> None:
    """Add faults (what, where) that a study survived to the tally of benchmarks/pipeline_faults.py, if there is one."""
    if path := os.environ.get("AQNPIPE_FAULTS_TALLY"):
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"seed": -1, "kind": kind, "faults": faults, "wrong": ""}) + "\n")


def planned_jobs(dry_run: str) -> dict[str, int]:
    """Return the jobs per rule in the output of a dry run, without rule `all`."""
    if "Nothing to be done" in dry_run:
        return {}
    table = dry_run.split("Job stats:")[1].split("Reasons:")[0]
    counts = {name: int(count) for name, count in re.findall(r"^(\w+) +(\d+)$", table, re.MULTILINE)}
    return {name: count for name, count in counts.items() if name not in ("total", "all")}


def differences(found: dict[str, bytes], expected: dict[str, bytes]) -> list[str]:
    """Return the names of files that are missing, unexpected or different."""
    return sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
