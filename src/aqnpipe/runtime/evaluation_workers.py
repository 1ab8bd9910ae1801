"""The workers of evaluations, each with its own engine and devices, and all evaluations of a run in one job.

Several workers are Ray actors, `EvaluationActor` with JSON as arguments and results. Which actor runs which shard
depends on timing and does not affect the results (see `evaluation.shards`). If an actor dies, another one runs its
shard again. A job for a whole run starts its workers once; every checkpoint is evaluated by `evaluation.stage.evaluate`
as in a job of its own, so the files are the same bytes. They wait in the run's scratch folder until all are done,
because Snakemake deletes the outputs of a job that fails: the next attempt takes over what is there and verified.
"""

import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from aqnpipe.artifacts.provenance import code_digest
from aqnpipe.artifacts.runs import StageFiles
from aqnpipe.config.run import EvaluationSpec
from aqnpipe.device import Device, RequestedDevice, resolve_device
from aqnpipe.errors import AqnpipeError, WorkerError
from aqnpipe.evaluation.shards import (
    SHARD_JSON,
    SHARD_RESULT_JSON,
    OpenShardRunner,
    Shard,
    ShardResult,
    ShardRunner,
    load_generator,
    local_shard_runner,
    run_shard,
)
from aqnpipe.evaluation.stage import evaluate, is_evaluated
from aqnpipe.generation.noisy_passes import NoisyGenerator
from aqnpipe.runtime.device_allocation import this_node
from aqnpipe.runtime.locks import remove_locked, run_lock
from aqnpipe.runtime.ray_cluster import RESOURCES, how_it_ended, ray_cluster, send_output_to

REQUESTED_BY = "resource workers of rule evaluate"
"""Name of the setting for the number of actors, for messages."""

_SECONDS_TO_GET_DEVICES = 180


def evaluation_runner(num_workers: int, folder: Path, say: Callable[[str], None] = print) -> OpenShardRunner:
    """Return the function that opens `evaluation_workers` for a single evaluation and ends them behind it."""

    @contextmanager
    def opened(spec: EvaluationSpec, model_dir: Path, max_tokens: int) -> Iterator[ShardRunner]:
        workers = evaluation_workers(num_workers, spec.device, folder, say, spec.generation.tensor_parallel)
        with workers as open_runner, open_runner(spec, model_dir, max_tokens) as runner:
            yield runner

    return opened


@contextmanager
def evaluation_workers(
    num_workers: int,
    requested: RequestedDevice,
    folder: Path,
    say: Callable[[str], None] = print,
    devices_each: int = 1,
) -> Iterator[OpenShardRunner]:
    """Yield a function that opens the same workers for one evaluation after the other; end them with the context.

    This process for one worker, else `num_workers` Ray actors with `devices_each` devices each, those of an actor on
    one of the nodes of this job. folder: for the actors' logs, on a file system that all nodes share; kept if the body
    or an actor fails. Raises DeviceError if there are too few devices; an opened runner raises WorkerError if fewer
    actors start than were requested or an actor runs other code than this process, and an AqnpipeError of an actor
    unchanged.
    """
    if num_workers == 1:
        yield local_shard_runner
        return
    folder = folder.absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    device = resolve_device(requested)
    with ray_cluster(device, num_workers, REQUESTED_BY, folder, devices_each):
        actors = _ActorPool(device, num_workers, folder, say, devices_each)
        try:
            yield actors.open
        finally:
            actors.close()
    shutil.rmtree(folder)


class EvaluationActor:
    """One worker, which holds a checkpoint on the devices that Ray gave to its process."""

    def __init__(self, log: str) -> None:
        send_output_to(Path(log))
        self._spec: EvaluationSpec | None = None
        self._generator: NoisyGenerator | None = None

    def load(self, spec: str, model_dir: str, max_tokens: int) -> str:
        """Load the checkpoint; return the node, process, code, device and engine of this worker as JSON."""
        if self._generator is not None:
            # Two checkpoints may not fit the device.
            self._generator.close()
            self._generator = None
        self._spec = EvaluationSpec.model_validate_json(spec)
        self._generator = load_generator(self._spec, Path(model_dir), max_tokens)
        return json.dumps(
            {
                "node": this_node(),
                "process": os.getpid(),
                "code": code_digest(__name__),
                "device": resolve_device(self._spec.device).kind,
                "generation": self._generator.description,
            }
        )

    def run(self, shard: bytes) -> bytes:
        """Run a shard (a `Shard` as JSON); return its `ShardResult` as JSON."""
        if self._spec is None or self._generator is None:
            raise RuntimeError("no checkpoint was loaded; this is a bug")
        return SHARD_RESULT_JSON.dump_json(run_shard(self._generator, self._spec, SHARD_JSON.validate_json(shard)))


class _ActorPool:
    """The actors that are alive, by number."""

    def __init__(
        self, device: Device, num_workers: int, folder: Path, say: Callable[[str], None], devices_each: int
    ) -> None:
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._folder, self._say, self._num_workers = folder, say, num_workers
        devices = {} if device.kind == "cpu" else {RESOURCES[device.kind]: devices_each}
        # A bundle lies on one node, so the devices of an engine do.
        places = placement_group([{"CPU": devices_each, **devices}] * num_workers)
        if not places.wait(_SECONDS_TO_GET_DEVICES):
            raise WorkerError(
                f"{REQUESTED_BY} is {num_workers}: the Ray cluster had no free device for each of them within "
                f"{_SECONDS_TO_GET_DEVICES} s"
            )
        self._options: dict[str, Any] = {
            "num_cpus": devices_each,
            "num_gpus": devices.get("GPU", 0),
            "resources": {name: count for name, count in devices.items() if name != "GPU"},
            "max_restarts": 0,
            "max_task_retries": 0,
        }
        self._place = partial(PlacementGroupSchedulingStrategy, places)
        self._actors: dict[int, Any] = {}

    @contextmanager
    def open(self, spec: EvaluationSpec, model_dir: Path, max_tokens: int) -> Iterator[ShardRunner]:
        """Load a checkpoint in place of the last one; yield its runner. An actor that died before is replaced."""
        import ray

        for number in sorted(set(range(self._num_workers)) - set(self._actors)):
            actor = ray.remote(EvaluationActor).options(**self._options, scheduling_strategy=self._place(number))
            self._actors[number] = actor.remote(str(self._log(number)))
        workers = self.load(spec, model_dir, max_tokens)
        nodes = sorted({str(worker["node"]) for worker in workers})
        self._say(f"{self._num_workers} evaluation workers, on {', '.join(nodes)}")
        yield ShardRunner(workers[0]["generation"], self.run)

    def load(self, spec: EvaluationSpec, model_dir: Path, max_tokens: int) -> list[dict[str, Any]]:
        """Load the checkpoint in every actor; return their descriptions. Raises WorkerError if an actor fails to."""
        import ray
        from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError

        arguments = (spec.model_dump_json(), str(model_dir.absolute()), max_tokens)
        calls = {number: actor.load.remote(*arguments) for number, actor in self._actors.items()}
        workers = []
        for number, call in calls.items():
            try:
                workers.append(json.loads(ray.get(call)))
            except (RayActorError, OutOfMemoryError) as error:
                raise WorkerError(
                    f"evaluation worker {number} of {self._num_workers} {how_it_ended(error)} before its model was "
                    f"loaded, expected all of them; log: {self._log(number)}"
                ) from error
            except RayTaskError as error:
                raise _cause(error) from error
        for number, worker in zip(calls, workers, strict=True):
            for what in ("code", "device", "generation"):
                expected = code_digest(__name__) if what == "code" else workers[0][what]
                if worker[what] != expected:
                    raise WorkerError(
                        f"evaluation worker {number} on node {worker['node']} has {what} {worker[what]}, expected "
                        f"{expected}: the same package, backend and kind of device on all nodes"
                    )
        return workers

    def run(self, shards: Sequence[Shard]) -> Iterator[ShardResult]:
        """Yield the results of all shards in order of completion; each actor runs one shard at a time.

        Raises WorkerError when no actor is left.
        """
        import ray
        from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError

        waiting, idle = deque(shards), deque(self._actors)
        under_way: dict[Any, tuple[int, Shard]] = {}
        ended = ""
        while waiting or under_way:
            while waiting and idle:
                number, shard = idle.popleft(), waiting.popleft()
                under_way[self._actors[number].run.remote(SHARD_JSON.dump_json(shard))] = number, shard
            if not under_way:
                raise WorkerError(
                    f"no evaluation worker of {self._num_workers} is left, the last one {ended}: {len(waiting)} of "
                    f"{len(shards)} shards are not done; the same command continues; logs: {self._folder}"
                )
            (done, *_), _ = ray.wait(list(under_way), num_returns=1)
            number, shard = under_way.pop(done)
            try:
                result = SHARD_RESULT_JSON.validate_json(ray.get(done))
            except (RayActorError, OutOfMemoryError) as error:
                del self._actors[number]
                waiting.appendleft(shard)
                ended = how_it_ended(error)
                self._say(
                    f"evaluation worker {number} of {self._num_workers} {ended}: the others run its shard again; log: "
                    f"{self._log(number)}"
                )
                continue
            except RayTaskError as error:
                raise _cause(error) from error
            idle.append(number)
            yield result

    def close(self) -> None:
        """End the actors; an engine ends itself when its actor is gone."""
        import ray

        for actor in self._actors.values():
            ray.kill(actor)

    def _log(self, number: int) -> Path:
        return self._folder / f"worker{number}.log"


def _cause(error: Any) -> Exception:
    """Return the AqnpipeError that an actor raised; any other error is a bug and is returned with its traceback."""
    cause: Exception = error.cause if isinstance(error.cause, AqnpipeError) else error
    return cause


@dataclass(frozen=True)
class EvaluatedCheckpoint:
    """One checkpoint of the run, how it is evaluated, and the files that are written."""

    spec: EvaluationSpec
    folder: Path
    outputs: StageFiles


def evaluate_run(
    checkpoints: Sequence[EvaluatedCheckpoint],
    test_problems: Path,
    scratch: Path,
    num_workers: int = 1,
    say: Callable[[str], None] = print,
    train_problems: Path | None = None,
) -> None:
    """Evaluate the checkpoints one after the other with the same workers, and write the files of all at the end.

    scratch: folder of the run's finished evaluations, removed at the end. Raises what `evaluate` raises, and
    RunLockedError if another process evaluates the run. No output is written unless all checkpoints are evaluated.
    """
    # The names of the files contain the step.
    staged = [StageFiles(*(scratch / path.name for path in _paths(one.outputs))) for one in checkpoints]
    with run_lock(scratch):
        first = checkpoints[0].spec
        workers = evaluation_workers(
            num_workers, first.device, scratch / "workers", say, first.generation.tensor_parallel
        )
        with workers as open_runner:
            for checkpoint, outputs in zip(checkpoints, staged, strict=True):
                spec, folder = checkpoint.spec, checkpoint.folder
                if is_evaluated(spec, folder, outputs, test_problems, train_problems):
                    run = f"{spec.model_role}/{spec.arm_id} seed {spec.seed} step {spec.step}"
                    say(f"{run}: evaluated in an earlier attempt")
                else:
                    evaluate(spec, folder, test_problems, outputs, say, train_problems, open_runner)
        for checkpoint, outputs in zip(checkpoints, staged, strict=True):
            for source, target in zip(_paths(outputs), _paths(checkpoint.outputs), strict=True):
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(source, target)
        remove_locked(scratch)


def _paths(files: StageFiles) -> list[Path]:
    return [getattr(files, field.name) for field in fields(files)]
