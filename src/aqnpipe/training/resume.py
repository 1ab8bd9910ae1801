"""Resume points: everything that a run needs to continue bit for bit after an optimiser step.

A resume point contains the trainer's state and log, and per worker its part of the trained weights and of the
optimiser's state, the measurements for the receipt and the audit, the faults' cached thresholds and the validations.
Nothing else is needed: every random draw is keyed by the step (see trainer.py), the learning rate is that of the step,
and points are written only after steps that use up all rollouts (`TrainingConfig.resume_interval`).

Every worker copies its tensors to the host's memory and goes on; a thread writes, hashes and flushes them during the
next step. At its end all workers have finished, and rank 0 publishes the point by one rename, so it is either complete
or absent.
"""

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME

from aqnpipe.artifacts.base import Artifact
from aqnpipe.artifacts.files import damage, files_in, rename, sync_files, write_durably
from aqnpipe.artifacts.provenance import sha256_of_files
from aqnpipe.config.training import RESUME_BYTES_PER_SECOND, TrainingConfig
from aqnpipe.models.sharding import is_share, like_share, local
from aqnpipe.noise.injection.faults import ActiveFaultState
from aqnpipe.noise.receipts.receipt import RecorderState
from aqnpipe.training.audit.auditor import TrainingAudit
from aqnpipe.training.audit.measure import Ledger
from aqnpipe.training.noise_plan import NoisePlan
from aqnpipe.training.ranks import gathered, rank_and_size
from aqnpipe.training.workspace import Workspace

_KEPT = 2
_MANIFEST = "manifest.json"
_ADAM_MOMENTS = 2


class Manifest(Artifact):
    """manifest.json of a resume point: SHA-256 of its own files and of the run's files at that time."""

    step: int
    files: dict[str, str]
    run_files: dict[str, str]


def prepare_resume(workspace: Workspace, say: Callable[[str], None]) -> Path | None:
    """Return the newest intact resume point and restore `workspace.run` to its state then; None if there is none.

    Every file is compared with its SHA-256. `say` gets one line about the outcome.
    """
    (workspace.folder / "finished.json").unlink(missing_ok=True)
    for unfinished in workspace.resume.glob(".step*"):
        shutil.rmtree(unfinished)
    flaws: list[str] = []
    for point in sorted(workspace.resume.glob("step*"), key=_step_of, reverse=True):
        manifest, flaw = _inspect(point, workspace)
        if manifest is not None:
            _reset(workspace.run, manifest)
            ignored = f"; ignored: {'; '.join(flaws)}" if flaws else ""
            say(f"{workspace.folder.parent.name}: resuming after step {manifest.step}{ignored}")
            return point
        flaws.append(flaw)
        shutil.rmtree(point)
    if flaws:
        say(f"{workspace.folder.parent.name}: no intact resume point, starting from the beginning ({'; '.join(flaws)})")
    shutil.rmtree(workspace.run, ignore_errors=True)
    workspace.run.mkdir(parents=True)
    return None


class PointSchedule:
    """Decides after which steps a worker would write a resume point: at an interval, or within a share of the time.

    `num_bytes` of this worker's part give the time of its first point; every later one takes as long as the one before.
    The choice depends on the clock, the results of a run do not depend on the choice.
    """

    def __init__(self, training: TrainingConfig, num_bytes: float) -> None:
        self._interval, self._share = training.resume_interval, training.resume_share
        self._spent, self._next = 0.0, num_bytes / RESUME_BYTES_PER_SECOND

    def add(self, seconds: float) -> None:
        """Count a point that was being written for `seconds`."""
        self._spent, self._next = self._spent + seconds, seconds

    def is_due(self, step: int, elapsed: float) -> bool:
        """Return whether to write a point after `step`, `elapsed` seconds after the start."""
        is_affordable = self._share is None or self._spent + self._next <= self._share * elapsed
        return is_affordable and step % self._interval == 0


class ResumePoints(TrainerCallback):
    """Makes the trainer write resume points, and write one and end after a stop request; publishes them.

    All workers call all methods after the same steps. `close` it when the training has ended in any way.
    """

    def __init__(
        self, workspace: Workspace, training: TrainingConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._workspace = workspace
        self._training = training
        self._clock = clock
        self._rank, self._num_workers = rank_and_size()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="resume point")
        self._staged: Path | None = None
        self._part: Future[tuple[dict[str, str], float]] | None = None
        self._run_files: dict[str, str] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock, and estimate the time of a point from the size of this worker's part."""
        trained = [local(weight) for _, weight in _own(kwargs["model"], self._rank, self._num_workers)]
        num_bytes = sum(weight.numel() * weight.element_size() for weight in trained)
        self._schedule = PointSchedule(self._training, (1 + _ADAM_MOMENTS) * num_bytes)
        self._began = self._clock()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Publish the last point, then decide, equally on every worker; the last step needs no resume point."""
        self._publish_written()
        if state.global_step % self._training.steps_per_rollout or state.global_step == state.max_steps:
            return
        is_due = self._schedule.is_due(state.global_step, self._clock() - self._began)
        stops, dues = zip(*gathered((self._workspace.stop_file.exists(), is_due)), strict=True)
        control.should_save = any(stops) or all(dues)
        control.should_training_stop = any(stops) or control.should_training_stop

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Publish the point of a stopped run."""
        self._publish_written()

    def write(self, step: int, save: Callable[[Path], dict[str, Tensor]]) -> None:
        """Begin the point after `step`.

        `save` writes this worker's small files, as `save_rank_state` and the trainer name them, into a folder and
        returns copies of its tensors.
        """
        began = self._clock()
        self._staged = self._workspace.resume / f".step{step}"
        self._staged.mkdir(parents=True, exist_ok=True)
        tensors = save(self._staged)
        # Files that the run finished until now: the thread must not look at those that come later.
        run_files = files_in(self._workspace.run) if self._rank == 0 else []
        self._part = self._thread.submit(self._write_part, self._staged, tensors, run_files, began)

    def close(self) -> None:
        """Wait for the thread, and remove a point that was not published: after an error a full disk needs the space.

        The earlier points stay.
        """
        self._thread.shutdown()
        if self._staged is not None:
            shutil.rmtree(self._staged, ignore_errors=True)

    def _write_part(
        self, staged: Path, tensors: dict[str, Tensor], run_files: Sequence[str], began: float
    ) -> tuple[dict[str, str], float]:
        """Return the digests of this worker's part of a point, when it is on the disk, and the seconds it took."""
        save_file(tensors, staged / _tensors_name(self._rank))
        names = [_tensors_name(self._rank), _state_name(self._rank), *([TRAINER_STATE_NAME] if self._rank == 0 else ())]
        digests = sha256_of_files({name: staged / name for name in names})
        sync_files(staged, names)
        run, new = self._workspace.run, [name for name in run_files if name not in self._run_files]
        self._run_files |= sha256_of_files({name: run / name for name in new})
        sync_files(run, new)
        return digests, self._clock() - began

    def _publish_written(self) -> None:
        """Wait for all parts of the point that is being written, if there is one, and publish it."""
        if self._part is None:
            return
        own, seconds = self._part.result()
        self._schedule.add(seconds)
        files = {name: digest for part in gathered(own) for name, digest in part.items()}
        staged, self._staged, self._part = self._staged, None, None
        if staged is None or self._rank > 0:
            return
        point = staged.with_name(staged.name.removeprefix("."))
        manifest = Manifest(step=_step_of(point), files=files, run_files=self._run_files)
        write_durably(staged / _MANIFEST, manifest.model_dump_json(indent=2) + "\n")
        rename(staged, point)
        for old in sorted(self._workspace.resume.glob("step*"), key=_step_of)[:-_KEPT]:
            shutil.rmtree(old)


class RankState(Artifact):
    """rank<R>.json of a resume point: the measurements of one rank up to that step."""

    receipt: str = Field(description="a RecorderState as JSON")
    faults: tuple[ActiveFaultState, ...]
    validation_accuracy: dict[int, float]
    audit: Ledger


def save_rank_state(
    folder: Path,
    rank: int,
    noise: NoisePlan,
    audit: TrainingAudit,
    validation_accuracy: Mapping[int, float],
) -> None:
    """Write the measurements of `rank` into a resume point."""
    state = RankState(
        receipt=noise.recorder.state().model_dump_json(),
        faults=noise.faults.states(),
        validation_accuracy=dict(validation_accuracy),
        audit=audit.ledger,
    )
    (folder / _state_name(rank)).write_text(state.model_dump_json(), encoding="utf-8")


def load_rank_state(point: Path, rank: int, noise: NoisePlan, audit: TrainingAudit) -> dict[int, float]:
    """Restore recorder, faults and audit from a resume point; return the validation accuracies by step."""
    state = RankState.model_validate_json((point / _state_name(rank)).read_bytes())
    noise.recorder.restore(RecorderState.model_validate_json(state.receipt))
    noise.faults.restore(state.faults)
    audit.ledger.restore(state.audit)
    return state.validation_accuracy


def own_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, num_workers: int) -> dict[str, Tensor]:
    """Return a copy, in the host's memory, of this worker's part of the trained weights and of the optimiser's state.

    The part: its shares of divided weights, and every `num_workers`-th of the weights that all workers have whole.
    """
    tensors = {}
    for name, weight in _own(model, rank, num_workers):
        for what, value in {"weight": weight.detach(), **optimizer.state.get(weight, {})}.items():
            tensors[f"{name}:{what}"] = local(value).to("cpu", copy=True).contiguous()
    return tensors


def load_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, point: Path, rank: int) -> None:
    """Restore the trained weights and the optimiser's state bit for bit."""
    trained = dict(_trained(model))
    state: dict[str, dict[str, Tensor]] = {name: {} for name in trained}
    for path in point.glob("rank*.safetensors"):
        for key, tensor in load_file(path).items():
            name, _, what = key.rpartition(":")
            if path.name == _tensors_name(rank) or not is_share(trained[name]):
                state[name][what] = tensor
    # A fused optimiser counts its steps on the device, others on the CPU.
    counts_on_device = optimizer.defaults.get("fused") or optimizer.defaults.get("capturable")
    with torch.no_grad():
        for name, weight in trained.items():
            saved = state[name]
            local(weight.detach()).copy_(saved.pop("weight"))
            for what, tensor in saved.items():
                restored = tensor.to(weight.device) if tensor.ndim or counts_on_device else tensor
                shared = tensor.ndim and is_share(weight)
                optimizer.state[weight][what] = like_share(weight, restored) if shared else restored


def _tensors_name(rank: int) -> str:
    return f"rank{rank}.safetensors"


def _state_name(rank: int) -> str:
    return f"rank{rank}.json"


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the trained weights by name; a weight that several modules share is there once."""
    return [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]


def _own(model: nn.Module, rank: int, num_workers: int) -> list[tuple[str, nn.Parameter]]:
    """Return the trained weights of which a worker writes something into a resume point."""
    return [
        (name, weight)
        for index, (name, weight) in enumerate(_trained(model))
        if is_share(weight) or index % num_workers == rank
    ]


def _inspect(point: Path, workspace: Workspace) -> tuple[Manifest | None, str]:
    """Return the manifest of an intact resume point, or None and the damage in words."""
    path = point / _MANIFEST
    try:
        manifest = Manifest.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None, f"{path} is missing"
    except ValidationError:
        return None, f"{path} is unreadable"
    if manifest.step != _step_of(point):
        return None, f"{path} says step {manifest.step}"
    flaw = damage(point, manifest.files) or damage(workspace.run, manifest.run_files)
    return (manifest, "") if flaw is None else (None, flaw)


def _reset(run: Path, manifest: Manifest) -> None:
    """Remove the files that were written after the resume point."""
    for path in sorted(run.rglob("*"), reverse=True):
        if path.is_dir():
            if not any(path.iterdir()):
                path.rmdir()
        elif str(path.relative_to(run)) not in manifest.run_files:
            path.unlink()


def _step_of(point: Path) -> int:
    return int(point.name.removeprefix("step"))
