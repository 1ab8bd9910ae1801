import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm, ttest_1samp

import aqnpipe
from aqnpipe.errors import DataError


def test_one_run_of_each_is_mcnemars_test():
    a = [1] * 12 + [0] * 8
    b = [1] * 4 + [0] * 8 + [1] * 1 + [0] * 7
    found = aqnpipe.compare(a, b, range(20))
    # 8 questions right in a alone, 1 in b alone.
    assert found.difference == pytest.approx(7 / 20)
    assert found.p_value == pytest.approx(2 * norm.sf(7 / 9**0.5))
    assert found.ci_low < 7 / 20 < found.ci_high
    assert (found.method, found.num_questions, found.num_seeds) == ("mcnemar", 20, 1)
    assert found.about == "these runs on other questions"


def test_shares_of_right_samples_are_a_t_test_over_questions():
    a, b = np.linspace(0, 1, 11), np.full(11, 0.25)
    assert aqnpipe.compare(a, b, range(11)).p_value == pytest.approx(ttest_1samp(a - b, 0).pvalue)


def test_several_seeds_make_a_statement_about_other_seeds():
    ids, seeds = [*range(50)] * 3, [seed for seed in "xyz" for _ in range(50)]
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 2, 150), rng.integers(0, 2, 150)
    found = aqnpipe.compare(a, b, ids, seeds)
    assert (found.method, found.num_seeds, found.about) == ("two_way", 3, "other seeds and questions")
    assert found.difference == pytest.approx(float(a.mean() - b.mean()))


def test_clusters_are_the_unit_where_questions_vary_together():
    """Two answers to each of 6 documents, equal within a document: as much as 6 questions with those answers."""
    of_documents = [0.75, 0.25, 0.5, 1.0, 0.0, 0.5]
    a, ids, documents = np.repeat(of_documents, 2), range(12), np.repeat([*"uvwxyz"], 2)
    found = aqnpipe.compare(a, np.full(12, 0.25), ids, clusters=documents)
    whole = aqnpipe.compare(of_documents, np.full(6, 0.25), range(6))
    assert found.p_value == pytest.approx(whole.p_value)
    assert (found.ci_low, found.ci_high) == pytest.approx((whole.ci_low, whole.ci_high))
    alone = aqnpipe.compare(a, np.full(12, 0.25), ids)
    assert aqnpipe.compare(a, np.full(12, 0.25), ids, clusters=ids).p_value == pytest.approx(alone.p_value)
    assert alone.p_value < found.p_value


@given(st.permutations(range(12)))
def test_the_order_of_the_rows_does_not_matter(order):
    a, b = [1, 1, 1, 0, 0, 1, 0, 1, 1, 1, 0, 1], [0, 1, 0, 0, 0, 1, 0, 0, 1, 0, 0, 1]
    whole = aqnpipe.compare(a, b, range(12))
    assert aqnpipe.compare([a[i] for i in order], [b[i] for i in order], order) == whole


@pytest.mark.parametrize(
    ("clusters", "message"),
    [
        (["d"], r"lengths \[1, 2\]"),
        (["d", "d"], "found 1 cluster, expected at least 2"),
    ],
)
def test_clusters_that_are_none_are_refused(clusters, message):
    with pytest.raises(DataError, match=message):
        aqnpipe.compare([1, 0], [0, 1], ["a", "b"], clusters=clusters)


def test_a_question_is_in_one_cluster():
    with pytest.raises(DataError, match="question 'a' is in clusters 'd' and 'e'"):
        aqnpipe.compare([1, 0, 1, 1], [0, 1, 1, 1], [*"abab"], [0, 0, 1, 1], clusters=[*"deee"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 0], [1], ["a", "b"]), r"lengths \[1, 2\]"),
        (([1, 0], [1, 0], ["a", "a"]), "question 'a' appears twice with seed 0"),
        (([1, 0, 1], [1, 0, 1], ["a", "b", "a"], [0, 0, 1]), "question 'b' is missing with seed 1"),
        (([1, 2], [1, 0], ["a", "b"]), "a_correct has 2"),
        (([1], [0], ["a"]), "found 1 questions"),
    ],
)
def test_what_does_not_pair_is_refused(arguments, message):
    with pytest.raises(DataError, match=message):
        aqnpipe.compare(*arguments)
