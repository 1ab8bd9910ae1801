"""Comparisons of given checkpoints, each a single set of weights: paired over questions, without training seeds.

What they show holds for these weights. Whether a recipe of training makes the difference needs several runs of it.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

import numpy as np

from aqnpipe.artifacts.comparisons import (
    CheckpointAccuracy,
    CheckpointComparison,
    ComparisonKind,
    EvaluatedCheckpoint,
    RobustnessReport,
)
from aqnpipe.comparison.contrasts import refuse_bad_evaluation
from aqnpipe.comparison.evaluations import OF_THE_TOKENIZER, LoadedEvaluation, RefusedError, setting_difference
from aqnpipe.config.dataset import PromptFormat
from aqnpipe.config.run import EvaluationSpec
from aqnpipe.statistics.arrays import FloatArray
from aqnpipe.statistics.crossed_effects import Estimate, estimate_difference
from aqnpipe.statistics.multiple_testing import Adjusted, adjusted_within_families
from aqnpipe.statistics.sample_sizes import VarianceParts, questions_needed

Compared = tuple[CheckpointComparison, Estimate | None]
"""A comparison without its numbers, and their estimate; None where it was refused."""

POWER = 0.8
"""Probability with which the questions that are named decide a comparison."""

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
    noises = spec.evaluation.noise_names()
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
        accuracies=tuple(_accuracies_of(evaluations, noises)),
        comparisons=tuple(
            row.model_copy(update={"noise": noises.get(row.noise_level)})
            for row in compare_checkpoints(evaluations, alpha)
        ),
        notes=tuple(_notes(evaluations, alpha)),
    )


def compare_checkpoints(evaluations: Sequence[LoadedEvaluation], alpha: float) -> tuple[CheckpointComparison, ...]:
    """Return every checkpoint against itself without noise, and every pair at every level and in its degradation.

    p-values are adjusted by Holm's method within each kind, over those comparisons that can be made, and intervals are
    at the level at which Holm's method made the test.
    """
    found = [*_of_noise(evaluations), *_of_pairs(evaluations)]
    tested = [(comparison.kind, estimate.two_sided_p()) for comparison, estimate in found if estimate is not None]
    adjusted = iter(adjusted_within_families([kind for kind, _ in tested], [p for _, p in tested], alpha))
    return tuple(
        comparison if estimate is None else _with_numbers(comparison, estimate, next(adjusted), alpha)
        for comparison, estimate in found
    )


def _with_numbers(
    comparison: CheckpointComparison, estimate: Estimate, adjusted: Adjusted, alpha: float
) -> CheckpointComparison:
    bound = 2.0 if comparison.kind == "degradation" else 1.0
    return comparison.model_copy(
        update={
            **estimate.columns(1 - adjusted.level, bound),
            "interval_level": 1 - adjusted.level,
            "p_value": estimate.two_sided_p(),
            "p_holm": adjusted.p_value,
            "method": estimate.method,
            "questions_needed": _questions_needed(estimate, adjusted, alpha),
        }
    )


def _questions_needed(estimate: Estimate, adjusted: Adjusted, alpha: float) -> int | None:
    """Return how many questions would decide an open comparison, if the true difference is the measured one."""
    if adjusted.p_value < alpha or estimate.spread is None:
        return None
    parts = VarianceParts(seed=0.0, question=estimate.spread.variance * estimate.num_units, residual=0.0)
    return estimate.questions_of(questions_needed(parts, 1, abs(estimate.difference), adjusted.level / 2, POWER))


def _accuracies_of(
    evaluations: Sequence[LoadedEvaluation], noises: Mapping[float, str]
) -> Iterator[CheckpointAccuracy]:
    columns = [name for name in CheckpointAccuracy.model_fields if name not in ("checkpoint", "noise")]
    for evaluation in evaluations:
        for row in evaluation.accuracy.to_dicts():
            own = {name: row[name] for name in columns}
            yield CheckpointAccuracy(checkpoint=evaluation.source.model, noise=noises.get(row["noise_level"]), **own)


def _notes(evaluations: Sequence[LoadedEvaluation], alpha: float) -> Iterator[str]:
    yield (
        "Intervals and tests are over questions, for these weights and these noise seeds. Whether a way of training "
        "makes the difference needs several runs of it."
    )
    yield (
        f"p-values are adjusted by Holm's method over the comparisons of each table. Intervals of accuracies are at "
        f"{1 - alpha:.0%}, those of differences at the level of that test: they exclude 0 where one is shown."
    )
    first = evaluations[0]
    others = [other.source.model for other in evaluations[1:] if _facts(other) != _facts(first)]
    if others:
        yield (
            f"{', '.join(others)}: other tokens of prompts or another end of responses than {first.source.model}; the "
            "questions are the same."
        )
    for evaluation in evaluations:
        rows = evaluation.accuracy.to_dicts()
        shares = {
            "were cut off at the token limit": max(row["truncated_fraction"] for row in rows),
            "have no answer that the scorer found, and count as wrong": max(
                row["parse_failure_fraction"] for row in rows
            ),
        }
        if max(shares.values()) > _MANY:
            said = (f"up to {share:.0%} of the responses {text}" for text, share in shares.items() if share >= 0.005)
            yield f"{evaluation.source.model}: {'; '.join(said)}."
        for problem in evaluation.problems:
            yield f"not used: {problem.reason}"


def _of_noise(evaluations: Sequence[LoadedEvaluation]) -> Iterator[Compared]:
    for evaluation in evaluations:
        for level in _noisy_levels(evaluation):
            yield _compared("noise", evaluation, evaluation, level)


def _of_pairs(evaluations: Sequence[LoadedEvaluation]) -> Iterator[Compared]:
    for first, second in combinations(evaluations, 2):
        for level in sorted({*first.levels, *second.levels}):
            yield _compared("accuracy", first, second, level)
        for level in _noisy_levels(first):
            yield _compared("degradation", first, second, level)


def _compared(kind: ComparisonKind, first: LoadedEvaluation, second: LoadedEvaluation, level: float) -> Compared:
    identity = {"kind": kind, "first": first.source.model, "second": second.source.model, "noise_level": level}
    try:
        for evaluation in (first, second):
            refuse_bad_evaluation(evaluation, [level] if kind == "accuracy" else [0.0, level])
        if kind != "noise":
            _refuse_unlike(first, second)
    except RefusedError as error:
        return CheckpointComparison.model_validate(identity | {"refusal": str(error)}), None
    treatment = _scores(first, level)
    control = _scores(second, 0.0 if kind == "noise" else level)
    if kind == "degradation":
        treatment, control = treatment - _scores(first, 0.0), control - _scores(second, 0.0)
    estimate = estimate_difference(treatment[None], control[None], None, first.levels[level].clusters)
    return CheckpointComparison.model_validate(identity), estimate


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
