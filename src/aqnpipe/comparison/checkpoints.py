"""Comparisons of given checkpoints, each a single set of weights: paired over questions, without training seeds.

What they show holds for these weights. Whether a recipe of training makes the difference needs several runs of it.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from aqnpipe.artifacts.checkpoints import (
    CheckpointAccuracy,
    CheckpointComparison,
    ComparisonKind,
    EvaluatedCheckpoint,
    RobustnessReport,
)
from aqnpipe.comparison.contrasts import RefusedError, refuse_bad_evaluation
from aqnpipe.comparison.evaluations import OF_THE_TOKENIZER, LoadedEvaluation, setting_difference
from aqnpipe.config.dataset import PromptFormat
from aqnpipe.config.run import EvaluationSpec
from aqnpipe.statistics.crossed_effects import estimate_difference
from aqnpipe.statistics.multiple_testing import holm_within_families

Row = TypeVar("Row", CheckpointAccuracy, CheckpointComparison)
FloatArray = npt.NDArray[np.float64]

_MANY = 0.05
"""Share of responses without an answer that a reader should know of."""


def report_of(
    evaluations: Sequence[LoadedEvaluation], sources: Mapping[str, str], data: str, spec: EvaluationSpec, alpha: float
) -> RobustnessReport:
    """Return accuracies and comparisons of checkpoints.

    `sources`: where each came from, by name. `data`: name of the data set. `spec`: of one of the evaluations, whose
    settings all share.
    """
    names = [evaluation.source.model for evaluation in evaluations]
    names_of_noises = spec.evaluation.noise_names()
    return RobustnessReport(
        data=data,
        prompt=_prompt_in_words(spec.prompt),
        scorer=spec.evaluation.primary_scorer,
        operators=spec.evaluation.operators,
        dtype=spec.dtype,
        alpha=alpha,
        checkpoints=tuple(
            EvaluatedCheckpoint(name=name, source=sources[name], weights_sha256=evaluation.weights or "")
            for name, evaluation in zip(names, evaluations, strict=True)
        ),
        accuracies=tuple(_named(row, names_of_noises) for row in _accuracies_of(evaluations)),
        comparisons=tuple(_named(row, names_of_noises) for row in compare_checkpoints(evaluations, alpha)),
        notes=tuple(_notes(evaluations, alpha)),
    )


def compare_checkpoints(evaluations: Sequence[LoadedEvaluation], alpha: float) -> tuple[CheckpointComparison, ...]:
    """Return every checkpoint against itself without noise, and every pair at every level and in its degradation.

    p-values are adjusted by Holm's method within each kind, over those comparisons that can be made.
    """
    found = [*_of_noise(evaluations, alpha), *_of_pairs(evaluations, alpha)]
    tested = [comparison for comparison in found if comparison.p_value is not None]
    adjusted = iter(
        holm_within_families(
            [comparison.kind for comparison in tested], [comparison.p_value or 0.0 for comparison in tested]
        )
    )
    return tuple(
        comparison if comparison.p_value is None else comparison.model_copy(update={"p_holm": next(adjusted)})
        for comparison in found
    )


def _named(row: Row, names: Mapping[float, str]) -> Row:
    """Return a row with the name of its noise, if it has one."""
    return row.model_copy(update={"noise": names.get(row.noise_level)})


def _accuracies_of(evaluations: Sequence[LoadedEvaluation]) -> tuple[CheckpointAccuracy, ...]:
    columns = [name for name in CheckpointAccuracy.model_fields if name not in ("checkpoint", "noise")]
    return tuple(
        CheckpointAccuracy(checkpoint=evaluation.source.model, **{name: row[name] for name in columns})
        for evaluation in evaluations
        for row in evaluation.accuracy.to_dicts()
    )


def _notes(evaluations: Sequence[LoadedEvaluation], alpha: float) -> Iterator[str]:
    yield (
        f"Intervals ({1 - alpha:.0%}) and tests are over questions, for these weights and these noise seeds. Whether a "
        "way of training makes the difference needs several runs of it."
    )
    yield "p-values are adjusted by Holm's method over the comparisons of each table."
    first = evaluations[0]
    others = [other.source.model for other in evaluations[1:] if _facts(other) != _facts(first)]
    if others:
        yield (
            f"{', '.join(others)}: other tokens of prompts or another end of responses than {first.source.model}; the "
            "questions are the same."
        )
    for evaluation in evaluations:
        rows = evaluation.accuracy.to_dicts()
        cut_off = max(float(row["truncated_fraction"]) for row in rows)
        unanswered = max(float(row["parse_failure_fraction"]) for row in rows)
        if max(cut_off, unanswered) > _MANY:
            yield (
                f"{evaluation.source.model}: up to {cut_off:.0%} of the responses were cut off at the token limit, and "
                f"in up to {unanswered:.0%} the scorer found no answer; both count as wrong."
            )
        for problem in evaluation.problems:
            yield f"not used: {problem.text}"


def _of_noise(evaluations: Sequence[LoadedEvaluation], alpha: float) -> Iterator[CheckpointComparison]:
    for evaluation in evaluations:
        for level in _noisy_levels(evaluation):
            yield _compared("noise", evaluation, evaluation, level, alpha)


def _of_pairs(evaluations: Sequence[LoadedEvaluation], alpha: float) -> Iterator[CheckpointComparison]:
    for first, second in combinations(evaluations, 2):
        for level in sorted({*first.levels, *second.levels}):
            yield _compared("accuracy", first, second, level, alpha)
        for level in _noisy_levels(first):
            yield _compared("degradation", first, second, level, alpha)


def _compared(
    kind: ComparisonKind, first: LoadedEvaluation, second: LoadedEvaluation, level: float, alpha: float
) -> CheckpointComparison:
    identity = {"kind": kind, "first": first.source.model, "second": second.source.model, "noise_level": level}
    try:
        for evaluation in (first, second):
            refuse_bad_evaluation(evaluation, [level] if kind == "accuracy" else [0.0, level])
        if kind != "noise":
            _refuse_unlike(first, second)
    except RefusedError as error:
        return CheckpointComparison.model_validate(identity | {"refusal": str(error)})
    treatment = _scores(first, level)
    control = _scores(second, 0.0 if kind == "noise" else level)
    if kind == "degradation":
        treatment, control = treatment - _scores(first, 0.0), control - _scores(second, 0.0)
    estimate = estimate_difference(treatment[None], control[None], None, first.levels[level].clusters)
    low, high = estimate.interval(1 - alpha)
    bound = 2.0 if kind == "degradation" else 1.0
    return CheckpointComparison.model_validate(
        identity
        | {
            "difference": estimate.difference,
            "ci_low": max(low, -bound),
            "ci_high": min(high, bound),
            "p_value": estimate.two_sided_p(),
            "method": estimate.method,
        }
    )


def _refuse_unlike(first: LoadedEvaluation, second: LoadedEvaluation) -> None:
    """Raise RefusedError if two evaluations asked other questions, or asked them in another way."""
    if first.weights is not None and first.weights == second.weights:
        raise RefusedError("model", f"{first.source.model} and {second.source.model} are the same weights")
    difference = setting_difference(first, second, of_tokenizers=False)
    if difference:
        raise RefusedError("setting", f"evaluated differently: {difference}")


def _prompt_in_words(prompt: PromptFormat) -> str:
    """Return how questions were asked, in one line."""
    chosen = [f"style {prompt.style}", f"layout {prompt.layout}"]
    chosen += [f"{prompt.num_examples} examples"] if prompt.num_examples else []
    return ", ".join(chosen + ([f"instruction {prompt.instruction!r}"] if prompt.instruction else []))


def _facts(evaluation: LoadedEvaluation) -> dict[str, str]:
    return {key: value for key, value in evaluation.setting.items() if key.startswith(OF_THE_TOKENIZER)}


def _noisy_levels(evaluation: LoadedEvaluation) -> list[float]:
    return sorted(level for level in evaluation.levels if level > 0)


def _scores(evaluation: LoadedEvaluation, level: float) -> FloatArray:
    """Return the share of right responses to every question, over noise seeds and samples."""
    return np.asarray(evaluation.levels[level].correct.mean(axis=0))
