"""Questions in clusters or batches: collapsed scores, their tests, and the warnings where nobody declared them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from aqnpipe.statistics.clusters import NOTABLE_TAIL, Batches, Clusters, neighbours_vary_together
from aqnpipe.statistics.crossed_effects import estimate_difference
from aqnpipe.statistics.seed_blocks import SeedBlocks


@given(st.lists(st.integers(0, 4), min_size=2, max_size=40).filter(lambda names: len(set(names)) > 1))
@settings(deadline=None)
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


def decoded(studies, draws, size, shared=0.0, by_length=0.0, easy=1.0, number=1000, seed=0):
    """Yield scores[arm, noise draw, seed, question] of two arms with 3 seeds, decoded in batches of `size`.

    shared: standard deviation of what the noise of a batch does to the difference of the arms. by_length: advantage of
    an arm at the longest prompts, and its disadvantage at the shortest. easy: of questions, as a mean logit.
    """
    rng = np.random.default_rng(seed)
    batches = Batches(np.arange(number) // size)
    for _ in range(studies):
        chance = 1 / (1 + np.exp(-rng.normal(easy, 1.5, number)))
        noise = rng.normal(0, shared, (draws, 1, batches.numbers[-1] + 1))[:, :, batches.numbers]
        apart = noise + by_length * np.linspace(-1, 1, number)
        chances = np.clip(np.stack([chance + apart / 2, chance - apart / 2]), 0, 1)
        yield batches, (rng.random((2, draws, 3, number)) < chances).astype(float)


def warnings(studies):
    return sum(
        batches.notable_correlation((ours - theirs).mean(axis=1)) is not None for batches, (ours, theirs) in studies
    )


@pytest.mark.parametrize(("draws", "size"), [(1, 250), (1, 50), (1, 8), (2, 250), (2, 8), (3, 50)])
@pytest.mark.parametrize("easy", [1.0, 7.0])
def test_batches_without_shared_noise_are_hardly_ever_noticed(draws, size, easy):
    """Also of easy questions, of which few ever differ."""
    number = 500
    assert warnings(decoded(number, draws, size, easy=easy)) <= stats.binom.ppf(0.999, number, 2 * NOTABLE_TAIL)


@pytest.mark.parametrize(("draws", "size"), [(1, 50), (1, 8), (2, 250)])
def test_an_arm_that_is_better_at_long_prompts_shares_no_noise(draws, size):
    """20 points better at the longest prompts and worse at the shortest, of which batches are made."""
    assert warnings(decoded(200, draws, size, by_length=0.2)) <= stats.binom.ppf(0.999, 200, 2 * NOTABLE_TAIL)


@pytest.mark.parametrize(("draws", "size", "power"), [(1, 50, 0.95), (2, 250, 0.9)])
def test_noise_that_a_batch_shares_is_noticed_and_no_effect_of_the_arm(draws, size, power):
    """Of 20 points, standard deviation: with questions as units equal arms differ in 23 and 65 % of studies."""
    studies = list(decoded(100, draws, size, shared=0.2))
    rejected = {"questions": 0, "batches": 0}
    for batches, (ours, theirs) in studies:
        for unit, clusters in (("questions", None), ("batches", Clusters.of(batches.numbers.tolist()))):
            estimate = estimate_difference(ours.mean(axis=0), theirs.mean(axis=0), clusters=clusters)
            rejected[unit] += estimate.two_sided_p() < 0.05
    assert rejected["batches"] <= stats.binom.ppf(0.999, 100, 0.05) < rejected["questions"]
    assert warnings(studies) >= stats.binom.ppf(0.001, 100, power)


def test_batches_that_cannot_be_told_from_questions_say_nothing():
    scores = np.random.default_rng(0).normal(0, 1, (2, 12))
    for numbers in (range(12), [0] * 12):
        assert Batches(np.array(numbers)).notable_correlation(scores) is None
    assert Batches(np.arange(12) // 4).notable_correlation(scores[:1]) is None
    assert Batches(np.arange(12) // 2).notable_correlation(np.zeros((2, 12))) is None


def test_batches_in_which_all_answers_change_alike_have_correlation_one():
    changed = np.repeat([1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0], 5)
    assert Batches(np.arange(40) // 5).notable_correlation(np.stack([changed, 0 * changed])) == pytest.approx(1)


def test_the_correlation_is_that_which_was_put_in():
    """Half of the variance is the batch's: the estimates of 100 studies of 100 batches have this mean."""
    rng, batches = np.random.default_rng(2), Batches(np.arange(1000) // 10)
    found = [
        batches.notable_correlation(rng.normal(0, 1, (2, 100))[:, batches.numbers] + rng.normal(0, 1, (2, 1000)))
        for _ in range(100)
    ]
    assert np.mean(found) == pytest.approx(0.5, abs=5 * np.std(found) / 10)
