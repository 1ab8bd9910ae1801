import numpy as np
import pytest

from aqnpipe.statistics.clusters import Clusters
from aqnpipe.statistics.planning import USUAL, PairVariances, Split, cheapest, detectable, pilot_of

VARIANCES = PairVariances(seed=2e-4, question=0.02, answer=0.1, draw=0.2)


def test_variances_of_pairs_are_those_that_were_put_in():
    draws = np.random.default_rng(3)
    true = np.array([0.01, 0.04, 0.09, 0.16])

    def scores():
        return (
            draws.normal(0, 0.1, (6, 1, 1))
            + draws.normal(0, 0.2, (1, 1, 300))
            + draws.normal(0, 0.3, (6, 1, 300))
            + draws.normal(0, 0.4, (6, 4, 300))
        )

    found = pilot_of([(scores(), np.zeros((6, 4, 300))) for _ in range(80)], 4).variances
    assert [found.seed, found.question, found.answer, found.draw] == pytest.approx(true, rel=0.15)


def test_questions_of_a_cluster_that_vary_together_count_as_their_cluster():
    """Ten clusters of 30: a cluster's effect of variance 0.04 makes a question vary by 30 * 0.04 more."""
    draws = np.random.default_rng(4)
    clusters = Clusters.of([number // 30 for number in range(300)])

    def scores():
        of_clusters = draws.normal(0, 0.2, (1, 1, 10)).repeat(30, axis=2)
        return of_clusters + draws.normal(0, 0.3, (6, 1, 300)) + draws.normal(0, 0.4, (6, 4, 300))

    pairs = [(scores(), np.zeros((6, 4, 300))) for _ in range(80)]
    found = pilot_of(pairs, 4, clusters).variances
    assert [found.question, found.answer, found.draw] == pytest.approx([30 * 0.04, 0.09, 0.16], rel=0.15)
    assert pilot_of(pairs, 4).variances.question < 0.1
    assert detectable(found, (3, 300, 2), 4, 0.05, 0.8, 10) > detectable(found, (3, 300, 2), 4, 0.05, 0.8)


def test_one_seed_has_no_variances_and_shows_no_arm_effect():
    assert pilot_of([(np.zeros((1, 2, 5)), np.zeros((1, 2, 5)))], 4) is None
    assert detectable(VARIANCES, (1, 1000, 1), 4, 0.05, 0.8) is None


def test_more_of_anything_finds_smaller_differences():
    base = detectable(VARIANCES, (3, 500, 1), 4, 0.05, 0.8)
    for sizes, arms, alpha in (((6, 500, 1), 4, 0.05), ((3, 1000, 1), 4, 0.05), ((3, 500, 4), 4, 0.05)):
        assert detectable(VARIANCES, sizes, arms, alpha, 0.8) < base
    assert detectable(VARIANCES, (2, 500, 1), 12, 0.05, 0.8) < detectable(VARIANCES, (2, 500, 1), 4, 0.05, 0.8)
    assert detectable(VARIANCES, (3, 500, 1), 4, 0.005, 0.8) > base


def test_the_cheapest_split_by_hand():
    """At 1 hour a seed and 1 per 1,000 answers, a study of at least 3 seeds and 400 questions: 3 * (1 + 0.5)."""
    found = cheapest(
        lambda seeds, questions, draws: seeds >= 3 and questions * draws >= 400,
        lambda seeds, questions, draws: seeds * (1 + questions * draws / 1000),
        most_questions=1319,
        noisy=False,
    )
    assert found == Split(3, 500, 1, 4.5)
    assert cheapest(lambda *_: False, lambda *_: 1.0, 100, noisy=True) is None


def pilot(draws, arms, seeds, sd, questions=200):
    """Return what a pilot says whose runs vary with a standard deviation `sd`, beside the sampling of answers."""
    scores = draws.normal(0.5, sd, (arms, seeds, 1, 1)) + draws.normal(0, 0.3, (arms, seeds, 1, questions))
    pairs = [(scores[first], scores[second]) for first in range(arms) for second in range(first)]
    return pilot_of(pairs, arms)


def test_the_range_of_a_pilot_holds_the_truth_in_four_of_five():
    draws = np.random.default_rng(0)
    ranges = [pilot(draws, 4, 4, 0.03).seed_range for _ in range(200)]
    inside = sum(found is not None and found[0] <= 2 * 0.03**2 <= found[1] for found in ranges)
    assert 0.7 <= inside / 200 <= 0.9


def test_a_pilot_that_says_nothing_about_seeds_leaves_the_usual_value():
    """Two arms of two seeds have one degree of freedom; runs that do not vary have no variance between seeds."""
    draws = np.random.default_rng(1)
    for found in (pilot(draws, 2, 2, 0.03), pilot_of([(np.ones((5, 1, 9)), np.ones((5, 1, 9)))], 2)):
        assert (found.variances.seed, found.seed_range) == (USUAL.seed, None)
        assert found.ends == (found.variances, found.variances)
    assert pilot(draws, 2, 5, 0.03).seed_range is not None
