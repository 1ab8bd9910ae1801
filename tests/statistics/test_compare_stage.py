import dataclasses

import numpy as np
import polars as pl
import pytest

from aqnpipe.artifacts import (
    AccuracyTable,
    ClaimsFile,
    ComparisonTable,
    EvaluationTable,
    RunRecord,
    read_json,
    read_table,
    write_json,
    write_table,
)
from aqnpipe.errors import DataError
from aqnpipe.noise.evaluation_receipt import EvaluationReceipts
from aqnpipe.statistics.stage import ComparisonOutputs, compare


@pytest.fixture
def artifacts(synthetic, tmp_path):
    return synthetic.write_study(tmp_path, synthetic.study(), num_questions=200)


@pytest.fixture
def run(tmp_path):
    outputs = ComparisonOutputs(tmp_path / "a.parquet", tmp_path / "c.parquet", tmp_path / "claims.json")

    def compared(study, evaluations):
        compare(study, evaluations, outputs)
        return (
            read_table(outputs.accuracy, AccuracyTable),
            read_table(outputs.comparisons, ComparisonTable),
            read_json(outputs.claims, ClaimsFile),
        )

    return compared


def find(artifacts, arm, seed=0):
    return next(one for one in artifacts.evaluations if (one.arm, one.seed) == (arm, seed))


def rewrite_table(source, change):
    write_table(source.table, change(pl.read_parquet(source.table)), EvaluationTable)


def verdicts(claims):
    return {claim.comparison_id: claim.verdict for claim in claims.claims}


def reason(claims, comparison_id):
    return next(claim.invalid_reason for claim in claims.claims if claim.comparison_id == comparison_id)


def test_a_whole_study(artifacts, run):
    accuracy, comparisons, claims = run(artifacts.study, artifacts.evaluations)
    assert len(accuracy) == len(artifacts.evaluations) * 3
    assert comparisons["comparison_id"].to_list() == [
        "baseline-vs-pretrained@0",
        "baseline@0.1-vs-0",
        "E5b@0.1-vs-0",
        "E5-vs-baseline@0",
        "E5b-vs-E5@0",
        "srdd_guided-vs-E5b@0.1",
    ]
    assert verdicts(claims)["baseline-vs-pretrained@0"] == "supported"
    assert comparisons["verdict"].to_list() == [claim.verdict for claim in claims.claims]
    assert claims.family_size == 6


def test_numbers_follow_from_the_rows(artifacts, run):
    accuracy, comparisons, claims = run(artifacts.study, artifacts.evaluations)
    rows = [pl.read_parquet(find(artifacts, arm, seed).table) for arm in ("E5b", "E5") for seed in (0, 1)]
    right = [table.filter(pl.col("noise_level") == 0)["correct_strict"].mean() for table in rows]
    row = comparisons.row(by_predicate=pl.col("comparison_id") == "E5b-vs-E5@0", named=True)
    assert row["treatment_accuracy"] == pytest.approx(np.mean(right[:2]))
    assert row["difference"] == pytest.approx(np.mean(right[:2]) - np.mean(right[2:]))
    shown = accuracy.filter(pl.col("arm") == "E5b", pl.col("seed") == 1, pl.col("noise_level") == 0)
    assert shown["accuracy"].item() == pytest.approx(right[1])
    assert shown["parse_failure_fraction"].item() == pytest.approx(1 - right[1])
    claim = next(one for one in claims.claims if one.comparison_id == "E5b-vs-E5@0")
    assert [seed.difference for seed in claim.seeds] == pytest.approx([right[0] - right[2], right[1] - right[3]])
    assert sum((claim.seeds[0].both_correct, claim.seeds[0].only_treatment)) == right[0] * 200


def test_noise_seeds_are_averaged_per_question(artifacts, run):
    _, comparisons, claims = run(artifacts.study, artifacts.evaluations)
    rows = pl.concat(pl.read_parquet(find(artifacts, "baseline", seed).table) for seed in (0, 1))
    noisy = rows.filter(pl.col("noise_level") == 0.1)
    row = comparisons.row(by_predicate=pl.col("comparison_id") == "baseline@0.1-vs-0", named=True)
    assert row["treatment_accuracy"] == pytest.approx(noisy["correct_strict"].mean())
    assert noisy["noise_seed"].n_unique() == 2
    claim = next(one for one in claims.claims if one.comparison_id == "baseline@0.1-vs-0")
    assert claim.seeds[0].both_correct + claim.seeds[0].neither <= 200


def test_same_inputs_same_bytes(artifacts, run, tmp_path):
    run(artifacts.study, artifacts.evaluations)
    first = [(tmp_path / name).read_bytes() for name in ("a.parquet", "c.parquet", "claims.json")]
    run(artifacts.study, artifacts.evaluations)
    assert first == [(tmp_path / name).read_bytes() for name in ("a.parquet", "c.parquet", "claims.json")]


def test_one_seed_shows_nothing_about_arms(synthetic, run, tmp_path):
    study = synthetic.study(seeds=[0])
    made = synthetic.write_study(tmp_path, study, num_questions=200)
    _, comparisons, claims = run(study, made.evaluations)
    arms = comparisons.filter(pl.col("kind") == "arms")
    assert set(arms["verdict"]) == {"not_shown"}
    assert all("luck of training is not covered" in method for method in arms["method"])
    assert "supported" in comparisons.filter(pl.col("kind") == "levels")["verdict"]
    assert claims.family_size == 6


def test_earlier_checkpoints_do_not_enter_comparisons(synthetic, artifacts, run, tmp_path):
    extra = synthetic.write_evaluation(tmp_path / "early", artifacts.study, "E5", 0, 30, num_questions=200)
    rewrite_table(extra, lambda table: table.with_columns(correct_strict=pl.lit(value=False)))
    _, before, _ = run(artifacts.study, artifacts.evaluations)
    accuracy, after, _ = run(artifacts.study, [extra, *artifacts.evaluations])
    assert after.equals(before)
    assert accuracy.filter(pl.col("step") == 30)["accuracy"].to_list() == [0.0, 0.0, 0.0]


def test_other_questions_are_not_compared(artifacts, run):
    rewrite_table(find(artifacts, "E5"), lambda table: table.filter(pl.col("question_id") != "q00003"))
    _, comparisons, claims = run(artifacts.study, artifacts.evaluations)
    assert verdicts(claims)["E5b-vs-E5@0"] == "invalid"
    assert "answered different questions" in reason(claims, "E5b-vs-E5@0")
    assert comparisons.row(by_predicate=pl.col("comparison_id") == "E5b-vs-E5@0", named=True)["p_value"] is None
    assert claims.family_size == 4


def test_duplicated_rows_are_not_compared(artifacts, run):
    source = find(artifacts, "E5")
    table = pl.read_parquet(source.table)
    pl.concat([table, table.head(2)]).write_parquet(source.table)
    _, _, claims = run(artifacts.study, artifacts.evaluations)
    assert "2 rows repeat" in reason(claims, "E5b-vs-E5@0")


def test_identical_responses_across_levels_are_a_red_flag(artifacts, run):
    source = find(artifacts, "E5b", 1)
    rewrite_table(source, lambda table: table.with_columns(response=pl.col("question_id")))
    _, _, claims = run(artifacts.study, artifacts.evaluations)
    assert "noise was probably absent" in reason(claims, "E5b@0.1-vs-0")
    assert "noise was probably absent" in reason(claims, "srdd_guided-vs-E5b@0.1")
    assert reason(claims, "E5b-vs-E5@0") is None


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"config": {"evaluation": {"max_response_tokens": 80}}}, "config.evaluation.max_response_tokens is 40"),
        ({"code_digest": "fedcba"}, "code_digest is"),
        ({"inputs_sha256": {"test_problems": "cd" * 32}}, "inputs.test_problems is"),
        ({"device": "cuda"}, "device is"),
        ({"identity": {"arm": "E5", "seed": 1, "step": 60}}, "the record says seed 1, expected 0"),
    ],
)
def test_other_settings_are_not_compared(artifacts, run, change, expected):
    source = find(artifacts, "E5")
    old = read_json(source.record, RunRecord)
    write_json(source.record, old.model_copy(update=change))
    _, _, claims = run(artifacts.study, artifacts.evaluations)
    assert verdicts(claims)["E5b-vs-E5@0"] == "invalid"
    assert expected in reason(claims, "E5b-vs-E5@0")
    assert verdicts(claims)["baseline@0.1-vs-0"] != "invalid"


def test_a_failed_receipt_is_not_compared(synthetic, artifacts, run):
    source = find(artifacts, "E5")
    receipts = read_json(source.receipt, EvaluationReceipts)
    clean = synthetic.evaluation_receipt(0.0)
    broken = [one.model_copy(update={"receipt": clean}) if one.noise_level else one for one in receipts.passes]
    write_json(source.receipt, receipts.model_copy(update={"passes": tuple(broken)}))
    _, _, claims = run(artifacts.study, artifacts.evaluations)
    assert "receipt refused: pass at level 0.05" in reason(claims, "E5b-vs-E5@0")


def test_a_missing_receipt_is_not_compared(artifacts, run):
    source = find(artifacts, "E5")
    receipts = read_json(source.receipt, EvaluationReceipts)
    write_json(source.receipt, receipts.model_copy(update={"passes": receipts.passes[:-1]}))
    _, _, claims = run(artifacts.study, artifacts.evaluations)
    assert "no receipt for level 0.1, noise seed 1" in reason(claims, "E5b-vs-E5@0")


def test_a_run_without_its_last_step_is_not_compared(artifacts, run):
    source = find(artifacts, "E5")
    early = dataclasses.replace(source, step=30)
    old = read_json(source.record, RunRecord)
    write_json(source.record, old.model_copy(update={"identity": {"arm": "E5", "step": 30}}))
    _, _, claims = run(artifacts.study, [early if one is source else one for one in artifacts.evaluations])
    assert "the last evaluated step should be 60" in reason(claims, "E5b-vs-E5@0")


def test_missing_seeds_are_not_compared(artifacts, run):
    present = [one for one in artifacts.evaluations if (one.arm, one.seed) != ("E5", 1)]
    _, _, claims = run(artifacts.study, present)
    assert "seeds differ: [0, 1] for E5b, [0] for E5" in reason(claims, "E5b-vs-E5@0")


def test_a_missing_file_is_one_clear_error(artifacts, run):
    find(artifacts, "E5").receipt.unlink()
    with pytest.raises(DataError, match="no such file"):
        run(artifacts.study, artifacts.evaluations)
