"""Pieces of an evaluation answered by Ray actors, each with an engine on a device of its own.

Actors are made of one named class of this package and called with JSON; what they return is JSON. Which of them
answers what depends on timing and says nothing about the results (see `pieces`). An actor that dies has its piece
answered by another one.
"""

import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from aqnpipe.artifacts.provenance import code_digest
from aqnpipe.config.run import EvaluationSpec
from aqnpipe.device import Device, resolve_device
from aqnpipe.errors import AqnpipeError, WorkerError
from aqnpipe.evaluation.shards import AnsweredPiece, Piece, answer
from aqnpipe.generation.backend_choice import open_generator
from aqnpipe.generation.noisy_passes import NoisyGenerator
from aqnpipe.models.loading import load_tokenizer
from aqnpipe.runtime.device_allocation import this_node
from aqnpipe.runtime.ray_cluster import RESOURCES, ray_cluster, send_output_to

ASKED_BY = "resource workers of rule evaluate"
"""What the number of actors is called where users set it."""

_SECONDS_TO_GET_DEVICES = 180


@dataclass(frozen=True)
class Answering:
    """Workers that are ready: what run.json says of their backend, and how they answer pieces, in any order."""

    description: dict[str, str | int | bool]
    answers: Callable[[Sequence[Piece]], Iterator[AnsweredPiece]]


def load_generator(spec: EvaluationSpec, model_dir: Path, max_tokens: int) -> NoisyGenerator:
    """Load the checkpoint on the first device that this process sees; `max_tokens`: longest prompt and response."""
    torch.set_num_threads(spec.evaluation.threads)
    return open_generator(
        spec.generation,
        model_dir,
        load_tokenizer(model_dir),
        dtype=spec.dtype,
        attention=spec.attention,
        device=resolve_device(spec.device),
        max_tokens=max_tokens,
        batch_size=spec.evaluation.batch_size,
        threads=spec.evaluation.threads,
    )


@contextmanager
def answering_here(spec: EvaluationSpec, model_dir: Path, max_tokens: int) -> Iterator[Answering]:
    """Answer in this process, piece by piece; Ray has no part in it."""
    generator = load_generator(spec, model_dir, max_tokens)
    try:
        yield Answering(generator.description, lambda pieces: (answer(generator, spec, piece) for piece in pieces))
    finally:
        generator.close()


class EvaluationActor:
    """One worker: the checkpoint on the device that Ray gave to this process."""

    def __init__(self, log: str) -> None:
        send_output_to(Path(log))
        self._spec: EvaluationSpec | None = None
        self._generator: NoisyGenerator | None = None

    def load(self, spec: str, model_dir: str, max_tokens: int) -> str:
        """Load the checkpoint; return as JSON who this worker is."""
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

    def answer(self, piece: str) -> str:
        """Answer a `Piece` as JSON; return the `AnsweredPiece` as JSON."""
        if self._spec is None or self._generator is None:
            raise RuntimeError("no checkpoint was loaded; this is a bug")
        return answer(self._generator, self._spec, Piece.from_json(piece)).to_json()


@contextmanager
def answering_actors(
    spec: EvaluationSpec,
    model_dir: Path,
    max_tokens: int,
    num_workers: int,
    folder: Path,
    say: Callable[[str], None] = print,
) -> Iterator[Answering]:
    """Start `num_workers` Ray actors, one per device, inside the nodes of this job; end them with the context.

    folder: for the actors' logs, on a file system that all nodes see; kept if the body or an actor fails. Raises
    DeviceError if there are too few devices, WorkerError if fewer actors start than were asked for or one runs other
    code than this process; what an actor raises as a user's mistake is raised here.
    """
    folder = folder.absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    device = resolve_device(spec.device)
    with ray_cluster(device, num_workers, ASKED_BY, folder):
        team = _Team(device, num_workers, folder, say)
        try:
            workers = team.load(spec, model_dir, max_tokens)
            say(f"{num_workers} evaluation workers, on {', '.join(sorted({str(one['node']) for one in workers}))}")
            yield Answering(workers[0]["generation"], team.answers)
        finally:
            team.close()
    shutil.rmtree(folder)


class _Team:
    """The actors that are alive, by number."""

    def __init__(self, device: Device, num_workers: int, folder: Path, say: Callable[[str], None]) -> None:
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._folder, self._say, self._num_workers = folder, say, num_workers
        own = {} if device.kind == "cpu" else {RESOURCES[device.kind]: 1}
        places = placement_group([{"CPU": 1, **own}] * num_workers)
        if not places.wait(_SECONDS_TO_GET_DEVICES):
            raise WorkerError(
                f"{ASKED_BY} is {num_workers}: the Ray cluster had no free device for each of them within "
                f"{_SECONDS_TO_GET_DEVICES} s"
            )
        options: dict[str, Any] = {
            "num_cpus": 1,
            "num_gpus": own.get("GPU", 0),
            "resources": {name: count for name, count in own.items() if name != "GPU"},
            "max_restarts": 0,
            "max_task_retries": 0,
        }
        self._actors: dict[int, Any] = {
            number: ray.remote(EvaluationActor)
            .options(**options, scheduling_strategy=PlacementGroupSchedulingStrategy(places, number))
            .remote(str(folder / f"worker{number}.log"))
            for number in range(num_workers)
        }

    def load(self, spec: EvaluationSpec, model_dir: Path, max_tokens: int) -> list[dict[str, Any]]:
        """Let every actor load the checkpoint; return who they are. All have to."""
        import ray
        from ray.exceptions import RayActorError, RayTaskError

        arguments = (spec.model_dump_json(), str(model_dir.absolute()), max_tokens)
        calls = {number: actor.load.remote(*arguments) for number, actor in self._actors.items()}
        workers = []
        for number, call in calls.items():
            try:
                workers.append(json.loads(ray.get(call)))
            except RayActorError as error:
                raise WorkerError(
                    f"evaluation worker {number} of {self._num_workers} did not start; all that were asked for have "
                    f"to; log: {self._log(number)}"
                ) from error
            except RayTaskError as error:
                raise _cause(error) from error
        for number, worker in enumerate(workers):
            for what in ("code", "device", "generation"):
                expected = code_digest(__name__) if what == "code" else workers[0][what]
                if worker[what] != expected:
                    raise WorkerError(
                        f"evaluation worker {number} on node {worker['node']} has {what} {worker[what]}, expected "
                        f"{expected}: the same package, backend and kind of device on all nodes"
                    )
        return workers

    def answers(self, pieces: Sequence[Piece]) -> Iterator[AnsweredPiece]:
        """Yield the answers of all pieces as they come; each actor has one piece at a time.

        Raises WorkerError when no actor is left.
        """
        import ray
        from ray.exceptions import RayActorError, RayTaskError

        waiting, idle = deque(pieces), deque(self._actors)
        under_way: dict[Any, tuple[int, Piece]] = {}
        while waiting or under_way:
            while waiting and idle:
                number, piece = idle.popleft(), waiting.popleft()
                under_way[self._actors[number].answer.remote(piece.to_json())] = number, piece
            if not under_way:
                raise WorkerError(
                    f"all {self._num_workers} evaluation workers died, {len(waiting)} of {len(pieces)} pieces are not "
                    f"answered (out of memory?); logs: {self._folder}"
                )
            (done, *_), _ = ray.wait(list(under_way), num_returns=1)
            number, piece = under_way.pop(done)
            try:
                answered = AnsweredPiece.from_json(ray.get(done))
            except RayActorError:
                del self._actors[number]
                waiting.appendleft(piece)
                self._say(
                    f"evaluation worker {number} of {self._num_workers} died (killed, or out of memory?): the others "
                    f"answer its piece again; log: {self._log(number)}"
                )
                continue
            except RayTaskError as error:
                raise _cause(error) from error
            idle.append(number)
            yield answered

    def close(self) -> None:
        """End the actors; the engine of one ends itself when its actor is gone."""
        import ray

        for actor in self._actors.values():
            ray.kill(actor)

    def _log(self, number: int) -> Path:
        return self._folder / f"worker{number}.log"


def _cause(error: Any) -> Exception:
    """Return what a user can act on: an error of ours that an actor raised; a bug keeps its traceback."""
    cause: Exception = error.cause if isinstance(error.cause, AqnpipeError) else error
    return cause
