"""Questions in clusters: collapsed scores, their tests, and the warning about clusters that nobody declared."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from aqnpipe.statistics.clusters import Clusters, neighbours_vary_together
from aqnpipe.statistics.crossed_effects import estimate_difference
from aqnpipe.statistics.seed_blocks import SeedBlocks


@given(st.lists(st.integers(0, 4), min_size=2, max_size=40).filter(lambda names: len(set(names)) > 1))
def test_collapsed_scores_keep_the_mean_and_are_linear(names):
    clusters, draws = Clusters.of(names), np.random.default_rng(len(names))
    first, second = draws.random((2, 3, len(names)))
    assert clusters.collapsed(first).mean(axis=1) == pytest.approx(first.mean(axis=1))
    together = clusters.collapsed(first) - clusters.collapsed(second)
    assert clusters.collapsed(first - second) == pytest.approx(together)


def test_clusters_of_equal_size_by_hand():
    """Means of clusters 0.5, 1 and 0: their variance 1/4 is that of a cluster-robust standard error with 2 freedom."""
    clusters = Clusters.of(["a", "b", "a", "b", "c", "c"])
    collapsed = clusters.collapsed(np.array([1.0, 1.0, 0.0, 1.0, 0.0, 0.0]))
    assert sorted(collapsed) == pytest.approx([0.0, 0.5, 1.0])
    assert clusters.freedom == pytest.approx(2)


def test_a_large_cluster_takes_degrees_of_freedom():
    """Shares 0.8, 0.1 and 0.1: 1 / 0.66 effective clusters."""
    assert Clusters.of(["a"] * 8 + ["b", "c"]).freedom == pytest.approx(1 / 0.66 - 1)


def test_single_questions_are_no_clusters():
    draws = np.random.default_rng(0)
    treatment, control = draws.random((2, 3, 30))
    plain = estimate_difference(treatment, control)
    same = estimate_difference(treatment, control, clusters=Clusters.of(range(30)))
    assert (same.two_sided_p(), same.interval(0.9)) == (
        pytest.approx(plain.two_sided_p()),
        pytest.approx(plain.interval(0.9)),
    )
    assert same.analysis == (*plain.analysis, "clusters")


def template_studies(number, seeds, sizes, rng):
    """Yield scores[arm, seed, question] of four equal arms to which templates are easier or harder (SD 25 points)."""
    codes = np.repeat(np.arange(len(sizes)), sizes)
    for _ in range(number):
        easy = 1 / (1 + np.exp(-rng.normal(1, 1.5, len(codes))))
        chance = np.clip(easy + rng.normal(0, 0.25, (4, len(sizes)))[:, codes], 0.02, 0.98)
        yield codes, (rng.random((4, seeds, len(codes))) < chance[:, None]).astype(float)


@pytest.mark.parametrize("sizes", [(20,) * 10, (60, 40, 30, 20, 15, 10, 10, 5, 5, 5)])
@pytest.mark.parametrize("seeds", [1, 2, 3, 5])
def test_templates_that_favour_an_arm_are_no_effect_of_the_arm(seeds, sizes):
    """Questions as units reject 17 to 54 % with ten equal templates, a normal test of clustered errors 7 to 10 %."""
    rng, studies, rejected, as_questions = np.random.default_rng(seeds), 300, 0, 0
    for codes, scores in template_studies(studies, seeds, sizes, rng):
        variance = SeedBlocks(scores.mean(axis=2)).of_pair(0, 1)
        clusters = Clusters.of(codes.tolist())
        rejected += estimate_difference(scores[0], scores[1], variance, clusters).two_sided_p() < 0.05
        as_questions += estimate_difference(scores[0], scores[1], variance).two_sided_p() < 0.05
    assert rejected <= stats.binom.ppf(0.999, studies, 0.05)
    assert as_questions > stats.binom.ppf(0.999, studies, 0.05)


def test_neighbours_of_one_document_are_noticed_and_independent_questions_are_not():
    rng = np.random.default_rng(3)
    of_documents = np.repeat(rng.normal(0, 0.2, 50), 8) + rng.normal(0, 0.4, 400)
    assert neighbours_vary_together(of_documents)
    assert sum(neighbours_vary_together(rng.normal(0, 1, 400)) for _ in range(1000)) <= 5
    assert not neighbours_vary_together(np.zeros(10))
