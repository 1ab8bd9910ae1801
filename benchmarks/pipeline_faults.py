"""Random machine faults in whole studies: afterwards a plain `snakemake` must finish with the same bytes.

    OMP_NUM_THREADS=1 python benchmarks/pipeline_faults.py --folder /var/tmp/faults --minutes 60

Each trial runs the smallest study that has every stage, in its own folder, and injects one kind of machine fault once
or several times. Then it runs `snakemake` without arguments and compares every byte of the results with those of an
undisturbed study. Needs root (for file systems in memory and memory limits) and libfaketime. An interrupted benchmark
continues from the contents of its folder. Writes docs/machine-faults.md.
"""

import argparse
import collections
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from faulted_study import FaultedStudy, Run, WarmPython, differences
from smallest import not_here, parse
from typer.testing import CliRunner

from aqnpipe.cli.main import app
from aqnpipe.models.prepared import PREPARED_MODEL_FILE

PAGE = Path(__file__).parents[1] / "docs" / "machine-faults.md"
MEMORY_CGROUPS = Path("/sys/fs/cgroup/memory")
SHARES = {
    "kills": 16,
    "full disk": 3,
    "read-only": 2,
    "two at once": 2,
    "out of memory": 2,
    "clock": 3,
    "one byte": 1,
}
"""Trials of each kind in one round."""
Faults = list[list[str]]
"""The faults of a study in order, each as fault and place."""


@dataclass(frozen=True)
class Reference:
    """The undisturbed study: its results, its duration, and the bytes used on its disk before and after."""

    expected: dict[str, bytes]
    seconds: float
    least: int
    most: int


class BrokenError(Exception):
    """A study did not end like the undisturbed one."""


def kills(study: FaultedStudy, generator: random.Random, whole: Reference) -> Faults:
    """Kill four to nine times in a row: a job, Snakemake with its jobs, or Snakemake alone."""
    faults: Faults = []
    for _ in range(generator.randint(4, 9)):
        run = study.start()
        what = generator.choice(["a job", "Snakemake and its jobs", "Snakemake and its jobs", "Snakemake alone"])
        place = _kill_at_random(run, what, generator, whole)
        if place is None:
            break
        faults.append([f"SIGKILL of {what}", place])
        orphans = run.jobs()
        if orphans and generator.random() < 0.5:
            _wait_until(lambda run=run: not run.jobs())
    _wait_until_ended(study)
    return faults


def full_disk(study: FaultedStudy, generator: random.Random, whole: Reference) -> Faults:
    """Run twice on a disk that is too small, then enlarge the disk."""
    faults: Faults = []
    for size in sorted(generator.uniform(whole.least, whole.most) for _ in range(2)):
        study.disk(f"size={int(size)}")
        run = study.start()
        if run.wait() == 0:
            break
        faults.append(["full disk", _failed_rules(run)])
        _refuse_traceback(run)
    study.disk("size=1g")
    return faults


def read_only(study: FaultedStudy, generator: random.Random, whole: Reference) -> Faults:
    """Kill a study, then run it again while its disk is read-only."""
    run = study.start()
    if generator.random() < 0.75:
        _kill_at_random(run, "Snakemake and its jobs", generator, whole)
    run.kill_all()
    study.disk("ro")
    refused = study.start()
    if refused.wait() == 0:
        raise BrokenError("snakemake succeeded on a read-only disk")
    study.disk("rw")
    return [["read-only disk", "whole folder"]]


def two_at_once(study: FaultedStudy, generator: random.Random, whole: Reference) -> Faults:
    """Start a second Snakemake while the first one runs, or at nearly the same time."""
    delay = generator.choice([0.0, generator.uniform(0, 2), generator.uniform(0, whole.seconds)])
    first = study.start()
    time.sleep(delay)
    second = study.start()
    codes = sorted([first.wait(), second.wait()])
    if codes[0] != 0:
        raise BrokenError(f"both ended with an error: {first.said()} {second.said()}")
    return [["two Snakemakes at once", "one refused" if codes[1] else "one after the other"]]


def out_of_memory(study: FaultedStudy, generator: random.Random, whole: Reference) -> Faults:
    """Limit the memory of the jobs so that the kernel kills one, then remove the limit."""
    group = MEMORY_CGROUPS / f"aqnpipe-{study.folder.name}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(int(generator.uniform(16, 160) * 2**20)))
        run = study.start(AQNPIPE_WARM_CGROUP=str(group / "cgroup.procs"))
        code = run.wait()
        control = dict(line.split() for line in (group / "memory.oom_control").read_text().splitlines())
    finally:
        _wait_until(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()
    if int(control["oom_kill"]) == 0:
        return []
    if code == 0:
        raise BrokenError("a job was killed, but snakemake succeeded")
    return [["a job killed by the kernel, out of memory", _failed_rules(run)]]


def clock(study: FaultedStudy, generator: random.Random, whole: Reference) -> Faults:
    """Move the clock by minutes to weeks, ahead or back, while the study runs; kill it or not, and correct the clock.

    After a jump back Snakemake may fail a job with an error because its outputs are older than its inputs.
    """
    jump = generator.choice([-1, 1]) * int(60 * 10 ** generator.uniform(0, 4))
    run = study.start(python=study.python.set_clock(0))
    time.sleep(generator.uniform(0, whole.seconds / 2))
    jumped = time.time()
    study.python.set_clock(jump)
    if generator.random() < 0.5:
        _kill_at_random(run, "Snakemake and its jobs", generator, whole)
        run.kill_all()
    elif run.wait() and not (jump < 0 and "older modification time" in run.said()):
        raise BrokenError(f"the clock jumped: {run.said()}")
    study.shift_times(jump, jumped)
    return [[f"clock {'ahead' if jump > 0 else 'back'}, and right again", "a study under way"]]


def one_byte(study: FaultedStudy, generator: random.Random, whole: Reference) -> Faults:
    """Change one byte of every file of finished results, one file after the other, then of all at once.

    `aqnpipe verify` must name each, and what it removes with --repair must be made again.
    """
    if study.run()[0]:
        raise BrokenError("the undisturbed study failed")
    faults: Faults = []
    files = [study.results / name for name, content in sorted(whole.expected.items()) if content]
    changed = {path: _with_one_other_byte(path.read_bytes(), generator) for path in files}
    for path, content in changed.items():
        intact = path.read_bytes()
        path.write_bytes(content)
        named = _damaged(study)
        # A damaged model is named by its record, and its weights too where a job wrote them.
        if not named & {path, path.with_name(PREPARED_MODEL_FILE)}:
            raise BrokenError(f"a changed byte of {path} was not found; found {sorted(named)}")
        path.write_bytes(intact)
        inside = path.relative_to(study.results).parts
        faults.append(["one changed byte", inside[0] if len(inside) > 1 else "pages and tables"])
    if named := _damaged(study):
        raise BrokenError(f"found damage where there is none: {sorted(named)}")
    for path, content in changed.items():
        path.write_bytes(content)
    # In a process of its own, which holds the lock of the results until it ends.
    repaired = subprocess.run(  # noqa: S603 - the interpreter itself
        [sys.executable, "-c", "from aqnpipe.cli.main import main; main()", "verify", study.results, "--repair"],
        env=study.python.environment,
        check=False,
    )
    if repaired.returncode != 1:
        raise BrokenError(f"verify --repair of damaged results ended with {repaired.returncode}")
    return faults


def _with_one_other_byte(content: bytes, generator: random.Random) -> bytes:
    position = generator.randrange(len(content))
    return content[:position] + bytes([content[position] ^ 1 << generator.randrange(8)]) + content[position + 1 :]


def _damaged(study: FaultedStudy) -> set[Path]:
    """Return the files that `aqnpipe verify` names."""
    found = CliRunner().invoke(app, ["verify", str(study.results)])
    if found.exit_code not in (0, 1):
        raise BrokenError(f"verify ended with {found.exit_code}: {found.output} {found.exception!r}")
    return {Path(line.partition(": ")[0]) for line in found.output.splitlines() if not line.startswith("verify:")}


KINDS: dict[str, Callable[[FaultedStudy, random.Random, Reference], Faults]] = {
    "kills": kills,
    "full disk": full_disk,
    "read-only": read_only,
    "two at once": two_at_once,
    "out of memory": out_of_memory,
    "clock": clock,
    "one byte": one_byte,
}
DETECTED = {
    "SIGKILL of a job": "Snakemake, which names the job",
    "SIGKILL of Snakemake and its jobs": "the next `snakemake`",
    "SIGKILL of Snakemake alone": "the next `snakemake`",
    "full disk": "the job, in one line",
    "read-only disk": "`snakemake`, which does not start",
    "two Snakemakes at once": "the lock of the study",
    "a job killed by the kernel, out of memory": "Snakemake, which names the job",
    "clock ahead, and right again": "the next `snakemake`",
    "clock back, and right again": "the next `snakemake`",
    "one changed byte": "`aqnpipe verify`, which names the file",
    "SIGKILL of a worker of a training": "the job, which ends the others",
    "SIGKILL of the launch of a training with workers": "the next start of the run",
    "SIGKILL of a whole training with workers in mid-step": "the next start of the run",
    "Slurm: job cancelled, its node drained": "Snakemake, which submits it again",
    "Slurm: controller and node daemon killed": "Slurm, when they are back",
    "Slurm: node cut off": "Slurm, which queues the job again",
    "Slurm: preempted": "Slurm, which queues the job again",
    "Slurm: time limit": "the job, which stops; Snakemake submits it again",
    "Slurm: Ctrl-C": "Snakemake, which cancels its jobs",
    "Slurm: Snakemake killed, its job alive": "the lock of the run",
}
"""What notices each fault; those of workers and Slurm are tried by tests."""
ON_A_DISK_OF_ITS_OWN = ("full disk", "read-only")


def main() -> int:
    """Run the trials, add each to the tally in the folder, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, required=True, help="folder of the studies and the tally; an earlier tally is continued"
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="start no trial after this time (default: 60)")
    parser.add_argument("--faults", type=int, default=1000, help="stop after this number of faults (default: 1000)")
    parser.add_argument("--cold", action="store_true", help="first run a study without shared imports")
    parser.add_argument("--kind", choices=KINDS, action="append", help="run only trials of this kind; may be repeated")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page to write (default: %(default)s)")
    arguments = parse(parser, faults=1, kind=["read-only"], page=Path("/dev/stdout"))
    if os.geteuid() != 0:
        not_here("the rights of root, to mount disks")
    deadline = time.monotonic() + 60 * arguments.minutes
    folder: Path = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    tally = folder / "tally.jsonl"
    rows = [json.loads(line) for line in tally.read_text().splitlines()] if tally.exists() else []
    python = WarmPython(folder)
    whole = _reference(python, folder)
    if arguments.cold:
        _refuse_other_bytes_cold(python, folder, whole)
    kinds = [kind for kind, share in SHARES.items() for _ in range(share) if kind in (arguments.kind or KINDS)]
    while time.monotonic() < deadline and sum(len(row["faults"]) for row in rows) < arguments.faults:
        seed = len(rows)
        kind = _generator(seed // len(kinds)).sample(kinds, len(kinds))[seed % len(kinds)]
        row = _trial(python, folder / f"study{seed}", kind, seed, whole)
        rows.append(row)
        with tally.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        sys.stderr.write(f"{sum(len(trial['faults']) for trial in rows)} faults; {row}\n")
        arguments.page.write_text(page(rows, whole.seconds), encoding="utf-8")
    python.close()
    return int(any(row["wrong"] for row in rows))


def _generator(seed: int) -> random.Random:
    return random.Random(seed)  # noqa: S311 - chooses faults and times


def _reference(python: WarmPython, folder: Path) -> Reference:
    """Run the undisturbed study."""
    shutil.rmtree(folder / "reference", ignore_errors=True)
    study = FaultedStudy(python, folder / "reference", disk=True)
    least, began = shutil.disk_usage(study.folder).used, time.monotonic()
    code, said = study.run()
    if code:
        raise BrokenError(said)
    seconds, most = time.monotonic() - began, shutil.disk_usage(study.folder).used
    expected = study.bytes_of_results()
    study.close()
    return Reference(expected, seconds, least, most)


def _refuse_other_bytes_cold(python: WarmPython, folder: Path, whole: Reference) -> None:
    """Run the study as users do, each process with its own imports; raise BrokenError if its bytes differ."""
    shutil.rmtree(folder / "cold", ignore_errors=True)
    cold = FaultedStudy(python, folder / "cold")
    done = subprocess.run(
        [sys.executable, "-m", "snakemake"], cwd=cold.folder, env=python.environment, capture_output=True, check=False
    )
    found = differences(cold.bytes_of_results(), whole.expected)
    if done.returncode or found:
        raise BrokenError(f"without shared imports the study ended with {done.returncode} and differs in {found}")


def _trial(python: WarmPython, folder: Path, kind: str, seed: int, whole: Reference) -> dict[str, Any]:
    shutil.rmtree(folder, ignore_errors=True)
    generator = _generator(seed)
    faults: Faults = []
    wrong = ""
    study = FaultedStudy(python, folder, disk=kind in ON_A_DISK_OF_ITS_OWN)
    try:
        faults = KINDS[kind](study, generator, whole)
        code, said = study.run()
        if code:
            raise BrokenError(f"`snakemake` ended with {code}: {said}")
        if found := differences(study.bytes_of_results(), whole.expected):
            raise BrokenError(f"these files differ: {', '.join(found)}")
        if kind == "clock" and "Nothing to be done" not in (said := study.run("--dry-run")[1]):
            raise BrokenError(f"jobs are left after the clock was corrected: {said}")
    except (BrokenError, subprocess.TimeoutExpired) as error:
        wrong = str(error)[-4000:]
    finally:
        study.close()
    if not wrong:
        shutil.rmtree(folder)
    return {"seed": seed, "kind": kind, "faults": faults, "wrong": wrong}


def _kill_at_random(run: Run, what: str, generator: random.Random, whole: Reference) -> str | None:
    """Kill at a random moment; return the running jobs in words, or None if the run ended before."""
    if what == "a job":
        count = generator.randint(1, 3)
        seen: set[int] = set()
        while len(seen) < count:
            if run.process.poll() is not None:
                return None
            seen |= set(run.jobs())
            time.sleep(0.01)
        time.sleep(generator.expovariate(3))
        running = run.jobs()
        if not running:
            return None if run.wait() == 0 else "after its end"
        pid = generator.choice(sorted(running))
        if run.kill(pid) and run.wait() == 0:
            raise BrokenError(f"{running[pid]} was killed, but snakemake succeeded")
        return running[pid]
    time.sleep(generator.uniform(0, whole.seconds / 2))
    if run.process.poll() is not None:
        return None
    running = run.jobs()
    (run.kill_snakemake if what == "Snakemake alone" else run.kill_all)()
    return " and ".join(sorted(running.values())) or "no job"


def _wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise BrokenError("a process did not end")
        time.sleep(0.05)


def _wait_until_ended(study: FaultedStudy) -> None:
    _wait_until(lambda: not any(run.processes() for run in study.runs))


def _failed_rules(run: Run) -> str:
    # The terminal shows messages of rules, not their names; a log is named by its rule.
    names = set(re.findall(r"^log: .*?logs/(\w+)", run.said(), re.MULTILINE))
    return " and ".join(sorted(names)) or "Snakemake"


def _refuse_traceback(run: Run) -> None:
    """Raise BrokenError if the terminal shows a traceback of this package."""
    said = run.said()
    if "Traceback" in said and "aqnpipe" in said.split("Traceback")[1]:
        raise BrokenError(f"a traceback: {said}")


def page(rows: list[dict[str, Any]], seconds: float) -> str:
    """Return the tally as Markdown."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for row in rows:
        for fault, where in row["faults"]:
            counts[fault][where] += 1
    total = sum(places.total() for places in counts.values())
    wrong = [row for row in rows if row["wrong"]]
    lost = collections.Counter(
        fault for row in wrong for fault in {fault for fault, _ in row["faults"]} or {row["kind"]}
    )
    outcome = (
        "After each fault `snakemake`, without any argument, succeeded. The results had the same files with the same\n"
        "bytes as those of an undisturbed study."
        if not wrong
        else f"{len(wrong)} studies did not end as they should: {', '.join(str(row['seed']) for row in wrong)}."
    )
    table = "".join(
        f"| {fault} | {places.total()} | {places.total() - lost[fault]} | {lost[fault]} | {DETECTED[fault]} | "
        f"{', '.join(f'{where} {number}' for where, number in sorted(places.items()))} |\n"
        for fault, places in sorted(counts.items())
    )
    kinds = ", ".join(f"{kind} {number}" for kind, number in collections.Counter(row["kind"] for row in rows).items())
    return f"""# Faults of the machine

`make faults MINUTES=60`: {total} faults in {len(rows)} whole studies
(every rule of the workflow; {seconds:.0f} s undisturbed). {outcome}

Studies: {kinds}. The command continues from the contents of its folder, so a longer run adds to this tally.

| fault | tried | detected | lost | detected by | running job, or place, and times |
|---|---|---|---|---|---|
{table}
Lost are studies that did not end with the bytes of the undisturbed one. A fault that was not detected counts as lost.

Snakemake and its jobs are separate processes, started by the usual commands, but forked from a process that has
already imported the libraries (`tests/support/warm_python.py`); otherwise imports would take most of the time.
`--cold` compares the bytes with those of a study without this shortcut. Where Snakemake was killed alone, its jobs
continued as orphans, half of the time beside those of the next Snakemake; the last `snakemake` started when they
had ended. A run during which the clock goes back may fail, because Snakemake refuses outputs that are older than
their inputs; the next one, with the right clock, must not. All results are compared except logs, Snakemake's
benchmarks and the section of the page that shows these.

A single run of training was killed 300 times at chosen calls and at random times, in mid-step too, and none was lost
([kill trials](../benchmarks/kill_trials.md)). By hand, once, on 2026-11-28: SIGKILL of Snakemake, a
training with rollouts on vLLM, its engine and the engine's worker (8 processes) in mid-step; the next `snakemake`
resumed the run, and 15 of 15 files were equal.

Tests try these, and are counted above only where they ran with `AQNPIPE_FAULTS_TALLY=FOLDER/tally.jsonl`.
`tests/runtime/test_training.py`: SIGKILL of one worker, of the launch, and of the whole tree of a training with two
workers in mid-step. `tests/workflow/test_slurm.py`, the profile for Ascend on a real Slurm on one machine with fake
devices: a cancelled job whose node is drained, controller and node daemon killed, a node cut off, preemption, the time
limit, Ctrl-C, and Snakemake killed while its job lives; the results have the bytes of an undisturbed study with the
other profile.

Not tried: a power cut, which loses what is not yet on the disk (training flushes its resume points, damage to other
artifacts is found by their checksums), and several machines at once.
"""


if __name__ == "__main__":
    sys.exit(main())
