import json

import numpy as np
import polars as pl
import pytest
from typed import typed

from aqnpipe.errors import ConfigError

STEPS = 20


@pytest.fixture
def write(tmp_path):
    def write_group(name, offset=0.0, base=0, seeds=4):
        for seed in range(seeds):
            folder = tmp_path / name / f"seed{seed}"
            folder.mkdir(parents=True)
            generator = np.random.default_rng(base + seed)
            loss = 2 + 0.1 * generator.standard_normal(STEPS) + offset * (np.arange(STEPS) >= 10)
            reward = 0.5 + 0.01 * generator.standard_normal(STEPS)
            columns = {"step": np.arange(1, STEPS + 1), "loss": loss, "reward_mean": reward}
            pl.DataFrame(columns).write_parquet(folder / "metrics.parquet")
        return tmp_path / name

    return write_group


def run(*arguments):
    return typed("compare-runs", *arguments)


def test_a_difference_names_metric_step_and_size_and_ends_with_exit_code_3(write, tmp_path):
    result = run(write("gpu"), write("npu", offset=3.0), "--json", tmp_path / "found.json")
    assert result.exit_code == 3
    last = result.stdout.splitlines()[-1]
    assert last.startswith(
        "Yes, they differ by more than seeds explain: loss from step 11 on, by +3 where seeds explain"
    )
    assert "aqnpipe parity" in last
    rows = {row["metric"]: row for row in json.loads((tmp_path / "found.json").read_text())["metrics"]}
    assert (rows["loss"]["first_unequal"], rows["loss"]["first_beyond"]) == (11, 11)
    assert (rows["reward"]["first_unequal"], rows["reward"]["first_beyond"]) == (None, None)


def test_seeds_of_one_machine_end_with_what_remains_possible(write):
    result = run(write("gpu"), write("npu", base=100))
    assert result.exit_code == 0
    last = result.stdout.splitlines()[-1]
    assert last.startswith("No difference beyond that between seeds was found in 20 steps; mean differences of up to")
    assert last.endswith("possible.")


def test_equal_runs_are_said_to_be_equal(write):
    result = run(write("gpu"), write("npu"))
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, "No: all numbers of all 20 steps are equal.")
    one = run(write("a", seeds=1), write("b", seeds=1))
    assert (one.exit_code, one.stdout.splitlines()[-1]) == (0, "No: all numbers of all 20 steps are equal.")


def test_one_run_on_each_side_says_that_nothing_tells_seeds_from_machines(write):
    result = run(write("gpu", seeds=1) / "seed0", write("npu", seeds=1, base=5) / "seed0")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1].startswith(
        "Not known whether seeds explain the difference: each side has one run"
    )
    assert "step 1" in result.stdout


@pytest.mark.parametrize("alpha", ["0", "1", "-1", "nan"])
def test_an_alpha_that_is_no_probability_is_one_line(write, alpha):
    result = run(write("gpu"), write("npu"), f"--alpha={alpha}")
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).startswith("--alpha: found ")
