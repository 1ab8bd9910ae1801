"""Devices that a scheduler or a lease gives to a job."""

import os
import signal
import stat
import subprocess
import sys
import time

import pytest

from aqnpipe.errors import DeviceError
from aqnpipe.runtime import device_allocation as allocation
from aqnpipe.runtime.device_allocation import (
    Allocation,
    allocated_devices,
    current_allocation,
    devices_of_machine,
    environment_of_node,
    lease_devices,
    nodes_of_job,
    place_of_job,
    slurm_npu_ids,
)

# As Slurm 22.05 prints it.
ONE_NODE = """JobId=2 JobName=wrap
   JobState=RUNNING Reason=None Dependency=(null)
   NodeList=npu01
   JOB_GRES=npu:910c:4
     Nodes=npu01 CPU_IDs=60-63 Mem=100 GRES=npu:910c:4(IDX:0-2,5)
   TresPerNode=gres:npu:910c:4
"""
THREE_NODES = """JobId=3 JobName=wrap
   ReqNodeList=(null) ExcNodeList=npu11
   NodeList=npu[09-10],npu12
     Nodes=npu[09-10] CPU_IDs=63 Mem=100 GRES=npu:910c:2(IDX:6-7)
     Nodes=npu12 CPU_IDs=63 Mem=100 GRES=npu:910c:2(IDX:0,3)
"""

# Takes leases repeatedly. While it holds a device it marks it with a folder; a folder cannot be created twice.
COMPETITOR = """
import sys, time
from pathlib import Path
from aqnpipe.runtime.device_allocation import lease_devices
folder, count, rounds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
for _ in range(rounds):
    with lease_devices(folder / "leases", "cuda", ["0", "1", "2"], count, 0.002) as taken:
        assert len(set(taken)) == count
        for name in taken:
            (folder / f"in-use-{name}").mkdir()
        time.sleep(0.003)
        for name in taken:
            (folder / f"in-use-{name}").rmdir()
"""
HOLDER = """
import sys, time
from pathlib import Path
from aqnpipe.runtime.device_allocation import lease_devices
with lease_devices(Path(sys.argv[1]), "npu", ["4", "5"], 2, 0.01) as taken:
    print(*taken, flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def bare(monkeypatch, tmp_path):
    for name in ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "SLURM_JOB_ID", "SLURMD_NODENAME"):
        monkeypatch.setenv(name, "")  # so that monkeypatch restores it after the test
        monkeypatch.delenv(name)
    monkeypatch.setattr(allocation, "LEASES", tmp_path / "leases")
    monkeypatch.setattr(allocation, "_ids_in_dev", lambda kind: ())


@pytest.fixture
def in_slurm(monkeypatch, tmp_path):
    """Return a function that fakes a Slurm job whose `scontrol` prints the given text."""

    def enter(details, node="npu01", code=0):
        script = tmp_path / "scontrol"
        script.write_text(f"#!/bin/sh\necho 'slurm: no such job' >&2\ncat <<'EOF'\n{details}EOF\nexit {code}\n")
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        monkeypatch.setenv("SLURM_JOB_ID", "2")
        monkeypatch.setenv("SLURMD_NODENAME", node)

    return enter


def test_nodes_are_those_of_the_job_and_each_has_devices_of_its_own(in_slurm):
    assert nodes_of_job() == ()
    in_slurm(THREE_NODES, node="npu09")
    assert nodes_of_job() == ("npu09", "npu10", "npu12")
    assert environment_of_node("npu12") == {"ASCEND_RT_VISIBLE_DEVICES": "0,3"}
    in_slurm("JobId=4\n   NodeList=gpu01\n", node="gpu01")
    assert nodes_of_job() == ("gpu01",)
    assert environment_of_node("gpu01") == {}


def test_npu_ids_come_from_the_job_of_the_node():
    assert slurm_npu_ids(ONE_NODE, "npu01") == ("0", "1", "2", "5")
    assert slurm_npu_ids(THREE_NODES, "npu10") == ("6", "7")
    assert slurm_npu_ids(THREE_NODES, "npu12") == ("0", "3")
    assert slurm_npu_ids(THREE_NODES, "npu11") == ()
    assert slurm_npu_ids("Nodes=gpu01 CPU_IDs=0 Mem=0 GRES=gpu:a100:2(IDX:0-1)", "gpu01") == ()


def test_ascend_ids_of_a_slurm_job_are_set(in_slurm):
    in_slurm(ONE_NODE)
    found = current_allocation()
    assert found == Allocation("npu", ("0", "1", "2", "5"))
    assert str(found) == "devices given: ASCEND_RT_VISIBLE_DEVICES=0,1,2,5"
    assert place_of_job() == "node npu01, Slurm job 2"
    assert os.environ["ASCEND_RT_VISIBLE_DEVICES"] == "0,1,2,5"


def test_what_slurm_says_itself_is_taken(in_slurm, monkeypatch):
    in_slurm("", node="gpu01", code=1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert current_allocation() == Allocation("cuda", ("2", "3"))


def test_a_slurm_job_without_devices(in_slurm):
    in_slurm("   NodeList=gpu01\n", node="gpu01")
    assert str(current_allocation()) == "devices given: none"


def test_slurm_that_does_not_answer_is_an_error(in_slurm):
    in_slurm("", code=1)
    with pytest.raises(DeviceError, match="cannot query its devices: slurm: no such job; list them in"):
        current_allocation()


def test_a_lease_is_what_the_process_sees(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    with allocated_devices("cuda", 1) as first:
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "4"
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
        with allocated_devices("auto", 1) as second:
            assert (first.ids, second.ids) == (("4",), ("6",))
            assert str(second) == "devices leased: CUDA_VISIBLE_DEVICES=6"


def test_devices_are_found_in_dev_and_a_cpu_study_rehearses_with_them(monkeypatch):
    monkeypatch.setattr(allocation, "_ids_in_dev", lambda kind: ("0", "1") if kind == "cuda" else ())
    assert devices_of_machine("auto") == devices_of_machine("cpu") == devices_of_machine("cuda") == ("cuda", ("0", "1"))
    assert devices_of_machine("npu") == ("cpu", ())


def test_more_leases_than_devices_is_an_error():
    with (
        pytest.raises(DeviceError, match=r"gives 1 of this machine's devices to a job, found 0"),
        allocated_devices("auto", 1),
    ):
        pass


def test_in_an_allocation_of_slurm_jobs_lease_its_devices_only(in_slurm, monkeypatch):
    """`salloc --gres=gpu:2`, and there `snakemake --profile workstation`."""
    monkeypatch.setattr(allocation, "_ids_in_dev", lambda kind: ("0", "1", "2", "3"))
    in_slurm("", node="gpu01")
    with pytest.raises(DeviceError, match=r"found 0$"), allocated_devices("cuda", 1):
        pass
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert devices_of_machine("auto") == ("cuda", ("0", "1"))
    assert devices_of_machine("npu") == ("cpu", ())
    with (
        pytest.raises(DeviceError, match="3 of the devices of Slurm job 2 to a job, found 2"),
        allocated_devices("cuda", 3),
    ):
        pass
    with allocated_devices("cuda", 1) as first:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
        # Slurm numbers the devices of another job on this node from 0 as well.
        monkeypatch.setenv("SLURM_JOB_ID", "3")
        with allocated_devices("cuda", 2) as others:
            assert (first.ids, others.ids) == (("0",), ("0", "1"))


def test_jobs_at_once_in_an_allocation_do_not_share_a_device(in_slurm, monkeypatch):
    in_slurm("")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with allocated_devices("cuda") as first:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
        with allocated_devices("cuda") as second:
            assert (first.ids, second.ids) == (("0",), ("1",))


def test_a_study_on_the_cpu_needs_no_scontrol(monkeypatch, tmp_path):
    """Containers have none."""
    monkeypatch.setenv("SLURM_JOB_ID", "2")
    monkeypatch.setenv("PATH", str(tmp_path))
    with allocated_devices("cpu") as given:
        assert given == Allocation("cpu", ())
    with pytest.raises(DeviceError, match="list them in CUDA_VISIBLE_DEVICES"), allocated_devices("cuda"):
        pass


def test_an_empty_job_id_is_no_job(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "")
    assert nodes_of_job() == ()
    assert current_allocation() == Allocation("cpu", ())


def test_devices_of_a_container_are_counted_from_0(monkeypatch, tmp_path):
    monkeypatch.undo()
    for name in ("nvidia2", "nvidia10", "nvidiactl", "nvidia-uvm", "davinci_manager"):
        (tmp_path / name).touch()
    monkeypatch.setattr(allocation, "_DEV", tmp_path)
    assert allocation._ids_in_dev("cuda") == ("0", "1")
    assert allocation._ids_in_dev("npu") == ()


@pytest.fixture
def four_gpus(monkeypatch):
    """A machine without a scheduler and without a profile, whose torch is built for its four GPUs."""
    monkeypatch.setattr(allocation, "can_compute_on", lambda kind: kind == "cuda")
    monkeypatch.setattr(allocation, "_ids_in_dev", lambda kind: ("0", "1", "2", "3") if kind == "cuda" else ())


@pytest.mark.parametrize("requested", ["auto", "cuda"])
def test_without_a_profile_a_job_uses_one_device_of_several(four_gpus, requested):
    with allocated_devices(requested) as first:
        assert (first, os.environ["CUDA_VISIBLE_DEVICES"]) == (Allocation("cuda", ("0",), leased=True), "0")
        del os.environ["CUDA_VISIBLE_DEVICES"]  # as another job finds it
        with allocated_devices(requested) as second:
            assert second.ids == ("1",)


def test_without_a_profile_a_job_uses_a_device_per_worker(four_gpus):
    with allocated_devices("cuda", num_devices=2) as given:
        assert given.ids == ("0", "1")


def test_devices_that_the_user_excluded_are_not_used(four_gpus, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    with allocated_devices("auto") as given:
        assert given.ids == ("2",)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with allocated_devices("auto") as given:
        assert given.ids == ()


def test_one_device_is_shared_as_before_and_a_cpu_study_has_none(four_gpus, monkeypatch):
    with allocated_devices("cpu") as given:
        assert given == Allocation("cpu", ())
    monkeypatch.setattr(allocation, "_ids_in_dev", lambda kind: ("0",))
    with allocated_devices("cuda") as given:
        assert given == Allocation("cpu", ())
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_a_torch_for_the_cpu_leases_nothing(four_gpus, monkeypatch):
    monkeypatch.setattr(allocation, "can_compute_on", lambda kind: False)
    with allocated_devices("auto") as given:
        assert given == Allocation("cpu", ())


def test_a_slurm_job_with_one_worker_uses_its_first_device(in_slurm, monkeypatch):
    in_slurm("")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with allocated_devices("cuda", num_devices=2) as given:
        assert given.ids == ("4", "5")
    with allocated_devices("cuda") as given:
        assert (given.ids, os.environ["CUDA_VISIBLE_DEVICES"]) == (("4",), "4")


def test_jobs_that_compete_never_share_a_device(tmp_path):
    jobs = [
        subprocess.Popen([sys.executable, "-c", COMPETITOR, str(tmp_path), str(count), "25"])
        for count in (1, 1, 2, 2, 3, 1)
    ]
    assert [job.wait(timeout=60) for job in jobs] == [0] * len(jobs)
    assert sorted(path.name for path in (tmp_path / "leases").iterdir()) == [f"cuda-{i}.lock" for i in range(3)]


def test_a_killed_job_frees_its_devices(tmp_path):
    job = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert job.stdout.readline().split() == ["4", "5"]
    os.kill(job.pid, signal.SIGKILL)
    started = time.monotonic()
    with lease_devices(tmp_path, "npu", ["4", "5"], 2, 0.01) as taken:
        assert taken == ("4", "5")
    assert time.monotonic() - started < 10
    job.wait()


def test_held_devices_are_passed_over_and_kinds_do_not_mix(tmp_path):
    with lease_devices(tmp_path, "cuda", ["0", "1"], 1, 0.01) as first:
        with lease_devices(tmp_path, "cuda", ["0", "1"], 1, 0.01) as second:
            assert (first, second) == (("0",), ("1",))
        with lease_devices(tmp_path, "npu", ["0"], 1, 0.01) as other:
            assert other == ("0",)
    with lease_devices(tmp_path, "cuda", ["0", "1"], 2, 0.01) as both:
        assert both == ("0", "1")


def test_a_folder_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(DeviceError, match=r"cuda-0\.lock: cannot be opened as a lock file"),
        lease_devices(tmp_path / "file", "cuda", ["0"], 1, 0.01),
    ):
        pass
