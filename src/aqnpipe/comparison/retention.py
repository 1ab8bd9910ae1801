"""Removes weights that a study does not keep, once every evaluation of their run exists and would be compared.

Comparisons read evaluations and no weights, with one exception: whether anything was learned, if several checkpoints
have equal weights. The record of removed weights answers that. It is written before the weights go, so that a killed
job leaves either weights or a complete record, and the next one continues.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from aqnpipe.artifacts.evaluations import evaluation_files
from aqnpipe.artifacts.files import read_json, write_json
from aqnpipe.artifacts.runs import (
    REMOVED_WEIGHTS_FILE,
    RemovedWeights,
    RetainedRun,
    RunRecord,
    read_removed,
    why_weights_are_gone,
)
from aqnpipe.comparison.contrasts import refuse_bad_evaluation
from aqnpipe.comparison.evaluations import EvaluationInput, LoadedEvaluation, RefusedError, load_evaluations
from aqnpipe.comparison.lineage import lineage_problems
from aqnpipe.config.plan import StudyPlan
from aqnpipe.config.training import Keep
from aqnpipe.errors import ModelError
from aqnpipe.models.loading import is_untrained


def remove_weights(plan: StudyPlan, keep: Keep, output: Path, say: Callable[[str], None] = print) -> None:
    """Remove the weights that `keep` does not keep from the only run of `plan`, and write `output`.

    All weights stay if a comparison would refuse an evaluation of the run for itself; whether another run has the same
    weights is not asked. Raises ModelError if the weights to keep were removed before, under another `keep`.
    """
    ((model, arm, seed),) = plan.runs()
    label, run = f"{model}/{arm} seed {seed}", Path(plan.results, "runs", model, arm, f"seed{seed}")
    evaluations = _evaluations(plan)
    on_machines = [each for name in plan.study.config.evaluation.machines for each in _evaluations(plan.on(name))]
    if problem := _why_refused([*evaluations, *on_machines], plan.study.config.evaluation.all_levels()):
        say(f"{label}: all weights are kept: {problem}")
        steps = tuple(plan.checkpoint_steps)
        write_json(output, RetainedRun(keep=keep, kept_steps=steps, removed_steps=(), kept_because=problem))
        return
    kept = kept_step(evaluations, keep)
    if missing := why_weights_are_gone(_checkpoint(run, kept)):
        raise ModelError(f"keep is {keep}, which keeps step {kept}: {missing}")
    removed = [step for step in plan.checkpoint_steps if step != kept]
    digests = read_json(run / "run.json", RunRecord).outputs_sha256
    for step in removed:
        _remove(_checkpoint(run, step), keep, digests, Path(plan.results, "models", model))
    say(f"{label}: weights after step {kept} are kept ({keep}), those after {', '.join(map(str, removed))} removed")
    write_json(output, RetainedRun(keep=keep, kept_steps=(kept,), removed_steps=tuple(removed)))


def kept_step(evaluations: Sequence[LoadedEvaluation], keep: Keep) -> int:
    """Return the step whose weights are kept: the last, or the best: most accurate at the lowest noise level.

    Of equally accurate steps the later one is the best.
    """
    if keep == "last":
        return max(evaluation.source.step for evaluation in evaluations)
    # The rows are sorted by noise level.
    return max((evaluation.accuracy["accuracy"][0], evaluation.source.step) for evaluation in evaluations)[1]


def _why_refused(evaluations: Sequence[LoadedEvaluation], levels: Sequence[float]) -> str | None:
    """Return why a comparison at one of the levels would refuse an evaluation; None if it would use all."""
    try:
        for evaluation in evaluations:
            refuse_bad_evaluation(evaluation, levels)
    except RefusedError as refused:
        return str(refused)
    return None


def _evaluations(plan: StudyPlan) -> list[LoadedEvaluation]:
    problems = lineage_problems(plan)
    config = plan.study.config
    inputs = [
        EvaluationInput(
            **vars(evaluation_files(Path(plan.results), *run, step, plan.machine)),
            lineage_problems=problems[*run, step],
        )
        for run in plan.runs()
        for step in plan.checkpoint_steps
    ]
    return list(load_evaluations(inputs, config.evaluation.primary_scorer, config.statistics.alpha).values())


def _checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step{step}"


def _remove(checkpoint: Path, keep: Keep, digests: dict[str, str], model: Path) -> None:
    """Remove the weights in a checkpoint, unless a job did before."""
    files = sorted(checkpoint.glob("*.safetensors"))
    if files and read_removed(checkpoint) is None:
        prefix = f"checkpoints/{checkpoint.name}/"
        removed = RemovedWeights(
            keep=keep,
            files_sha256={path.name: digests[f"{prefix}{path.name}"] for path in files},
            untrained=is_untrained(checkpoint, model),
        )
        write_json(checkpoint / REMOVED_WEIGHTS_FILE, removed)
    for path in files:
        path.unlink()
