import json

import numpy as np
import polars as pl
import pytest

from aqnpipe.comparison.training_runs import compare_runs, read_runs
from aqnpipe.errors import DataError

NAMES = ("gpu", "npu")


def table(seed=0, steps=12, **changed):
    generator = np.random.default_rng(seed)
    values = {"step": range(1, steps + 1), "loss": generator.normal(1, 0.1, steps), "kl": generator.normal(0, 1, steps)}
    return pl.DataFrame(values | changed)


def group(offset=0.0, seeds=(0, 1, 2, 3), base=0):
    return {f"seed{seed}": table(base + seed).with_columns(pl.col("loss") + offset) for seed in seeds}


def test_a_run_an_arm_a_file_and_a_folder_of_files_are_read(tmp_path):
    for seed in (0, 1):
        (tmp_path / f"E5/seed{seed}").mkdir(parents=True)
        table(seed).write_parquet(tmp_path / f"E5/seed{seed}/metrics.parquet")
    assert list(read_runs(tmp_path / "E5")) == ["seed0", "seed1"]
    assert read_runs(tmp_path / "E5/seed1")["run"].equals(table(1))
    files = tmp_path / "files"
    files.mkdir()
    table(0).write_csv(files / "a.csv")
    (files / "b.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in table(1).iter_rows(named=True)))
    rows = [{"step": row["step"], "loss": row["loss"]} for row in table(2).iter_rows(named=True)]
    (files / "c.json").write_text(json.dumps({"log_history": [*rows, {"step": 12, "eval_loss": 1.0, "note": "text"}]}))
    (files / "notes.txt").write_text("not read")
    found = read_runs(files)
    assert list(found) == ["a", "b", "c"]
    for number, name in enumerate(found):
        assert found[name].drop_nulls("loss")["loss"].to_list() == pytest.approx(table(number)["loss"].to_list())


def test_the_names_of_trl_and_verl_are_known():
    ours = table().rename({"loss": "reward_mean"})
    verl = ours.rename({"reward_mean": "critic/rewards/mean", "kl": "actor/ppo_kl"})
    found = compare_runs({"run": ours}, {"run": verl}, NAMES)
    assert [(row.metric, row.columns) for row in found.metrics] == [
        ("reward", ("reward_mean", "critic/rewards/mean")),
        ("kl", ("kl", "actor/ppo_kl")),
    ]
    assert all(row.difference == 0 and row.first_unequal is None for row in found.metrics)


def test_the_first_unequal_step_and_the_first_beyond_the_band_are_named():
    generator = np.random.default_rng(5)
    steps = np.arange(1, 13)

    def moved(run):
        noise = np.where(steps >= 9, 9 + 0.1 * generator.standard_normal(12), 1e-6 * generator.standard_normal(12))
        return run.with_columns(pl.col("loss") + pl.Series(np.where(steps >= 5, noise, 0.0)))

    found = compare_runs(group(), {name: moved(run) for name, run in group().items()}, NAMES, ["loss"])
    (row,) = found.metrics
    assert found.paired
    assert (row.first_unequal, row.first_beyond) == (5, 9)
    assert found.differing == (row,)


def test_other_seeds_of_one_machine_do_not_differ_and_an_offset_does():
    assert compare_runs(group(), group(base=10), NAMES).differing == ()
    found = compare_runs(group(), {f"run{n}": run for n, run in enumerate(group(1.0, base=10).values())}, NAMES)
    assert not found.paired
    assert [row.metric for row in found.differing] == ["loss"]
    assert found.metrics[0].p_adjusted < 0.05 < found.metrics[1].p_adjusted


def test_steps_are_those_of_both_sides_and_the_last_value_of_a_repeated_one_counts():
    resumed = pl.concat([table(steps=8).with_columns(loss=pl.lit(7.0)), table()]).sort("step", maintain_order=True)
    found = compare_runs({"run": table(steps=10)}, {"run": table()}, NAMES, ["loss"])
    assert (found.steps, found.num_steps, found.only_one_side) == ((1, 10), 10, 2)
    again = compare_runs({"run": table()}, {"run": resumed}, NAMES, ["loss"])
    assert again.metrics[0].first_unequal is None


def test_a_number_on_one_side_alone_is_a_difference():
    lost = table().with_columns(pl.when(pl.col("step") < 7).then(pl.col("loss")).otherwise(float("nan")).alias("loss"))
    found = compare_runs({"run": table()}, {"run": lost}, NAMES, ["loss"])
    assert found.metrics[0].first_beyond == 7
    assert found.differing


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a,b\n1,2\n", "found no column of steps, expected one of step,"),
        ("step,loss\n", "found no steps"),
        ("step,loss\none,2\n", "column step has other values than whole numbers"),
        ('step,loss\n"1', "no table of metrics|other values than whole numbers"),
    ],
)
def test_files_that_hold_no_metrics_are_one_line(tmp_path, content, message):
    path = tmp_path / "a.csv"
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        read_runs(path)


@pytest.mark.parametrize("content", ["{", "[1, 2]", "{}", '[{"step": 1}, 2]'])
def test_json_of_another_form_is_one_line(tmp_path, content):
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(DataError, match=r"a\.json: no table of metrics"):
        read_runs(path)


def test_missing_files_empty_folders_and_other_endings_are_one_line(tmp_path):
    with pytest.raises(DataError, match="nothing: no such file or folder"):
        read_runs(tmp_path / "nothing")
    with pytest.raises(DataError, match=r"holds no metrics, expected metrics\.parquet"):
        read_runs(tmp_path)
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(DataError, match=r"found \.txt, expected \.parquet, \.csv"):
        read_runs(tmp_path / "a.txt")


def test_runs_without_a_common_metric_or_step_are_one_line():
    with pytest.raises(DataError, match="gpu and npu: no metric in common, expected one of reward, loss"):
        compare_runs({"run": table().select("step", "kl")}, {"run": table().select("step", "loss")}, NAMES)
    with pytest.raises(DataError, match="npu: has no metric speed"):
        compare_runs({"run": table(speed=1.0)}, {"run": table()}, NAMES, ["speed"])
    late = table().with_columns(pl.col("step") + 100)
    with pytest.raises(DataError, match="no step in common with a value of loss"):
        compare_runs({"run": table()}, {"run": late}, NAMES)
    with pytest.raises(DataError, match="gpu: column loss has other values than numbers"):
        compare_runs({"run": table(loss="x")}, {"run": table()}, NAMES)
