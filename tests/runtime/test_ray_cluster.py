"""Messages when Ray does not start; running clusters are tested with training and evaluation."""

import pytest

from aqnpipe.device import Device
from aqnpipe.errors import WorkerError
from aqnpipe.runtime.ray_cluster import ray_cluster

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


def test_a_mistake_of_ours_keeps_its_traceback(monkeypatch, tmp_path):
    def fail(**_):
        raise TypeError("unknown argument")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.init", fail)
    with pytest.raises(TypeError), ray_cluster(CPU, 1, "workers", tmp_path):
        raise AssertionError("the body ran without a cluster")
