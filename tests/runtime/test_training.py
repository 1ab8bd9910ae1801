"""Training with two CPU workers on Ray: the result of a single worker, reproducible bytes, clean ends.

Ray takes about ten seconds to start, so most tests share a cluster of two nodes and the runs on it. The others start a
private cluster.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest
from faulted_study import tally
from pydantic import ValidationError
from ray_nodes import descendants, two_ray_nodes
from safetensors.torch import load_file
from small_disk import mounted_small_disk
from tiny_training import write_builtin_inputs

from aqnpipe.artifacts.files import read_json, read_table
from aqnpipe.artifacts.provenance import sha256_of_file
from aqnpipe.artifacts.runs import TrainingMetrics
from aqnpipe.config.run import TrainingSpec
from aqnpipe.errors import DeviceError, StorageError, TrainingError, WorkerError
from aqnpipe.noise.receipts.receipt import Receipt, RecorderState
from aqnpipe.runtime import training
from aqnpipe.runtime.training import launch_workers, run_training_job
from aqnpipe.training.resume import RankState
from aqnpipe.training.run import run_worker
from aqnpipe.training.workspace import Workspace

NOISE = {"operators": "matmul", "error": {"kind": "relative_gaussian", "scale": 0.05}}
AQN = {"schedule": {"kind": "linear", "sigma_start": 0.05, "sigma_end": 0.01}}
SETTINGS = {
    "epochs": 1,
    "prompts_per_step": 4,
    "rollouts_per_prompt": 4,
    "micro_batch_size": 4,
    "learning_rate": 1e-4,
    "max_response_tokens": 24,
    "checkpoint_every": 2,
    "resume_every": 1,
    "validation_questions": 5,
    "num_workers": 2,
}


def spec(noisy=False, **training):
    return TrainingSpec(
        model_role="base",
        arm_id="test",
        arm={"description": "", "operator_noise": NOISE if noisy else None, "aqn": AQN if noisy else None},
        seed=0,
        num_steps=3,
        device="cpu",
        dtype="float32",
        attention="eager",
        prompt={},
        training={**SETTINGS, **training},
    )


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return write_builtin_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def cluster():
    with two_ray_nodes() as nodes:
        yield nodes


@pytest.fixture(scope="module")
def finished(cluster, inputs, tmp_path_factory):
    """Return a function that maps a name to the folder and messages of a finished run; each run is made once.

    Beside the noisy run are its resume points, which a finished run does not keep.
    """
    folder = tmp_path_factory.mktemp("runs")
    requested = {"one": spec(num_workers=1), "two": spec(), "noisy": spec(noisy=True)}
    kept = {}

    def launch(*arguments):
        launch_workers(*arguments)
        shutil.copytree(arguments[2].resume, folder / "noisy" / "resume")

    def get(name):
        if name not in kept:
            said, run = [], folder / name / "run"
            with mock.patch.object(training, "launch_workers", launch if name == "noisy" else launch_workers):
                run_training_job(requested[name], inputs, run, folder / name / "scratch", said.append)
            kept[name] = run, said
        return kept[name]

    return get


def metrics_of(run):
    return read_table(run / "metrics.parquet", TrainingMetrics)


def digests(run):
    return {str(path.relative_to(run)): sha256_of_file(path) for path in run.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_two_workers_learn_what_one_does(finished):
    """Draws are keyed by the row in the whole batch, so the rollouts are the same; the loss agrees to 6 decimals.

    Only the order of sums differs. A step of Adam moves weights by at most learning_rate, and by far less where only
    the last digits of a gradient change.
    """
    (single, _), (double, said) = finished("one"), finished("two")
    alone, together = metrics_of(single), metrics_of(double)
    assert together["reward_mean"].n_unique() > 1
    assert (alone["loss"].abs() > 1e-3).any()
    for column in ("reward_mean", "reward_std", "response_tokens_mean", "truncated_fraction", "validation_accuracy"):
        assert alone[column].to_list() == together[column].to_list(), column
    for column, bound in (("loss", 1e-6), ("grad_norm", 1e-4)):
        assert (alone[column] - together[column]).abs().max() < bound, column
    weights = [load_file(run / "checkpoints" / "step3" / "model.safetensors") for run in (single, double)]
    assert max((weights[0][name] - weights[1][name]).abs().max() for name in weights[0]) < 3 * 1e-4 / 4
    assert said[0] == f"base/test seed 0: 2 workers, on {socket.gethostname()}"
    lines = [line.partition(" reward")[0] for line in said[1:]]
    assert lines == [f"base/test seed 0: step {step}/3" for step in (1, 2, 3)], "one of the workers speaks"


@pytest.mark.slow
def test_the_receipt_is_of_both_workers(finished):
    runs = [finished(name)[0] for name in ("one", "two", "noisy")]
    alone, together, noised = (read_json(run / "receipt.json", Receipt).check() for run in runs)
    assert (alone.num_workers, together.num_workers, noised.num_workers) == (1, 2, 2)
    passes = [{record.phase: record.passes for record in receipt.phases} for receipt in (alone, together)]
    for phase in ("reference", "actor_forward", "backward"):
        assert passes[0][phase] == passes[1][phase] == 3 * 4
    scale, elements = noised.measured_scale("actor_forward")
    assert abs(scale / 0.05 - 1) < 5 / (2 * elements) ** 0.5
    assert [sync.step for sync in noised.weight_syncs] == [0, 1, 2]


@pytest.mark.slow
def test_workers_draw_noise_of_their_own(finished):
    """With equal noise both workers would measure the same squared errors."""
    noisy, _ = finished("noisy")
    last = max(noisy.parent.glob("resume/step*"))
    saved = [RankState.model_validate_json(path.read_bytes()) for path in sorted(last.glob("rank*.json"))]
    states = [RecorderState.model_validate_json(each.receipt) for each in saved]
    squares = [[row.squares for row in state.rows if row.error] for state in states]
    assert len(squares) == 2
    assert all(first != second for first, second in zip(*squares, strict=True))


SCRIPT = """
import sys
from pathlib import Path
from aqnpipe.config.run import TrainingSpec
from aqnpipe.errors import AqnpipeError
from aqnpipe.training.run import TrainingInputs
from aqnpipe.runtime.training import run_training_job

if __name__ == "__main__":
    spec, folder, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    inputs = TrainingInputs(folder / "model", folder / "train.parquet", folder / "test.parquet")
    try:
        run_training_job(TrainingSpec.model_validate_json(spec), inputs, out / "run", out / "scratch", print)
    except AqnpipeError as error:
        sys.exit(f"ERROR: {error}")
"""


class Launch:
    """A training job in a process of its own, on a private cluster."""

    def __init__(self, inputs, out):
        out.mkdir(exist_ok=True)
        script = out / "launch.py"
        script.write_text(textwrap.dedent(SCRIPT))
        own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self.log = out / "log"
        self._resume_points = out / "scratch"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-u", script, spec(noisy=True).model_dump_json(), inputs.model.parent, out],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=own,
                cwd=out,
            )

    def wait_for_step(self, step, timeout=900):
        """Wait until the resume point after `step` exists; return the commands of all descendants by process id."""
        return self.wait_until(lambda: list(self._resume_points.glob(f"*/resume/step{step}")), timeout)

    def wait_until(self, condition, timeout=900):
        """Wait for a condition; return the commands of all descendants by process id."""
        until = time.monotonic() + timeout
        while not condition():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < until, self.log.read_text()
            time.sleep(0.05)
        return descendants(self.process.pid)


def wait_until_gone(pids, timeout=90):
    until = time.monotonic() + timeout
    while alive := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < until, f"processes left: {alive}"
        time.sleep(0.2)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow
def test_killed_workers_and_a_killed_launch_leave_nothing_behind_and_end_in_the_same_bytes(finished, inputs, tmp_path):
    """So the same run twice, undisturbed, gives the same bytes too."""
    out = tmp_path / "killed"
    launch = Launch(inputs, out)
    below = launch.wait_for_step(1)
    worker = max(pid for pid, command in below.items() if "RayTrainWorker" in command)
    os.kill(worker, signal.SIGKILL)
    assert launch.process.wait(timeout=300) == 1
    assert (
        "memory is one possible cause), so all were ended; the same command continues"
        in launch.log.read_text().splitlines()[-1]
    )
    wait_until_gone(below)

    # The whole tree at once in the midst of step 3: launch, Ray's processes and both workers.
    launch = Launch(inputs, out)
    below = launch.wait_until(lambda: "step 2/3" in launch.log.read_text())
    for pid in (launch.process.pid, *below):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert sum("RayTrainWorker" in command for command in below.values()) == 2
    assert launch.process.wait() == -signal.SIGKILL
    wait_until_gone(below)
    assert "resuming after step 1" in launch.log.read_text()
    assert "step 3/3" not in launch.log.read_text()
    assert not list(out.glob("scratch/*/resume/step2"))

    launch = Launch(inputs, out)
    below = launch.wait_for_step(2)
    launch.process.kill()
    launch.process.wait()
    wait_until_gone(below)
    assert "resuming after step 1" in launch.log.read_text()

    said = []
    run_training_job(spec(noisy=True), inputs, out / "run", out / "scratch", said.append)
    assert "resuming after step 2" in said[0]
    assert digests(out / "run") == digests(finished("noisy")[0])
    tally(
        "workers",
        ("SIGKILL of a worker of a training", "after step 1"),
        ("SIGKILL of the launch of a training with workers", "after step 2"),
        ("SIGKILL of a whole training with workers in mid-step", "in step 3"),
    )


@pytest.mark.parametrize("cause", ["dead", "refused", "bug"])
def test_an_error_that_follows_from_a_lost_worker_does_not_hide_the_cause(tmp_path, cause):
    train, health = pytest.importorskip("ray.train"), pytest.importorskip("ray.train.v2._internal.exceptions")
    lost = RuntimeError("Connection closed by peer")
    other = {
        "dead": health.WorkerHealthCheckFailedError("dead", RuntimeError("it died")),
        "refused": TrainingError("grad_norm is not finite"),
        "bug": KeyError("a bug"),
    }[cause]
    error = train.WorkerGroupError("failed", {0: lost, 1: other})
    setup = training._WorkerSetup(spec(), None, workspace(tmp_path), None)
    with pytest.raises(Exception) as raised:  # noqa: PT011 # which one is asserted below
        training._raise_cause(error, setup)
    if cause == "dead":
        assert isinstance(raised.value, WorkerError)
        assert "worker 1 of 2" in str(raised.value)
    else:
        assert raised.value is (error if cause == "bug" else other)


def test_a_worker_that_lost_a_peer_holds_its_error_back(tmp_path, monkeypatch):
    slept = []

    def fail(*_):
        raise RuntimeError("gone")

    monkeypatch.setattr(training, "run_worker", fail)
    monkeypatch.setattr(training, "send_output_to", lambda path: None)
    monkeypatch.setattr(training.time, "sleep", slept.append)
    monkeypatch.setattr(training.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(training.distributed, "get_rank", lambda: 1)
    setup = training._WorkerSetup(spec(), None, workspace(tmp_path), None)
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(RuntimeError, match="gone"):
        training._ray_worker({"setup": setup})
    assert slept == [training._SECONDS_TO_DETECT_DEATH]


@pytest.mark.slow
def test_an_error_of_a_worker_comes_out_as_one_line_here_of_a_full_disk(cluster, inputs, tmp_path):
    weights = (inputs.model / "model.safetensors").stat().st_size
    with mounted_small_disk(tmp_path / "disk", f"{weights // 2}") as disk:
        message = r"^no space left on device for \S+; free some and start again, the last resume point is kept$"
        with pytest.raises(StorageError, match=message) as refused:
            run_training_job(spec(), inputs, disk / "run", disk / "scratch", lambda _: None)
        assert "\n" not in str(refused.value)
        assert not list(disk.glob("scratch/*/resume/.step*")), "a resume point that was not finished"


@pytest.mark.slow
def test_more_workers_than_the_cluster_has_devices_are_refused(cluster, inputs, tmp_path):
    with pytest.raises(DeviceError, match=r"num_workers is 4, found 2 CPU cores in the Ray cluster"):
        launch_workers(spec(num_workers=4), inputs, workspace(tmp_path), None)


def test_more_workers_than_this_machine_has_devices_are_refused(inputs, tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    with pytest.raises(DeviceError, match=r"num_workers is 2, found 1 CPU cores on this machine"):
        launch_workers(spec(), inputs, workspace(tmp_path), None)


def test_a_run_with_fewer_workers_than_requested_is_refused(inputs, tmp_path):
    """As if a launcher had silently started a single process."""
    with pytest.raises(WorkerError, match=r"1 workers train, training\.num_workers is 2"):
        run_worker(spec(), inputs, workspace(tmp_path), None)


def test_shares_that_do_not_come_out_even_are_refused():
    with pytest.raises(ValidationError, match="num_workers 3 must divide prompts_per_step 4: the rollouts"):
        spec(num_workers=3)
    with pytest.raises(ValidationError, match=r"micro_batch_size 3 must divide .*/num_workers 2 = 8"):
        spec(micro_batch_size=3)


def test_a_worker_without_questions_to_validate_on_is_refused():
    with pytest.raises(ValidationError, match="validation_questions 1 must be at least num_workers 2"):
        spec(validation_questions=1)


def workspace(folder):
    made = Workspace(folder / "scratch" / "key")
    made.run.mkdir(parents=True)
    return made
