"""Recipes do what their pages say."""

import re
import shlex
import sys
import types
from pathlib import Path

import polars as pl
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "torchrun.md"


def test_the_first_page_prints_what_it_says(capsys):
    page = (PAGE.parents[2] / "README.md").read_text()
    ((program, output),) = re.findall(r"^```python\n(.*?)^```\n\n```\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    exec(program, {})
    assert capsys.readouterr().out == output


@pytest.mark.slow
@pytest.mark.usefixtures("offline")
def test_torchrun_prints_the_line_of_the_page(command_line, tmp_path, monkeypatch):
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (program,) = (text for kind, text in blocks if kind == "python")
    command, output = (text for kind, text in blocks[:3] if not kind)
    (tmp_path / "train.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    name, *words = shlex.split(command)
    assert name == "aqnpipe"
    words[words.index("torchrun")] = str(Path(sys.executable).with_name("torchrun"))
    done = command_line(*words)
    assert done.returncode == 0, done.stderr
    # Losses depend on the kind of processor, and the numbers of products do not.
    ranks, line = output.strip().splitlines()[:-1], output.strip().splitlines()[-1]
    assert line in done.stderr.splitlines()
    assert sorted(each.split(":")[0] for each in done.stdout.splitlines()) == sorted(each[:6] for each in ranks)


def test_a_tracker_gets_the_metrics_of_every_run(tmp_path, monkeypatch):
    """By the code of the page, with a stand-in for trackio: the values that it gets are the whole point."""
    sent = []
    tracker = types.ModuleType("trackio")
    tracker.init = lambda **settings: sent.append((settings["name"], settings["config"], []))
    tracker.log = lambda values, step: sent[-1][2].append((step, values))
    tracker.finish = lambda: None
    monkeypatch.setitem(sys.modules, "trackio", tracker)
    monkeypatch.chdir(tmp_path)
    for seed in (0, 1):
        folder = Path("results/runs/base/E5", f"seed{seed}")
        folder.mkdir(parents=True)
        rows = {"step": [1, 2], "reward_mean": [0.25, 0.5 + seed], "validation_accuracy": [None, 0.75]}
        pl.DataFrame(rows).write_parquet(folder / "metrics.parquet")
    page = PAGE.with_name("trackers.md").read_text()
    (program,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    exec(compile(program, "trackers.md", "exec"), {})
    assert [(name, config["seed"]) for name, config, _ in sent] == [("E5 seed0", "seed0"), ("E5 seed1", "seed1")]
    assert sent[1][2] == [
        (1, {"reward_mean": 0.25}),
        (2, {"reward_mean": 1.5, "validation_accuracy": 0.75}),
    ]
