"""Leaps of KL and loss: found at their step, not smeared over the steps around it."""

from types import SimpleNamespace

import polars as pl
import pytest

from aqnpipe.report.training import leap_sentences, leap_table, leaps, smoothed_by_arm
from aqnpipe.report.words import load_words


def run(kl, loss=None):
    steps = range(1, len(kl) + 1)
    table = pl.DataFrame({"step": steps, "kl": kl, "loss": loss or [0.0] * len(kl)})
    return SimpleNamespace(model="base", arm="E5", seed=1, metrics=table)


def test_a_spike_is_one_leap_at_its_step():
    found = leaps([run([0.1, 0.2] * 10 + [73.0] + [0.1, 0.2] * 10)])
    assert [(leap.metric, leap.step, leap.value) for leap in found] == [("kl", 21, 73.0)]
    assert found[0].usual in (0.1, 0.2)
    sentences = leap_sentences(found, load_words("en"))
    assert sentences == [f"KL of E5 seed 1 jumps to 73 at step 21; the steps around it are at {found[0].usual}."]
    assert leap_table(found, load_words("zh")).rows[0].cells[:3] == ("E5 种子 1", "KL 散度", "21")


@pytest.mark.parametrize(
    "kl",
    [
        [0.1] * 30,
        [0.01 * step for step in range(40)],
        [0.1 + 0.3 * (step > 20) for step in range(40)],
        [0.0] * 20 + [0.45] + [0.0] * 20,
        [None] * 10,
        [5.0],
    ],
)
def test_slow_changes_and_small_ones_are_none(kl):
    assert leaps([run(kl)]) == []


def test_more_leaps_than_are_told_are_counted():
    kl = [0.1] * 60
    for step in (10, 22, 34, 46, 58):
        kl[step] = 10.0 + step
    found = leaps([run(kl)])
    assert [leap.step for leap in found] == [59, 47, 35, 23, 11]
    assert leap_sentences(found, load_words("en"))[-1] == "2 more jumps are listed in the numbers below."


def test_the_line_of_kl_passes_below_a_spike_and_that_of_the_reward_is_a_mean():
    kl = [0.1] * 10 + [50.0] + [0.1] * 10
    table = run(kl).metrics.with_columns(arm=pl.lit("E5"), seed=pl.lit(0), reward_mean=pl.col("kl"))
    assert smoothed_by_arm(table, "kl", 5, 1)["mean"].max() == 0.1
    assert smoothed_by_arm(table, "reward_mean", 5, 1)["mean"].max() == pytest.approx((50 + 0.4) / 5)
