"""Rows of one place are added up column by column."""

import json

import pytest
import torch

from aqnpipe.config.noise import NoiseSpec, RelativeGaussian
from aqnpipe.noise.receipts.receipt import RecorderState
from aqnpipe.noise.receipts.recorder import ReceiptRecorder
from aqnpipe.noise.receipts.table import Row, fault_operator, grouped

SMALL, LARGE = RelativeGaussian(scale=0.05), RelativeGaussian(scale=0.1)


def test_rows_of_a_place_are_summed_united_and_their_maxima_kept():
    first = Row("rollout", passes=2, largest_deviation=0.3, formats={"float32"}, contradictions={"a": 1})
    second = Row("rollout", passes=3, largest_deviation=0.2, formats={"bfloat16"}, contradictions={"a": 2, "b": 1})
    other = Row("rollout", layer=0, passes=7)
    assert grouped([first, other, second]) == (
        Row(
            "rollout",
            passes=5,
            largest_deviation=0.3,
            formats={"float32", "bfloat16"},
            contradictions={"a": 3, "b": 1},
        ),
        other,
    )
    assert (first.passes, first.contradictions) == (2, {"a": 1}), "the rows that are added up stay as they are"


def test_what_was_not_counted_is_no_zero():
    unknown, none = Row("rollout", 0), Row("rollout", 0, sequences=0, gradients=set())
    assert [row.sequences for row in (*grouped([unknown, unknown]), *grouped([unknown, none]))] == [None, 0]
    assert grouped([unknown, none])[0].gradients == set()


@pytest.mark.parametrize(
    ("one", "another"),
    [({"error": SMALL}, {"error": LARGE}), ({"num_faulty_channels": 1}, {"num_faulty_channels": 2})],
)
def test_rows_about_different_things_are_not_added_up(one, another):
    with pytest.raises(ValueError, match=f"rollout mm layer 1: {next(iter(one))}"):
        grouped([Row("rollout", None, 1, "mm", **one), Row("rollout", None, 1, "mm", **another)])
    (row,) = grouped([Row("rollout", None, 1, "mm"), Row("rollout", None, 1, "mm", **one)])
    assert getattr(row, next(iter(one))) == next(iter(one.values()))


def test_columns_without_a_value_are_not_written():
    state = RecorderState(rows=(Row("rollout", 0, 0, "mm", error=SMALL, sequences=0, calls=2),))
    text = state.model_dump_json()
    (row,) = json.loads(text)["rows"]
    assert row.pop("error")["kind"] == "relative_gaussian"
    assert row == {"phase": "rollout", "step": 0, "layer": 0, "operator": "mm", "sequences": 0, "calls": 2}
    assert RecorderState.model_validate_json(text) == state


def test_a_phase_is_the_sum_of_its_rows_without_faults_and_aqn():
    rows = (
        Row("rollout", 0, passes=2),
        Row("rollout", None, 1, "mm", error=SMALL, calls=4),
        Row("backward", None, 1, fault_operator(0), calls=8),
        Row("rollout", 1, passes=1),
    )
    state = RecorderState(rows=rows)
    assert state.phases == (Row("rollout", passes=3, calls=4),)
    assert state.model_copy(update={"rows": rows[:2]}).phases == (Row("rollout", passes=2, calls=4),)


def test_tensors_are_added_when_they_are_read():
    recorder = ReceiptRecorder(NoiseSpec(), expected_phases=(), num_layers=3, num_norms=7)
    for _ in range(2):
        recorder.add("rollout", operator="mm", changed=torch.tensor([3]), squares=torch.tensor(0.25), calls=1)
    assert recorder.seen("rollout", "changed", "squares", "calls") == Row("rollout", changed=6, squares=0.5, calls=2)
