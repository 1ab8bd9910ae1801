"""Resume points: all that a run needs to go on bit for bit after an optimiser step, whole or not there at all.

A resume point holds the trained weights, the optimiser, the learning-rate schedule, the trainer's state and log, and
per rank the receipt so far and the validations. Nothing else is needed, because every random draw is keyed by the step
(see trainer.py) and points are only made where no rollouts are left over (see `resume_interval`).
"""

import math
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, ValidationError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import TrainerCallback

from aqnpipe.artifacts.base import Artifact
from aqnpipe.artifacts.durable_files import damage, digests_of, rename, sync_tree, write_durably
from aqnpipe.config.training import TrainingConfig
from aqnpipe.noise.injection.faults import ActiveFaultState
from aqnpipe.noise.receipts.recorder_state import RecorderState
from aqnpipe.training.noise_plan import NoisePlan
from aqnpipe.training.ranks import gathered
from aqnpipe.training.workspace import Workspace

_KEPT = 2
_MANIFEST = "manifest.json"
_WEIGHTS = "weights.safetensors"


class Manifest(Artifact):
    """manifest.json of a resume point: SHA-256 of its own files, and of the run's files at that time."""

    step: int
    files: dict[str, str]
    run_files: dict[str, str]


def resume_interval(training: TrainingConfig) -> int:
    """Optimiser steps between resume points: `resume_every`, or the next multiple of the steps per rollout.

    Only after those steps are all rollouts used up, so that none need to be kept.
    """
    return math.ceil(training.resume_every / training.steps_per_rollout) * training.steps_per_rollout


def prepare_resume(workspace: Workspace, say: Callable[[str], None]) -> Path | None:
    """Return the newest resume point that is whole, with `workspace.run` as it was then; None to start afresh.

    Every file is compared with its SHA-256. Says in one line what is done.
    """
    (workspace.folder / "finished.json").unlink(missing_ok=True)
    shutil.rmtree(workspace.resume / ".staged", ignore_errors=True)
    flaws: list[str] = []
    for point in sorted(workspace.resume.glob("step*"), key=_step_of, reverse=True):
        manifest, flaw = _inspect(point, workspace)
        if manifest is not None:
            _reset(workspace.run, manifest)
            ignored = f"; ignored: {'; '.join(flaws)}" if flaws else ""
            say(f"{workspace.folder.parent.name}: going on after step {manifest.step}{ignored}")
            return point
        flaws.append(flaw)
        shutil.rmtree(point)
    if flaws:
        say(f"{workspace.folder.parent.name}: no whole resume point, starting from the beginning ({'; '.join(flaws)})")
    shutil.rmtree(workspace.run, ignore_errors=True)
    workspace.run.mkdir(parents=True)
    return None


class ResumePoints:
    """Writes the resume points of a run. Every rank calls `write` after the same steps; rank 0 does what is common."""

    def __init__(self, workspace: Workspace, *, is_main_process: bool, wait_for_all: Callable[[], None]) -> None:
        self._workspace = workspace
        self._is_main_process = is_main_process
        self._wait_for_all = wait_for_all
        self._run_files: dict[str, str] = {}

    def write(self, step: int, save: Callable[[Path], None]) -> None:
        """Write the point after `step`; `save` puts this rank's part into a folder.

        The point appears by one rename when all of it is on the disk; after any error the points before it are as
        they were.
        """
        staged = self._workspace.resume / ".staged"
        if self._is_main_process:
            shutil.rmtree(staged, ignore_errors=True)
            staged.mkdir(parents=True)
        self._wait_for_all()
        with ExitStack() as cleanup:
            # On a full disk its space is needed. Not after a success: another rank may still be publishing.
            cleanup.callback(shutil.rmtree, staged, ignore_errors=True)
            save(staged)
            self._wait_for_all()
            if self._is_main_process:
                self._publish(staged, step)
            cleanup.pop_all()

    def _publish(self, staged: Path, step: int) -> None:
        run = self._workspace.run
        self._run_files = digests_of(run, self._run_files)
        manifest = Manifest(step=step, files=digests_of(staged), run_files=self._run_files)
        write_durably(staged / _MANIFEST, manifest.model_dump_json(indent=2) + "\n")
        sync_tree(run)
        sync_tree(staged)
        rename(staged, self._workspace.resume / f"step{step}")
        for old in sorted(self._workspace.resume.glob("step*"), key=_step_of)[:-_KEPT]:
            shutil.rmtree(old)


class RankState(Artifact):
    """rank<R>.json of a resume point: what one rank has measured so far."""

    receipt: str = Field(description="a RecorderState as JSON")
    faults: tuple[ActiveFaultState, ...]
    validation_accuracy: dict[int, float]


def save_rank_state(folder: Path, rank: int, noise: NoisePlan, validation_accuracy: Mapping[int, float]) -> None:
    """Write what `rank` has measured into a resume point."""
    state = RankState(
        receipt=noise.recorder.state().to_json(),
        faults=noise.faults.states(),
        validation_accuracy=dict(validation_accuracy),
    )
    (folder / f"rank{rank}.json").write_text(state.model_dump_json(), encoding="utf-8")


def load_rank_state(point: Path, rank: int, noise: NoisePlan) -> dict[int, float]:
    """Restore the recorder and the faults of `noise` from a resume point; return the validation accuracies by step."""
    state = RankState.model_validate_json((point / f"rank{rank}.json").read_bytes())
    noise.recorder.restore(RecorderState.from_json(state.receipt))
    noise.faults.restore(state.faults)
    return state.validation_accuracy


def save_weights(model: nn.Module, folder: Path) -> None:
    """Write the trainable weights, each once where several modules share one."""
    save_file({name: weight.detach().contiguous() for name, weight in _trained(model)}, folder / _WEIGHTS)


def load_weights(model: nn.Module, point: Path) -> None:
    """Restore the trainable weights bit for bit."""
    saved = load_file(point / _WEIGHTS)
    with torch.no_grad():
        for name, weight in _trained(model):
            weight.copy_(saved[name])


class ResumeCallback(TrainerCallback):
    """Asks the trainer for a resume point at regular steps, and for one and an end when a stop was requested."""

    def __init__(self, workspace: Workspace, training: TrainingConfig) -> None:
        self._stop_file = workspace.stop_file
        self._interval = resume_interval(training)
        self._steps_per_rollout = training.steps_per_rollout

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Decide after a step, alike on every rank; after the last one there is nothing to go on with."""
        if state.global_step % self._steps_per_rollout or state.global_step == state.max_steps:
            return
        stop = any(gathered(self._stop_file.exists()))
        control.should_save = stop or state.global_step % self._interval == 0
        control.should_training_stop = stop or control.should_training_stop


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]


def _inspect(point: Path, workspace: Workspace) -> tuple[Manifest | None, str]:
    """Return the manifest of a resume point that is whole, or None and what is wrong with it."""
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
    """Take away what was written after the resume point."""
    for path in sorted(run.rglob("*"), reverse=True):
        if path.is_dir():
            if not any(path.iterdir()):
                path.rmdir()
        elif str(path.relative_to(run)) not in manifest.run_files:
            path.unlink()


def _step_of(point: Path) -> int:
    return int(point.name.removeprefix("step"))
