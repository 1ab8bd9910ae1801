"""The compare stage: every declared comparison of a study, with its verdict."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from aqnpipe.artifacts import (
    AccuracyTable,
    Claim,
    ClaimsFile,
    ComparisonTable,
    write_json,
    write_table,
)
from aqnpipe.config.analysis import StatisticsConfig
from aqnpipe.config.study import Study
from aqnpipe.statistics.claims import METHODS, detectable, holm, sentence_of, verdict_of
from aqnpipe.statistics.contrasts import Contrast, build_contrasts, last_evaluations
from aqnpipe.statistics.evaluations import EvaluationInput, load_evaluation
from aqnpipe.statistics.seeds import Estimate, estimate_difference

__all__ = ["ComparisonOutputs", "EvaluationInput", "compare"]

_TEXT_COLUMNS = ("comparison_id", "kind", "model", "treatment", "control", "method", "verdict")
_COUNT_COLUMNS = ("num_seeds", "num_questions")


@dataclass(frozen=True)
class ComparisonOutputs:
    """Files that the compare stage writes."""

    accuracy: Path
    comparisons: Path
    claims: Path


def compare(study: Study, evaluations: Sequence[EvaluationInput], outputs: ComparisonOutputs) -> None:
    """Test every declared comparison on the last steps; write accuracies of all checkpoints, comparisons and claims.

    What must not be compared gets the verdict `invalid` with the reason. Raises DataError where a file is malformed.
    """
    settings = study.config.statistics
    scorer = study.config.evaluation.primary_scorer
    loaded = [load_evaluation(source, scorer, settings.alpha) for source in evaluations]
    contrasts = build_contrasts(study, last_evaluations(loaded), settings.alpha)
    rows, claims = judge(contrasts, settings)
    accuracy = pl.concat([one.accuracy for one in loaded])
    write_table(outputs.accuracy, accuracy.sort("model", "arm", "seed", "step", "noise_level"), AccuracyTable)
    write_table(outputs.comparisons, rows, ComparisonTable)
    write_json(outputs.claims, claims)


def judge(contrasts: Sequence[Contrast], settings: StatisticsConfig) -> tuple[pl.DataFrame, ClaimsFile]:
    """Return the comparison table and the claims; Holm's family is every contrast that is not refused."""
    estimates = {
        one.comparison_id: estimate_difference(one.treatment_scores, one.control_scores, settings.alpha)
        for one in contrasts
        if one.invalid_reason is None
    }
    adjusted = dict(zip(estimates, holm([one.p_value for one in estimates.values()]), strict=True))
    family_alpha = settings.alpha / max(len(estimates), 1)
    rows, claims = [], []
    for contrast in contrasts:
        key = contrast.comparison_id
        if key in estimates:
            row, claim = _judged(contrast, estimates[key], adjusted[key], family_alpha, settings)
        else:
            row, claim = _refused(contrast)
        rows.append(row)
        claims.append(claim)
    return _table(rows), ClaimsFile(alpha=settings.alpha, family_size=len(estimates), claims=tuple(claims))


def _judged(
    contrast: Contrast, estimate: Estimate, p_holm: float, family_alpha: float, settings: StatisticsConfig
) -> tuple[dict[str, object], Claim]:
    verdict = verdict_of(contrast, estimate, p_holm, settings.alpha)
    sentence = sentence_of(contrast, estimate, verdict, p_holm, family_alpha, settings.power, 1 - settings.alpha)
    row = _identity(contrast) | {
        "num_seeds": estimate.num_seeds,
        "num_questions": estimate.num_questions,
        "treatment_accuracy": float(contrast.treatment_scores.mean()),
        "control_accuracy": float(contrast.control_scores.mean()),
        "difference": estimate.difference,
        "ci_low": estimate.ci_low,
        "ci_high": estimate.ci_high,
        "standard_error": estimate.standard_error,
        "degrees_of_freedom": estimate.degrees_of_freedom,
        "p_value": estimate.p_value,
        "p_holm": p_holm,
        "minimum_detectable_difference": detectable(estimate, family_alpha, settings.power),
        "method": METHODS[estimate.method],
        "verdict": verdict,
    }
    claim = Claim(
        comparison_id=contrast.comparison_id,
        claim=contrast.comparison.claim,
        verdict=verdict,
        sentence=sentence,
        seeds=contrast.seed_tables,
    )
    return row, claim


def _refused(contrast: Contrast) -> tuple[dict[str, object], Claim]:
    row = _identity(contrast) | {"num_seeds": 0, "num_questions": 0, "method": "not compared", "verdict": "invalid"}
    claim = Claim(
        comparison_id=contrast.comparison_id,
        claim=contrast.comparison.claim,
        verdict="invalid",
        sentence=f"Not compared: {contrast.invalid_reason}.",
        seeds=(),
        invalid_reason=contrast.invalid_reason,
    )
    return row, claim


def _identity(contrast: Contrast) -> dict[str, object]:
    return {
        "comparison_id": contrast.comparison_id,
        "kind": contrast.comparison.kind,
        "model": contrast.treatment.model,
        "treatment": contrast.treatment.arm,
        "control": contrast.control.arm,
        "treatment_level": contrast.treatment.noise_level,
        "control_level": contrast.control.noise_level,
    }


def _table(rows: Sequence[dict[str, object]]) -> pl.DataFrame:
    columns = list(ComparisonTable.to_schema().columns)
    types: dict[str, pl.DataType | type[pl.DataType]] = {
        name: pl.String if name in _TEXT_COLUMNS else pl.Int64 if name in _COUNT_COLUMNS else pl.Float64
        for name in columns
    }
    return pl.DataFrame([{name: row.get(name) for name in columns} for row in rows], schema=types)
