"""The smallest study with every stage, run by Snakemake in a folder of its own, and what is done to it meanwhile."""

import contextlib
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
import yaml

import aqnpipe

ROOT = Path(__file__).parents[2]
_NOISE = {"operators": "matmul", "error": {"kind": "relative_gaussian", "scale": 0.05}}
_RANGES = [{"sigma_start": 0.05, "sigma_end": 0.01}]
STUDY: dict[str, Any] = {
    "study": "faults",
    "results_dir": "results",
    "arms_file": "config/arms.yaml",
    "models": {"base": {"source": "tiny"}},
    "machines": {"target": {"faults": [{"type": "dead_zone", "layer": 3, "magnitude": 0.05}]}},
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
    "statistics": {"bootstrap_samples": 200, "published": "config/published.yaml"},
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
_TIMED = ("logs", "benchmarks")
_STARTS = 5


class WarmPython:
    """Forks Snakemake and its jobs from a process that has a copy of the package imported."""

    def __init__(self, folder: Path, environment: dict[str, str] | None = None, source: Path | None = None) -> None:
        self.folder = folder
        self.stand_in = folder / "python"
        self.source = source or folder / "src"
        if source is None:
            # With the compiled kernels, which would else be compiled anew.
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
        # Under libfaketime a sleep of Python fails now and then (EINVAL), also during imports.
        for _ in range(_STARTS):
            self._server = subprocess.Popen(
                [sys.executable, Path(__file__).with_name("warm_python.py"), folder / "socket", self.stand_in],
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

    def set_clock(self, seconds: int) -> "WarmPython":
        """Return another one, whose clock is so many seconds ahead (or back) of the machine's, from now on."""
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
    """One Snakemake process that was started, with its jobs."""

    process: subprocess.Popen[bytes]
    pids: Path
    output: Path

    def processes(self) -> dict[int, str]:
        """What runs now: `snakemake`, and jobs by the name of their script, by process id."""
        found = {}
        for path in self.pids.iterdir():
            name = path.read_text()
            with contextlib.suppress(psutil.NoSuchProcess):
                if name and psutil.Process(int(path.name)).status() != psutil.STATUS_ZOMBIE:
                    found[int(path.name)] = name
        return found

    def jobs(self) -> dict[int, str]:
        """The jobs that run now, by process id; the rule's name is the end of the script's."""
        return {pid: name.split(".")[-2] for pid, name in self.processes().items() if name != "snakemake"}

    def kill(self, pid: int) -> None:
        """Kill one process, if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def kill_all(self) -> None:
        """Kill Snakemake, then its shells and jobs, until none is left."""
        while found := self.processes():
            for pid, name in sorted(found.items(), key=lambda one: one[1] != "snakemake"):
                with contextlib.suppress(ProcessLookupError):
                    (os.killpg if name == "snakemake" else os.kill)(pid, signal.SIGKILL)
            time.sleep(0.02)
        self.process.wait()

    def kill_snakemake(self) -> None:
        """Kill Snakemake alone; its jobs go on as orphans."""
        for pid, name in self.processes().items():
            if name == "snakemake":
                self.kill(pid)
        self.process.wait()

    def wait(self, seconds: float = 300) -> int:
        """Wait for its end; its exit code."""
        return self.process.wait(seconds)

    def said(self) -> str:
        """What it wrote to the terminal."""
        return self.output.read_text(encoding="utf-8", errors="replace")


class FaultedStudy:
    """One study in a folder, on a disk of its own if requested (in memory; needs the rights of root)."""

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
        (folder / "config").mkdir()
        for name in ("schema.json", "published.yaml"):
            shutil.copy(ROOT / "config" / name, folder / "config")
        (folder / "config" / "config.yaml").write_text(yaml.safe_dump(STUDY), encoding="utf-8")
        (folder / "config" / "arms.yaml").write_text(yaml.safe_dump({"arms": ARMS}), encoding="utf-8")

    @property
    def results(self) -> Path:
        """Where its artifacts are."""
        return self.folder / "results"

    def start(self, *arguments: str, python: WarmPython | None = None, **environment: str) -> Run:
        """Give the command `snakemake`."""
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
        """Give the command `snakemake` and wait for its end; exit code, and what it wrote to the terminal."""
        run = self.start(*arguments, **environment)
        return run.wait(), run.said()

    def disk(self, options: str) -> None:
        """Mount its disk with other options (size=64m, ro, rw)."""
        subprocess.run(["mount", "-o", f"remount,{options}", self.folder], check=True)

    def shift_times(self, seconds: int, since: float) -> None:
        """Shift the times of all files written since then: as they are if the clock went wrong meanwhile."""
        for path in self.folder.rglob("*"):
            status = path.lstat()
            if status.st_mtime >= since:
                os.utime(path, (status.st_atime + seconds, status.st_mtime + seconds), follow_symlinks=False)

    def close(self) -> None:
        """End what still runs, and give the disk back with all that is on it."""
        for run in self.runs:
            run.kill_all()
        if self._has_disk:
            subprocess.run(["umount", self.folder], check=True)

    def bytes_of_results(self) -> dict[str, bytes]:
        """Every file of the results by its path, hidden ones and those in the way too, but for what tells times.

        Logs and Snakemake's benchmarks are left out, and the page's section that shows the latter.
        """
        found = {}
        for path in sorted(self.results.rglob("*")):
            name = str(path.relative_to(self.results))
            if name.split("/")[0] in _TIMED:
                continue
            found[name] = path.read_bytes() if path.is_file() else b""
        if "report.html" in found:
            found["report.html"] = _COSTS.sub(b"", found["report.html"])
        return found


def differences(found: dict[str, bytes], expected: dict[str, bytes]) -> list[str]:
    """Names of what is missing, too much, or has other bytes."""
    return sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
