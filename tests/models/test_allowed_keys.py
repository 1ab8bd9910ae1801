"""Which keys a config.json may have: real sets of keys pass, and none that transformers uses for its own purposes."""

import inspect
import json
import re
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from transformers import CONFIG_MAPPING, PreTrainedConfig, configuration_utils, modeling_utils
from transformers.models.auto import auto_factory, configuration_auto
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from aqnpipe.config.model import _REFERENCES
from aqnpipe.errors import ModelError
from aqnpipe.models.untrusted import _taken, load_config, refuse_code

FILE = yaml.safe_load((Path(__file__).parent / "real_configs.yaml").read_text())
SIZES, QWEN2, REAL = FILE["sizes"], FILE["qwen2"], FILE["real"]


@pytest.fixture
def load(tmp_path):
    def load_from(content):
        (tmp_path / "config.json").write_text(json.dumps(content), encoding="utf-8")
        return load_config(tmp_path)

    return load_from


@pytest.mark.parametrize("name", REAL)
def test_real_sets_of_keys_pass(load, tmp_path, name):
    found = load(REAL[name])
    assert found.num_hidden_layers == 2
    refuse_code(tmp_path / "config.json", REAL[name].get("auto_map"), found.model_type)


def test_every_decoder_only_family_may_have_what_it_writes_itself():
    tried = 0
    for family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        kind = CONFIG_MAPPING[family]
        if not kind.has_no_defaults_at_init and not {"backbone", "backbone_config"} & {x.name for x in fields(kind)}:
            for written in (kind().to_dict(), kind().to_diff_dict()):
                assert list(_taken(kind, written)) == [], family
            tried += 1
    assert tried > 100


@pytest.mark.parametrize(
    "key",
    [
        *("attribute_map", "sub_configs", "to_dict", "get_text_config", "base_config_key", "_auto_class", "__class__"),
        *("save_pretrained", "standardize_rope_params", "base_model_fsdp_plan", "_output_attentions", "validate"),
    ],
)
def test_a_key_that_names_a_part_of_transformers_is_one_line(load, key):
    with pytest.raises(ModelError, match=rf"config\.json: {key} is not a setting of qwen2, but a part of transformers"):
        load({**QWEN2, key: {"_attn_implementation_internal": "rope_theta"}})


def test_so_is_one_inside_a_part(load):
    family = {**SIZES, "model_type": "gemma3_text"}
    with pytest.raises(ModelError, match=r"text_config\.attribute_map is not a setting of gemma3"):
        load({"num_hidden_layers": 2, "model_type": "gemma3", "text_config": {**family, "attribute_map": {"a": "b"}}})
    assert load({"num_hidden_layers": 2, "model_type": "gemma3", "text_config": family}).text_config.hidden_size == 64


def test_so_is_one_for_generation(load, tmp_path):
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "transformers_version": "4.37.0"}')
    load(QWEN2)
    (tmp_path / "generation_config.json").write_text('{"to_dict": 1}')
    with pytest.raises(ModelError, match="to_dict is not a setting, but a part of transformers"):
        load(QWEN2)


def test_a_number_of_parts_that_would_take_for_ever_is_one_line(load):
    """A name is made for each label."""
    with pytest.raises(ModelError, match="num_labels is 1000000000, expected at most 1,000,000"):
        load({**QWEN2, "num_labels": 10**9})
    assert load({**QWEN2, "num_labels": 3, "num_parameters": 7_615_616_512}).num_labels == 3


@pytest.mark.parametrize("key", _REFERENCES)
def test_a_key_that_refers_to_other_files_is_one_line(load, key):
    with pytest.raises(ModelError, match=f"{key} would load other files or code than named here"):
        load({**QWEN2, key: ["config.4.0.0.json"]})
    load({**QWEN2, **({} if key == "configuration_files" else {key: None})})


def test_transformers_reads_no_further_key_where_it_loads():
    """A new name here needs a decision: may a model folder set it?"""
    sources = "".join(
        inspect.getsource(module) for module in (modeling_utils, configuration_utils, auto_factory, configuration_auto)
    )
    read = set(re.findall(r'(?:getattr|hasattr)\((?:self\.|model_|parent_)?config, "(\w+)"', sources))
    read |= set(re.findall(r'"(\w+)" in config(?:_dict)?\b', sources))
    declared = {field.name for field in fields(PreTrainedConfig)}
    examined = {"quantization_config", "auto_map", "AutoConfig", "_attn_implementation"}
    harmless = {"sep_token_id", "tie_word_embeddings", "gradient_checkpointing", "attention_dropout", "model_type"}
    harmless |= {"sliding_window", "layer_types", "mtp_layer_types", "num_attention_heads", "num_kv_shared_layers"}
    harmless |= {"initializer_range", "initializer_factor", "init_std"}
    assert read >= {"transformers_weights", "fusion_config", "configuration_files", "distributed_config"}
    assert read - declared - examined - harmless - {*_REFERENCES} == set()


def test_a_family_that_is_no_decoder_never_gets_to_its_configuration(load):
    with pytest.raises(ModelError, match="model_type is 'timm_wrapper', expected a decoder-only model"):
        load({"num_hidden_layers": 2, "model_type": "timm_wrapper", "backbone": "evil/repository"})


@pytest.mark.parametrize(
    ("auto_map", "family"),
    [
        ({"AutoConfig": "evil/repo--configuration_phi3.Phi3Config", "AutoModelForCausalLM": "x.Evil"}, "phi3"),
        ({"AutoConfig": "configuration_phi3.Phi3Config"}, "qwen2"),
        ({"AutoConfig": "configuration_qwen.QWenConfig"}, "qwen"),
        ({"AutoModelForCausalLM": 5}, "qwen2"),
        ({"AutoTokenizer": ["tokenization_evil.EvilTokenizer", None]}, None),
        (["tokenization_evil.EvilTokenizer", None], None),
        ("tokenization_evil.EvilTokenizer", None),
    ],
)
def test_code_that_transformers_lacks_is_refused(tmp_path, auto_map, family):
    with pytest.raises(ModelError, match="auto_map asks for code from the model, which is never run"):
        refuse_code(tmp_path / "config.json", auto_map, family)


@pytest.mark.parametrize(
    ("auto_map", "family"),
    [
        (None, "qwen2"),
        ({"AutoConfig": "configuration_mpt.MPTConfig", "AutoModelForCausalLM": "modeling_mpt.MPTForCausalLM"}, "mpt"),
        ({"AutoConfig": "owner/repo--configuration_falcon.FalconConfig"}, "falcon"),
        ({"AutoModelForSequenceClassification": "modeling_own.Reward"}, "qwen2"),
        ({"AutoTokenizer": ["tokenization_x.LlamaTokenizer", None]}, None),
    ],
)
def test_code_of_before_transformers_had_the_family_is_not_needed(tmp_path, auto_map, family):
    refuse_code(tmp_path / "config.json", auto_map, family)
