"""Every error model in an evaluation, through the command line: its receipt proves it, and names it in the tables."""

import polars as pl
import pytest
import yaml
from typer.testing import CliRunner

from aqnpipe.artifacts.files import read_json
from aqnpipe.cli.main import app
from aqnpipe.config.noise import MantissaTruncation, NoiseSpec
from aqnpipe.errors import AqnpipeError
from aqnpipe.noise.receipts.other_checks import cache_error
from aqnpipe.noise.receipts.receipt import EvaluationReceipts

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
    result = CliRunner().invoke(app, arguments)
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
    error = CliRunner().invoke(app, ["robustness", "tiny", *arguments]).exception
    assert isinstance(error, AqnpipeError)
    assert message in str(error)
    assert "\n" not in str(error)
    assert not (tmp_path / "robustness").exists()
