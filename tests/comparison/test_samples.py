"""Several samples per question: they are averaged within questions, the units of every test; numbers by hand."""

import numpy as np
import polars as pl
import pytest
from checksum_files import write_parquet_with_checksum
from made_up import evaluation_receipt, facts_of, record, rewrite_table

from aqnpipe.artifacts.comparisons import AccuracyTable, ClaimsFile, ComparisonTable, RobustnessTable
from aqnpipe.artifacts.evaluations import EvaluationTable
from aqnpipe.artifacts.files import read_json, read_table, write_json, write_table
from aqnpipe.comparison.evaluations import EvaluationInput, load_evaluations
from aqnpipe.comparison.stage import compare
from aqnpipe.data.scoring import SCORERS
from aqnpipe.noise.receipts.receipt import EvaluationPass, EvaluationReceipts

# (question, noise level, noise seed, sample, right, answered, cut off)
ROWS = [
    ("a", 0.0, 0, 0, True, True, False),
    ("a", 0.0, 0, 1, True, True, False),
    ("b", 0.0, 0, 0, False, True, False),
    ("b", 0.0, 0, 1, True, True, False),
    ("a", 0.1, 0, 0, True, True, False),
    ("a", 0.1, 0, 1, False, False, True),
    ("b", 0.1, 0, 0, False, False, True),
    ("b", 0.1, 0, 1, False, True, False),
    ("a", 0.1, 1, 0, True, True, False),
    ("a", 0.1, 1, 1, True, True, True),
    ("b", 0.1, 1, 0, False, True, False),
    ("b", 0.1, 1, 1, True, True, False),
]


def load_one(source, scorer):
    """The only evaluation of a source."""
    (found,) = load_evaluations([source], scorer, 0.05).values()
    return found


def write(folder, rows):
    source = EvaluationInput(*(folder / name for name in ("t.parquet", "r.json", "run.json")), "base", "E5", 0, 10)
    columns = ["question_id", "noise_level", "noise_seed", "sample", "right", "answered", "cut"]
    table = pl.DataFrame(rows, schema=columns, orient="row")
    table = table.select(
        *columns[:4],
        pl.format("{} {} {}", "question_id", "noise_level", "sample").alias("response"),
        *(pl.when(pl.col("answered")).then(pl.lit("1")).alias(f"answer_{scorer}") for scorer in SCORERS),
        *(pl.col("right").alias(f"correct_{scorer}") for scorer in SCORERS),
        pl.lit(5, pl.Int64).alias("response_tokens"),
        pl.when(pl.col("cut")).then(pl.lit("length")).otherwise(pl.lit("stop")).alias("finish_reason"),
    )
    write_table(source.table, table, EvaluationTable)
    passes = [EvaluationPass(noise_level=0.0, noise_seed=0, receipt=evaluation_receipt(0.0))] + [
        EvaluationPass(noise_level=0.1, noise_seed=seed, receipt=evaluation_receipt(0.1)) for seed in (0, 1)
    ]
    write_json(source.receipt, EvaluationReceipts(passes=tuple(passes), facts=facts_of(table)))
    write_json(source.record, record("evaluate", "E5", 0, 10, {}))
    return source


def test_samples_are_averaged_within_questions(tmp_path):
    loaded = load_one(write(tmp_path, ROWS), "strict")
    assert loaded.problems == ()
    clean, noisy = loaded.levels[0.0], loaded.levels[0.1]
    assert (clean.num_samples, clean.noise_seeds, noisy.noise_seeds) == (2, (0,), (0, 1))
    assert clean.correct.tolist() == [[1.0, 0.5]]
    assert noisy.correct.tolist() == [[0.5, 0.0], [1.0, 0.5]]


def test_accuracy_is_the_mean_with_truncation_and_parse_failures_by_scorer(tmp_path):
    rows = load_one(write(tmp_path, ROWS), "harness_flexible").accuracy
    columns = ["num_questions", "num_noise_seeds", "num_samples", "accuracy", "truncated_fraction"]
    assert rows.select(columns).rows() == [(2, 1, 2, 3 / 4, 0.0), (2, 2, 2, 4 / 8, 3 / 8)]
    for name in ("fraction", *SCORERS):
        assert rows[f"parse_failure_{name}"].to_list() == [0.0, 2 / 8]
    AccuracyTable.validate(rows)


def test_the_order_of_rows_does_not_matter(tmp_path):
    loaded = load_one(write(tmp_path, ROWS[::-1]), "strict")
    assert loaded.levels[0.1].correct.tolist() == [[0.5, 0.0], [1.0, 0.5]]


def test_passes_with_unequal_samples_are_incomplete(tmp_path):
    loaded = load_one(write(tmp_path, ROWS[:-1]), "strict")
    assert [problem.reason for problem in loaded.problems] == [
        "base/E5 seed 0 step 10: noise level 0.1: questions differ by noise seed"
    ]


def test_equal_samples_of_a_question_do_not_look_like_another_level(tmp_path):
    """Two equal responses must not cancel: levels 0 and 0.1 differ in them."""
    source = write(tmp_path, ROWS)
    table = pl.read_parquet(source.table)
    same = table.with_columns(response=pl.format("{} {}", "question_id", "noise_level"))
    rewrite_table(source, same)
    assert load_one(source, "strict").levels[0.1].same_responses_as is None
    rewrite_table(source, same.with_columns(response=pl.col("question_id")))
    assert load_one(source, "strict").levels[0.1].same_responses_as == 0.0


@pytest.fixture(scope="module")
def made(synthetic, tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    return folder, synthetic.write_evaluations(folder, synthetic.study())


@pytest.fixture
def artifacts(made, tmp_path):
    folder, made_up = made
    return made_up.copied(folder, tmp_path)


def compared(artifacts, folder):
    outputs = folder
    compare(artifacts.study, artifacts.evaluations, outputs)
    return (
        read_table(outputs / "accuracy.parquet", AccuracyTable),
        read_table(outputs / "comparisons.parquet", ComparisonTable),
        read_table(outputs / "robustness.parquet", RobustnessTable),
        read_json(outputs / "claims.json", ClaimsFile),
    )


def add_sample(source, change=lambda table: table):
    table = pl.read_parquet(source.table)
    second = change(table.with_columns(sample=pl.lit(1, pl.Int64)))
    rewrite_table(source, pl.concat([table, second]))


def test_a_sample_that_repeats_the_first_changes_nothing_but_its_count(artifacts, tmp_path):
    once = compared(artifacts, tmp_path / "once")
    for source in artifacts.evaluations:
        add_sample(source)
    two = compared(artifacts, tmp_path / "two")
    assert set(two[0]["num_samples"]) == {2}
    assert two[0].drop("num_samples").equals(once[0].drop("num_samples"))
    assert two[1].equals(once[1])
    assert two[2].equals(once[2])
    assert two[3].model_copy(update={"tables_sha256": once[3].tables_sha256}) == once[3]


def test_a_second_sample_enters_comparisons_by_half(artifacts, tmp_path):
    """Every second sample of E5b is wrong: its accuracy is halved, and the number of questions is still 200."""
    before = compared(artifacts, tmp_path / "once")[1]
    for source in artifacts.evaluations:
        wrong = source.arm == "E5b"
        add_sample(source, (lambda table: table.with_columns(correct_strict=pl.lit(False))) if wrong else lambda t: t)
    _, after, _, claims = compared(artifacts, tmp_path / "two")

    def row(table):
        return table.row(by_predicate=pl.col("comparison_id") == "E5b-vs-E5@0", named=True)

    assert row(after)["num_questions"] == 200
    assert row(after)["treatment_accuracy"] == pytest.approx(row(before)["treatment_accuracy"] / 2)
    assert row(after)["difference"] == pytest.approx(
        row(before)["treatment_accuracy"] / 2 - row(before)["control_accuracy"]
    )
    claim = next(claim for claim in claims.claims if claim.comparison_id == "E5b-vs-E5@0")
    assert [seed.treatment_better + seed.control_better + seed.equal for seed in claim.seeds] == [200] * 2
    assert np.mean([seed.difference for seed in claim.seeds]) == pytest.approx(row(after)["difference"])


def test_arms_with_unequal_numbers_of_samples_are_not_compared(artifacts, tmp_path):
    for seed in (0, 1):
        add_sample(artifacts.find("E5b", seed))
    _, _, _, claims = compared(artifacts, tmp_path / "out")
    reasons = {claim.comparison_id: claim.invalid_reason for claim in claims.claims}
    assert "samples per question differ: 2 for" in reasons["E5b-vs-E5@0"]
    assert reasons["E5b@0.1-vs-0"] is None


def test_evaluations_that_are_read_together_are_those_that_are_read_alone(artifacts):
    """Also beside one with clusters, which is another table, and one with a repeated row, which is refused."""
    clustered, repeated = artifacts.evaluations[1:3]
    table = pl.read_parquet(clustered.table)
    rewrite_table(clustered, table.with_columns(cluster=pl.col("question_id").str.slice(0, 5)))
    table = pl.read_parquet(repeated.table)
    write_parquet_with_checksum(repeated.table, pl.concat([table, table[:1]]))
    together = load_evaluations(artifacts.evaluations, "strict", 0.05)
    assert len(together) == len(artifacts.evaluations)
    for source in artifacts.evaluations:
        found = together[source.model, source.arm, source.seed, source.step]
        alone = load_one(source, "strict")
        assert found.accuracy.equals(alone.accuracy)
        assert (found.source, found.problems, found.setting) == (source, alone.problems, alone.setting)
        assert found.levels.keys() == alone.levels.keys() == {0.0, 0.05, 0.1}
        for level, scores in found.levels.items():
            assert (scores.correct == alone.levels[level].correct).all()
            assert (scores.clusters is None) == (source is not clustered)
        assert bool(found.problems) == (source is repeated)
