"""The distance between sampler and policy in the report: pooled shares, and the alert on growth."""

from types import SimpleNamespace

import pytest

from aqnpipe.artifacts.sampler_distance import (
    DistanceGrowth,
    DistancePart,
    DistanceParts,
    SamplerDistance,
)
from aqnpipe.report.distance_view import distance_table, growth_sentences
from aqnpipe.report.words import load_words

EN, ZH = load_words("en"), load_words("zh")


def part(cause, share, rms=0.1):
    return DistancePart(cause=cause, mean=0.0, rms=rms, share=share)


def parts(step, tokens, rms, shares, **places):
    made = tuple(part(cause, share) for cause, share in shares.items())
    return DistanceParts(
        step=step, rollout_step=step - 1, num_sequences=2, num_tokens=tokens, mean_absolute=rms / 2, rms=rms,
        parts=made, forwards=9, **places,
    )  # fmt: skip


def run(arm, seed, *steps, growth=None, facts=True, why_not=None, mode=None):
    distance = SamplerDistance(steps=steps, growth=growth, why_not=why_not)
    training = SimpleNamespace(sampler_distance=distance) if facts else None
    generation = {} if mode is None else {"batch_invariant": mode}
    return SimpleNamespace(arm=arm, seed=seed, record=SimpleNamespace(training=training, generation=generation))


def grown(first, last, has_grown=True):
    return DistanceGrowth(num_rollouts=25, first_mean=first, last_mean=last, standard_error=0.001, has_grown=has_grown)


def test_shares_are_pooled_over_runs_by_hand():
    """Sums of squares 10 * 0.2^2 = 0.4 and 40 * 0.1^2 = 0.4: both runs weigh the same."""
    one = parts(1, 10, 0.2, {"rollout_noise": 0.9, "decoding": 0.1})
    other = parts(1, 40, 0.1, {"rollout_noise": 0.7, "decoding": 0.305, "batch": -0.005})
    table = distance_table([run("E5", 0, one), run("E5", 1, other)], EN)
    (row,) = table.rows
    assert row.cells[0] == "E5"
    assert row.cells[1] == "noise in the rollout 80.0\u00a0%; decoding token by token 20.2\u00a0%"
    # The mean over tokens: (10 * 0.1 + 40 * 0.05) / 50.
    assert row.cells[2:] == ("1", "2", "0.06")


def test_first_and_last_step_are_rows_of_their_own_and_arms_keep_their_order():
    first, last = parts(1, 10, 0.2, {"engine": 1.0}), parts(20, 10, 0.3, {"staleness": 1.0})
    table = distance_table([run("E5", 0, first, last), run("baseline", 0, first)], EN)
    found = [(row.cells[0], row.cells[1], row.cells[2]) for row in table.rows]
    assert found == [
        ("E5", "vLLM and its number format 100.0\u00a0%", "1"),
        ("E5", "older weights of the sampler 100.0\u00a0%", "20"),
        ("baseline", "vLLM and its number format 100.0\u00a0%", "1"),
    ]


def test_a_distance_of_zero_has_no_shares():
    nothing = parts(1, 10, 0.0, {"decoding": None, "batch": None})
    assert distance_table([run("E5", 0, nothing)], EN).rows[0].cells[1] == "–"


def test_runs_without_parts_have_a_row_with_the_reason():
    first, last = parts(1, 10, 0.2, {"engine": 1.0}), parts(20, 10, 0.3, {"engine": 1.0})
    memory, switch = "at step 1: the device has too little free memory", "training.explain_sampler_distance is false"
    runs = [
        run("E5", 0, first, last),
        run("E5", 1, last, why_not=memory),
        run("baseline", 0, why_not=switch),
        run("baseline", 1, why_not=switch),
        run("baseline", 2),
        run("baseline", 3, facts=False),
    ]
    assert [row.cells for row in distance_table(runs, EN).rows[2:]] == [
        ("E5", f"not explained: {memory}", "–", "1", "–"),
        ("baseline", f"not explained: {switch}", "–", "2", "–"),
        ("baseline", "not explained: its record has neither parts nor a reason", "–", "2", "–"),
    ]
    assert [row.cells[3] for row in distance_table(runs, EN).rows[:2]] == ["1", "2"]
    assert switch in distance_table(runs, ZH).rows[-2].cells[1]
    assert growth_sentences(runs, EN) == []
    assert distance_table([], EN) is None


def test_the_note_names_arms_with_and_without_the_batch_invariant_mode():
    alike = [run("E5", 0, mode=True), run("baseline", 0, mode=True), run("E6", 0)]
    assert "batch-invariant" not in distance_table(alike, EN).note
    note = distance_table([*alike, run("E7", 0, mode=False)], EN).note
    assert "batch-invariant mode in E5; baseline, and did not in E7" in note


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
