"""Resume points: everything that a run needs to continue bit for bit after an optimiser step.

A resume point contains the trained weights, the optimiser, the learning-rate schedule, the trainer's state and log, and
per rank the measurements for the receipt and the audit, the faults' cached thresholds and the validations. Nothing else
is needed: every random draw is keyed by the step (see trainer.py), and points are written only after steps that use up
all rollouts (see `resume_interval`). A point appears by one rename, so it is either complete or absent.
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
from aqnpipe.artifacts.sampler_distance import DistanceProgress
from aqnpipe.config.training import TrainingConfig
from aqnpipe.models.shares import is_sharded, is_share, like_share, local
from aqnpipe.noise.injection.faults import ActiveFaultState
from aqnpipe.noise.receipts.recorder_state import RecorderState
from aqnpipe.training.audit.auditor import AuditState, TrainingAudit
from aqnpipe.training.distance.probe import DistanceProbe
from aqnpipe.training.noise_plan import NoisePlan
from aqnpipe.training.ranks import gathered
from aqnpipe.training.workspace import Workspace

_KEPT = 2
_MANIFEST = "manifest.json"
_WEIGHTS = "weights.safetensors"


class Manifest(Artifact):
    """manifest.json of a resume point: SHA-256 of its own files and of the run's files at that time."""

    step: int
    files: dict[str, str]
    run_files: dict[str, str]


def resume_interval(training: TrainingConfig) -> int:
    """Return the optimiser steps between resume points: `resume_every`, rounded up to whole batches of rollouts.

    At these steps all rollouts are used up, so a resume point does not contain any.
    """
    return math.ceil(training.resume_every / training.steps_per_rollout) * training.steps_per_rollout


def prepare_resume(workspace: Workspace, say: Callable[[str], None]) -> Path | None:
    """Return the newest intact resume point and restore `workspace.run` to its state then; None if there is none.

    Every file is compared with its SHA-256. `say` gets one line about the outcome.
    """
    (workspace.folder / "finished.json").unlink(missing_ok=True)
    shutil.rmtree(workspace.resume / ".staged", ignore_errors=True)
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


class ResumePoints:
    """Writes the resume points of a run. All ranks call `write` after the same steps; rank 0 publishes the point."""

    def __init__(self, workspace: Workspace, *, is_main_process: bool, wait_for_all: Callable[[], None]) -> None:
        self._workspace = workspace
        self._is_main_process = is_main_process
        self._wait_for_all = wait_for_all
        self._run_files: dict[str, str] = {}

    def write(self, step: int, save: Callable[[Path], None]) -> None:
        """Write the point after `step`; `save` writes this rank's part into a folder.

        The point appears by one rename when all its files are on the disk. An error leaves the earlier points as they
        were.
        """
        staged = self._workspace.resume / ".staged"
        if self._is_main_process:
            shutil.rmtree(staged, ignore_errors=True)
            staged.mkdir(parents=True)
        self._wait_for_all()
        with ExitStack() as cleanup:
            # After an error only: a full disk needs the space. After a success rank 0 may still be publishing.
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
    """rank<R>.json of a resume point: the measurements of one rank up to that step."""

    receipt: str = Field(description="a RecorderState as JSON")
    faults: tuple[ActiveFaultState, ...]
    validation_accuracy: dict[int, float]
    audit: AuditState
    distance: DistanceProgress


def save_rank_state(
    folder: Path,
    rank: int,
    noise: NoisePlan,
    audit: TrainingAudit,
    distance: DistanceProbe,
    validation_accuracy: Mapping[int, float],
) -> None:
    """Write the measurements of `rank` into a resume point."""
    state = RankState(
        receipt=noise.recorder.state().to_json(),
        faults=noise.faults.states(),
        validation_accuracy=dict(validation_accuracy),
        audit=audit.state(),
        distance=distance.state(),
    )
    (folder / f"rank{rank}.json").write_text(state.model_dump_json(), encoding="utf-8")


def load_rank_state(
    point: Path, rank: int, noise: NoisePlan, audit: TrainingAudit, distance: DistanceProbe
) -> dict[int, float]:
    """Restore recorder, faults, audit and distances from a resume point; return the validation accuracies by step."""
    state = RankState.model_validate_json((point / f"rank{rank}.json").read_bytes())
    noise.recorder.restore(RecorderState.from_json(state.receipt))
    noise.faults.restore(state.faults)
    audit.restore(state.audit)
    distance.restore(state.distance)
    return state.validation_accuracy


def save_weights(model: nn.Module, folder: Path) -> None:
    """Write the trainable weights; a weight that several modules share is written once."""
    save_file({name: weight.detach().contiguous() for name, weight in _trained(model)}, folder / _WEIGHTS)


def load_weights(model: nn.Module, point: Path) -> None:
    """Restore the trainable weights bit for bit; those of a sharded model are restored by `load_shares`."""
    if is_sharded(model):
        return
    saved = load_file(point / _WEIGHTS)
    with torch.no_grad():
        for name, weight in _trained(model):
            weight.copy_(saved[name])


def save_shares(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, rank: int) -> None:
    """Write this worker's shares of the trainable weights, and the optimiser's state of them, into a resume point."""
    tensors = {}
    for name, weight in _trained(model):
        tensors[f"{name}:weight"] = local(weight.detach())
        for key, value in optimizer.state[weight].items():
            tensors[f"{name}:{key}"] = local(value)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / _shares_name(rank))


def load_shares(model: nn.Module, optimizer: torch.optim.Optimizer, point: Path, rank: int) -> None:
    """Restore what `save_shares` wrote, bit for bit."""
    state: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in load_file(point / _shares_name(rank)).items():
        name, _, what = key.rpartition(":")
        state.setdefault(name, {})[what] = tensor
    with torch.no_grad():
        for name, weight in _trained(model):
            saved = state[name]
            local(weight.detach()).copy_(saved.pop("weight"))
            own = optimizer.state[weight]
            for what, tensor in saved.items():
                # The step of Adam counts on the CPU, moments are where the weight is.
                own[what] = tensor.to(weight.device) if tensor.ndim else tensor
                if tensor.ndim and is_share(weight):
                    own[what] = like_share(weight, own[what])


def _shares_name(rank: int) -> str:
    return f"shares{rank}.safetensors"


class ResumeCallback(TrainerCallback):
    """Makes the trainer write a resume point at regular steps, and write one and end after a stop request."""

    def __init__(self, workspace: Workspace, training: TrainingConfig) -> None:
        self._stop_file = workspace.stop_file
        self._interval = resume_interval(training)
        self._steps_per_rollout = training.steps_per_rollout

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Decide after a step, equally on every rank; the last step needs no resume point."""
        if state.global_step % self._steps_per_rollout or state.global_step == state.max_steps:
            return
        stop = any(gathered(self._stop_file.exists()))
        control.should_save = stop or state.global_step % self._interval == 0
        control.should_training_stop = stop or control.should_training_stop


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]


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
