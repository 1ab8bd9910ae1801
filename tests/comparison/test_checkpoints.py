"""Checkpoints compared over questions: values worked out by hand, and what must not be compared."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from scipy.stats import norm

from aqnpipe.comparison.checkpoints import compare_checkpoints, report_of
from aqnpipe.comparison.evaluations import EvaluationInput, LevelScores, LoadedEvaluation, Refusal
from aqnpipe.config.dataset import PromptFormat
from aqnpipe.config.evaluation import EvaluationConfig
from aqnpipe.config.run import EvaluationSpec

SPEC = EvaluationSpec(
    model_role="a",
    arm_id="pretrained",
    seed=0,
    step=0,
    dtype="float32",
    attention="eager",
    prompt=PromptFormat(instruction="Think ."),
    evaluation=EvaluationConfig(max_response_tokens=8, batch_size=4),
)
QUESTIONS = tuple(f"test-{number:05d}" for number in range(40))


def scores(*correct):
    table = np.array(correct, dtype=float)
    seeds = tuple(range(len(table)))
    return LevelScores(QUESTIONS[: table.shape[1]], seeds, 1, table, None)


def evaluation(name, levels, *, weights=None, setting=None, problems=()):
    source = EvaluationInput(name, "pretrained", 0, 0, Path("t"), Path("r"), Path("j"))
    rows = [
        {
            "noise_level": level,
            "num_questions": found.correct.shape[1],
            "num_noise_seeds": len(found.noise_seeds),
            "accuracy": float(found.correct.mean()),
            "ci_low": 0.0,
            "ci_high": 1.0,
            "truncated_fraction": 0.5 if name == "long" else 0.0,
            "parse_failure_fraction": {"mute": 0.25, "long": 0.02}.get(name, 0.0),
        }
        for level, found in levels.items()
    ]
    setting = {"config.dtype": "'float32'", "facts.end_token": "1"} | (setting or {})
    return LoadedEvaluation(source, levels, tuple(problems), weights or name, setting, pl.DataFrame(rows))


def ones(count, of=40):
    return [1.0] * count + [0.0] * (of - count)


A = evaluation("a", {0.0: scores(ones(30)), 0.1: scores(ones(28))})
B = evaluation("b", {0.0: scores(ones(30)), 0.1: scores(ones(12))})


def found(evaluations, kind, level):
    (row,) = [r for r in compare_checkpoints(evaluations, 0.05) if (r.kind, r.noise_level) == (kind, level)]
    return row


def test_accuracy_under_the_same_noise_is_paired_over_questions():
    row = found([A, B], "accuracy", 0.1)
    # 16 questions right in a alone, none in b alone.
    assert row.difference == pytest.approx(16 / 40)
    assert row.p_value == pytest.approx(2 * norm.sf(4))
    assert row.ci_low < 16 / 40 < row.ci_high
    assert row.method == "mcnemar"


def test_equal_accuracy_has_no_difference():
    row = found([A, B], "accuracy", 0.0)
    assert (row.difference, row.p_value) == (0.0, 1.0)


def test_the_degradation_of_the_first_minus_that_of_the_second():
    # a loses 2 of 40, b loses 18 of 40: a loses 16/40 less.
    row = found([A, B], "degradation", 0.1)
    assert row.difference == pytest.approx(-2 / 40 + 18 / 40)
    # 16 differences of 1 and 24 of 0: t over questions.
    values = np.array([0.0] * 12 + [1.0] * 16 + [0.0] * 12)
    error = values.std(ddof=1) / 40**0.5
    assert row.ci_high - row.ci_low == pytest.approx(2 * 2.0227 * error, rel=1e-3)


def test_noise_seeds_are_averaged_per_question():
    first = evaluation("a", {0.0: scores(ones(40)), 0.1: scores(ones(40), ones(20))})
    second = evaluation("b", {0.0: scores(ones(40)), 0.1: scores(ones(20), ones(20))})
    row = found([first, second], "accuracy", 0.1)
    assert row.difference == pytest.approx(0.25)
    assert row.method == "questions"


def test_p_values_are_adjusted_within_each_kind():
    rows = compare_checkpoints([A, B], 0.05)
    noise = sorted((row for row in rows if row.kind == "noise"), key=lambda row: row.p_value)
    assert [row.p_holm for row in noise] == pytest.approx(
        [2 * noise[0].p_value, max(2 * noise[0].p_value, noise[1].p_value)]
    )
    (degradation,) = [row for row in rows if row.kind == "degradation"]
    assert degradation.p_holm == degradation.p_value


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (evaluation("b", dict(B.levels), weights="a"), "a and b are the same weights"),
        (evaluation("b", dict(B.levels), setting={"config.dtype": "'bfloat16'"}), "config.dtype is 'float32' for a"),
        (evaluation("b", {0.0: B.levels[0.0]}), "noise level 0.1 was not evaluated"),
        (
            evaluation("b", dict(B.levels), problems=[Refusal("receipt", "b: receipt invalid: no noise")]),
            "receipt invalid",
        ),
    ],
)
def test_what_cannot_be_compared_has_a_reason_and_no_number(other, reason):
    row = found([A, other], "degradation", 0.1)
    assert reason in row.refusal
    assert row.difference is row.p_value is row.p_holm is None


def test_families_with_other_tokenizers_are_compared_and_noted():
    other = evaluation("b", dict(B.levels), setting={"facts.end_token": "2"})
    assert found([A, other], "accuracy", 0.1).refusal is None
    report = report_of([A, other], {"a": "./a", "b": "./b"}, "gsm8k", SPEC, 0.05)
    assert any(note.startswith("b: other tokens") for note in report.notes)


def test_the_report_says_what_it_does_not_show():
    report = report_of([A, evaluation("mute", dict(B.levels))], {"a": "./a", "mute": "./b"}, "gsm8k", SPEC, 0.05)
    assert "needs several runs" in report.notes[0]
    assert (report.data, report.prompt) == ("gsm8k", "style plain, layout bare, instruction 'Think .'")
    no_answer = "% of the responses have no answer that the scorer found, and count as wrong."
    assert f"mute: up to 25{no_answer}" in report.notes
    assert not any(note.startswith("a: ") for note in report.notes)
    report = report_of([A, evaluation("long", dict(B.levels))], {"a": "./a", "long": "./b"}, "gsm8k", SPEC, 0.05)
    cut = "up to 50% of the responses were cut off at the token limit; "
    assert f"long: {cut}up to 2{no_answer}" in report.notes


def test_the_interval_of_a_difference_says_what_its_adjusted_p_says():
    """Twelve comparisons of accuracy: an unadjusted 95 % interval would exclude 0 where the p-value shows nothing."""
    others = [evaluation(f"c{number}", {0.0: scores(ones(30 + number)), 0.1: A.levels[0.1]}) for number in range(1, 4)]
    rows = [row for row in compare_checkpoints([A, B, *others], 0.05) if row.p_holm is not None]
    assert {row.p_holm < 0.05 for row in rows} == {True, False}
    for row in rows:
        assert (row.p_holm < 0.05) == (not row.ci_low <= 0 <= row.ci_high), row
    assert any(row.p_value < 0.05 < row.p_holm for row in rows)
