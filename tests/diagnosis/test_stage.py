import hashlib
from pathlib import Path

import polars as pl
import pytest
import yaml
from made_up_parities import identity, operator, parity
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from aqnpipe.artifacts.diagnoses import DiagnosisOrigin, LayerTable, SigmaFile, Verdict
from aqnpipe.artifacts.files import read_json, read_table, read_yaml, write_json, write_table
from aqnpipe.artifacts.problems import ProblemTable
from aqnpipe.artifacts.provenance import sha256_of_file
from aqnpipe.cli.study import open_study
from aqnpipe.config.dataset import PromptFormat
from aqnpipe.config.diagnosis import DiagnosisConfig, SigmaRule
from aqnpipe.config.noise import Fault, Machine
from aqnpipe.config.plan import StudyPlan
from aqnpipe.config.study import load_study
from aqnpipe.diagnosis.stage import diagnose, generate_layer_sigmas, import_diagnosis
from aqnpipe.errors import ConfigError, DataError, ModelError, ReceiptError

CONFIG = DiagnosisConfig(num_prompts=2, num_repeats=2, gain_trials=2)
TEXT = "Tom has many red apples and gives some to his friend . How are left ?"
WORDS = TEXT.split()

ROOT = Path(__file__).parents[2]
NUMBERS = ("instability", "instability_jump_z", "gain", "gain_z", "kurtosis", "log_kurtosis_drop_z")
OTHERS = {"sensitivity": [0.1] * 3}
HERE = ("base", "npu")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory, make_model):
    folder = tmp_path_factory.mktemp("model")
    make_model(num_layers=4).save_pretrained(folder)
    vocabulary = {word: index for index, word in enumerate(["<unk>", "<end>", *dict.fromkeys(WORDS)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "train.parquet"
    questions = [" ".join(WORDS), " ".join(reversed(WORDS)), "Tom has apples ."]
    table = pl.DataFrame(
        {
            "question_id": ["a", "b", "c"],
            "question": questions,
            "answer": ["#### 1"] * 3,
            "gold_answer": ["1"] * 3,
        }
    )
    write_table(path, table, ProblemTable)
    return path


def run(model_dir, problems, output_dir, machine=None, config=CONFIG, name="cpu"):
    diagnose(model_dir, problems, PromptFormat(), machine or Machine(), config, output_dir, names=("tiny", name))
    return read_diagnosis(output_dir)


@pytest.fixture(scope="module")
def healthy(model_dir, problems, tmp_path_factory):
    """A diagnosis of the machine without faults; tests do not change its files."""
    folder = tmp_path_factory.mktemp("healthy")
    run(model_dir, problems, folder)
    return folder


NOISY_LAYER = Machine(faults=[Fault(type="noise", layer=2, magnitude=0.1)])


@pytest.fixture(scope="module")
def noisy(model_dir, problems, tmp_path_factory):
    """A diagnosis of NOISY_LAYER, with sigmas; tests do not change its files."""
    folder = tmp_path_factory.mktemp("noisy")
    run(model_dir, problems, folder, NOISY_LAYER, name="noisy_layer_2")
    write_sigmas(folder, "noisy_layer_2")
    return folder


def write_sigmas(folder, name, strategy="published", output=None):
    files = (folder / "layers.parquet", folder / "verdict.json", SigmaRule(), output or folder / "sigmas.yaml")
    generate_layer_sigmas(*files, "tiny", name, strategy)


def read_diagnosis(folder):
    return read_table(folder / "layers.parquet", LayerTable), read_json(folder / "verdict.json", Verdict)


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_healthy_machine(healthy):
    table, verdict = read_diagnosis(healthy)
    assert table["layer"].to_list() == [0, 1, 2, 3]
    assert verdict.verdict == "healthy"
    assert verdict.simulated_faults == ()
    assert verdict.statistical_forward_equivalents == 2 * (1 + 2 + 2)
    assert 11 < verdict.exact_forward_equivalents <= 25
    assert verdict.forward_equivalents == pytest.approx(10 + verdict.exact_forward_equivalents, abs=0.01)
    assert digests(healthy).keys() == {"layers.parquet", "verdict.json"}


def test_a_machine_with_a_device_of_its_own_says_what_it_was_diagnosed_on(model_dir, problems, healthy, tmp_path):
    run(model_dir, problems, tmp_path / "named", Machine(device="cpu"))
    assert read_json(tmp_path / "named" / "verdict.json", Verdict).origin.device == "cpu"
    assert '"device"' not in (healthy / "verdict.json").read_text()


def test_sensitivity_is_measured_on_the_faulty_machine_and_changes_the_sigmas(healthy, noisy, tmp_path):
    found = {}
    for name, folder in (("cpu", healthy), ("noisy_layer_2", noisy)):
        table, _ = read_diagnosis(folder)
        assert (table["sensitivity"] > 0).all()
        write_sigmas(folder, name, "robust_first", tmp_path / f"{name}.yaml")
        found[name] = table["sensitivity"].to_list(), read_yaml(tmp_path / f"{name}.yaml", SigmaFile).aqn.layer_sigmas
    for on_cpu, on_target in zip(*found.values(), strict=True):
        assert on_cpu != on_target


def test_sensitivity_uses_at_most_the_configured_questions(model_dir, problems, healthy, tmp_path):
    one = CONFIG.model_copy(update={"sensitivity_texts": 1})
    whole, _ = read_diagnosis(healthy)
    first, _ = run(model_dir, problems, tmp_path, config=one)
    assert whole["sensitivity"].to_list() != first["sensitivity"].to_list()
    assert whole.drop("sensitivity").equals(first.drop("sensitivity"))


def test_faulty_machine_is_found_and_its_reach_recorded(noisy):
    _, verdict = read_diagnosis(noisy)
    assert (verdict.verdict, verdict.layer, verdict.type) == ("fault", 2, "noise")
    assert (verdict.site, verdict.num_faulty_channels, verdict.method) == ("layer_output", 64, "all")
    (simulated,) = verdict.simulated_faults
    assert simulated["type"] == "noise"
    # the layer runs 1 + 2 + 2 times on each of two prompts of 16 tokens and 64 channels, then under the probes
    assert simulated["elements"] > 2 * 5 * 16 * 64
    assert 0 < simulated["affected_elements"] <= simulated["elements"]


def test_same_inputs_give_the_same_bytes(model_dir, problems, noisy, tmp_path):
    run(model_dir, problems, tmp_path, NOISY_LAYER, name="noisy_layer_2")
    write_sigmas(tmp_path, "noisy_layer_2")
    assert digests(tmp_path) == digests(noisy)
    assert len(digests(noisy)) == 3


def test_too_few_questions_are_refused_and_nothing_is_written(model_dir, problems, tmp_path):
    with pytest.raises(DataError, match="3 questions, expected at least num_prompts = 4"):
        run(model_dir, problems, tmp_path / "out", config=DiagnosisConfig(num_prompts=4))
    assert not (tmp_path / "out").exists()


def test_fault_layer_out_of_range_is_refused(model_dir, problems, tmp_path):
    with pytest.raises(ModelError, match="expected 0 to 3"):
        run(model_dir, problems, tmp_path / "out", Machine(faults=[Fault(type="bias", layer=4, magnitude=0.1)]))


def test_fault_that_changes_nothing_is_refused(model_dir, problems, tmp_path):
    machine = Machine(faults=[Fault(type="saturation", layer=1, magnitude=1e-12)])
    with pytest.raises(ReceiptError, match=r"type=saturation,layer=1,magnitude=1e-12 changed none of \d+ values"):
        run(model_dir, problems, tmp_path / "out", machine)
    assert not (tmp_path / "out").exists()


def test_sigmas_carry_the_diagnosis_they_come_from(model_dir, noisy):
    sigmas = read_yaml(noisy / "sigmas.yaml", SigmaFile)
    assert sigmas.srdd_metadata == {
        "num_layers": 4,
        "strategy": "published",
        "total_noise_energy": pytest.approx(sum(sigma**2 for sigma in sigmas.aqn.layer_sigmas.values())),
        "model": "tiny",
        "machine": "noisy_layer_2",
        "weights_sha256": sha256_of_file(model_dir / "model.safetensors"),
        "verdict": "fault",
        "fault_layer": 2,
        "fault_type": "noise",
    }
    assert sorted(sigmas.aqn.layer_sigmas) == [0, 1, 2, 3]
    assert "base sigma" in sigmas.reasons[1] or "x1.5" in sigmas.reasons[1]


def test_sigmas_by_damage_take_the_error_from_the_parity_of_the_same_weights(model_dir, healthy, tmp_path):
    weights, path = sha256_of_file(model_dir / "model.safetensors"), tmp_path / "parity.json"

    def sigmas(**changed):
        operators = [operator("q_proj", layer, relative_rms=0.001 * (layer + 1)) for layer in range(4)]
        norm = operator("input_layernorm", 0, relative_rms=10.0)
        settings = {"operators": [*operators, norm], "first": identity(weights_sha256=weights), **changed}
        write_json(path, parity(**settings))
        files = (healthy / "layers.parquet", healthy / "verdict.json", SigmaRule(), tmp_path / "sigmas.yaml")
        generate_layer_sigmas(*files, "tiny", "cpu", "damage_first", parity=path)
        return read_yaml(tmp_path / "sigmas.yaml", SigmaFile)

    found = sigmas()
    assert found.srdd_metadata["parity_sha256"] == sha256_of_file(path)
    assert "error 0.1 %" in found.reasons[0]
    assert "error 0.4 %" in found.reasons[3]
    for changed, message in (
        ({"first": identity()}, "a parity of other weights"),
        ({"verdict": "fault", "summary": "layer 2 is wrong."}, "layer 2 is wrong. Expected a parity of a machine that"),
        ({"same_inputs": False}, "made without --replay"),
    ):
        with pytest.raises(ConfigError, match=message):
            sigmas(**changed)
    with pytest.raises(DataError, match=r"the parity has layers \[0\]"):
        sigmas(operators=[operator("q_proj", 0)])


def test_sigmas_of_mixed_up_diagnoses_are_refused(healthy, tmp_path):
    table, _ = read_diagnosis(healthy)
    verdict = healthy / "verdict.json"
    shorter = tmp_path / "shorter.parquet"
    write_table(shorter, table.head(3), LayerTable)
    with pytest.raises(DataError, match=r"num_layers is 4, but .* has 3 rows"):
        generate_layer_sigmas(shorter, verdict, SigmaRule(), tmp_path / "s.yaml", "tiny", "cpu")
    for model, machine in (("tiny", "other"), ("other", "cpu")):
        with pytest.raises(DataError, match="found a diagnosis of model tiny on machine cpu"):
            generate_layer_sigmas(healthy / "layers.parquet", verdict, SigmaRule(), tmp_path / "s.yaml", model, machine)
    write_table(shorter, table.with_columns(gain=table["gain"] * 2), LayerTable)
    with pytest.raises(DataError, match="not from the same diagnosis"):
        generate_layer_sigmas(shorter, verdict, SigmaRule(), tmp_path / "s.yaml", "tiny", "cpu")


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
    with pytest.raises(
        ConfigError, match="pretrained_machine: found 'target', expected a machine on which jobs run here"
    ):
        load_study(study)
    study["machines"]["target"]["faults"] = [{"type": "dead_zone", "layer": 3, "magnitude": 0.05}]
    with pytest.raises(ConfigError, match="diagnosed_in: a machine diagnosed elsewhere has no simulated faults"):
        load_study(study)
