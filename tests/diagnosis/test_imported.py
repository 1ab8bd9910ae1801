"""Diagnoses made elsewhere: taken over if they are of the same weights, refused in one line otherwise."""

from pathlib import Path

import polars as pl
import pytest
import yaml

from aqnpipe.artifacts.diagnoses import DiagnosisOrigin, LayerTable, SigmaFile, Verdict
from aqnpipe.artifacts.files import read_json, read_yaml, write_json, write_table
from aqnpipe.artifacts.provenance import sha256_of_file
from aqnpipe.cli.front_door import open_study
from aqnpipe.config.diagnosis import SigmaRule
from aqnpipe.config.plan import StudyPlan
from aqnpipe.config.study import load_study
from aqnpipe.diagnosis.imported import import_diagnosis
from aqnpipe.diagnosis.stage import generate_layer_sigmas
from aqnpipe.errors import ConfigError, DataError

ROOT = Path(__file__).parents[2]
NUMBERS = ("instability", "instability_jump_z", "gain", "gain_z", "kurtosis", "log_kurtosis_drop_z", "changed_share")
OTHERS = {"zero_share": [0.0] * 3, "values_at_maximum": [1.0] * 3, "pile_up": [0.0] * 3, "sensitivity": [0.1] * 3}
HERE = ("base", "npu")


@pytest.fixture
def elsewhere(tmp_path):
    """A diagnosis of the weights in `model`, whose layer 1 has a low gain."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
    folder = tmp_path / "there"
    columns = {name: [0.0] * 3 for name in NUMBERS} | {"gain": [1.0, 0.5, 1.0]} | OTHERS
    table = pl.DataFrame({"layer": range(3), **columns, "role": ["healthy"] * 3})
    write_table(folder / "layers.parquet", table, LayerTable)
    write_verdict(folder, sha256_of_file(tmp_path / "model" / "model.safetensors"))
    return folder


def write_verdict(folder, weights):
    origin = DiagnosisOrigin(
        model="small",
        machine="device",
        weights_sha256=weights,
        layers_sha256=sha256_of_file(folder / "layers.parquet"),
    )
    verdict = Verdict(
        verdict="healthy",
        reason="",
        layer=None,
        type=None,
        faults=(),
        findings=(),
        num_layers=3,
        forward_equivalents=1.0,
        origin=origin,
    )
    write_json(folder / "verdict.json", verdict)


def test_sigmas_come_from_the_diagnosis_made_elsewhere(elsewhere, tmp_path):
    said = []
    import_diagnosis(elsewhere, tmp_path / "model", tmp_path / "here", names=HERE, say=said.append)
    assert said == [f"base/npu: healthy, diagnosed elsewhere ({elsewhere}: small on device)"]
    origin = read_json(tmp_path / "here" / "verdict.json", Verdict).origin
    assert (origin.model, origin.machine) == HERE
    assert origin.imported_from == f"{elsewhere}: small on device"
    files = (tmp_path / "here" / name for name in ("layers.parquet", "verdict.json"))
    generate_layer_sigmas(*files, SigmaRule(), tmp_path / "sigmas.yaml", *HERE)
    assert read_yaml(tmp_path / "sigmas.yaml", SigmaFile).aqn.layer_sigmas == {0: 0.05, 1: 0.075, 2: 0.05}


def test_a_diagnosis_of_other_weights_is_refused(elsewhere, tmp_path):
    (tmp_path / "model" / "model.safetensors").write_bytes(b"other weights")
    with pytest.raises(DataError, match=r"a diagnosis of weights \w{12} \(model small there\), expected those"):
        import_diagnosis(elsewhere, tmp_path / "model", tmp_path / "here", names=HERE)
    assert not (tmp_path / "here").exists()


def test_layers_of_another_diagnosis_are_refused(elsewhere, tmp_path):
    table = pl.read_parquet(elsewhere / "layers.parquet")
    write_table(elsewhere / "layers.parquet", table.with_columns(gain=table["gain"] * 2), LayerTable)
    with pytest.raises(DataError, match=r"not from the same diagnosis as .*verdict\.json"):
        import_diagnosis(elsewhere, tmp_path / "model", tmp_path / "here", names=HERE)


@pytest.fixture
def study(monkeypatch, elsewhere):
    monkeypatch.chdir(ROOT)
    config = yaml.safe_load((ROOT / "config" / "smoke.yaml").read_text())
    config["machines"]["target"] = {"diagnosed_in": str(elsewhere.parent / "{model}")}
    return config | {"arms_file": str(ROOT / "config" / "arms.yaml")}


def test_a_study_names_the_folder_by_model_role(study, elsewhere, tmp_path):
    plan = StudyPlan(load_study(study))
    assert plan.imported_diagnosis("base", "device") == []
    assert plan.imported_diagnosis("base", "target")[0] == f"{tmp_path}/base/layers.parquet"
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study))
    with pytest.raises(ConfigError, match=r"machines\.target\.diagnosed_in: found no .*base/layers\.parquet"):
        open_study([tmp_path / "study.yaml"])
    elsewhere.rename(tmp_path / "base")
    open_study([tmp_path / "study.yaml"])


def test_sigmas_that_need_a_sensitivity_are_refused_without_one(study, elsewhere, tmp_path):
    arms = yaml.safe_load(Path(study["arms_file"]).read_text(encoding="utf-8"))
    study["arms"] = ["baseline", "guided_robust_first"]
    study |= {"comparisons": [], "arms_file": str(tmp_path / "arms.yaml")}
    study["training"]["epochs"] = 2
    (tmp_path / "arms.yaml").write_text(yaml.safe_dump(arms))
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study))
    elsewhere = elsewhere.rename(tmp_path / "base")
    open_study([tmp_path / "study.yaml"])
    table = pl.read_parquet(elsewhere / "layers.parquet").with_columns(sensitivity=pl.lit(None, dtype=pl.Float64))
    write_table(elsewhere / "layers.parquet", table, LayerTable)
    with pytest.raises(ConfigError, match=r"layers\.parquet has no sensitivity .* which the sigmas robust_first need"):
        open_study([tmp_path / "study.yaml"])


def test_nothing_runs_on_a_machine_that_is_elsewhere(study):
    study["evaluation"]["pretrained_machine"] = "target"
    with pytest.raises(ConfigError, match="pretrained_machine: target was diagnosed elsewhere, nothing runs on it"):
        load_study(study)
    study["machines"]["target"]["faults"] = [{"type": "dead_zone", "layer": 3, "magnitude": 0.05}]
    with pytest.raises(ConfigError, match="diagnosed_in: a machine diagnosed elsewhere has no simulated faults"):
        load_study(study)
