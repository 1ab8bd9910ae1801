from dataclasses import replace
from types import SimpleNamespace

import polars as pl
import pytest

from aqnpipe.artifacts.comparisons import ClaimsFile
from aqnpipe.artifacts.files import read_json
from aqnpipe.config.analysis import ArmPair
from aqnpipe.report.explorer import (
    MAX_QUESTIONS_PER_GROUP,
    MAX_RESPONSE_CHARACTERS,
    explored_pair,
    explorer,
    flips,
    outcomes,
)
from aqnpipe.report.words import load_words


@pytest.fixture(scope="module")
def data(built):
    return built.made.report_data(built.folder)


def test_the_first_comparison_of_arms_is_explored_unless_the_study_names_a_pair(built, synthetic, data):
    assert explored_pair(built.study, data.comparisons) == ArmPair(treatment="baseline", control="pretrained")
    named = built.study.model_dump()["config"]["report"] | {"explore": {"treatment": "E5b", "control": "E5"}}
    study = synthetic.study(report=named)
    assert explored_pair(study, data.comparisons) == ArmPair(treatment="E5b", control="E5")
    assert explored_pair(built.study, data.comparisons.clear()) is None


def with_primary(comparisons, name, **values):
    """The comparisons, of which that of the id `name` is primary and has further values."""
    values = {"role": "primary"} | values
    chosen = pl.col("comparison_id") == name
    return comparisons.with_columns(
        pl.when(chosen).then(pl.lit(value)).otherwise(pl.col(column)).alias(column) for column, value in values.items()
    )


@pytest.mark.parametrize(
    ("primary", "values", "expected"),
    [
        ("srdd_guided-vs-E5b@0.1", {}, ("srdd_guided", "E5b", 0.1)),
        ("srdd_guided-vs-E5b@0.1", {"kind": "degradation"}, ("srdd_guided", "E5b", 0.1)),
        ("srdd_guided-vs-E5b@0.1", {"verdict": "invalid"}, ("baseline", "pretrained", 0.0)),
        ("E5b@0.1-vs-0", {}, ("baseline", "pretrained", 0.0)),
    ],
)
def test_the_pair_of_the_primary_claim_is_explored(built, data, primary, values, expected):
    assert primary in set(data.comparisons["comparison_id"])
    pair = explored_pair(built.study, with_primary(data.comparisons, primary, **values))
    assert (pair.treatment, pair.control, pair.noise_level) == expected


def test_a_degradation_between_arms_is_explored_where_it_is_the_first(built, data):
    only = data.comparisons.filter(pl.col("comparison_id").is_in(["baseline@0.1-vs-0", "srdd_guided-vs-E5b@0.1"]))
    assert len(only) == 2
    changes = with_primary(only, "srdd_guided-vs-E5b@0.1", role="secondary", kind="degradation")
    assert explored_pair(built.study, changes).treatment == "srdd_guided"


def test_the_noise_seed_of_the_responses_is_named(built, data, synthetic, tmp_path):
    named = built.study.model_dump()["config"]["report"]
    for level, text in ((0.1, "at 10 % noise: they disagree"), (0.0, "without noise: they disagree")):
        pair = {"treatment": "srdd_guided", "control": "E5b", "noise_level": level}
        html = built.build(study=synthetic.study(report=named | {"explore": pair}), into=tmp_path).html
        found = flips(ArmPair(**pair), built.study, data)[0]
        assert set(found["noise_seed"]) == {0}
        part = html.replace("\u00a0", " ").split('<section id="explorer">')[1]
        assert f"srdd_guided against E5b, {text}" in part
        assert ("All responses are those to noise seed 0." in part) == (level > 0)


@pytest.mark.parametrize(("treatment", "control", "level"), [("E5b", "E5", 0.0), ("srdd_guided", "E5b", 0.1)])
def test_flips_are_those_of_the_tables_by_seed(built, data, treatment, control, level):
    """Without noise there is one draw: counts per seed equal those that the compare stage computed by itself."""
    pair = ArmPair(treatment=treatment, control=control, noise_level=level)
    flipped, num_questions, num_seeds = flips(pair, built.study, data)
    assert (num_questions, num_seeds) == (200, 2)
    claims = {claim.comparison_id: claim for claim in read_json(built.folder / "claims.json", ClaimsFile).claims}
    claim = claims[f"{treatment}-vs-{control}@{level:g}"]
    counted = flipped.group_by("seed").agg(pl.col("treatment_correct").sum(), pl.col("control_correct").sum())
    if level == 0:
        expected = {(seed.seed, seed.treatment_better, seed.control_better) for seed in claim.seeds}
        assert set(counted.iter_rows()) == expected
    assert flipped["treatment_correct"].ne(flipped["control_correct"]).all()
    assert flipped["treatment_response"].str.starts_with(treatment).all()
    assert flipped["control_response"].str.starts_with(control).all()
    assert flipped["question"].str.starts_with("What is ").all()


def test_a_pretrained_model_is_compared_with_every_seed(built, data):
    flipped, _, num_seeds = flips(ArmPair(treatment="baseline", control="pretrained"), built.study, data)
    assert num_seeds == 2
    assert set(flipped["seed"]) == {0, 1}
    assert set(flipped["control_response"].str.head(12)) == {"pretrained 0"}


def test_only_the_first_sample_is_shown(built, data):
    pair = ArmPair(treatment="srdd_guided", control="E5b", noise_level=0.1)

    class Sampled:
        """An evaluation with a second sample of every response, which is always correct."""

        def __init__(self, evaluated):
            self.source = evaluated.source
            first = evaluated.responses()
            second = first.with_columns(sample=pl.lit(1, pl.Int64), correct_strict=pl.lit(value=True))
            self.responses = lambda: pl.concat([second, first])

    sampled = replace(data, evaluations=[Sampled(evaluated) for evaluated in data.evaluations])
    assert flips(pair, built.study, sampled)[0].equals(flips(pair, built.study, data)[0])


def flip(question, seed, treatment_correct, response="answer"):
    return {
        "treatment": "A",
        "control": "B",
        "noise_level": 0.0,
        "noise_seed": 0,
        "seed": seed,
        "question_id": question,
        "question": f"text of {question}",
        "gold_answer": "7",
        "treatment_correct": treatment_correct,
        "control_correct": not treatment_correct,
        "treatment_response": response,
        "control_response": "other",
    }


def test_questions_that_flip_in_most_seeds_come_first():
    rows = [
        *(flip("q3", seed, True) for seed in (0, 1, 2)),
        *(flip("q1", seed, True) for seed in (1, 2)),
        *(flip("q2", seed, True) for seed in (0, 1)),
        flip("q4", 0, False),
        *(flip("q5", 0, True), flip("q5", 1, False)),
    ]
    found = explorer(ArmPair(treatment="A", control="B"), pl.DataFrame([r for r in rows if isinstance(r, dict)]), 10, 3)
    assert [question["question_id"] for question in found.groups[0]["shown"]] == ["q3", "q1", "q2"]
    assert [question["num_flips"] for question in found.groups[0]["shown"]] == [3, 2, 2]
    assert [question["seed"] for question in found.groups[0]["shown"]] == [0, 1, 0]
    assert [question["question_id"] for question in found.groups[1]["shown"]] == ["q4"]
    assert [response["correct"] for response in found.groups[1]["shown"][0]["responses"]] == [False, True]
    assert (found.num_flipped, found.num_both_ways, found.num_questions) == (5, 1, 10)


def test_long_lists_and_long_responses_are_cut_and_say_so():
    long = "x" * (MAX_RESPONSE_CHARACTERS + 5)
    rows = pl.DataFrame([flip(f"q{n:03}", 0, True, long) for n in range(MAX_QUESTIONS_PER_GROUP + 9)])
    group = explorer(ArmPair(treatment="A", control="B"), rows, 100, 1).groups[0]
    assert group["num_questions"] == MAX_QUESTIONS_PER_GROUP + 9
    assert len(group["shown"]) == MAX_QUESTIONS_PER_GROUP
    assert len(group["shown"][0]["responses"][0]["text"]) == MAX_RESPONSE_CHARACTERS
    assert group["shown"][0]["responses"][0]["left_out"] == 5


def test_the_page_shows_both_responses(built):
    part = built.html.split('<section id="explorer">')[1].split("</section>")[0]
    assert "baseline against pretrained, without noise" in part
    assert part.count("<pre") == 2 * part.count('<details id="question-')
    table = pl.read_parquet(built.folder / "flips.parquet")
    assert f"they disagree on {table['question_id'].n_unique()} of 200 questions" in part
    assert "baseline 0 0.0 0 #### " in part


def test_csv_holds_no_text_of_models(built):
    columns = pl.read_csv(built.folder / "flips.csv").columns
    assert set(pl.read_parquet(built.folder / "flips.parquet").columns) - set(columns) == {
        "question",
        "gold_answer",
        "treatment_response",
        "control_response",
    }


def test_any_two_arms_have_the_questions_of_their_flips(built, data):
    """Where the seeds' flips of a question do not cancel each other, one arm is right in more of its seeds."""
    table = outcomes(ArmPair(treatment="E5", control="baseline"), built.study, data, load_words("en"))
    assert table.headers[2:] == ("pretrained", "baseline", "E5", "E5b", "srdd_guided")
    cells = {row.cells[0]: dict(zip(table.headers, row.cells, strict=True)) for row in table.rows}
    pair = ArmPair(treatment="E5b", control="E5")
    found = explorer(pair, *flips(pair, built.study, data))
    shares = {name: {arm: eval(row[arm]) for arm in ("E5b", "E5")} for name, row in cells.items()}
    better = [
        sum(each["E5b"] > each["E5"] for each in shares.values()),
        sum(each["E5b"] < each["E5"] for each in shares.values()),
    ]
    assert better == [group["num_questions"] for group in found.groups]
    assert all(better)
    assert {row["E5"].partition("/")[2] for row in cells.values()} == {"2"}
    assert {row["pretrained"].partition("/")[2] for row in cells.values()} == {"1"}
    assert all(len({eval(cell) for cell in row.cells[2:]}) > 1 for row in table.rows)


def test_too_many_arms_have_no_table_of_outcomes(built, data, monkeypatch):
    pair = ArmPair(treatment="E5", control="baseline")
    monkeypatch.setattr("aqnpipe.report.explorer.MAX_OUTCOME_COLUMNS", 5)
    assert outcomes(pair, built.study, data, load_words("en")) is not None
    monkeypatch.setattr("aqnpipe.report.explorer.MAX_OUTCOME_COLUMNS", 4)
    assert outcomes(pair, built.study, data, load_words("en")) is None


def test_without_answers_of_an_arm_at_the_level_there_is_no_table_of_outcomes(built, data):
    pair = ArmPair(treatment="E5", control="baseline", noise_level=0.1)
    assert outcomes(pair, built.study, data, load_words("en")) is not None
    evaluations = [
        SimpleNamespace(source=each.source, responses=lambda each=each: each.responses().filter(noise_level=0.0))
        if each.source.arm == "E5b"
        else each
        for each in data.evaluations
    ]
    assert outcomes(pair, built.study, replace(data, evaluations=tuple(evaluations)), load_words("en")) is None
