"""`import aqnpipe` is cheap, and `aqnpipe.diagnose` takes a model in memory and shows what the JSON shows."""

import inspect
import json
import re
import subprocess
import sys

import pytest
import torch
from random_models import random_model_of
from transformers import MambaConfig, MambaForCausalLM

import aqnpipe
from aqnpipe.artifacts.provenance import dependencies
from aqnpipe.errors import ConfigError, ModelError

FAULT = "type=saturation,layer=1,magnitude=0.3,sparsity=0.02,site=o_proj"


@pytest.fixture(scope="module")
def model():
    return random_model_of("llama", num_layers=3)


def test_importing_the_package_imports_nothing_slow():
    code = "import sys, aqnpipe; print({'torch', 'polars', 'pydantic'} & {*sys.modules}, 'diagnose' in dir(aqnpipe))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set() True"


def test_the_public_function_makes_no_other_stage_depend_on_the_diagnosis():
    assert not [name for name in dependencies("aqnpipe.training.stage") if name.startswith("aqnpipe.diagnosis")]
    assert "aqnpipe" in dependencies("aqnpipe.training.stage")


@pytest.mark.parametrize("name", sorted(aqnpipe._PUBLIC))
def test_every_argument_is_named_in_the_docstring(name):
    public = getattr(aqnpipe, name)
    unnamed = [each for each in inspect.signature(public).parameters if not re.search(rf"\b{each}\b", public.__doc__)]
    assert unnamed == []


def test_unknown_names_are_refused():
    with pytest.raises(AttributeError, match="no attribute 'diagnosis_of'"):
        aqnpipe.diagnosis_of  # noqa: B018


def test_a_healthy_machine(model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = aqnpipe.diagnose(model, method="exact")
    assert result.verdict == "healthy"
    assert result.faults == ()
    assert isinstance(result.untested, tuple)
    assert result.cost == result.forward_equivalents > 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_fault_has_its_place_and_what_was_seen(model):
    result = aqnpipe.diagnose(model, method="exact", faults=[FAULT], seed=5)
    assert result.verdict == "fault"
    (fault,) = result.faults
    assert (fault.layer, fault.site, fault.type) == (1, "o_proj", "saturation")
    assert len(fault.channels) == fault.num_faulty_channels > 0
    assert fault.evidence
    assert result.seed == 5


def test_the_result_is_what_the_json_shows(model):
    result = aqnpipe.diagnose(model, num_prompts=2)
    content = json.loads(result.model_dump_json())
    assert {
        "verdict",
        "faults",
        "untested",
        "forward_equivalents",
        "versions",
        "hardware",
        "host",
        "time",
    } <= content.keys()
    assert content["model"] == "LlamaForCausalLM"
    assert (content["dtype"], content["attention"], content["method"]) == ("float32", "eager", "all")
    assert len(content["layers"]) == 3


def test_threads_are_restored(model):
    before = torch.get_num_threads()
    aqnpipe.diagnose(model, method="exact", threads=before + 1)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sead": 1}, "diagnose: sead"),
        ({"num_prompts": 0}, "diagnose: num_prompts"),
        ({"faults": ["type=bias"]}, "missing key"),
        ({"method": "exakt"}, "method is 'exakt', expected exact, all"),
    ],
)
def test_wrong_options_are_one_line(model, options, message):
    with pytest.raises(ConfigError, match=message) as error:
        aqnpipe.diagnose(model, **options)
    assert "\n" not in str(error.value)


def test_a_model_of_another_family_is_refused():
    model = MambaForCausalLM(MambaConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2))
    with pytest.raises(ModelError, match="linear_attention"):
        aqnpipe.diagnose(model)


def test_a_model_on_several_devices_or_without_weights_is_refused():
    split = random_model_of("llama", num_layers=2)
    split.lm_head.to("meta")
    with pytest.raises(ModelError, match="its weights are on cpu, meta, expected all of them on one device"):
        aqnpipe.diagnose(split)
    with pytest.raises(ModelError, match="its weights are on meta"):
        aqnpipe.diagnose(split.to("meta"))


def test_a_number_format_that_has_no_probes_is_refused():
    with pytest.raises(ModelError, match="its layers are float64, expected float32, bfloat16, float16"):
        aqnpipe.diagnose(random_model_of("llama", num_layers=2).double())
