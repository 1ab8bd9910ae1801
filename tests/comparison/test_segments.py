"""Effects by segment: which questions belong to a segment, and the unit of its interval."""

import numpy as np
import polars as pl
import pytest

from aqnpipe.comparison.contrasts import Contrast, Scores, Side
from aqnpipe.comparison.descriptive import segment_effects
from aqnpipe.comparison.evaluations import Refusal
from aqnpipe.config.analysis import ArmComparison
from aqnpipe.statistics.clusters import Clusters
from aqnpipe.statistics.paired import PairedCounts, score_interval

KINDS = ["sum"] * 20 + ["product"] * 16 + ["rare"] * 4
STEPS = [1] * 10 + [2] * 26 + [3] * 4
IDS = tuple(f"q{number:02d}" for number in range(40))
QUESTIONS = pl.DataFrame(
    {
        "question_id": IDS,
        "question": "?",
        "answer": ["a line\n" * steps + "#### 7" for steps in STEPS],
        "gold_answer": "7",
        "cluster": KINDS,
    }
)
# Treatment alone is right on 8 sums, control alone on 4 products; the common rest is equal.
TREATMENT = [1.0] * 8 + [0.0] * 12 + [0.0] * 4 + [1.0] * 12 + [1.0] * 4
CONTROL = [0.0] * 8 + [0.0] * 12 + [1.0] * 4 + [1.0] * 12 + [0.0] * 4


def contrast(treatment, control, *, name="c", role="primary", clusters=None):
    comparison = ArmComparison(
        kind="arms", treatment="a", control="b", noise_level=0.0, expected="higher", role=role, claim="a helps"
    )
    arrays = (np.atleast_2d(np.asarray(side, float)) for side in (treatment, control))
    scores = Scores(*arrays, 0.5, 0.5, None, clusters=clusters, question_ids=IDS)
    return Contrast(name, comparison, Side("base", "a", 0.0), Side("base", "b", 0.0), scores, None)


HELPS = contrast(TREATMENT, CONTROL)


def by_name(effects):
    return {(effect.by, effect.segment): effect for effect in effects}


def width(effect):
    return effect.ci_high - effect.ci_low


def test_each_segment_has_the_effect_of_its_questions():
    found = by_name(segment_effects([HELPS], QUESTIONS, 0.05))
    assert list(found) == [("kind", "sum"), ("kind", "product"), ("steps", "1"), ("steps", "2")]
    sums, products = found["kind", "sum"], found["kind", "product"]
    assert (sums.num_questions, sums.difference) == (20, 0.4)
    assert (products.num_questions, products.difference) == (16, -0.25)
    assert (sums.ci_low, sums.ci_high) == pytest.approx(score_interval(PairedCounts(8, 0, 20), 0.05))
    assert (products.ci_low, products.ci_high) == pytest.approx(score_interval(PairedCounts(0, 4, 16), 0.05))
    assert found["steps", "1"].difference == 0.8
    assert found["steps", "2"].difference == pytest.approx(-4 / 26)


def test_the_order_of_the_file_does_not_matter():
    assert segment_effects([HELPS], QUESTIONS.reverse(), 0.05) == segment_effects([HELPS], QUESTIONS, 0.05)


def test_clusters_are_the_units_where_a_segment_has_several():
    alone = by_name(segment_effects([HELPS], QUESTIONS, 0.05))
    pairs = contrast(TREATMENT, CONTROL, clusters=Clusters.of([number // 2 for number in range(40)]))
    of_pairs = by_name(segment_effects([pairs], QUESTIONS, 0.05))
    assert of_pairs["kind", "sum"].num_clusters == 10
    assert of_pairs["kind", "sum"].difference == alone["kind", "sum"].difference
    assert width(of_pairs["kind", "sum"]) > width(alone["kind", "sum"])
    of_kinds = by_name(segment_effects([contrast(TREATMENT, CONTROL, clusters=Clusters.of(KINDS))], QUESTIONS, 0.05))
    assert of_kinds["kind", "sum"] == alone["kind", "sum"]
    assert of_kinds["steps", "2"].num_clusters == 2


def test_the_primary_claim_is_chosen_and_else_the_first_with_data():
    other = contrast(CONTROL, TREATMENT, name="other", role="secondary")
    assert {effect.comparison_id for effect in segment_effects([other, HELPS], QUESTIONS, 0.05)} == {"c"}
    refused = Contrast("r", HELPS.comparison, HELPS.treatment, HELPS.control, None, Refusal("missing", "no runs"))
    assert segment_effects([refused, other], QUESTIONS, 0.05) == ()
    assert {effect.comparison_id for effect in segment_effects([other], QUESTIONS, 0.05)} == {"other"}


@pytest.mark.parametrize(
    ("columns", "ways"),
    [
        (pl.all(), {"kind", "steps"}),
        (pl.all().exclude("cluster"), {"steps"}),
        (pl.all().exclude("answer"), {"kind"}),
    ],
)
def test_without_kinds_or_worked_answers_there_are_no_such_segments(columns, ways):
    assert {effect.by for effect in segment_effects([HELPS], QUESTIONS.select(columns), 0.05)} == ways


def test_one_segment_kinds_of_their_own_and_other_questions_have_no_effects():
    same = QUESTIONS.with_columns(cluster=pl.lit("sum"), answer=pl.lit("7"))
    assert segment_effects([HELPS], same, 0.05) == ()
    own = QUESTIONS.with_columns(cluster=pl.col("question_id"), answer=pl.lit("a line\n#### 7"))
    assert segment_effects([HELPS], own, 0.05) == ()
    assert segment_effects([HELPS], QUESTIONS.head(30), 0.05) == ()


def test_several_seeds_count_in_the_interval():
    seeds = np.stack([np.roll(TREATMENT, shift) for shift in (0, 3, 5)])
    sums = by_name(segment_effects([contrast(seeds, [CONTROL] * 3)], QUESTIONS, 0.05))["kind", "sum"]
    assert sums.difference == pytest.approx((seeds - CONTROL)[:, :20].mean())
    assert sums.ci_low < sums.difference < sums.ci_high
