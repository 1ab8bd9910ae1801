"""Messages when Ray does not start; running clusters are tested with training and evaluation."""

import pytest

import aqnpipe.runtime.ray_cluster as cluster
from aqnpipe.device import Device
from aqnpipe.errors import DeviceError, WorkerError
from aqnpipe.runtime.ray_cluster import how_it_ended, ray_cluster

CPU = Device("cpu", 1, ("cpu",))
SLOW = "The current node timed out during startup.\nThis could happen because"


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        (
            Exception(SLOW),
            r"Ray did not start on node \S+: The current node timed out during startup\. \(the machine may be",
        ),
        (
            ConnectionError("no cluster at 10.0.0.1:6379"),
            "no cluster at 10.0.0.1:6379 .*RAY_ADDRESS, if it is set, must name",
        ),
        (TimeoutError(), "Ray did not start on node .*: TimeoutError"),
    ],
    ids=["bare", "address", "silent"],
)
def test_a_ray_that_does_not_start_is_one_line_and_nothing_is_left(monkeypatch, tmp_path, raised, message):
    def fail(**_):
        raise raised

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.init", fail)
    with pytest.raises(WorkerError, match=message) as refused, ray_cluster(CPU, 1, "workers", tmp_path):
        raise AssertionError("the body ran without a cluster")
    assert "\n" not in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_an_actor_that_ray_ended_for_its_memory_is_not_called_killed():
    from ray.exceptions import ActorDiedError, OutOfMemoryError

    assert how_it_ended(OutOfMemoryError("1 worker(s) were killed")) == (
        "was ended by Ray, because the memory of its node was nearly full"
    )
    assert how_it_ended(ActorDiedError()) == (
        "died (crashed, or ended by a signal: if by SIGKILL, memory is one possible cause)"
    )


def test_an_actor_that_was_stopped_did_not_run_out_of_memory():
    """The error is as Ray words it."""
    from ray.exceptions import RayActorError

    cause = "Worker exits unexpectedly. Worker exits with an exit code 1. The process receives a SIGTERM."
    assert how_it_ended(RayActorError(error_msg=cause)) == "was stopped by SIGTERM"


def test_a_mistake_of_ours_keeps_its_traceback(monkeypatch, tmp_path):
    def fail(**_):
        raise TypeError("unknown argument")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.init", fail)
    with pytest.raises(TypeError), ray_cluster(CPU, 1, "workers", tmp_path):
        raise AssertionError("the body ran without a cluster")


def test_workers_with_several_devices_each_need_them_all(monkeypatch, tmp_path):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    three = Device("cuda", 3, ("GPU",) * 3)
    with (
        pytest.raises(
            DeviceError, match=r"workers is 2, found 3 cuda devices on this .*needs 2 \(generation\.tensor_par"
        ),
        ray_cluster(three, 2, "workers", tmp_path, devices_each=2),
    ):
        raise AssertionError("the body ran without devices")


@pytest.mark.parametrize(
    ("num_workers", "nodes", "offered"),
    [
        (4, (), {"num_cpus": 8, "num_gpus": 8}),
        (4, ("a", "b"), {"num_cpus": 4, "num_gpus": 4}),
        # An engine is on one node: three engines of two devices need four devices of one of two nodes.
        (3, ("a", "b"), {"num_cpus": 4, "num_gpus": 4}),
    ],
)
def test_every_node_offers_the_devices_of_whole_workers(monkeypatch, tmp_path, num_workers, nodes, offered):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(cluster, "nodes_of_job", lambda: nodes)
    asked = []

    def stop(arguments):
        asked.append(arguments)
        raise WorkerError("stopped here")

    monkeypatch.setattr(cluster, "_start_ray", stop)
    with (
        pytest.raises(WorkerError, match="stopped here"),
        ray_cluster(Device("cuda", 8, ("GPU",) * 8), num_workers, "workers", tmp_path, devices_each=2),
    ):
        raise AssertionError("the body ran without a cluster")
    assert {name: asked[0][name] for name in offered} == offered
