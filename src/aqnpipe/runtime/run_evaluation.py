"""The evaluations of all checkpoints of a run in one job, whose workers are started once.

Every checkpoint is evaluated by `evaluation.stage.evaluate`, as in a job of its own, so the files are the same bytes.
They wait in the run's scratch folder until all are done, because Snakemake deletes the outputs of a job that fails: the
next attempt of a job that was killed or reached its time limit takes over what is there and verified.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from aqnpipe.config.run import EvaluationSpec
from aqnpipe.evaluation.stage import EvaluationOutputs, evaluate, is_evaluated
from aqnpipe.runtime.evaluation_workers import evaluation_workers
from aqnpipe.runtime.file_lock import remove_locked, run_lock


@dataclass(frozen=True)
class EvaluatedCheckpoint:
    """One checkpoint of the run, how it is evaluated, and the files that are written."""

    spec: EvaluationSpec
    folder: Path
    outputs: EvaluationOutputs


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
    staged = [_staged(checkpoint, scratch) for checkpoint in checkpoints]
    with run_lock(scratch):
        first = checkpoints[0].spec
        workers = evaluation_workers(
            num_workers, first.device, scratch / "workers", say, first.generation.tensor_parallel
        )
        with workers as open_runner:
            for checkpoint, outputs in zip(checkpoints, staged, strict=True):
                spec, folder = checkpoint.spec, checkpoint.folder
                if is_evaluated(spec, folder, outputs, test_problems, train_problems):
                    say(f"{_label(spec)}: evaluated in an earlier attempt")
                else:
                    evaluate(spec, folder, test_problems, outputs, say, train_problems, open_runner)
        for checkpoint, outputs in zip(checkpoints, staged, strict=True):
            _move(outputs, checkpoint.outputs)
        remove_locked(scratch)


def _staged(checkpoint: EvaluatedCheckpoint, scratch: Path) -> EvaluationOutputs:
    """Return where the files of a checkpoint wait; their names, which contain the step, are those of the outputs."""
    outputs = checkpoint.outputs
    return EvaluationOutputs(*(scratch / getattr(outputs, field.name).name for field in fields(outputs)))


def _move(staged: EvaluationOutputs, outputs: EvaluationOutputs) -> None:
    for field in fields(outputs):
        target: Path = getattr(outputs, field.name)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(getattr(staged, field.name), target)


def _label(spec: EvaluationSpec) -> str:
    return f"{spec.model_role}/{spec.arm_id} seed {spec.seed} step {spec.step}"
