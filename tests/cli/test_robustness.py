"""`aqnpipe robustness` as a user types it, on the built-in models."""

import io
import json
import shutil

import polars as pl
import pytest
import yaml
from rich.console import Console
from typed import typed as aqnpipe

from aqnpipe.artifacts.comparisons import ClaimsFile
from aqnpipe.artifacts.files import read_json
from aqnpipe.artifacts.runs import RunRecord
from aqnpipe.cli import robustness
from aqnpipe.config.model import builtin_folder
from aqnpipe.config.noise import MantissaTruncation, NoiseSpec
from aqnpipe.errors import AqnpipeError
from aqnpipe.noise.receipts.other_checks import cache_error
from aqnpipe.noise.receipts.receipt import EvaluationReceipts

SMALL = ("--questions", "12", "--max-tokens", "8", "--batch-size", "12", "--levels", "0,0.2")


def typed(*arguments):
    return aqnpipe("robustness", *arguments)


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
    accuracy = pl.read_csv(folder / "out" / "accuracy.csv")
    assert {(row["arm"], row["noise_level"]) for row in accuracy.to_dicts()} == {
        (name, level) for name in ("my-model", "other") for level in (0.0, 0.2)
    }
    kinds = pl.read_csv(folder / "out" / "comparisons.csv")["kind"].to_list()
    assert (kinds.count("levels"), kinds.count("arms"), kinds.count("degradation")) == (2, 2, 1)
    receipt = json.loads((folder / "out/eval/checkpoints/my-model/seed0/step0.receipt.json").read_text())
    (noisy,) = [entry["receipt"] for entry in receipt["passes"] if entry["noise_level"] == 0.2]
    assert any(row.get("recomputed", 0) > 0 for row in noisy["rows"])
    assert "Checkpoints under noise: word_problems (style plain, layout bare)" in result.stdout
    assert "| my-model |" in (folder / "out" / "summary.md").read_text()
    assert "my-model" in (folder / "out" / "report.html").read_text()
    assert result.stdout.splitlines()[-1].startswith(
        ("Not known whether my-model and other", "Yes: my-model and other")
    )
    assert read_json(folder / "out" / "claims.json", ClaimsFile).answer is not None


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
    printed = json.loads(result.stdout)
    assert printed["comparisons"] == pl.read_parquet(folder / "out" / "comparisons.parquet").to_dicts()
    assert len(printed["accuracy"]) == 4
    assert printed["answer"] == made[1].stdout.splitlines()[-1]
    assert "written: " in result.stderr


def test_a_terminal_has_a_bar_that_ends_with_all_passes(monkeypatch):
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    monkeypatch.setattr(robustness, "console_of", lambda stderr: console)
    with robustness._progress(3) as show:
        show("checkpoints/b : evaluated before with these settings", 2)
        show("checkpoints/a seed 0 step 0: noise 5% seed 0: 3/12 correct, 2 cut off")
    said = console.file.getvalue().splitlines()[-2]
    assert "a: noise 5% seed 0: 3/12 correct" in said
    assert "cut off" not in said
    assert "checkpoints" not in said
    assert "100%" in said


def test_what_is_there_is_used_again_and_other_settings_are_not(made):
    folder, _ = made
    out = folder / "out"
    before = (out / "claims.json").read_bytes()
    again = typed(folder / "my-model", "other=tiny-large", *SMALL, "--output", out)
    assert again.exit_code == 0
    assert again.output.count("evaluated before with these settings") == 2
    assert (out / "claims.json").read_bytes() == before
    table = out / "eval/checkpoints/other/seed0/step0.parquet"
    table.write_bytes((out / "eval/checkpoints/my-model/seed0/step0.parquet").read_bytes())
    replaced = typed(folder / "my-model", "other=tiny-large", *SMALL, "--output", out)
    assert replaced.output.count("evaluated before with these settings") == 1
    assert (out / "claims.json").read_bytes() == before
    more = typed(folder / "my-model", *SMALL, "--noise-seeds", "1", "--output", out)
    assert more.exit_code == 0
    assert "evaluated before" not in more.output


def test_the_same_weights_are_compared_under_other_settings_and_refused_under_the_same(made, tmp_path):
    folder, _ = made
    other = tmp_path / "other-theta"
    shutil.copytree(folder / "my-model", other)
    refused = typed(folder / "my-model", other, *SMALL, "--output", tmp_path / "out")
    assert "checkpoint other-theta: has the same weights as checkpoint my-model" in str(refused.exception)
    config = json.loads((other / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] *= 1.5
    (other / "config.json").write_text(json.dumps(config))
    result = typed(folder / "my-model", other, *SMALL, "--output", tmp_path / "out")
    assert result.exit_code == 0, result.output
    claims = read_json(tmp_path / "out" / "claims.json", ClaimsFile).claims
    assert "invalid" not in {found.verdict for found in claims}
    first, second = (
        read_json(tmp_path / "out" / f"eval/checkpoints/{name}/seed0/step0.run.json", RunRecord).inputs_sha256
        for name in ("my-model", "other-theta")
    )
    assert first["weights"] == second["weights"]
    assert first["settings"] != second["settings"]


def test_settings_that_change_no_logit_are_not_in_the_digest_of_settings(made, tmp_path):
    """So models of a hub, whose files are not there before a job, are found to be the same by their evaluations."""
    folder, _ = made
    shutil.copytree(folder / "my-model", tmp_path / "later")
    config = json.loads((tmp_path / "later" / "config.json").read_text())
    (tmp_path / "later" / "config.json").write_text(
        json.dumps(config | {"transformers_version": "9", "bos_token_id": 3})
    )
    assert typed(tmp_path / "later", *SMALL, "--output", tmp_path / "out").exit_code == 0
    first, second = (
        read_json(path, RunRecord).inputs_sha256
        for path in (
            folder / "out/eval/checkpoints/my-model/seed0/step0.run.json",
            tmp_path / "out/eval/checkpoints/later/seed0/step0.run.json",
        )
    )
    assert first["settings"] == second["settings"]
    assert first["config"] != second["config"]


MISTAKES = {
    "no such folder": (["./nothing-here"], "model 'nothing-here': found no such folder"),
    "unknown name": (["nothing"], "model source 'nothing' is unknown"),
    "same name twice": (["tiny", "tiny"], "are both called 'tiny': name them"),
    "a name of a study": (["pretrained=tiny"], "checkpoint pretrained: found pretrained, expected another name"),
    "same model twice": (["tiny", "v1.5=tiny"], "checkpoint v1.5: found 'tiny', expected another model, this is also"),
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
    "output is a file": (["tiny", "--output", "FILE"], "--output: FILE is no folder"),
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


NOISES = {
    "truncated": {"operator_noise": {"error": {"kind": "mantissa_truncation", "mantissa_bits": 3}}},
    "biased": {"operator_noise": {"error": {"kind": "systematic_bias", "scale": 0.02}}},
    "absolute": {"operator_noise": {"error": {"kind": "absolute_gaussian", "scale": 0.1}}},
    "layer": {"operator_noise": {"layers": [2], "error": {"kind": "relative_gaussian", "scale": 0.1}}},
    "mlp": {
        "module_noise": {
            "modules": ["*.down_proj"],
            "point": "output",
            "error": {"kind": "relative_gaussian", "scale": 0.2},
        }
    },
}


@pytest.mark.slow
def test_every_error_model_is_proven_by_its_receipt(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "noises.yaml").write_text(yaml.safe_dump(NOISES, sort_keys=False))
    arguments = [
        "robustness",
        "tiny",
        "--questions",
        "4",
        "--max-tokens",
        "8",
        "--batch-size",
        "4",
        "--levels",
        "0,0.1",
    ]
    presets = ["w4a16_nvfp4", "w4a4_mxfp4", "kv8_fp8", "kv8_int8"]
    arguments += [part for name in presets for part in ("--noise", name)]
    arguments += ["--noises", "noises.yaml", "--noise-seeds", "0,1"]
    result = aqnpipe(*arguments)
    assert result.exit_code == 0, result.output
    assert "the noise truncated" in result.stdout
    receipts = read_json(
        next(tmp_path.glob("robustness/eval/checkpoints/tiny/**/step0.receipt.json")), EvaluationReceipts
    )
    assert not receipts.problems()
    found = {(row.noise_level, row.noise_seed): row.receipt for row in receipts.passes}
    # Presets, truncated, biased: once; absolute, layer, mlp and the level: with both seeds.
    assert len(found) == 1 + 2 + 6 + 2 * 3
    # A rounding moves by 1/sqrt(12) of a step: of E4M3 an eighth of the leading bit, of int8 1/127 of the largest.
    for level, number_format, error in ((3.0, "fp8", 0.026), (4.0, "int8", 2.5 / 127 / 12**0.5)):
        cells = found[level, 0].cache_cells
        assert (found[level, 0].kv_cache.format, len(cells)) == (number_format, found[level, 0].num_layers)
        assert cache_error(cells) == pytest.approx(error, rel=0.3)
    assert found[1.0, 0].operator_noise.error.format == "nvfp4"
    assert isinstance(found[5.0, 0].operator_noise.error, MantissaTruncation)
    for size, level in ((0.02, 6.0), (0.1, 7.0)):
        assert found[level, 0].measured_scale("evaluation")[0] == pytest.approx(size, rel=0.05)
    assert {cell.layer for cell in found[8.0, 0].cells if cell.measured} <= {2, None}
    assert found[9.0, 1].module_noise.modules == ("*.down_proj",)
    other = receipts.passes[-1].model_copy(update={"receipt": found[6.0, 0]})
    assert other.differences(NoiseSpec(module_noise=found[9.0, 1].module_noise)) == [
        "evaluation at level 9, noise seed 1: the receipt is of other noise"
    ]
    accuracy = pl.read_parquet(tmp_path / "robustness" / "accuracy.parquet").sort("noise_level")
    assert accuracy["noise"].to_list() == [None, None, *presets, *NOISES]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--noise", "w4a16_nvfp"], "--noise: found 'w4a16_nvfp', expected a known name (did you mean w4a16_nvfp4?)"),
        (["--noise", "w4a4"], "--noise: found 'w4a4', expected one of w4a4_mxfp4, w4a4_nvfp4"),
        (["--noise", "kv8_fp8", "--noise", "kv8_fp8"], "--noise kv8_fp8: given twice, expected once"),
        (["--noises", "gone.yaml"], "gone.yaml: no such file"),
        (["--noises", "empty.yaml"], "empty.yaml: (top level): found null, expected a mapping"),
        (["--noises", "twice.yaml", "--noise", "w4a16_nvfp4"], "w4a16_nvfp4 is also given as --noise"),
        (
            ["--noises", "far.yaml"],
            "--noises: far.operator_noise.layers: found [99], expected layers 0 to 5, which model tiny (tiny) has",
        ),
        (["--noises", "fused.yaml"], "--noises: fused.operator_noise.attention: found 'fused'"),
    ],
)
def test_mistakes_are_one_line(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.yaml").write_text("")
    (tmp_path / "far.yaml").write_text(
        "far: {operator_noise: {layers: [99], error: {kind: relative_gaussian, scale: 0.1}}}\n"
    )
    (tmp_path / "fused.yaml").write_text(
        "fused: {operator_noise: {attention: fused, error: {kind: relative_gaussian, scale: 0.1}}}\n"
    )
    (tmp_path / "twice.yaml").write_text("w4a16_nvfp4: w4a16_nvfp4\n")
    error = typed("tiny", *arguments).exception
    assert isinstance(error, AqnpipeError)
    assert message in str(error)
    assert "\n" not in str(error)
    assert not (tmp_path / "robustness").exists()
