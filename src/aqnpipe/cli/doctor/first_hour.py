"""`aqnpipe doctor --try`: the first hour on a machine, in minutes, and one page of what passed, for bug reports.

The kernels are tried by the tests of a clone and the cost of noise by its benchmarks, as they are. The study is the
smoke study with one sharded worker per device, rollouts on vLLM where it is installed, a kill, and a resume. On a CPU
the same runs with worker processes in place of devices.
"""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import psutil
import yaml

import aqnpipe
from aqnpipe.artifacts.files import write_text
from aqnpipe.cli.doctor.command import OPTIONAL, Item, install_advice
from aqnpipe.config.yaml_file import read_yaml_file
from aqnpipe.device import Device, resolve_device
from aqnpipe.generation.vllm.plugin import is_vllm_installed
from aqnpipe.report.markup import page_template
from aqnpipe.report.numbers import in_markdown_cell
from aqnpipe.shipped import SHIPPED, SNAKEFILE

PAGE = "first-hour.md"
_KERNEL_TESTS = ("tests/gpu", "tests/noise/kernels", "tests/benchmarks/test_gemm_cuda.py")
_COSTS = {"cuda": ("benchmarks/noise_overhead_cuda.py",), "cpu": ("benchmarks/noise_overhead.py", "--rounds", "3")}
_NO_CLONE = "needs a clone of the repository, and pytest there"
_CLONE = Path(aqnpipe.__file__).parents[2]
_TAIL = 30


@dataclass
class Outcome:
    """Findings of one step: lines for the page, and what it could not try, with the reason."""

    name: str
    status: Literal["passed", "did not pass", "not tried"]
    found: list[str]
    not_tried: list[str] = field(default_factory=list)
    speeds: list[tuple[str, str]] = field(default_factory=list)
    costs: list[dict[str, Any]] = field(default_factory=list)
    log: Path | None = None
    minutes: float = 0.0


@dataclass(frozen=True)
class Attempt:
    """The folder of everything that is tried, its device, workers and the time at which it ends."""

    folder: Path
    device: Device
    workers: int
    deadline: float

    def run(
        self, command: Sequence[str], log: str, cwd: Path | None = None, kill_when: Callable[[], bool] = lambda: False
    ) -> int | None:
        """Run a command and return its exit code; None if it was killed, at `kill_when` or at the deadline."""
        with (self.folder / log).open("a", encoding="utf-8") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=cwd)  # noqa: S603
            try:
                while process.poll() is None:
                    if time.monotonic() > self.deadline or kill_when():
                        return None
                    time.sleep(0.1)
                return process.returncode
            finally:
                if process.poll() is None:  # this process and all below it end as by `kill -9`
                    parent = psutil.Process(process.pid)
                    everyone = [parent, *parent.children(recursive=True)]
                    for each in everyone:
                        each.kill()
                    process.wait()
                    psutil.wait_procs(everyone, timeout=30)


def try_out(
    folder: Path, machine: Sequence[Item], workers: int | None, minutes: float, say: Callable[[str], None]
) -> bool:
    """Try everything and write the page into `folder`, after every step; return whether all that was tried passed."""
    device = resolve_device("auto")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    number = workers or (2 if device.kind == "cpu" else device.count)
    attempt = Attempt(folder.resolve(), device, number, time.monotonic() + 60 * minutes)
    outcomes: list[Outcome] = []
    for step in (_kernels, _study, _costs):
        started = time.monotonic()
        outcome = step(attempt)
        outcome.minutes = (time.monotonic() - started) / 60
        outcomes.append(outcome)
        say(f"{outcome.name}: {outcome.status}; {'; '.join(outcome.found)}")
        write_text(folder / PAGE, _page(attempt, outcomes, machine))
    say(f"The page for a report: {folder / PAGE}")
    return all(outcome.status != "did not pass" for outcome in outcomes)


def _kernels(attempt: Attempt) -> Outcome:
    name = "noise kernels against their references"
    if not all(map(os.path.exists, _KERNEL_TESTS)) or find_spec("pytest") is None:
        return Outcome(name, "not tried", [_NO_CLONE])
    command = [sys.executable, "-m", "pytest", "-rfEs", "--color=no", "-m", "not slow", *_KERNEL_TESTS]
    code = attempt.run(command, "kernels.log")
    lines = (attempt.folder / "kernels.log").read_text(encoding="utf-8").splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    skips = re.findall(r"(?m)^SKIPPED \[(\d+)\] .*?\d: (.*)$", "\n".join(lines))
    reasons = {why: sum(int(number) for number, other in skips if other == why) for _, why in skips}
    skipped = [f"{number} tests: {why}" for why, number in reasons.items()]
    summary = [line for line in lines if re.search(r"\d+ (passed|failed)", line)][-1:]
    found = [*(summary if code is not None else ["not finished in time"]), *failed]
    return Outcome(name, _status(code == 0), found, skipped, log=attempt.folder / "kernels.log")


def _costs(attempt: Attempt) -> Outcome:
    name, script = "cost of noise against its targets", _COSTS.get(attempt.device.kind)
    if script is None or not Path(script[0]).is_file():
        return Outcome(name, "not tried", [_NO_CLONE if script else f"no benchmark for {attempt.device.kind}"])
    figures = attempt.folder / "costs.json"
    code = attempt.run([sys.executable, *script, "--json", str(figures)], "costs.log")
    log = attempt.folder / "costs.log"
    if code != 0:
        why = "not finished in time" if code is None else f"exit code {code}"
        return Outcome(name, "did not pass", [f"{why}; figures so far are in its log"], log=log)
    costs = json.loads(figures.read_text(encoding="utf-8"))["ratios"]
    aimed = [cost for cost in costs if cost["target"] is not None]
    missed = [f"{cost['what']} ({cost['median']:.3f})" for cost in aimed if cost["median"] > cost["target"]]
    found = [f"{len(aimed) - len(missed)} of {len(aimed)} targets met", *(f"missed: {what}" for what in missed)]
    speeds = [(cost["what"], f"{cost['tokens_per_second']:.0f}") for cost in costs if cost["tokens_per_second"]]
    return Outcome(name, _status(not missed), found, speeds=speeds, costs=costs, log=log)


def _study(attempt: Attempt) -> Outcome:
    vllm, several = is_vllm_installed(), attempt.workers > 1
    name = f"a study, {attempt.workers} {'sharded workers' if several else 'worker'}, killed and resumed"
    study, log = attempt.folder / "study.yaml", attempt.folder / "study.log"
    study.write_text(yaml.safe_dump(_settings(attempt, vllm), sort_keys=False), encoding="utf-8")
    on_cpu = attempt.device.kind == "cpu"
    options = ["--cores", str(max(2, attempt.workers))] if on_cpu else ["--profile", f"{SHIPPED}/profiles/workstation"]
    command = [sys.executable, "-m", "snakemake", "--snakefile", str(SNAKEFILE), f"--configfile={study}", *options]
    points = "results/scratch/*/*/resume/step*"
    code = attempt.run(command, log.name, attempt.folder, lambda: any(attempt.folder.glob(points)))
    killed = code is None and time.monotonic() < attempt.deadline
    if killed:
        code = attempt.run(command, log.name, attempt.folder)
    logs = sorted((attempt.folder / "results" / "logs").rglob("*.log"))
    text = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in logs)
    resumed = re.search(r"resuming after step (\d+)", text)
    started = re.search(r": (\d+) workers, on ", text)
    finished = code == 0 and (attempt.folder / "results" / "report.html").is_file()
    together = not several or (started is not None and int(started[1]) == attempt.workers)
    found = [
        "its report was written, all receipts accepted"
        if finished
        else f"not finished ({'no time left' if code is None else f'exit code {code}'})",
        f"killed, then resumed after step {resumed[1]}" if killed and resumed else "not resumed from a kill",
        f"rollouts and evaluations by {'vLLM' if vllm else 'transformers'}, {attempt.device.label}",
    ]
    not_tried = [] if vllm else [f"vLLM: not installed; {install_advice('vllm', OPTIONAL['vllm'])}"]
    not_tried += [] if several else ["sharded workers: there is one device"]
    not_tried += ["NCCL and devices: there are none, workers are processes that talk by gloo"] if on_cpu else []
    speed = re.findall(r"(\d+) tokens/s", text)[-1:]
    speeds = [("training of the tiny model in this study, generated tokens, all phases", value) for value in speed]
    return Outcome(name, _status(finished and killed and bool(resumed) and together), found, not_tried, speeds, log=log)


def _settings(attempt: Attempt, vllm: bool) -> dict[str, Any]:
    """Return the smoke study with one noisy arm, number formats of the real studies, and a worker per device."""
    config = SHIPPED / "config"
    study: dict[str, Any] = read_yaml_file(config / "smoke.yaml")
    prompts = attempt.workers * -(-4 // attempt.workers)
    training = {
        "num_workers": attempt.workers,
        "parallelism": "fsdp" if attempt.workers > 1 else "data",
        "prompts_per_step": prompts,
        "micro_batch_size": study["training"]["rollouts_per_prompt"],
        "resume_every": 1,
        "checkpoint_every": 4,
    }
    return study | {
        "study": "first-hour",
        "results_dir": str(attempt.folder / "results"),
        "arms_file": str(config / study["arms_file"]),
        "device": attempt.device.kind,
        "models": {"base": {"source": "tiny", "dtype": "bfloat16", "attention": "sdpa"}},
        "dataset": study["dataset"] | {"num_train": 2 * prompts, "num_test": 20},
        "machines": {"target": study["machines"]["target"]},
        "arms": ["srdd_guided"],
        "training": study["training"] | training,
        "generation": {"backend": "vllm" if vllm else "transformers"},
        "comparisons": [{"kind": "levels", "arm": "srdd_guided", "noise_level": 0.1, "claim": "10 % noise hurts"}],
    }


def _status(good: bool) -> Literal["passed", "did not pass"]:
    return "passed" if good else "did not pass"


def _page(attempt: Attempt, outcomes: Sequence[Outcome], machine: Sequence[Item]) -> str:
    """Return the page as Markdown."""
    return page_template("first_hour.md.jinja").render(
        about=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, aqnpipe {version('aqnpipe')}, commit {_commit(_CLONE)}, "
        f"Python {platform.python_version()}, torch {version('torch')}, {attempt.device.label}.",
        outcomes=outcomes,
        machine=machine,
        checks_passed=", ".join(f"{check.name} {check.found}" for check in machine if check.status == "ok"),
        cell=in_markdown_cell,
        tail=lambda log: "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL:]),
    )


def _commit(clone: Path) -> str:
    """Return the commit of the clone that the package runs from, with "-dirty" if files differ from it."""
    git = shutil.which("git")
    if git is None or not (clone / ".git").exists():
        return f"unknown ({'the package runs from no clone' if git else 'git is not installed'})"
    command = [git, "-C", str(clone), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    return done.stdout.strip() or f"unknown ({done.stderr.strip()})"
