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


@given(st.permutations(range(12)))
def test_the_order_of_the_rows_does_not_matter(order):
    a, b = [1, 1, 1, 0, 0, 1, 0, 1, 1, 1, 0, 1], [0, 1, 0, 0, 0, 1, 0, 0, 1, 0, 0, 1]
    whole = aqnpipe.compare(a, b, range(12))
    assert aqnpipe.compare([a[i] for i in order], [b[i] for i in order], order) == whole


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
