"""The stage compare_machines: the same checkpoints on several machines, paired over questions.

A comparison of arms refuses evaluations from different devices. Here the device is what is compared: the weights must
be the same, and nothing may differ but the device and what the machine's settings change.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from aqnpipe.artifacts.comparisons import MachineDifferenceTable
from aqnpipe.artifacts.files import read_json, table_of, write_csv, write_table
from aqnpipe.artifacts.runs import RunRecord
from aqnpipe.comparison.contrasts import Checkpoint, checkpoint_name, refuse_bad_evaluation
from aqnpipe.comparison.evaluations import LoadedEvaluation, RefusedError, differing_settings, load_evaluations
from aqnpipe.comparison.stage import existing_evaluations
from aqnpipe.config.plan import StudyPlan
from aqnpipe.statistics.crossed_effects import estimate_difference

_MAY_DIFFER = {
    "config.dtype": "dtype",
    "config.evaluation.threads": "threads",
    "config.evaluation.batch_size": "batch size",
    "config.faults": "simulated faults",
}
_MAY_DIFFER_BY_PREFIX = {"versions.": "versions of libraries", "generation.": "engine"}
_DEVICE = ("device", "config.device")

_Pair = tuple[LoadedEvaluation, LoadedEvaluation]
"""A checkpoint by the study itself, and on the machine."""


def compare_machines(plan: StudyPlan, output: Path) -> None:
    """Write the differences between machines as `output` and as CSV beside it; DataError where a file is malformed."""
    settings = plan.study.config
    scorer, alpha = settings.evaluation.primary_scorer, settings.statistics.alpha
    here = load_evaluations(existing_evaluations(plan), scorer, alpha, settings.statistics.unit)
    rows: list[dict[str, Any]] = []
    for machine in settings.evaluation.machines:
        there = load_evaluations(existing_evaluations(plan.on(machine)), scorer, alpha)
        rows += ({"machine": machine} | row for row in _rows_of_machine(plan, here, there))
    table = table_of(rows, MachineDifferenceTable)
    write_table(output, table, MachineDifferenceTable)
    write_csv(output.with_suffix(".csv"), table)


def _rows_of_machine(
    plan: StudyPlan, here: Mapping[Checkpoint, LoadedEvaluation], there: Mapping[Checkpoint, LoadedEvaluation]
) -> Iterator[dict[str, Any]]:
    """Yield a row per arm, step and level."""
    by_step = sorted(plan.evaluations(), key=lambda checkpoint: (checkpoint[0], checkpoint[1], checkpoint[3]))
    for (model, arm, step), group in groupby(by_step, key=lambda checkpoint: (*checkpoint[:2], checkpoint[3])):
        checkpoints = list(group)
        for level in sorted(plan.study.config.evaluation.all_levels()):
            row = {"model": model, "arm": arm, "step": step, "noise_level": level}
            try:
                pairs = [_pair(checkpoint, level, here, there) for checkpoint in checkpoints]
                yield row | _compared(plan, pairs, level)
            except RefusedError as error:
                yield row | {"num_seeds": 0, "num_questions": 0, "problem": error.refusal.reason}


def _pair(
    checkpoint: Checkpoint,
    level: float,
    here: Mapping[Checkpoint, LoadedEvaluation],
    there: Mapping[Checkpoint, LoadedEvaluation],
) -> _Pair:
    """Return both evaluations of a checkpoint; RefusedError if one is missing or bad, or if both are not alike."""
    if checkpoint not in here or checkpoint not in there:
        where = "by the study itself" if checkpoint not in here else "on the machine"
        raise RefusedError("missing", f"missing evaluation {where}: {checkpoint_name(checkpoint)}")
    first, second = here[checkpoint], there[checkpoint]
    for evaluation in (first, second):
        refuse_bad_evaluation(evaluation, [level])
    if first.weights is None or first.weights != second.weights:
        raise RefusedError("setting", f"{first.source.name}: the two evaluations are of different weights")
    ours, theirs = first.levels[level], second.levels[level]
    for what in ("question_ids", "noise_seeds", "num_samples"):
        if getattr(ours, what) != getattr(theirs, what):
            name = what.replace("_", " ").removeprefix("num ")
            raise RefusedError("questions", f"{first.source.name}: the two evaluations have different {name}")
    for key in differing_settings(first, second):
        if key not in _DEVICE and _named(key) is None:
            found = f"{first.setting.get(key, 'absent')} and {second.setting.get(key, 'absent')}"
            raise RefusedError("setting", f"{first.source.name}: evaluated differently: {key} is {found}")
    return first, second


def _named(key: str) -> str | None:
    """Return in words a setting that may differ between machines; None if it may not."""
    by_prefix = (words for prefix, words in _MAY_DIFFER_BY_PREFIX.items() if key.startswith(prefix))
    return _MAY_DIFFER.get(key) or next(by_prefix, None)


def _compared(plan: StudyPlan, pairs: Sequence[_Pair], level: float) -> dict[str, Any]:
    """Return the figures of a row; the scores are [training seed, question], averaged over noise seeds."""
    first, second = (np.stack([pair[side].levels[level].correct for pair in pairs]) for side in (0, 1))
    ours, theirs = first.mean(axis=1), second.mean(axis=1)
    statistics = plan.study.config.statistics
    estimate = estimate_difference(theirs, ours, None, pairs[0][0].levels[level].clusters)
    return {
        "num_seeds": estimate.num_seeds,
        "num_questions": estimate.num_questions,
        "accuracy_here": float(ours.mean()),
        "accuracy_there": float(theirs.mean()),
        **estimate.columns(1 - statistics.alpha),
        "flipped": float((first != second).mean()),
        "method": estimate.method,
        "device_here": _all_of(pair[0].setting["device"] for pair in pairs),
        "device_there": _all_of(pair[1].setting["device"] for pair in pairs),
        "trained_on": _trained_on(plan, pairs),
        "differs_in": _all_of(name for pair in pairs for key in differing_settings(*pair) if (name := _named(key))),
    }


def _all_of(names: Iterator[str]) -> str | None:
    return ", ".join(sorted(set(names))) or None


def _trained_on(plan: StudyPlan, pairs: Sequence[_Pair]) -> str | None:
    """Return the devices of the training runs; None for models that this study did not train."""
    sources = [pair[0].source for pair in pairs]
    runs = [Path(plan.results, "runs", each.model, each.arm, f"seed{each.seed}", "run.json") for each in sources]
    trained = [path for path, each in zip(runs, sources, strict=True) if not plan.prepared_model(each.model, each.arm)]
    return _all_of(read_json(path, RunRecord).device for path in trained if path.is_file())
