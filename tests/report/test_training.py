"""Leaps of KL and loss, found at their step; the distance between sampler and policy; and modes of engines."""

from types import SimpleNamespace

import polars as pl
import pytest

from aqnpipe.artifacts.training_facts import DistanceGrowth
from aqnpipe.report.training import (
    distance_table,
    engine_sentences,
    growth_sentences,
    leap_sentences,
    leap_table,
    leaps,
    router_tables,
    smoothed_by_arm,
    verified_sentences,
)
from aqnpipe.report.words import load_words


def run(kl, loss=None, validations=None):
    steps = range(1, len(kl) + 1)
    table = pl.DataFrame(
        {
            "step": steps,
            "kl": kl,
            "loss": loss or [0.0] * len(kl),
            "validation_accuracy": [(validations or {}).get(step) for step in steps],
        },
        schema_overrides={"validation_accuracy": pl.Float64},
    )
    return SimpleNamespace(model="base", arm="E5", seed=1, metrics=table)


def distances(number_format, means, largest, kl):
    table = pl.DataFrame({"logp_difference_mean": means, "logp_difference_max": largest, "sampler_kl": kl})
    record = SimpleNamespace(config={"dtype": number_format})
    return SimpleNamespace(model="base", arm="E5", metrics=table, record=record)


def test_the_distance_of_sampler_and_policy_is_that_of_a_number_format():
    runs = [
        distances("float16", [0.001, 0.003], [0.02, 0.5], [0.0001, 0.0003]),
        distances("bfloat16", [0.02, 0.04], [0.9, 0.1], [0.01, 0.01]),
        distances("bfloat16", [0.05, 0.05], [0.2, 0.1], [0.03, 0.03]),
    ]
    rows = [row.cells for row in distance_table(runs, load_words("en")).rows]
    assert rows == [
        ("base", "bfloat16", "E5", "2", "0.04", "0.03", "0.05", "0.9", "0.02"),
        ("base", "float16", "E5", "1", "0.002", "0.002", "0.002", "0.5", "0.0002"),
    ]


def routed(number_format, agreement, tokens):
    columns = {"router_agreement": agreement, "tokens_routed_differently": tokens}
    table = pl.DataFrame(columns, schema_overrides=dict.fromkeys(columns, pl.Float64))
    return SimpleNamespace(
        model="base", arm="E5", metrics=table, record=SimpleNamespace(config={"dtype": number_format})
    )


def test_the_agreement_of_routers_is_that_of_a_number_format_and_of_runs_that_measured_it():
    dense = routed("bfloat16", [None, None], [None, None])
    runs = [
        routed("bfloat16", [0.9, 0.7], [0.2, 0.4]),
        routed("bfloat16", [1.0, 1.0], [0.0, 0.1]),
        routed("float32", [1.0, 1.0], [0.0, 0.0]),
        dense,
    ]
    (found,) = router_tables(runs, load_words("en"))
    assert [tuple(cell.replace("\xa0", " ") for cell in row.cells) for row in found.rows] == [
        ("base", "bfloat16", "E5", "2", "90.0 %", "80.0 %", "100.0 %", "17.5 %"),
        ("base", "float32", "E5", "1", "100.0 %", "100.0 %", "100.0 %", "0.0 %"),
    ]
    assert router_tables([dense], load_words("en")) == []


def test_a_spike_is_one_leap_at_its_step():
    runs = [run([0.1, 0.2] * 10 + [73.0] + [0.1, 0.2] * 10)]
    found = leaps(runs)
    assert [(leap.metric, leap.step, leap.value) for leap in found] == [("kl", 21, 73.0)]
    assert found[0].usual in (0.1, 0.2)
    sentences = leap_sentences(found, runs, load_words("en"))
    assert sentences == [
        f"KL of E5 seed 1 jumps to 73 at step 21; the steps around it are at {found[0].usual}. {UNKNOWN}"
    ]
    assert leap_table(found, load_words("zh")).rows[0].cells[:3] == ("E5 种子 1", "KL 散度", "21")


UNKNOWN = "No validation lies before and after it, so its effect is not known."
SPIKE = [0.1, 0.2] * 10 + [73.0] + [0.1, 0.2] * 10


@pytest.mark.parametrize(
    ("validations", "text"),
    [
        # From 0.4 to 0.5 before the leap, 0.5 to 0.48 over it, 0.48 to 0.45 after it.
        (
            {9: 0.4, 19: 0.5, 29: 0.48, 39: 0.45},
            "Validation accuracy is 50.0 % after step 19 and 48.0 % after step 29. Between other neighbouring "
            "validations of the run it changes by −3.0 to +10.0 points. "
            "The change at the jump is no worse than those: no harm is seen.",
        ),
        (
            {9: 0.4, 19: 0.5, 29: 0.46, 39: 0.45},
            "Validation accuracy is 50.0 % after step 19 and 46.0 % after step 29. Between other neighbouring "
            "validations of the run it changes by −1.0 to +10.0 points. The change at the jump is worse than those.",
        ),
        # The policy whose KL is measured at step 21 is that after step 20.
        ({19: 0.5, 20: 0.1}, "Validation accuracy is 50.0 % after step 19 and 10.0 % after step 20."),
        ({10: 0.4, 19: 0.5}, UNKNOWN),
        ({20: 0.5, 41: 0.4}, UNKNOWN),
        ({}, UNKNOWN),
    ],
)
def test_a_leap_comes_with_the_validations_around_it(validations, text):
    runs = [run([0.0] * 41), run(SPIKE, validations=validations)]
    runs[0].seed = 0
    (leap,) = found = leaps(runs)
    (sentence,) = leap_sentences(found, runs, load_words("en"))
    assert leap.step == 21
    assert sentence.replace("\u00a0", " ").split(f"are at {leap.usual}.")[1].strip() == text


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
    runs = [run(kl)]
    found = leaps(runs)
    assert [leap.step for leap in found] == [59, 47, 35, 23, 11]
    assert leap_sentences(found, runs, load_words("en"))[-1] == "2 more jumps are listed in the numbers below."


def test_the_line_of_kl_passes_below_a_spike_and_that_of_the_reward_is_a_mean():
    kl = [0.1] * 10 + [50.0] + [0.1] * 10
    table = run(kl).metrics.with_columns(arm=pl.lit("E5"), seed=pl.lit(0), reward_mean=pl.col("kl"))
    assert smoothed_by_arm(table, "kl", 5, 1)["mean"].max() == 0.1
    assert smoothed_by_arm(table, "reward_mean", 5, 1)["mean"].max() == pytest.approx((50 + 0.4) / 5)


EN, ZH = load_words("en"), load_words("zh")


def engine_run(arm, seed, growth=None, facts=True, mode=None, eager=None):
    training = SimpleNamespace(distance_growth=growth) if facts else None
    generation = {} if mode is None else {"batch_invariant": mode}
    generation |= {} if eager is None else {"enforce_eager": eager}
    return SimpleNamespace(arm=arm, seed=seed, record=SimpleNamespace(training=training, generation=generation))


def grown(first, last, has_grown=True):
    return DistanceGrowth(num_rollouts=25, first_mean=first, last_mean=last, standard_error=0.001, has_grown=has_grown)


def test_a_sentence_names_arms_with_and_without_the_batch_invariant_mode():
    alike = [engine_run("E5", 0, mode=True), engine_run("baseline", 0, mode=True), engine_run("E6", 0, facts=False)]
    assert engine_sentences(alike, EN) == growth_sentences(alike, EN) == []
    (sentence,) = engine_sentences([*alike, engine_run("E7", 0, mode=False)], EN)
    assert "batch-invariant mode in E5; baseline, and did not in E7" in sentence


def test_a_sentence_names_the_arms_whose_rollouts_replayed_graphs():
    eager = [engine_run("E5", 0, mode=False, eager=True), engine_run("E6", 0, facts=False)]
    assert engine_sentences(eager, EN) == []
    replayed = [engine_run("baseline", seed, mode=False, eager=False) for seed in (0, 1)]
    assert engine_sentences(replayed, EN) == ["Rollouts replayed vLLM's CUDA graphs in baseline."]
    (sentence,) = engine_sentences([*eager, *replayed], EN)
    assert sentence.startswith("Rollouts replayed vLLM's CUDA graphs in baseline, and did not in E5: these differ in")
    assert "baseline" in engine_sentences([*eager, *replayed], ZH)[0]


@pytest.mark.parametrize(("words", "expected"), [(EN, "E5 seed 1"), (ZH, "E5 种子 1")])
def test_the_alert_names_the_runs_that_have_grown_the_most(words, expected):
    runs = [
        engine_run("baseline", 0, growth=grown(0.1, 0.9, has_grown=False)),
        engine_run("E5", 0, growth=grown(0.01, 0.02)),
        engine_run("E5", 1, growth=grown(0.01, 0.05)),
        *(engine_run("E6", seed, growth=grown(0.01, 0.015)) for seed in range(3)),
    ]
    sentences = growth_sentences(runs, words)
    assert len(sentences) == 4
    assert expected in sentences[0]
    assert "0.01" in sentences[0]
    assert "0.05" in sentences[0]
    assert "first and last 5 rollouts" in sentences[0] or words is ZH
    assert "2" in sentences[-1]


def test_the_caption_counts_the_steps_that_were_verified():
    def verified(*steps):
        return SimpleNamespace(record=SimpleNamespace(training=SimpleNamespace(verified_steps=steps, steps=40)))

    assert verified_sentences([verified(), engine_run("E5", 0, facts=False)], EN) == []
    (sentence,) = verified_sentences([verified(20, 40), verified(40), engine_run("E5", 0, facts=False)], EN)
    assert sentence.startswith("In 3 of 80 optimiser steps a micro-batch was computed twice")
