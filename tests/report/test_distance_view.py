"""The distance between sampler and policy in the report: the alert on growth, and unequal modes of engines."""

from types import SimpleNamespace

import pytest

from aqnpipe.artifacts.training_facts import DistanceGrowth
from aqnpipe.report.training import engine_sentences, growth_sentences, verified_sentences
from aqnpipe.report.words import load_words

EN, ZH = load_words("en"), load_words("zh")


def run(arm, seed, growth=None, facts=True, mode=None, eager=None):
    training = SimpleNamespace(distance_growth=growth) if facts else None
    generation = {} if mode is None else {"batch_invariant": mode}
    generation |= {} if eager is None else {"enforce_eager": eager}
    return SimpleNamespace(arm=arm, seed=seed, record=SimpleNamespace(training=training, generation=generation))


def grown(first, last, has_grown=True):
    return DistanceGrowth(num_rollouts=25, first_mean=first, last_mean=last, standard_error=0.001, has_grown=has_grown)


def test_a_sentence_names_arms_with_and_without_the_batch_invariant_mode():
    alike = [run("E5", 0, mode=True), run("baseline", 0, mode=True), run("E6", 0, facts=False)]
    assert engine_sentences(alike, EN) == growth_sentences(alike, EN) == []
    (sentence,) = engine_sentences([*alike, run("E7", 0, mode=False)], EN)
    assert "batch-invariant mode in E5; baseline, and did not in E7" in sentence


def test_a_sentence_names_the_arms_whose_rollouts_replayed_graphs():
    eager = [run("E5", 0, mode=False, eager=True), run("E6", 0, facts=False)]
    assert engine_sentences(eager, EN) == []
    replayed = [run("baseline", seed, mode=False, eager=False) for seed in (0, 1)]
    assert engine_sentences(replayed, EN) == ["Rollouts replayed vLLM's CUDA graphs in baseline."]
    (sentence,) = engine_sentences([*eager, *replayed], EN)
    assert sentence.startswith("Rollouts replayed vLLM's CUDA graphs in baseline, and did not in E5: these differ in")
    assert "baseline" in engine_sentences([*eager, *replayed], ZH)[0]


@pytest.mark.parametrize(("words", "expected"), [(EN, "E5 seed 1"), (ZH, "E5 种子 1")])
def test_the_alert_names_the_runs_that_have_grown_the_most(words, expected):
    runs = [
        run("baseline", 0, growth=grown(0.1, 0.9, has_grown=False)),
        run("E5", 0, growth=grown(0.01, 0.02)),
        run("E5", 1, growth=grown(0.01, 0.05)),
        *(run("E6", seed, growth=grown(0.01, 0.015)) for seed in range(3)),
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

    assert verified_sentences([verified(), run("E5", 0, facts=False)], EN) == []
    (sentence,) = verified_sentences([verified(20, 40), verified(40), run("E5", 0, facts=False)], EN)
    assert sentence.startswith("In 3 of 80 optimiser steps a micro-batch was computed twice")
