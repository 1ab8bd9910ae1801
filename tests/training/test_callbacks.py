"""Progress messages of a run."""

from types import SimpleNamespace

import pytest
from transformers import TrainerState

from aqnpipe.training import callbacks
from aqnpipe.training.callbacks import ProgressCallback

ARGS = SimpleNamespace(generation_batch_size=128)
ROLLOUT = {"reward": 0.25, "completions/mean_length": 20.0, "sigma_measured": 0.0499}


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(callbacks, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def follow(clock, num_steps, seconds_per_step, logs, first_step=0):
    said = []
    progress = ProgressCallback("base/E5b seed 1", num_steps, said.append)
    progress.on_train_begin(ARGS, TrainerState(global_step=first_step), None)
    for step in range(first_step + 1, num_steps + 1):
        clock[0] += seconds_per_step
        progress.on_log(ARGS, TrainerState(global_step=step), None, logs={"loss": 0.1, **logs(step)})
    return said


def test_a_line_has_step_reward_kl_sigma_speed_and_time_left(clock):
    said = follow(clock, 100, 2.0, lambda step: {**ROLLOUT, "kl": 0.0123})
    assert len(said) == 10
    # 128 answers of 20 tokens in 2 s.
    assert said[3] == (
        "base/E5b seed 1: step 40/100 reward 0.250 kl 0.0123 sigma 0.0499 1280 tokens/s 2.00 s/step, 2 min left"
    )
    assert said[-1].endswith(" 0 s left")


def test_what_a_run_does_not_have_is_left_out(clock):
    (line,) = follow(clock, 1, 0.5, lambda step: {"reward": 0.5, "completions/mean_length": 1.0})
    assert line == "base/E5b seed 1: step 1/1 reward 0.500 256 tokens/s 0.50 s/step, 0 s left"


def test_long_steps_are_reported_once_a_minute(clock):
    said = follow(clock, 40, 25.0, lambda step: ROLLOUT)
    # A tenth of the steps is every fourth, at 100 s; in between, every third step is over a minute after the last line.
    assert [int(line.split()[4].split("/")[0]) for line in said] == sorted({*range(3, 41, 4), *range(4, 41, 4)})


def test_a_run_that_goes_on_is_timed_from_there(clock):
    said = follow(clock, 20, 3.0, lambda step: ROLLOUT, first_step=10)
    assert said[0].startswith("base/E5b seed 1: step 12/20")
    assert said[0].endswith("853 tokens/s 3.00 s/step, 24 s left")


def test_steps_that_share_a_rollout_show_its_reward(clock):
    said = follow(clock, 20, 1.0, lambda step: ROLLOUT if step % 2 else {})
    assert all("reward 0.250" in line and "sigma 0.0499" in line for line in said)
    assert said[0].split()[9:11] == ["1280", "tokens/s"]


def test_the_summary_at_the_end_is_no_step(clock):
    said = []
    progress = ProgressCallback("run", 1, said.append)
    progress.on_train_begin(ARGS, TrainerState(), None)
    progress.on_log(ARGS, TrainerState(global_step=1), None, logs={"train_runtime": 3.0})
    assert said == []


@pytest.mark.parametrize(
    ("seconds", "words"), [(0, "0 s"), (119, "119 s"), (150, "2 min"), (3540, "59 min"), (11130, "3 h 06 min")]
)
def test_durations_read_well(seconds, words):
    assert callbacks._duration(seconds) == words
