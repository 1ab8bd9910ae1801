"""The evaluate stage on Ray actors: the same bytes as in one process, whichever actor runs a shard or dies.

Ray takes about ten seconds to start, so most tests share a cluster of two nodes; one test starts a private cluster.
"""

import os
import signal
import sys

import polars as pl
import pytest
from ray_nodes import descendants, two_ray_nodes
from tiny_evaluation import evaluation_spec

from aqnpipe.artifacts.evaluations import EvaluationTable
from aqnpipe.artifacts.files import read_table, write_table
from aqnpipe.artifacts.problems import ProblemTable
from aqnpipe.artifacts.provenance import sha256_of_file
from aqnpipe.artifacts.runs import StageFiles
from aqnpipe.errors import DeviceError, ModelError, WorkerError
from aqnpipe.evaluation.stage import evaluate
from aqnpipe.generation.vllm.plugin import is_vllm_installed
from aqnpipe.runtime.evaluation_workers import evaluation_runner

NUM_QUESTIONS = 8


@pytest.fixture(scope="module")
def model_dir(save_model):
    return save_model(num_layers=2)


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "test.parquet"
    table = pl.DataFrame(
        {
            "question_id": [f"test-{i}" for i in range(NUM_QUESTIONS)],
            "question": ["What is 1 plus 1 ?" + " More words ." * i for i in range(NUM_QUESTIONS)],
            "answer": ["#### 2"] * NUM_QUESTIONS,
            "gold_answer": ["2"] * NUM_QUESTIONS,
        }
    )
    write_table(path, table, ProblemTable)
    return path


@pytest.fixture(scope="module")
def cluster():
    with two_ray_nodes() as nodes:
        yield nodes


def spec(**changes):
    """Two samples of two passes in batches of two: 16 shards."""
    faults = ({"type": "dead_zone", "layer": 0, "magnitude": 0.1},)
    return evaluation_spec({"max_response_tokens": 5}, **({"faults": faults} | changes))


def outputs(folder):
    return StageFiles(folder / "t.parquet", folder / "t.receipt.json", folder / "t.run.json")


def run(folder, model_dir, problems, workers, say=lambda _: None, **changes):
    folder.mkdir(exist_ok=True)
    runner = evaluation_runner(workers, folder / "t.workers", say)
    evaluate(spec(**changes), model_dir, problems, outputs(folder), say, open_runner=runner)
    return digests(folder)


def digests(folder):
    """Digests of all files in the folder, which show that nothing is left beside the three outputs."""
    return {path.name: sha256_of_file(path) for path in folder.iterdir()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory, model_dir, problems):
    return run(tmp_path_factory.mktemp("alone"), model_dir, problems, workers=1)


def actor_processes(of):
    """Return the process ids of the actors below a process."""
    return [pid for pid, command in descendants(of).items() if "EvaluationActor" in command]


def test_one_worker_needs_no_ray(tmp_path, model_dir, problems, alone, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert run(tmp_path, model_dir, problems, workers=1) == alone


@pytest.mark.slow
def test_two_actors_on_two_nodes_give_the_same_bytes(tmp_path, model_dir, problems, alone, cluster):
    assert run(tmp_path, model_dir, problems, workers=2) == alone


@pytest.mark.slow
def test_when_all_actors_die_the_stage_fails_and_writes_nothing(tmp_path, model_dir, problems, cluster):
    def say(line):
        if line.startswith("2 evaluation workers"):
            for process in actor_processes(os.getpid()):
                os.kill(process, signal.SIGKILL)

    with pytest.raises(WorkerError, match=r"16 of 16 shards are not done; the same command continues") as raised:
        run(tmp_path, model_dir, problems, workers=2, say=say)
    assert str(raised.value).startswith("no evaluation worker of 2 is left, the last one died (crashed, or ended")
    assert [path.name for path in tmp_path.iterdir()] == ["t.workers"]


@pytest.mark.slow
@pytest.mark.skipif(is_vllm_installed(), reason="vLLM is installed here")
def test_an_error_of_an_actor_comes_out_as_it_is(tmp_path, model_dir, problems, cluster):
    with pytest.raises(ModelError, match=r"vllm was requested but is not installed here"):
        run(tmp_path, model_dir, problems, workers=2, generation={"backend": "vllm"}, attention="sdpa")


@pytest.mark.slow
def test_more_workers_than_the_cluster_has_devices_are_refused(tmp_path, model_dir, problems, cluster):
    with pytest.raises(DeviceError, match=r"workers of rule evaluate is 3, found 2 CPU cores in the Ray cluster"):
        run(tmp_path, model_dir, problems, workers=3)


def test_more_workers_than_this_machine_has_devices_are_refused(tmp_path, model_dir, problems, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    with pytest.raises(DeviceError, match=r"workers of rule evaluate is 2, found 1 CPU cores on this machine"):
        run(tmp_path, model_dir, problems, workers=2)


@pytest.mark.slow
def test_a_killed_actors_work_is_done_by_the_other_on_a_cluster_of_its_own(
    tmp_path, model_dir, problems, alone, monkeypatch
):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    said, killed, addresses = [], [], set()

    def say(line):
        said.append(line)
        if not killed:
            import ray

            addresses.update(node["NodeManagerAddress"] for node in ray.nodes())
            killed.extend(actor_processes(os.getpid())[:1])
            os.kill(killed[0], signal.SIGKILL)

    assert run(tmp_path, model_dir, problems, workers=2, say=say) == alone
    assert "evaluation worker" in said[1]
    assert "memory is one possible cause): the others run its shard again" in said[1]
    assert len(read_table(outputs(tmp_path).table, EvaluationTable)) == 2 * 2 * NUM_QUESTIONS
    assert addresses == {"127.0.0.1"}
