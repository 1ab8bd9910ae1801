"""`aqnpipe robustness` as a user types it, on the built-in models."""

import io
import json
import shutil

import pytest
from rich.console import Console
from typer.testing import CliRunner

from aqnpipe.artifacts.comparisons import RobustnessReport
from aqnpipe.artifacts.files import read_json
from aqnpipe.cli.main import app
from aqnpipe.cli.robustness import evaluating
from aqnpipe.cli.robustness.evaluating import answer_of, markdown_of, text_of
from aqnpipe.config.model import builtin_folder
from aqnpipe.errors import AqnpipeError

SMALL = ("--questions", "12", "--max-tokens", "8", "--batch-size", "12", "--levels", "0,0.2")


def typed(*arguments):
    return CliRunner().invoke(app, ["robustness", *map(str, arguments)])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("robustness")
    own = folder / "my-model"
    shutil.copytree(builtin_folder("tiny"), own)
    result = typed(own, "other=tiny-large", *SMALL, "--output", folder / "out")
    assert result.exit_code == 0, result.output
    return folder, result


def test_a_folder_and_a_named_model_are_evaluated_with_receipts(made):
    folder, result = made
    report = read_json(folder / "out" / "robustness.json", RobustnessReport)
    assert [(c.name, c.source) for c in report.checkpoints] == [
        ("my-model", str(folder / "my-model")),
        ("other", "tiny-large"),
    ]
    assert {(row.checkpoint, row.noise_level) for row in report.accuracies} == {
        (name, level) for name in ("my-model", "other") for level in (0.0, 0.2)
    }
    kinds = [row.kind for row in report.comparisons]
    assert (kinds.count("noise"), kinds.count("accuracy"), kinds.count("degradation")) == (2, 2, 1)
    receipt = json.loads((folder / "out/eval/my-model/pretrained/seed0/step0.receipt.json").read_text())
    (noisy,) = [entry["receipt"] for entry in receipt["passes"] if entry["noise_level"] == 0.2]
    assert any(row.get("recomputed", 0) > 0 for row in noisy["rows"])
    assert "Accuracy in percent on 12 questions of word_problems (style plain, layout bare)" in result.stdout
    assert (folder / "out" / "robustness.csv").read_text().count("\n") == 1 + len(report.comparisons)
    assert "| my-model |" in (folder / "out" / "robustness.md").read_text()
    assert result.stdout.splitlines()[-1] == answer_of(report)


def test_elsewhere_than_on_a_terminal_every_pass_is_a_line_with_the_name_of_its_checkpoint(made):
    *passes, written = [line for line in made[1].stderr.splitlines() if "it/s]" not in line]
    assert [line.partition(" correct")[0].rpartition(":")[0] for line in passes] == [
        "my-model: noise 0% seed 0",
        "my-model: noise 20% seed 0",
        "other: noise 0% seed 0",
        "other: noise 20% seed 0",
    ]
    assert written.startswith("written: ")


def test_json_is_alone_on_standard_output(made):
    folder, _ = made
    result = typed(folder / "my-model", "other=tiny-large", *SMALL, "--output", folder / "out", "--json")
    printed = RobustnessReport.model_validate_json(result.stdout)
    assert printed == read_json(folder / "out" / "robustness.json", RobustnessReport)
    assert "written: " in result.stderr


def test_a_terminal_has_a_bar_that_ends_with_all_passes(monkeypatch):
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    monkeypatch.setattr(evaluating, "console_of", lambda stderr: console)
    with evaluating._progress(3) as show:
        show("b: evaluated before with these settings", 2)
        show("a/pretrained seed 0 step 0: noise 5% seed 0: 3/12 correct, 2 cut off")
    said = console.file.getvalue().splitlines()[-2]
    assert "a: noise 5% seed 0: 3/12 correct" in said
    assert "cut off" not in said
    assert "pretrained" not in said
    assert "100%" in said


def test_what_is_there_is_used_again_and_other_settings_are_not(made):
    folder, _ = made
    out = folder / "out"
    before = (out / "robustness.json").read_bytes()
    again = typed(folder / "my-model", "other=tiny-large", *SMALL, "--output", out)
    assert again.exit_code == 0
    assert again.output.count("evaluated before with these settings") == 2
    assert (out / "robustness.json").read_bytes() == before
    table = out / "eval/other/pretrained/seed0/step0.parquet"
    table.write_bytes((out / "eval/my-model/pretrained/seed0/step0.parquet").read_bytes())
    replaced = typed(folder / "my-model", "other=tiny-large", *SMALL, "--output", out)
    assert replaced.output.count("evaluated before with these settings") == 1
    assert (out / "robustness.json").read_bytes() == before
    more = typed(folder / "my-model", *SMALL, "--noise-seeds", "1", "--output", out)
    assert more.exit_code == 0
    assert "evaluated before" not in more.output


MISTAKES = {
    "no such folder": (["./nothing-here"], "model 'nothing-here': found no such folder"),
    "unknown name": (["nothing"], "model source 'nothing' is unknown"),
    "same name twice": (["tiny", "tiny"], "are both called 'tiny': name them"),
    "bad name": (["a b=tiny"], "its name is 'a b'"),
    "level is no number": (["tiny", "--levels", "0,five"], "--levels '0,five': found 'five'"),
    "no clean level": (["tiny", "--levels", "0.1"], "expected 0 among them"),
    "level above 1": (["tiny", "--levels", "5"], "--levels: found 5, expected below 1; did you mean 0.05?"),
    "level twice": (["tiny", "--levels", "0,0.1,0.1"], "--levels: found 0.1 twice, expected each value once"),
    "seed below 0": (["tiny", "--noise-seeds", "0,-1"], "--noise-seeds: found -1, expected at least 0"),
    "workers without vllm": (
        ["tiny", "--backend", "transformers", "--tensor-parallel", "2"],
        "--tensor-parallel: found 2 with backend transformers",
    ),
    "shots without an end": (["tiny", "--shots", "1"], "--shots with style plain needs layout question_answer"),
    "seed is no whole number": (["tiny", "--noise-seeds", "0.5"], "--noise-seeds '0.5'"),
    "no such data": (["tiny", "--data", "./no-data"], "--data ./no-data: no such file or folder, expected"),
    "no such questions": (["tiny", "--data", "no/data.jsonl"], "--data no/data.jsonl: no such file or folder"),
    "no known data": (["tiny", "--data", "nodata"], "--data: found 'nodata', which is no file or folder here"),
    "no such device": (["tiny", "--device", "npu"], "requested npu"),
    "more questions than there are": (["tiny", "--data", "DATA", "--questions", "9"], "9"),
    "style unknown": (["tiny", "--style", "prose"], "--style"),
    "output is a file": (["tiny", "--output", "FILE"], "found a file"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_and_writes_nothing(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").touch()
    (tmp_path / "DATA").mkdir()
    for split in ("train", "test"):
        rows = [json.dumps({"question": f"{split} {n} ?", "answer": f"#### {n}"}) for n in range(4)]
        (tmp_path / "DATA" / f"{split}.jsonl").write_text("\n".join(rows))
    arguments, message = MISTAKES[name]
    result = typed(*arguments)
    assert isinstance(result.exception, AqnpipeError), result.output
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)
    assert [path.name for path in tmp_path.iterdir()].sort() is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["DATA", "FILE"]


def report_with(**changes):
    """Return a report of two checkpoints; `changes` are of the comparison of what noise costs them."""
    row = {"kind": "degradation", "first": "a", "second": "b", "noise_level": 0.1, "difference": -0.04}
    row |= {"interval_level": 0.95, "ci_low": -0.077, "ci_high": -0.002, "p_value": 0.04, "p_holm": 0.04}
    accuracy = {"noise_level": 0.1, "num_questions": 500, "num_noise_seeds": 1, "accuracy": 0.5}
    accuracy |= {"ci_low": 0.4, "ci_high": 0.6, "truncated_fraction": 0.0, "parse_failure_fraction": 0.0}
    checkpoints = [{"name": name, "source": name, "weights_sha256": "0"} for name in ("a", "b")]
    rows = [row | changes]
    return RobustnessReport.model_validate(
        {"data": "gsm8k", "prompt": "", "scorer": "strict", "operators": "matmul", "dtype": "float32", "alpha": 0.05}
        | {"accuracies": [{"checkpoint": name} | accuracy for name in ("a", "b")], "comparisons": rows, "notes": []}
        | {"checkpoints": checkpoints[: 1 if rows[0]["kind"] == "noise" else 2]}
    )


UNKNOWN = {"ci_low": -0.09, "ci_high": 0.01, "p_holm": 0.2}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, "Yes: 10 % noise costs b 4.0 points less than a (95 % interval +0.2 to +7.7; 500 questions)."),
        (
            {"kind": "noise", "second": "a"},
            "Yes: 10 % noise costs a 4.0 points (95 % interval +0.2 to +7.7; 500 questions).",
        ),
        (
            {"questions_needed": 2300} | UNKNOWN,
            "Not known: 10 % noise costs b 4.0 points less than a (95 % interval -1.0 to +9.0; 500 questions); "
            "2,300 questions would decide it (80 %, if the true difference is this one).",
        ),
        ({"kind": "noise", "difference": 0.0003} | UNKNOWN, "Not known: 10 % noise costs b 0.0 points ("),
        (UNKNOWN, "no number of questions decides it if the true difference is this one."),
        ({"difference": None, "p_holm": None, "refusal": "a and b are the same weights"}, "Not known: a and b are "),
    ],
)
def test_the_last_line_answers(changes, sentence):
    report = report_with(**changes)
    assert sentence in answer_of(report)
    assert text_of(report)[-1] == answer_of(report)
    assert markdown_of(report)[-1] == f"**{answer_of(report)}**"
