"""Intervals of accuracies: as many questions as the answers are worth."""

import numpy as np
import polars as pl
import pytest
from scipy import stats
from statsmodels.stats.proportion import proportion_confint

from aqnpipe.comparison.evaluations import _effective_questions

QUESTIONS = 300


def table(answers):
    """Rows of answers[draw, question] at one noise level."""
    draws, questions = answers.shape
    return pl.DataFrame(
        {
            "noise_level": [0.1] * answers.size,
            "question_id": np.tile(np.arange(questions), draws),
            "correct": answers.ravel(),
        }
    )


def width(accuracy, number):
    low, high = proportion_confint(accuracy * number, number, method="wilson")
    return high - low


def test_one_answer_to_a_question_is_one_question():
    answers = np.random.default_rng(0).random((1, 40)) < 0.7
    assert _effective_questions(table(answers), "correct").to_list() == pytest.approx([40])
    assert _effective_questions(table(np.ones((3, 40), dtype=bool)), "correct").to_list() == [40]


def test_two_draws_that_always_agree_are_one_and_draws_of_equal_questions_are_all_counted():
    answers = np.random.default_rng(1).random((1, 40)) < 0.7
    assert _effective_questions(table(np.repeat(answers, 2, axis=0)), "correct").to_list() == pytest.approx([40])
    opposite = np.stack([np.ones(40, dtype=bool), np.zeros(40, dtype=bool)])
    assert _effective_questions(table(opposite), "correct").to_list() == [80]


def test_clusters_that_do_not_vary_are_worth_all_their_answers():
    opposite = np.stack([np.ones(40, dtype=bool), np.zeros(40, dtype=bool)])
    clustered = table(opposite).with_columns(cluster=pl.col("question_id") // 10)
    assert _effective_questions(clustered, "correct").to_list() == [80]


def test_intervals_of_two_draws_hold_their_level_and_are_shorter_than_those_of_one_yes_or_no():
    draws, covered, ratios, studies = np.random.default_rng(2), 0, [], 600
    population = 1 / (1 + np.exp(-(0.5 + draws.normal(0, 1.5, 200_000))))
    for _ in range(studies):
        chance = draws.choice(population, QUESTIONS)
        answers = draws.random((2, QUESTIONS)) < chance
        (number,) = _effective_questions(table(answers), "correct")
        low, high = proportion_confint(answers.mean() * number, number, method="wilson")
        covered += low <= population.mean() <= high
        ratios.append(width(answers.mean(), QUESTIONS) / (high - low))
    assert stats.binom.ppf(0.001, studies, 0.95) <= covered <= stats.binom.ppf(0.999, studies, 0.95)
    assert 1.1 < np.mean(ratios) < 1.25
