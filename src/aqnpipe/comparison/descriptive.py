"""Descriptive results beside the claims, part of no family: robustness, differences, A/A controls and segments.

Segments of the questions are those of one kind of problem, or of one number of steps of the worked answer.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import polars as pl
from statsmodels.stats.proportion import proportion_confint

from aqnpipe.artifacts.comparisons import AAControlRate, SegmentBy, SegmentEffect
from aqnpipe.comparison.contrasts import Contrast, Contrasts, Scores, refuse_bad_evaluation
from aqnpipe.comparison.evaluations import LoadedEvaluation, RefusedError
from aqnpipe.config.analysis import PRETRAINED, ArmComparison
from aqnpipe.config.arm import Arm
from aqnpipe.config.study import Study
from aqnpipe.statistics.arrays import FloatArray
from aqnpipe.statistics.clusters import Clusters
from aqnpipe.statistics.crossed_effects import estimate_difference
from aqnpipe.statistics.curves import robustness_row, slope_per_question

MIN_QUESTIONS = 10
"""A smaller segment is left out: its interval says nothing."""
MAX_SEGMENTS = 12
"""Of kinds of problems, the most frequent ones. Where every question has a kind of its own, none is shown."""


def robustness_rows(study: Study, contrasts: Contrasts) -> list[dict[str, Any]]:
    """Return a row per arm, over all noise levels after the last step, as in `RobustnessTable`."""
    levels, alpha = sorted(study.config.evaluation.noise_levels), study.config.statistics.alpha
    models = study.model_roles() if len(levels) > 1 else ()
    return [
        {"model": model, "num_seeds": 0, "num_questions": 0, "num_levels": 0} | row
        for model in models
        for row in _robustness_of_model(model, study.evaluated_arms(model), levels, contrasts, alpha)
    ]


def _robustness_of_model(
    model: str, arms: Sequence[str], levels: Sequence[float], contrasts: Contrasts, alpha: float
) -> Iterator[dict[str, Any]]:
    found: dict[str, tuple[FloatArray, Clusters | None]] = {}
    problems: dict[str, str] = {}
    for arm in arms:
        try:
            runs = contrasts.runs_of(model, arm)
            found[arm] = _mean_outcomes(runs, levels), runs[0].levels[levels[0]].clusters
        except RefusedError as error:
            problems[arm] = error.refusal.reason
    trained = {arm: means for arm, (means, _) in found.items() if arm != PRETRAINED}
    slopes = {arm: slope_per_question(levels, means).mean(axis=1) for arm, means in trained.items()}
    most = max(map(len, slopes.values()), default=0)
    # An arm may have fewer seeds than others, always the first ones.
    padded = {arm: np.append(values, np.full(most - len(values), np.nan)) for arm, values in slopes.items()}
    variances = contrasts.variances(model, padded)
    for arm in arms:
        if arm in problems:
            yield {"arm": arm, "problem": problems[arm]}
        else:
            means, clusters = found[arm]
            yield {"arm": arm} | robustness_row(levels, means, variances.of(arm), alpha, clusters)


def _mean_outcomes(runs: Sequence[LoadedEvaluation], levels: Sequence[float]) -> FloatArray:
    """Return the mean scores [level, seed, question]; RefusedError if the runs cannot be compared."""
    for run in runs:
        refuse_bad_evaluation(run, levels)
    if len({run.levels[level].question_ids for run in runs for level in levels}) > 1:
        raise RefusedError("questions", "seeds answered different questions")
    if len({run.levels[level].noise_seeds for level in levels for run in runs if level > 0}) > 1:
        raise RefusedError("noise_seeds", "seeds were evaluated with different noise seeds")
    return np.stack([np.stack([run.levels[level].correct for run in runs]).mean(axis=1) for level in levels])


def difference_rows(study: Study, contrasts: Contrasts) -> list[dict[str, Any]]:
    """Return a row per arm and level, after the last step, as in `artifacts.comparisons.DifferenceTable`."""
    return [row for role in study.model_roles() for row in _differences_of_model(study, role, contrasts)]


def _reference_arm(study: Study, role: str) -> str:
    """Return the first arm of a model without noise, AQN or simulated machine; else the pretrained model."""
    plain = (name for name, arm in study.arms.items() if arm.model == role and arm.aa_control_of is None)
    return next((name for name in plain if _is_plain(study.arms[name])), PRETRAINED)


def _is_plain(arm: Arm) -> bool:
    return not (arm.operator_noise or arm.module_noise or arm.kv_cache or arm.aqn or arm.machine)


def _differences_of_model(study: Study, role: str, contrasts: Contrasts) -> Iterator[dict[str, Any]]:
    reference, alpha = _reference_arm(study, role), study.config.statistics.alpha
    for name in (name for name, arm in study.arms.items() if arm.model == role and name != reference):
        for level in sorted(study.config.evaluation.all_levels()):
            comparison = ArmComparison(
                kind="arms", treatment=name, control=reference, noise_level=level, expected="higher", claim=name
            )
            identity = {"model": role, "arm": name, "reference": reference, "noise_level": level}
            yield identity | _estimated(contrasts.of(comparison, name), alpha)


def _estimated(contrast: Contrast, alpha: float) -> dict[str, Any]:
    if contrast.scores is None:
        return {"num_seeds": 0, "num_questions": 0, "problem": contrast.refusal.reason if contrast.refusal else None}
    estimate = contrast.scores.estimate()
    figures = estimate.columns(1 - alpha, contrast.bound)
    return {"num_seeds": estimate.num_seeds, "num_questions": estimate.num_questions, **figures}


_Outcome = tuple[float, bool]
"""An A/A test: its p-value, and whether both sides have equal outcomes on every question."""

_IDENTICAL: _Outcome = (1.0, True)


def aa_control_rates(study: Study, contrasts: Contrasts) -> tuple[AAControlRate, ...]:
    """Compare every A/A control of the study with its arm at every noise level; empty if there is none.

    Equal weights on both sides, which other comparisons refuse, count as identical. Other refusals are left out.
    """
    found = [
        contrast
        for contrast in _aa_contrasts(study, contrasts)
        if contrast.refusal is None or contrast.refusal.kind == "model"
    ]
    alpha = study.config.statistics.alpha
    across: list[_Outcome] = []
    single: list[_Outcome] = []
    for contrast in found:
        scores = contrast.scores
        if scores is None:
            across.append(_IDENTICAL)
            single += [_IDENTICAL] * len(study.seeds_of(contrast.treatment.arm))
            continue
        if len(scores.seeds) > 1:
            estimate = scores.estimate()
            across.append((estimate.two_sided_p(), estimate.spread is None and estimate.difference == 0))
        single += [
            (table.p_value, table.treatment_better + table.control_better == 0) for table in scores.by_seed(1 - alpha)
        ]
    rates = (_rate("across_seeds", across, alpha), _rate("single_runs", single, alpha))
    return tuple(rate for rate in rates if rate.tests)


def _aa_contrasts(study: Study, contrasts: Contrasts) -> list[Contrast]:
    pairs = [(name, arm.aa_control_of) for name, arm in study.arms.items() if arm.aa_control_of in study.arms]
    return [
        contrasts.of(
            ArmComparison(
                treatment=aa_control, control=str(repeated), noise_level=level, expected="higher", claim="A/A"
            ),
            "A/A",
        )
        for aa_control, repeated in pairs
        for level in study.config.evaluation.noise_levels
    ]


def _rate(kind: Literal["across_seeds", "single_runs"], outcomes: Sequence[_Outcome], alpha: float) -> AAControlRate:
    rejected = sum(p_value < alpha for p_value, _ in outcomes)
    low, high = proportion_confint(rejected, max(len(outcomes), 1), alpha=alpha, method="beta")
    return AAControlRate(
        kind=kind,
        alpha=alpha,
        tests=len(outcomes),
        rejected=rejected,
        identical=sum(identical for _, identical in outcomes),
        ci_low=float(low),
        ci_high=float(high),
    )


def segment_effects(contrasts: Sequence[Contrast], questions: pl.DataFrame, alpha: float) -> tuple[SegmentEffect, ...]:
    """Return the effects of the primary claim, else of the first one with data; empty if there are no two segments.

    questions: columns as in `artifacts.problems.ProblemTable`. Intervals are at 1 - alpha, each by itself.
    """
    primary = [contrast for contrast in contrasts if contrast.comparison.role == "primary"]
    chosen = next((one for one in primary or contrasts if one.scores is not None), None)
    if chosen is None or chosen.scores is None:
        return ()
    rows = {row["question_id"]: row for row in questions.iter_rows(named=True)}
    asked = [rows.get(name, {}) for name in chosen.scores.question_ids]
    labels: Mapping[SegmentBy, list[object]] = {
        "kind": [row.get("cluster") for row in asked],
        "steps": [_num_steps(row.get("answer", "")) for row in asked],
    }
    return tuple(
        effect
        for by, values in labels.items()
        for effect in _effects(chosen.comparison_id, chosen.scores, by, values, alpha)
    )


def _num_steps(answer: str) -> int | None:
    """Return the number of lines before the one with `####`; None for an answer that is not worked like this."""
    *steps, last = [line for line in answer.splitlines() if line.strip()] or [""]
    return len(steps) if steps and last.startswith("####") else None


def _effects(
    comparison_id: str, scores: Scores, by: SegmentBy, labels: Sequence[object], alpha: float
) -> Iterator[SegmentEffect]:
    counts = [(label, count) for label, count in Counter(labels).most_common() if count >= MIN_QUESTIONS]
    shown = [label for label, _ in counts[:MAX_SEGMENTS]]
    if None in labels or len(shown) < 2:
        return
    for label in sorted(shown) if by == "steps" else shown:  # type: ignore[type-var]
        chosen = np.array([other == label for other in labels])
        codes = np.zeros(0) if scores.clusters is None else scores.clusters.codes[chosen]
        # The questions of one kind are one cluster: then they are the units.
        clusters = Clusters.of(codes.tolist()) if len(set(codes)) > 1 else None
        estimate = estimate_difference(scores.treatment[:, chosen], scores.control[:, chosen], None, clusters)
        yield SegmentEffect(
            comparison_id=comparison_id,
            by=by,
            segment=str(label),
            num_questions=int(chosen.sum()),
            num_clusters=None if clusters is None else clusters.number,
            **estimate.columns(1 - alpha, scores.bound),
        )
