"""The compare stage: test every comparison of a study on the evaluations that exist, and give each a verdict."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import polars as pl

from aqnpipe.artifacts.comparisons import (
    AccuracyTable,
    Claim,
    ClaimAtLook,
    ClaimsFile,
    ComparisonTable,
    DifferenceTable,
    Family,
    LookFile,
    RobustnessTable,
)
from aqnpipe.artifacts.evaluations import evaluation_files
from aqnpipe.artifacts.files import read_json, read_table, table_of, write_csv, write_json, write_table
from aqnpipe.artifacts.problems import ProblemTable
from aqnpipe.artifacts.provenance import sha256_of_files
from aqnpipe.artifacts.runs import RunRecord
from aqnpipe.comparison.claims import (
    answer_of,
    contrasts_at_looks,
    judgement_at_look,
    last_looks,
    look_statement,
    statements_of,
)
from aqnpipe.comparison.contrasts import Contrast, Contrasts, Scores, checkpoint_name
from aqnpipe.comparison.descriptive import aa_control_rates, difference_rows, robustness_rows, segment_effects
from aqnpipe.comparison.evaluations import EvaluationInput, Refusal, load_evaluations
from aqnpipe.comparison.identity import comparison_ids, error_families
from aqnpipe.comparison.judgement import Evidence, Judgement, Tested, adjusted_tests, evidence_of, judge
from aqnpipe.comparison.lineage import lineage_problems
from aqnpipe.config.analysis import StatisticsConfig
from aqnpipe.config.plan import StudyPlan
from aqnpipe.config.study import Study
from aqnpipe.statistics.multiple_testing import interval_level
from aqnpipe.statistics.sample_sizes import variance_parts

__all__ = ["EvaluationInput", "compare", "existing_evaluations"]


def existing_evaluations(plan: StudyPlan) -> list[EvaluationInput]:
    """Return the evaluations of a study whose table, receipt and record exist, each with its lineage problems.

    Raises DataError if a file is damaged.
    """
    return [
        EvaluationInput(
            **vars(files),
            lineage_problems=problems,
            rollouts=None if plan.prepared_model(*checkpoint[:2]) is not None else _rollouts(plan, *checkpoint[:3]),
        )
        for checkpoint, problems in lineage_problems(plan).items()
        if (files := evaluation_files(Path(plan.results), *checkpoint, plan.machine)).exist
    ]


def _rollouts(plan: StudyPlan, model: str, arm: str, seed: int) -> str | None:
    """Return the backend that drew the rollouts of a run, and its version; None if its record does not say."""
    path = Path(plan.results, "runs", model, arm, f"seed{seed}", "run.json")
    drawn = read_json(path, RunRecord).generation if path.is_file() else {}
    return " ".join(str(drawn[part]) for part in ("backend", "vllm") if part in drawn) or None


def compare(
    study: Study,
    evaluations: Sequence[EvaluationInput],
    folder: Path,
    looks: Sequence[LookFile] = (),
    problems: Path | None = None,
) -> None:
    """Test every comparison on the last steps; write accuracies of all checkpoints, comparisons, robustness and claims.

    Each table is written into `folder` as parquet and as CSV beside it, and the claims as claims.json.
    looks: of a study that adds seeds, all of them; they decide its claims. problems: file of the test questions, for
    effects by segment.
    A comparison that is not meaningful, or whose evaluations do not all exist, gets the verdict `invalid` and the
    reason. Raises DataError if a file is malformed.
    """
    settings = study.config.statistics
    loaded = load_evaluations(evaluations, study.config.evaluation.primary_scorer, settings.alpha, settings.unit)
    contrasts = Contrasts(study, loaded)
    decided = last_looks(study, looks)
    named = comparison_ids(study.comparisons())
    has_usual_pairs = not study.has_training and not study.config.comparisons
    compared_pairs = contrasts_at_looks(study, loaded, looks)
    if not compared_pairs:
        compared_pairs = [contrasts.of(comparison, name) for name, comparison in named.items()]
    rows, claims, families = judge_all(compared_pairs, settings, study, decided)
    accuracy = (
        pl.concat([evaluation.accuracy for evaluation in loaded.values()]) if loaded else table_of([], AccuracyTable)
    )
    names = study.config.evaluation.noise_names()
    if names:
        accuracy = accuracy.with_columns(
            pl.col("noise_level").replace_strict(names, default=None, return_dtype=pl.String).alias("noise")
        )
    compared = table_of(rows, ComparisonTable)
    tables = {
        "accuracy": (accuracy.sort("model", "arm", "seed", "step", "noise_level"), AccuracyTable),
        "comparisons": (compared, ComparisonTable),
        "robustness": (table_of(robustness_rows(study, contrasts), RobustnessTable), RobustnessTable),
        "differences": (table_of(difference_rows(study, contrasts), DifferenceTable), DifferenceTable),
    }
    for name, (table, schema) in tables.items():
        write_table(folder / f"{name}.parquet", table, schema)
        write_csv(folder / f"{name}.csv", _with_reasons(compared, claims) if name == "comparisons" else table)
    written = {f"{name}.parquet": folder / f"{name}.parquet" for name in tables}
    write_json(
        folder / "claims.json",
        ClaimsFile(
            alpha=settings.alpha,
            power=settings.power,
            family_size=sum(families.values()),
            families=tuple(Family(name=name, size=size) for name, size in families.items()),
            claims=tuple(claims),
            aa_control_rates=aa_control_rates(study, contrasts),
            missing=tuple(checkpoint_name(key) for key in StudyPlan(study).evaluations() if key not in loaded),
            answer=answer_of(claims, rows, decided, named, settings.power, has_usual_pairs=has_usual_pairs),
            looks=tuple(looks),
            segments=()
            if problems is None or not problems.is_file()
            else segment_effects(compared_pairs, read_table(problems, ProblemTable), settings.alpha),
            tables_sha256=sha256_of_files(written),
        ),
    )


def _with_reasons(compared: pl.DataFrame, claims: Sequence[Claim]) -> pl.DataFrame:
    """Return the comparisons with the columns claim and reason: why a comparison is invalid, empty for the others."""
    reasons = pl.Series("reason", [claim.invalid_reason for claim in claims], dtype=pl.String)
    return compared.with_columns(pl.Series("claim", [claim.claim for claim in claims], dtype=pl.String), reasons)


def judge_all(
    contrasts: Sequence[Contrast],
    settings: StatisticsConfig,
    study: Study,
    decided: Mapping[str, ClaimAtLook] = MappingProxyType({}),
) -> tuple[list[dict[str, Any]], list[Claim], Mapping[str, int]]:
    """Return the rows of the comparison table, the claims, and the number of tested secondary claims per family.

    decided: the claims of a study that adds seeds at their last looks, by id, which decide the verdicts.
    """
    evidence = {
        contrast.comparison_id: evidence_of(contrast, contrast.scores.estimate())
        for contrast in contrasts
        if contrast.scores is not None
    }
    named = {name: found.contrast.comparison for name, found in evidence.items()}
    tests, others = adjusted_tests(
        named,
        {name: found.p_value for name, found in evidence.items()},
        {name: found.p_other for name, found in evidence.items() if found.p_other is not None},
        settings.alpha,
    )
    family_of = error_families(named)
    sizes = Counter(family_of.values())
    rows, claims = [], []
    for contrast in contrasts:
        key, comparison = contrast.comparison_id, contrast.comparison
        if contrast.scores is not None:
            own = tests[key], others.get(key)
            size = sizes[family_of[key]]
            row, found = _judged(evidence[key], contrast.scores, own, size, settings, decided.get(key))
        elif contrast.refusal is None:
            raise RuntimeError(f"{key} has no scores, and no reason why; this is a bug")
        else:
            row, found = _refused(
                contrast.refusal, interval_level(settings.alpha, one_sided=comparison.margin is not None)
            )
        claim = Claim(
            comparison_id=key,
            claim=comparison.claim,
            claim_zh=comparison.claim_zh,
            declared=bool(study.config.comparisons),
            role=comparison.role,
            verdict=row["verdict"],
            **found,
        )
        rows.append(_identity(contrast) | row)
        claims.append(claim)
    return rows, claims, {family: size for (role, family), size in sizes.items() if role == "secondary"}


def _judged(
    evidence: Evidence,
    scores: Scores,
    tests: tuple[Tested, Tested | None],
    family_size: int,
    settings: StatisticsConfig,
    decided: ClaimAtLook | None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the columns of a comparison that was tested, and the fields of its claim: statements and seeds."""
    claim, estimate = evidence.claim, evidence.estimate
    evenness = 1.0 if scores.clusters is None else scores.clusters.evenness
    parts = variance_parts(scores.differences, scores.seed_variance, evenness)
    judgement = judge(evidence, parts, tests, family_size, settings)
    if decided is not None:
        judgement = judgement_at_look(judgement, decided)
    is_degradation = claim.kind == "degradation"
    row = {
        "num_seeds": estimate.num_seeds,
        "num_questions": estimate.num_questions,
        "treatment_accuracy": scores.treatment_accuracy,
        "control_accuracy": scores.control_accuracy,
        "treatment_change": float(scores.treatment.mean()) if is_degradation else None,
        "control_change": float(scores.control.mean()) if is_degradation else None,
        "difference": estimate.difference,
        "standard_error": estimate.spread.standard_error if estimate.spread else None,
        "degrees_of_freedom": estimate.spread.degrees_of_freedom if estimate.spread else None,
        "method": " ".join(estimate.analysis),
        **_judgement_columns(judgement, has_margin=claim.margin is not None),
    }
    statements = statements_of(evidence, judgement, settings)
    at_look = () if decided is None else (look_statement(decided, claim),)
    return row, {"statements": (*statements, *at_look), "seeds": tuple(scores.by_seed(1 - settings.alpha))}


def _judgement_columns(judgement: Judgement, *, has_margin: bool) -> dict[str, Any]:
    name = "p_beyond" if has_margin else "p_equivalence"
    other = None if judgement.p_value is None else judgement.other
    return {
        **({} if other is None else {name: other.p_value, f"{name}_holm": other.p_holm}),
        **vars(judgement),
        "p_holm": None if judgement.p_value is None else judgement.claimed.p_holm,
    }


def _refused(refusal: Refusal, level: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the columns of a comparison that was not made, and the fields of its claim."""
    row = {"num_seeds": 0, "num_questions": 0, "interval_level": level, "method": "not_compared", "verdict": "invalid"}
    return row, {"seeds": (), "invalid_kind": refusal.kind, "invalid_reason": refusal.reason}


def _identity(contrast: Contrast) -> dict[str, Any]:
    return {
        "comparison_id": contrast.comparison_id,
        "kind": contrast.comparison.kind,
        "test": contrast.comparison.test,
        "role": contrast.comparison.role,
        "family": contrast.comparison.family if contrast.comparison.role == "secondary" else None,
        "margin": contrast.comparison.margin,
        "model": contrast.treatment.model,
        "treatment": contrast.treatment.arm,
        "control": contrast.control.arm,
        "treatment_level": contrast.treatment.noise_level,
        "control_level": contrast.control.noise_level,
    }
