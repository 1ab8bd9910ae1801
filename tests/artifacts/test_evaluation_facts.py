"""Facts of an evaluation against each other, against the settings, and against the rows of the table."""

import polars as pl
import pytest

from aqnpipe.artifacts.evaluations import EvaluationFacts, PassFacts, row_digests

ROWS = pl.DataFrame(
    {
        "question_id": ["b", "a", "b", "a"],
        "noise_level": 0.0,
        "noise_seed": 0,
        "sample": [0, 0, 1, 1],
        "response": ["one", "two", "three", "four"],
        "response_tokens": [3, 4, 5, 6],
        "finish_reason": "stop",
    }
)


def one_pass(level=0.0, seed=0, logits=("a", "b"), **changes):
    fields = {
        "noise_level": level,
        "noise_seed": seed,
        "first_logits": logits,
        "rows": "".join(row_digests(ROWS)),
        "rows_again": 3,
        "largest_difference": 0.1,
    }
    return PassFacts(**(fields | changes))


def facts(*passes, **changes):
    fields = {
        "end_token": 1,
        "stop_text": None,
        "prompts": "p",
        "passes": passes or (one_pass(),),
    }
    return EvaluationFacts(**(fields | changes))


def test_passes_under_their_own_noise_have_no_problem():
    noisy = (one_pass(0.1, 0, ("c", "d")), one_pass(0.1, 1, ("e", "f")), one_pass(0.2, 0, ("g", "h")))
    assert list(facts(one_pass(), *noisy).problems()) == []


@pytest.mark.parametrize(
    ("passes", "words"),
    [
        (
            (one_pass(0.1, 0, ("c", "d")), one_pass(0.1, 1, ("x", "d"))),
            "noise seeds 0 and 1 gave the same noise in 1 of 2",
        ),
        ((one_pass(), one_pass(0.1, 1)), "noise levels 0 and 0.1 gave the same logits in 2 of 2 batches"),
    ],
)
def test_passes_that_share_noise_are_named(passes, words):
    (problem, *_) = facts(*passes).problems()
    assert words in problem


def test_rows_in_any_order_are_those_of_the_facts():
    assert list(facts().row_problems(ROWS)) == []
    assert list(facts().row_problems(ROWS.reverse())) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows.with_columns(response=pl.Series(["two", "one", "three", "four"])),
        lambda rows: rows.with_columns(sample=1 - pl.col("sample")),
        lambda rows: rows.with_columns(response_tokens=pl.lit(1)),
        lambda rows: rows.with_columns(noise_seed=pl.lit(1)),
        lambda rows: rows.head(3),
    ],
)
def test_other_rows_are_named(change):
    (problem,) = facts().row_problems(change(ROWS))
    assert "evaluation at level 0, noise seed 0" in problem


def test_shards_are_those_that_the_study_requests():
    shared = {"generation": {"tensor_parallel": 2}}
    assert facts(shards=2).shard_problems(shared) == []
    assert facts().shard_problems(shared) == ["used shards 1, the study requests 2"]
    assert facts(shards=2).shard_problems({}) == ["used shards 2, the study requests 1"]
