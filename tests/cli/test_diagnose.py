import json
import re

import pytest
import torch
import yaml
from random_models import random_model_of
from transformers import AutoModelForCausalLM
from typed import typed

from aqnpipe.artifacts.diagnoses import DiagnosisFile, LayerTable, SigmaFile
from aqnpipe.artifacts.files import read_json, read_yaml
from aqnpipe.errors import ConfigError, DataError, ModelError, StorageError

FAULT = "type=saturation,layer=2,magnitude=0.3,sparsity=0.001,site=o_proj"


@pytest.fixture(scope="module")
def bare_model(tmp_path_factory):
    """Two layers, no tokenizer: exact probes do not mind, statistics do."""
    folder = tmp_path_factory.mktemp("bare")
    random_model_of("llama", num_layers=2).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def diagnosis(tmp_path_factory):
    path = tmp_path_factory.mktemp("diagnosis") / "tiny.json"
    result = typed("diagnose", "tiny", "--fault", FAULT, "--prompts", 2, "--json", path)
    assert result.exit_code == 3
    return path


def test_healthy_is_exit_0_with_a_table_on_standard_output():
    result = typed("diagnose", "tiny", "--method", "exact")
    assert result.exit_code == 0
    assert result.stdout.startswith("HEALTHY tiny on cpu")
    cost = re.search(r"cost: ([\d.]+) whole-model forwards", result.stdout)
    assert 0 < float(cost[1]) <= 25


def test_fault_is_exit_3_and_the_json_says_where(diagnosis):
    content = json.loads(diagnosis.read_text())
    keys = ("verdict", "layer", "type", "site", "num_faulty_channels")
    assert {*keys, "forward_equivalents", "layers"} <= content.keys()
    found = [content[key] for key in keys]
    assert found == ["fault", 2, "saturation", "o_proj", 1]
    assert len(content["layers"]) == 6
    assert content["layers"][2]["faulty_sites"] == ["o_proj"]
    assert content["layers"][0]["scans"].keys() == LayerTable.to_schema().columns.keys()
    assert content["simulated_faults"][0]["faulty_channels"] == 1


def test_a_reproducer_goes_to_a_folder_that_exists(bare_model, tmp_path):
    with pytest.raises(StorageError, match="--reproducer"):
        raise typed("diagnose", bare_model, "--reproducer", tmp_path / "none").exception
    fault = "type=bias,layer=1,magnitude=0.5,site=o_proj"
    result = typed("diagnose", bare_model, "--method", "exact", "--fault", fault, "--reproducer", tmp_path)
    assert result.exit_code == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["operands.safetensors", "reproduce.py"]
    assert "The fault is simulated; nothing follows for this device." in result.stdout


@pytest.mark.slow
def test_several_faults(tmp_path):
    path = tmp_path / "two.json"
    second = "type=noise,layer=5,magnitude=0.1"
    result = typed("diagnose", "tiny", "--fault", FAULT, "--fault", second, "--method", "exact", "--json", path)
    assert result.exit_code == 3
    assert [(fault.layer, fault.site) for fault in read_json(path, DiagnosisFile).faults] == [
        (2, "o_proj"),
        (5, "layer_output"),
    ]


def test_abstain_is_exit_4(bare_model, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(bare_model, dtype=torch.float16)
    with torch.no_grad():
        for linear in model.model.layers[1].mlp.children():
            if isinstance(linear, torch.nn.Linear):
                linear.weight.fill_(6e4)
    model.save_pretrained(tmp_path)
    result = typed("diagnose", tmp_path, "--dtype", "float16")
    assert result.exit_code == 4
    assert "in float16 this may be the overflow of a healthy layer" in " ".join(result.stdout.split())


def test_a_folder_without_a_tokenizer_will_do_in_any_dtype(bare_model):
    assert typed("diagnose", bare_model, "--method", "exact", "--dtype", "bfloat16").exit_code == 0


def test_random_weights_need_a_shape_alone(bare_model, tmp_path):
    (tmp_path / "config.json").write_text((bare_model / "config.json").read_text())
    result = typed(
        "diagnose", tmp_path, "--random-weights", "--method", "exact", "--fault", "type=bias,layer=1,magnitude=0.1"
    )
    assert result.exit_code == 3


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["tiny", "--fault", "type=bias"], ConfigError, "missing key"),
        (["tiny", "--fault", "type=bias,layer=6,magnitude=0.1"], ModelError, "fault.layer is 6, expected 0 to 5"),
        (["tiny", "--fault", "type=bias,layer=0,magnitude=0.1,site=q_norm"], ModelError, "fault.site is 'q_norm'"),
        (["huge"], ModelError, "model source 'huge' is unknown"),
        (["./no-such-folder"], ModelError, "no such folder"),
        (["tiny", "--device", "abacus"], ConfigError, "--device abacus: not usable here"),
    ],
)
def test_user_errors_are_one_line(arguments, error, message):
    result = typed("diagnose", *arguments, "--method", "exact")
    assert isinstance(result.exception, error)
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)


def test_sigmas_to_standard_output_and_to_a_file(diagnosis, tmp_path):
    printed = typed("sigmas", diagnosis, "--base-sigma", "0.02")
    assert printed.exit_code == 0
    sigmas = yaml.safe_load(printed.stdout)
    assert list(sigmas["aqn"]["layer_sigmas"]) == [str(layer) for layer in range(6)]
    assert sigmas["aqn"]["base_sigma"] == 0.02
    path = tmp_path / "sigmas.yaml"
    assert typed("sigmas", diagnosis, "-o", path).exit_code == 0
    assert read_yaml(path, SigmaFile).srdd_metadata["strategy"] == "published"


def test_sigmas_need_the_scans(tmp_path):
    path = tmp_path / "exact.json"
    typed("diagnose", "tiny", "--method", "exact", "--json", path)
    result = typed("sigmas", path)
    assert isinstance(result.exception, DataError)
    assert "expected a diagnosis with --method all" in str(result.exception)
