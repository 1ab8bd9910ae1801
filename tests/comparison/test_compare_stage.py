import dataclasses

import numpy as np
import polars as pl
import pytest
from checksum_files import write_parquet_with_checksum
from made_up import evaluation_receipt, rewrite_table

from aqnpipe.artifacts.comparisons import AccuracyTable, ClaimsFile, ComparisonTable, DifferenceTable, RobustnessTable
from aqnpipe.artifacts.files import read_json, read_table, write_json
from aqnpipe.artifacts.runs import RunRecord
from aqnpipe.comparison.stage import compare, existing_evaluations
from aqnpipe.config.plan import StudyPlan
from aqnpipe.errors import DataError
from aqnpipe.noise.receipts.receipt import EvaluationReceipts
from aqnpipe.report.claims import sentence_text
from aqnpipe.report.tables import analysis_text
from aqnpipe.report.words import load_words


@pytest.fixture(scope="module")
def originals(synthetic, tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluations")
    return folder, synthetic.write_evaluations(folder, synthetic.study())


@pytest.fixture
def artifacts(originals, tmp_path):
    folder, made_up = originals
    return made_up.copied(folder, tmp_path)


@pytest.fixture
def run(tmp_path):
    outputs = tmp_path

    def compared(study, evaluations):
        compare(study, evaluations, outputs)
        return (
            read_table(outputs / "accuracy.parquet", AccuracyTable),
            read_table(outputs / "comparisons.parquet", ComparisonTable),
            read_json(outputs / "claims.json", ClaimsFile),
        )

    return compared


def find(artifacts, arm, seed=0):
    return artifacts.find(arm, seed)


def rewrite_rows(source, change):
    rewrite_table(source, change(pl.read_parquet(source.table)))


def verdicts(claims):
    return {claim.comparison_id: claim.verdict for claim in claims.claims}


def reason(claims, comparison_id):
    return next(claim.invalid_reason for claim in claims.claims if claim.comparison_id == comparison_id)


def unchanged(claims, comparison_id):
    """Return the values of the sentence that says that noise changed no response; None: there is none."""
    claim = next(claim for claim in claims.claims if claim.comparison_id == comparison_id)
    return next((found.values for found in claim.statements if found.key == "claim.unchanged_responses"), None)


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
    claim = next(claim for claim in claims.claims if claim.comparison_id == "E5b-vs-E5@0")
    assert [seed.difference for seed in claim.seeds] == pytest.approx([right[0] - right[2], right[1] - right[3]])
    first = claim.seeds[0]
    assert first.treatment_better - first.control_better == pytest.approx((right[0] - right[2]) * 200)


def test_noise_seeds_are_averaged_per_question(artifacts, run):
    _, comparisons, claims = run(artifacts.study, artifacts.evaluations)
    rows = pl.concat(pl.read_parquet(find(artifacts, "baseline", seed).table) for seed in (0, 1))
    noisy = rows.filter(pl.col("noise_level") == 0.1)
    row = comparisons.row(by_predicate=pl.col("comparison_id") == "baseline@0.1-vs-0", named=True)
    assert row["treatment_accuracy"] == pytest.approx(noisy["correct_strict"].mean())
    assert noisy["noise_seed"].n_unique() == 2
    claim = next(claim for claim in claims.claims if claim.comparison_id == "baseline@0.1-vs-0")
    assert np.mean([seed.difference for seed in claim.seeds]) == pytest.approx(row["difference"])


def test_same_inputs_same_bytes(artifacts, run, tmp_path):
    run(artifacts.study, artifacts.evaluations)
    files = [path for path in tmp_path.iterdir() if path.is_file()]
    first = [path.read_bytes() for path in files]
    run(artifacts.study, artifacts.evaluations)
    assert len(files) == 9
    assert first == [path.read_bytes() for path in files]


def test_one_seed_shows_nothing_about_arms(synthetic, run, tmp_path):
    study = synthetic.study(seeds=[0])
    made = synthetic.write_evaluations(tmp_path, study)
    _, comparisons, claims = run(study, made.evaluations)
    arms = comparisons.filter(pl.col("kind") == "arms")
    assert set(arms["verdict"]) == {"not_shown"}
    words = load_words("en")
    assert all("run-to-run variance not covered" in analysis_text(method, words) for method in arms["method"])
    assert "supported" in comparisons.filter(pl.col("kind") == "levels")["verdict"]
    assert claims.family_size == 6


def test_earlier_checkpoints_do_not_enter_comparisons(synthetic, artifacts, run, tmp_path):
    extra = synthetic.write_evaluation(tmp_path, artifacts.study, "E5", 0, 30)
    rewrite_rows(extra, lambda table: table.with_columns(correct_strict=pl.lit(value=False)))
    _, before, _ = run(artifacts.study, artifacts.evaluations)
    accuracy, after, _ = run(artifacts.study, [extra, *artifacts.evaluations])
    assert after.equals(before)
    assert accuracy.filter(pl.col("step") == 30)["accuracy"].to_list() == [0.0, 0.0, 0.0]


def test_noise_that_changes_no_response_is_compared_and_named(artifacts, run):
    """Receipts prove noise, which may be too small for the questions that were asked."""
    source = find(artifacts, "E5b", 1)
    rewrite_rows(source, lambda table: table.with_columns(response=pl.col("question_id")))
    _, _, claims = run(artifacts.study, artifacts.evaluations)
    for comparison in ("E5b@0.1-vs-0", "srdd_guided-vs-E5b@0.1"):
        assert unchanged(claims, comparison) == {"run": "base/E5b seed 1 step 60", "runs": 1}
    assert unchanged(claims, "E5b-vs-E5@0") is None
    assert all(reason(claims, claim.comparison_id) is None for claim in claims.claims)


def with_record(**changes):
    """Function that changes the record of an evaluation."""
    return lambda source: write_json(source.record, read_json(source.record, RunRecord).model_copy(update=changes))


def with_rows(change):
    """Function that changes the table of an evaluation."""
    return lambda source: write_parquet_with_checksum(source.table, change(pl.read_parquet(source.table)))


def with_passes(change):
    """Function that changes the receipts of an evaluation."""

    def write(source):
        receipts = read_json(source.receipt, EvaluationReceipts)
        write_json(source.receipt, receipts.model_copy(update={"passes": tuple(change(receipts.passes))}))

    return write


def evaluated_with(**settings):
    return {"dtype": "float32", "evaluation": {"max_response_tokens": 40, "primary_scorer": "strict"} | settings}


def without_noise(passes):
    clean = evaluation_receipt(0.0)
    return [one.model_copy(update={"receipt": clean}) if one.noise_level else one for one in passes]


@pytest.mark.parametrize(
    ("sabotage", "expected"),
    [
        (
            lambda source: rewrite_rows(source, lambda rows: rows.filter(pl.col("question_id") != "q00003")),
            "answered different questions",
        ),
        (with_rows(lambda rows: pl.concat([rows, rows.head(2)])), "2 rows repeat"),
        (with_record(config=evaluated_with(max_response_tokens=80)), "config.evaluation.max_response_tokens is 40"),
        (with_record(config=evaluated_with(primary_scorer="last_number")), "config.evaluation.primary_scorer is"),
        (with_record(config={"dtype": "bfloat16"}), "config.dtype is 'float32'"),
        (with_record(code_digest="fedcba"), "code_digest is"),
        (with_record(inputs_sha256={"test_problems": "cd" * 32}), "inputs.test_problems is"),
        (with_record(device="cuda"), "device is"),
        (
            with_record(identity={"model": "base", "arm": "E5", "seed": 1, "step": 60}),
            "the record says seed 1, expected 0",
        ),
        (with_passes(without_noise), "receipt invalid: evaluation at level 0.05"),
        (with_passes(lambda passes: passes[:-1]), "no receipt for level 0.1, noise seed 1"),
    ],
)
def test_what_is_wrong_with_an_evaluation_refuses_its_comparisons_alone(artifacts, run, sabotage, expected):
    sabotage(find(artifacts, "E5"))
    _, comparisons, claims = run(artifacts.study, artifacts.evaluations)
    assert verdicts(claims)["E5b-vs-E5@0"] == "invalid"
    assert expected in reason(claims, "E5b-vs-E5@0")
    assert comparisons.row(by_predicate=pl.col("comparison_id") == "E5b-vs-E5@0", named=True)["p_value"] is None
    assert verdicts(claims)["baseline@0.1-vs-0"] != "invalid"
    assert claims.family_size == 4


def test_a_run_without_its_last_step_is_not_compared(artifacts, run):
    source = find(artifacts, "E5")
    early = dataclasses.replace(source, step=30)
    old = read_json(source.record, RunRecord)
    identity = {"model": "base", "arm": "E5", "seed": 0, "step": 30}
    write_json(source.record, old.model_copy(update={"identity": identity}))
    _, _, claims = run(
        artifacts.study, [early if evaluation is source else evaluation for evaluation in artifacts.evaluations]
    )
    assert reason(claims, "E5b-vs-E5@0") == "missing evaluations: base/E5 seed 0 step 60"


def test_missing_seeds_are_not_compared(artifacts, run):
    present = [evaluation for evaluation in artifacts.evaluations if (evaluation.arm, evaluation.seed) != ("E5", 1)]
    _, _, claims = run(artifacts.study, present)
    assert reason(claims, "E5b-vs-E5@0") == "missing evaluations: base/E5 seed 1 step 60"
    assert claims.missing == ("base/E5 seed 1 step 60",)
    assert verdicts(claims)["baseline@0.1-vs-0"] != "invalid"


def test_a_missing_file_is_one_clear_error(artifacts, run):
    find(artifacts, "E5").receipt.unlink()
    with pytest.raises(DataError, match="no such file"):
        run(artifacts.study, artifacts.evaluations)


def changed(artifacts, **changes):
    """The same evaluations under another study file."""
    config = artifacts.study.config.model_dump(mode="json") | changes
    return artifacts.study.model_validate({"config": config, "arms": artifacts.study.arms})


def test_tables_are_written_as_csv_too(artifacts, run, tmp_path):
    _, comparisons, _ = run(artifacts.study, artifacts.evaluations)
    texts = {"claim": pl.String, "reason": pl.String}
    written = pl.read_csv(tmp_path / "comparisons.csv", schema=dict(comparisons.schema) | texts)
    assert written.drop(texts).equals(comparisons)
    names = {"accuracy.csv", "comparisons.csv", "robustness.csv", "differences.csv"}
    assert {path.name for path in tmp_path.glob("*.csv")} == names


def test_the_csv_of_comparisons_says_what_was_claimed_and_why_one_is_invalid(artifacts, run, tmp_path):
    find(artifacts, "E5").table.unlink()
    left = [source for source in artifacts.evaluations if source.table.exists()]
    _, _, claims = run(artifacts.study, left)
    written = pl.read_csv(tmp_path / "comparisons.csv").select("claim", "verdict", "reason").rows()
    assert written == [(claim.claim, claim.verdict, claim.invalid_reason) for claim in claims.claims]
    assert any("E5 seed 0" in (reason or "") for _, _, reason in written)


def test_every_arm_is_set_against_the_one_without_noise(artifacts, run, tmp_path):
    accuracy, comparisons, _ = run(artifacts.study, artifacts.evaluations)
    table = read_table(tmp_path / "differences.parquet", DifferenceTable)
    assert set(table["reference"]) == {"baseline"}
    assert table["arm"].unique(maintain_order=True).to_list() == ["E5", "E5b", "srdd_guided"]
    mean = dict(accuracy.filter(pl.col("step") > 0, pl.col("noise_level") == 0.05).group_by("arm").agg(
        pl.col("accuracy").mean()).iter_rows())  # fmt: skip
    row = table.row(by_predicate=(pl.col("arm") == "E5") & (pl.col("noise_level") == 0.05), named=True)
    assert row["difference"] == pytest.approx(mean["E5"] - mean["baseline"])
    # Where the study declares the same comparison, the interval is the same but for its level, which covers the family.
    declared = comparisons.row(
        by_predicate=(pl.col("kind") == "arms") & (pl.col("treatment") == "E5") & (pl.col("control") == "baseline"),
        named=True,
    )
    same = table.row(
        by_predicate=(pl.col("arm") == "E5") & (pl.col("noise_level") == declared["treatment_level"]), named=True
    )
    assert same["difference"] == pytest.approx(declared["difference"])
    assert declared["ci_low"] < same["ci_low"] < same["ci_high"] < declared["ci_high"]
    undecided = (comparisons["verdict"] == "not_shown").sum()
    assert declared["interval_level"] == pytest.approx(1 - 0.05 / undecided)


def test_a_named_noise_is_a_level_of_its_own_in_the_differences(artifacts, run, tmp_path):
    def under_a_name(rows):
        return pl.concat([rows, rows.filter(pl.col("noise_level") == 0.1).with_columns(noise_level=pl.lit(1.0))])

    content = artifacts.study.model_dump()
    content["config"]["evaluation"]["noises"] = {"fp4": "w4a16_nvfp4"}
    for source in artifacts.evaluations:
        rewrite_rows(source, under_a_name)
    run(type(artifacts.study).model_validate(content), artifacts.evaluations)
    table = read_table(tmp_path / "differences.parquet", DifferenceTable).filter(pl.col("arm") == "E5")
    assert table["noise_level"].to_list() == [0.0, 0.05, 0.1, 1.0]
    compared = ("difference", "ci_low", "ci_high", "problem")
    assert table.select(compared).row(3) == table.select(compared).row(2)


def test_robustness_of_every_arm(artifacts, run, tmp_path):
    accuracy, _, _ = run(artifacts.study, artifacts.evaluations)
    table = read_table(tmp_path / "robustness.parquet", RobustnessTable)
    assert table["arm"].to_list() == ["pretrained", "baseline", "E5", "E5b", "srdd_guided"]
    row = table.row(by_predicate=pl.col("arm") == "E5", named=True)
    shown = accuracy.filter(pl.col("arm") == "E5").group_by("noise_level").agg(pl.col("accuracy").mean())
    by_level = dict(shown.iter_rows())
    assert row["accuracy_lowest_level"] == pytest.approx(by_level[0.0])
    assert row["slope"] == pytest.approx(by_level[0.1] - by_level[0.0])
    assert row["problem"] is None
    assert table.filter(pl.col("arm") == "pretrained")["num_seeds"].item() == 1


def mean_accuracy(artifacts, arm, level):
    tables = [pl.read_parquet(find(artifacts, arm, seed).table) for seed in (0, 1)]
    return np.mean([table.filter(pl.col("noise_level") == level)["correct_strict"].mean() for table in tables])


def test_margins_families_and_degradation(synthetic, artifacts, run):
    study = changed(
        artifacts,
        comparisons=[
            synthetic.degradation("E5b", "E5", family="robustness"),
            synthetic.arms("E5b", "E5", expected=None, test="equivalence", margin=0.3, family="robustness"),
            synthetic.levels("E5", test="non_inferiority", margin=0.001),
            synthetic.arms("E5b", "E5"),
        ],
    )
    _, comparisons, claims = run(study, artifacts.evaluations)
    assert [(family.name, family.size) for family in claims.families] == [("robustness", 2), ("main", 2)]
    first, second, third, fourth = comparisons.rows(named=True)
    assert first["comparison_id"] == "E5b-vs-E5@0-to-0.1"
    assert first["difference"] == pytest.approx(first["treatment_change"] - first["control_change"])
    cost = mean_accuracy(artifacts, "E5b", 0.1) - mean_accuracy(artifacts, "E5b", 0.0)
    assert first["treatment_change"] == pytest.approx(cost)
    assert first["control_accuracy"] == pytest.approx(mean_accuracy(artifacts, "E5", 0.1))
    assert (second["test"], second["margin"], second["verdict"]) == ("equivalence", 0.3, "supported")
    # Of each family one claim is left undecided at the most, or two: their intervals are at that level.
    assert (second["interval_level"], fourth["interval_level"]) == (0.9, 0.975)
    # Holm within the family: the smaller of two p-values is doubled, whatever the other family holds.
    smaller, larger = sorted((first["p_value"], second["p_value"]))
    adjusted = sorted((first["p_holm"], second["p_holm"]))
    assert adjusted == pytest.approx([min(2 * smaller, 1), max(2 * smaller, larger)])
    assert (third["margin"], third["treatment_change"]) == (0.001, None)
    assert third["verdict"] in ("refuted", "not_shown")


def test_a_study_without_comparisons_gets_the_default_ones(artifacts, run):
    study = changed(artifacts, comparisons=[])
    _, comparisons, claims = run(study, artifacts.evaluations)
    assert set(comparisons["kind"]) == {"arms", "levels", "degradation"}
    assert {family.name for family in claims.families} == {"arms", "degradation"}
    assert not any(claim.declared for claim in claims.claims)
    assert "invalid" not in verdicts(claims).values()


def test_run_to_run_variance_is_moderated_by_the_other_arms(artifacts, run):
    """Four arms of two seeds: 1 degree of freedom of the pair, 2 of the others, which count as 1/(1/1.75 + 1/2)."""
    _, comparisons, _ = run(artifacts.study, artifacts.evaluations)
    freedom = dict(comparisons.select("comparison_id", "degrees_of_freedom").iter_rows())
    assert freedom["E5b-vs-E5@0"] >= 1 + 1 / (1 / 1.75 + 1 / 2) - 1e-9


def test_equal_weights_of_two_arms_are_not_compared(artifacts, run):
    first, second = (read_json(find(artifacts, arm).record, RunRecord) for arm in ("E5", "E5b"))
    write_json(find(artifacts, "E5b").record, second.model_copy(update={"inputs_sha256": first.inputs_sha256}))
    _, _, claims = run(artifacts.study, artifacts.evaluations)
    assert "are the same weights" in reason(claims, "E5b-vs-E5@0")


def test_two_noisy_levels_with_the_same_responses_are_named(synthetic, artifacts, run):
    rewrite_rows(
        find(artifacts, "E5"),
        lambda table: table.with_columns(
            response=pl.when(pl.col("noise_level") > 0).then(pl.lit("the same")).otherwise(pl.col("response"))
        ),
    )
    study = changed(artifacts, comparisons=[synthetic.arms("E5b", "E5", 0.1), synthetic.arms("E5b", "E5")])
    _, _, claims = run(study, artifacts.evaluations)
    assert [unchanged(claims, claim.comparison_id) is None for claim in claims.claims] == [False, True]
    assert "未改变这些题目的任何回答" in sentence_text(claims.claims[0], load_words("zh"))


def test_an_unfinished_study_is_compared_as_far_as_it_goes(artifacts, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = StudyPlan(artifacts.study)
    assert len(existing_evaluations(plan)) == len(artifacts.evaluations) == plan.num_evaluations
    find(artifacts, "srdd_guided").receipt.unlink()
    # Behind made-up evaluations there are no runs.
    found = [dataclasses.replace(evaluation, lineage_problems=()) for evaluation in existing_evaluations(plan)]
    accuracy, comparisons, claims = run(artifacts.study, found)
    assert verdicts(claims)["srdd_guided-vs-E5b@0.1"] == "invalid"
    assert comparisons.filter(pl.col("verdict") == "invalid").height == 1
    assert claims.missing == ("base/srdd_guided seed 0 step 60",)
    assert len(accuracy) == (plan.num_evaluations - 1) * 3
    table = read_table(tmp_path / "robustness.parquet", RobustnessTable)
    assert "missing evaluations" in table.filter(pl.col("arm") == "srdd_guided")["problem"].item()


def test_a_study_with_nothing_yet(artifacts, run):
    accuracy, comparisons, claims = run(artifacts.study, [])
    assert accuracy.is_empty()
    assert set(comparisons["verdict"]) == {"invalid"}
    assert {claim.invalid_kind for claim in claims.claims} == {"missing"}
    assert claims.family_size == 0


def test_aa_controls_give_a_false_positive_rate(synthetic, run, tmp_path):
    study = synthetic.study(arms=["baseline", "E5", "E5b", "E5b_sham"], comparisons=[])
    made = synthetic.write_evaluations(tmp_path, study)
    _, _, claims = run(study, made.evaluations)
    across, single = claims.aa_control_rates
    assert (across.kind, across.tests, across.identical) == ("across_seeds", 3, 0)
    assert (single.kind, single.tests) == ("single_runs", 6)
    assert 0 <= across.ci_low <= across.rejected / across.tests <= across.ci_high <= 1
    for seed in (0, 1):
        real, sham = (read_json(made.find(arm, seed).record, RunRecord) for arm in ("E5b", "E5b_sham"))
        write_json(made.find("E5b_sham", seed).record, sham.model_copy(update={"inputs_sha256": real.inputs_sha256}))
    _, _, claims = run(study, made.evaluations)
    assert claims.aa_control_rates[0].identical == 3
    assert claims.aa_control_rates[0].rejected == 0


def test_clusters_are_the_unit_of_every_test_and_interval(synthetic, artifacts, run, tmp_path):
    """Ten clusters of 20 questions: the questions' part has 9 degrees of freedom, and the method is named."""
    study = changed(artifacts, comparisons=[synthetic.arms("E5b", "E5"), synthetic.levels("pretrained")])
    accuracy, plain, _ = run(study, artifacts.evaluations)
    for source in artifacts.evaluations:
        number = pl.col("question_id").str.extract(r"(\d+)$").cast(pl.Int64)
        rewrite_rows(source, lambda rows: rows.with_columns(cluster=pl.format("kind {}", number % 10)))  # noqa: B023
    clustered_accuracy, clustered, claims = run(study, artifacts.evaluations)
    assert [method.split()[-1] for method in clustered["method"]] == ["clusters"] * 2
    assert "clusters of questions are the unit" in analysis_text(clustered["method"][0], load_words("en"))
    assert clustered["difference"].to_list() == pytest.approx(plain["difference"].to_list())
    assert clustered["num_questions"].to_list() == [200, 200]
    assert clustered["degrees_of_freedom"][1] == pytest.approx(9)
    assert plain["degrees_of_freedom"][1] == pytest.approx(199)
    assert clustered_accuracy["accuracy"].equals(accuracy["accuracy"])
    assert not clustered_accuracy["ci_low"].equals(accuracy["ci_low"])
    seed = claims.claims[0].seeds[0]
    assert seed.ci_low <= seed.difference <= seed.ci_high
    for source in artifacts.evaluations:
        rewrite_rows(source, lambda rows: rows.with_columns(cluster=pl.lit("one")))
    _, _, claims = run(study, artifacts.evaluations)
    assert "all questions are in one cluster" in reason(claims, "E5b-vs-E5@0")


def test_noise_that_a_batch_shares_is_noticed_unless_batches_are_the_unit(synthetic, artifacts, run, tmp_path):
    """In every second batch of ten questions E5b is right in the first noise draw, and wrong in the second."""
    claims = [synthetic.arms("E5b", "E5"), synthetic.arms("E5b", "E5", noise_level=0.1)]
    study = changed(artifacts, comparisons=claims)
    number = pl.col("question_id").str.extract(r"(\d+)$").cast(pl.Int64) // 10

    def warned(study):
        return [
            any(one.key == "claim.batches" for one in claim.statements)
            for claim in run(study, artifacts.evaluations)[2].claims
        ]

    for source in artifacts.evaluations:
        rewrite_rows(source, lambda rows: rows.with_columns(batch=number))
    assert warned(study) == [False, False]
    shared = pl.when(number % 2 == 0).then(pl.col("noise_seed") == 0).otherwise(pl.col("correct_strict"))
    for source in artifacts.evaluations:
        if source.arm == "E5b":
            rewrite_rows(source, lambda rows: rows.with_columns(correct_strict=shared))
    assert warned(study) == [True, True]
    as_unit = changed(artifacts, comparisons=claims, statistics={"unit": "batch"})
    assert warned(as_unit) == [False, False]
    _, compared, _ = run(as_unit, artifacts.evaluations)
    assert [method.split()[-1] for method in compared["method"]] == ["clusters"] * 2
    for source in artifacts.evaluations[:1]:
        rewrite_rows(source, lambda rows: rows.with_columns(batch=pl.lit(None, pl.Int64)))
    assert warned(study) == [True, True]
    with pytest.raises(DataError, match=r"statistics.unit is batch, expected questions without clusters whose batches"):
        run(as_unit, artifacts.evaluations)


def test_tables_by_seed_are_of_the_claimed_quantity(artifacts, run, synthetic):
    """A degradation is a change: what noise costs one side less what it costs the other, over all noise draws."""
    study = changed(artifacts, comparisons=[synthetic.degradation("E5", "baseline")])
    _, comparisons, claims = run(study, artifacts.evaluations)
    row = comparisons.row(0, named=True)
    (claim,) = claims.claims
    assert np.mean([seed.difference for seed in claim.seeds]) == pytest.approx(row["difference"])
    for seed in claim.seeds:
        change = {}
        for arm in (row["treatment"], row["control"]):
            table = pl.read_parquet(find(artifacts, arm, seed.seed).table)
            at, clean = (table.filter(noise_level=level) for level in (row["treatment_level"], 0.0))
            means = [part.group_by("question_id").agg(pl.col("correct_strict").mean()) for part in (at, clean)]
            both = means[0].join(means[1], on="question_id", suffix="_clean").sort("question_id")
            change[arm] = (both["correct_strict"] - both["correct_strict_clean"]).to_numpy()
        difference = change[row["treatment"]] - change[row["control"]]
        assert seed.difference == pytest.approx(difference.mean())
        assert (seed.treatment_better, seed.control_better) == ((difference > 0).sum(), (difference < 0).sum())
        assert seed.treatment_better + seed.control_better + seed.equal == len(difference)
