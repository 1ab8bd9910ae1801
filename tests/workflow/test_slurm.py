"""Both cluster profiles on a real Slurm of three nodes on this machine: where jobs run, and what disturbs them.

The devices are fakes and the study computes on the CPU, so the bytes must be the same on any node, disturbed or not.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from faulted_study import tally
from filelock import FileLock
from replacing import replace_in, substituted

import aqnpipe

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "tests" / "cluster" / "slurm_on_one_machine.py"
SNAKEMAKE = ROOT / "tests" / "support" / "prompt_snakemake.py"
RESULTS = Path("results/cluster")
SECONDS = 1800
"""Longest wait for anything; a loaded machine takes minutes for what an idle one does in seconds."""


def cluster(*arguments):
    return subprocess.run(
        [sys.executable, CLUSTER, *arguments], check=True, stdout=subprocess.PIPE, text=True, timeout=120
    ).stdout.strip()


def slurm(*command):
    """Ask Slurm, up to three times: where its daemon is busy and closes the connection, SIGPIPE ends the client."""
    for _ in range(3):
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
        if done.returncode != -signal.SIGPIPE:
            break
        time.sleep(1)
    done.check_returncode()
    return done.stdout


def wait_for(what, condition):
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.3)
    pytest.fail(f"waited {SECONDS} s for {what}")


class Run:
    """A copy of `source` in which Snakemake runs the study of the cluster tests."""

    def __init__(self, source, folder, profile, site=None):
        self.folder, self.profile = folder, profile
        shutil.copytree(source, folder, symlinks=True, dirs_exist_ok=True)
        path = folder / "profiles" / profile / "config.yaml"
        text = path.read_text()
        for key, value in (site or {}).items():
            text = substituted(text, rf"(?m)^  {key}: \S+", f"  {key}: {value}")
        path.write_text(text)
        self.log = folder / "snakemake.log"
        self.process = None
        self.step_seen = 0

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def start(self, *arguments):
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, SNAKEMAKE, "--profile", self.profile, "--configfile", "study.yaml"),
                    *("--slurm-init-seconds-before-status-checks", "1", "--latency-wait", "10", *arguments),
                ],
                cwd=self.folder,
                env={**os.environ, "PYTHONPATH": str(self.folder / "src"), "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def end(self):
        """Wait for Snakemake; returns its exit code."""
        return self.process.wait(timeout=SECONDS)

    def text(self):
        return self.log.read_text()

    def jobs(self, rule):
        """Slurm jobs of a rule that are not over: (id, state, node)."""
        lines = slurm("squeue", "--noheader", "--format=%i|%T|%N|%k|%Z").splitlines()
        found = [line.split("|") for line in lines]
        return [
            (job, state, node)
            for job, state, node, comment, folder in found
            if comment.startswith(f"rule_{rule}_") and folder == str(self.folder)
        ]

    def training(self, after=()):
        """Id of a running training job that has written a resume point of its own since the last call; else None.

        With `after`, the ids of earlier jobs, it must be another one that goes on where they were.
        """
        log = self.train_log()
        resumed = re.search(r"resuming after step (\d+)", log)
        running = [job for job, state, _ in self.jobs("train") if state == "RUNNING" and f"Slurm job {job}\n" in log]
        if not running or running[0] in after or (after and not resumed):
            return None
        points = self.folder.glob(f"{RESULTS}/scratch/*/*/resume/step*")
        step = max((int(path.name[4:]) for path in points), default=0)
        if step <= max(self.step_seen, int(resumed[1]) if resumed else 0):
            return None
        self.step_seen = step
        return running[0]

    def trainer(self):
        """Process id of the training that holds the run's lock."""
        return json.loads((self.folder / RESULTS / "scratch" / "base_baseline_seed0" / "lock").read_text())["pid"]

    def training_again(self, ended):
        """As `training`, once another process than `ended` has resumed; until then the log and points are old."""
        has_resumed = self.trainer() != ended and "resuming after step" in self.train_log()
        return self.training() if has_resumed else None

    def train_log(self):
        path = self.folder / RESULTS / "logs" / "train" / "base_baseline_seed0.log"
        return path.read_text() if path.exists() else ""

    def places(self):
        """Per rule the (kind of node, number of devices) of its jobs, as the jobs wrote it in their logs."""
        found = {}
        for path in (self.folder / RESULTS / "logs").rglob("*.log"):
            rule = path.parent.name if path.parent.name != "logs" else path.stem
            node, in_slurm = re.match(r"node (\S+?)(, Slurm job \d+)?\n", path.read_text()).groups()
            given = re.search(r"devices given: (\w+)=(\S+)\n", path.read_text())
            devices = (given[1], len(given[2].split(","))) if given else None
            found.setdefault(rule, set()).add((node.rstrip("0123456789") if in_slurm else "here", devices))
        return found

    def artifacts(self):
        """Bytes of all results by path; logs, times (the page's costs too) and workspaces are none."""
        results = self.folder / RESULTS
        files = (path.relative_to(results) for path in results.rglob("*") if path.is_file())
        found = {
            str(path): (results / path).read_bytes()
            for path in files
            if path.parts[0] not in ("logs", "benchmarks", "jobs", "scratch") and not path.name.startswith(".")
        }
        found["report.html"] = substituted(found["report.html"], rb'(?s)<section id="costs">.*?</section>', b"")
        return found


@pytest.fixture(scope="module")
def slurm_here(shared_folder):
    """Slurm with two GPU nodes and an NPU node, for the tests of this file; one test process at a time has it."""
    reason = cluster("why-not")
    if reason:
        pytest.skip(f"no Slurm on this machine: {reason}")
    with FileLock(shared_folder / "slurm.lock"):
        cluster("start")
        yield
        cluster("stop")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of the pipeline, from which all runs are made: the sources may be edited meanwhile."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("config", "workflow", "profiles"):
        shutil.copytree(ROOT / name, folder / name)
    for name in ("Snakefile", "a100", "ascend", "tests/cluster/study.yaml"):
        shutil.copy(ROOT / name, folder, follow_symlinks=False)
    package = folder / "src" / "aqnpipe"
    shutil.copytree(Path(aqnpipe.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture(scope="module")
def started(slurm_here, source, tmp_path_factory):
    """The study on the GPU nodes, left alone; it runs while others are tested, as most of its time is waiting."""
    with Run(source, tmp_path_factory.mktemp("a100"), "a100", site={"train_devices": 4}) as run:
        run.start()
        yield run


@pytest.fixture(scope="module")
def undisturbed(started):
    """The study on the GPU nodes at its end."""
    assert started.end() == 0, started.text()
    return started


def test_a_run_over_two_nodes_is_stopped_before_its_limit_and_goes_on(started, source, tmp_path):
    with Run(source, tmp_path, "a100", site={"train_nodes": 2, "train_devices": 1}) as run:
        settings = "num_workers: 2\n  resume_every: 2\n  micro_batch_size: 4"
        replace_in(tmp_path / "study.yaml", ("micro_batch_size: 8", settings), ("epochs: 20", "epochs: 6"))
        receipt = f"{RESULTS}/runs/base/baseline/seed0/receipt.json"
        run.start(receipt)
        job = wait_for("training on two nodes", run.training)
        assert "base/baseline seed 0: 2 workers, on gpu01, gpu02\n" in run.train_log()
        slurm("scancel", "--signal=URG", job)  # to every process of the job, as before its limit
        wait_for("training to stop", lambda: "stopped by a signal" in run.train_log())
        assert run.end() == 0, run.text()
        assert "resuming after step" in run.train_log()
    assert json.loads((tmp_path / receipt).read_text())["num_workers"] == 2
    left = subprocess.run(["ps", "-eo", "args"], check=True, stdout=subprocess.PIPE, text=True).stdout
    assert str(tmp_path) not in left


def test_jobs_run_on_their_nodes_with_their_devices(undisturbed):
    places = undisturbed.places()
    for rule in ("prepare_data", "prepare_model", "generate_layer_sigmas"):
        assert places.pop(rule) == {("here", None)}
    for rule in ("compare", "report"):
        assert places.pop(rule) <= {("gpu", None), ("npu", None)}
    assert places == {
        "train": {("gpu", ("CUDA_VISIBLE_DEVICES", 4))},
        "evaluate": {("gpu", ("CUDA_VISIBLE_DEVICES", 1))},
        "srdd_diagnose": {("gpu", ("CUDA_VISIBLE_DEVICES", 1))},
    }
    assert "device: cpu (a rehearsal: the devices given are not used)" in undisturbed.train_log()
    assert re.match("node gpu0[12], Slurm job ", undisturbed.train_log())
    assert not socket.gethostname().startswith(("gpu", "npu"))


def test_a_study_disturbed_in_every_way_ends_with_the_same_bytes(source, undisturbed, tmp_path):
    with Run(source, tmp_path, "ascend", site={"train_devices": 4}) as run:
        disturb(run)
    places = run.places()
    assert places["train"] == {("npu", ("ASCEND_RT_VISIBLE_DEVICES", 4))}
    assert places["evaluate"] == places["srdd_diagnose"] == {("npu", ("ASCEND_RT_VISIBLE_DEVICES", 1))}
    ours, theirs = run.artifacts(), undisturbed.artifacts()
    assert {name for name in ours | theirs if ours.get(name) != theirs.get(name)} == set()
    assert not run.jobs("")
    tally(
        "Slurm",
        ("Slurm: job cancelled, its node drained", "train"),
        ("Slurm: controller and node daemon killed", "train"),
        ("Slurm: node cut off", "train"),
        ("Slurm: preempted", "train"),
        ("Slurm: time limit", "train"),
        ("Slurm: Ctrl-C", "train"),
        ("Slurm: Snakemake killed, its job alive", "train"),
    )


def disturb(run):
    """Run the study to its end, with everything going wrong that goes wrong on clusters."""
    run.start()
    seen = [wait_for("the first training job", run.training)]

    # The node is drained and the job cancelled: the retry waits for the node.
    slurm("scontrol", "update", "nodename=npu01", "state=drain", "reason=test")
    slurm("scancel", seen[0])
    wait_for("the retry in the queue", lambda: any(state == "PENDING" for _, state, _ in run.jobs("train")))
    slurm("scontrol", "update", "nodename=npu01", "state=resume")
    seen.append(wait_for("training on the node that is back", lambda: run.training(seen)))

    # Controller and node daemon die and come back: the job does not notice.
    cluster("kill", "slurmctld")
    cluster("kill", "npu01")
    cluster("revive", "slurmctld")
    cluster("revive", "npu01")
    assert wait_for("the same job after the restart", run.training) == seen[-1]

    # The node is cut off: Slurm queues the job again under its number, and on the node that is back it goes on.
    ended = run.trainer()
    os.kill(ended, signal.SIGSTOP)  # so that it is not done before
    cluster("kill", "npu01")
    wait_for("the job to be queued again", lambda: (seen[-1], "PENDING") in [job[:2] for job in run.jobs("train")])
    cluster("revive", "npu01")
    assert wait_for("training after the node was cut off", lambda: run.training_again(ended)) == seen[-1]

    # Preempted: Slurm ends it without asking, and queues it again under its number.
    ended = run.trainer()
    os.kill(ended, signal.SIGSTOP)  # so that it is not done before
    slurm("scontrol", "requeue", seen[-1])
    wait_for("the preempted job to be queued", lambda: (seen[-1], "PENDING") in [job[:2] for job in run.jobs("train")])
    assert wait_for("training after the preemption", lambda: run.training_again(ended)) == seen[-1]

    # Its time is nearly up: Slurm says so by SIGURG, training writes a resume point, and the retry goes on from there.
    os.kill(run.trainer(), signal.SIGSTOP)  # so that it is not done before; Slurm wakes it before it sends its signal
    slurm("scontrol", "update", f"jobid={seen[-1]}", f"timelimit={minutes_since_start(seen[-1]) + 5}")
    wait_for("training to stop before its limit", lambda: "stopped by a signal" in run.train_log())
    seen.append(wait_for("training after the time limit", lambda: run.training(seen)))

    # Ctrl-C: Snakemake cancels its jobs and ends.
    os.kill(run.trainer(), signal.SIGSTOP)  # so that it is not done before; Slurm wakes it before it ends it
    run.process.send_signal(signal.SIGINT)
    assert run.end() != 0
    wait_for("an empty queue", lambda: not run.jobs("train"))

    # Snakemake is killed: its job lives on, and a new start must not train the same run beside it.
    run.start()
    seen.append(wait_for("training after Ctrl-C", lambda: run.training(seen)))
    os.killpg(run.process.pid, signal.SIGKILL)
    run.end()
    trainer = run.trainer()
    os.kill(trainer, signal.SIGSTOP)
    assert [job for job, _, _ in run.jobs("train")] == [seen[-1]]
    run.start("--unlock")
    assert run.end() == 0, run.text()
    run.start()
    refused = "another process works on this run"
    wait_for("the second job to be refused", lambda: refused in run.text() or refused in run.train_log())
    os.kill(trainer, signal.SIGCONT)
    wait_for("the first job to end", lambda: seen[-1] not in [job for job, _, _ in run.jobs("train")])
    if run.end() != 0:  # every retry was refused while the first job worked
        run.start()
        assert run.end() == 0, run.text()


def minutes_since_start(job):
    """Minutes that a Slurm job has run for, rounded down."""
    return int(slurm("squeue", "--noheader", f"--jobs={job}", "--Format=TimeUsed:20").strip().split(":")[-2])
