"""Which keys a config.json may have: real sets of keys pass, and none that transformers uses for its own purposes."""

import inspect
import json
import re
from dataclasses import fields

import pytest
from transformers import CONFIG_MAPPING, PreTrainedConfig, configuration_utils, modeling_utils
from transformers.models.auto import auto_factory, configuration_auto
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from aqnpipe.config.model import _REFERENCES
from aqnpipe.errors import ModelError
from aqnpipe.models.allowed_keys import _taken, load_config, refuse_code

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "use_cache": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA = {**SIZES, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
QWEN2 = {**SIZES, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu"}

# Keys as they stand in files on the hub and as tools write them; sizes are small.
REAL = {
    "Qwen2.5": {
        **QWEN2,
        "attention_dropout": 0.0,
        "max_window_layers": 28,
        "rope_theta": 1000000.0,
        "sliding_window": 131072,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.43.1",
        "use_mrope": False,
        "use_sliding_window": False,
    },
    "Llama 3.2": {
        **LLAMA,
        "attention_bias": False,
        "eos_token_id": [1, 2, 3],
        "head_dim": 16,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 1024,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
    },
    "Llama 2 with linear scaling as of old, and the author's path": {
        **LLAMA,
        "_name_or_path": "/home/somebody/llama/7b",
        "pad_token_id": 0,
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "rope_theta": 10000.0,
        "torch_dtype": "float16",
        "max_sequence_length": 2048,
    },
    "unsloth": {
        **LLAMA,
        "_name_or_path": "unsloth/llama-3-8b",
        "unsloth_fixed": True,
        "unsloth_version": "2025.3.19",
        "unsloth_training_args": {"gradient_checkpointing": "unsloth"},
    },
    "bitsandbytes": {
        **LLAMA,
        "_pre_quantization_dtype": "float16",
        "quantization_config": {
            "_load_in_4bit": True,
            "_load_in_8bit": False,
            "bnb_4bit_compute_dtype": "bfloat16",
            "bnb_4bit_quant_type": "nf4",
            "llm_int8_skip_modules": None,
            "load_in_4bit": True,
            "quant_method": "bitsandbytes",
        },
    },
    "MLX": {**QWEN2, "quantization": {"group_size": 64, "bits": 4}},
    "Phi-3 with the code of before transformers had it": {
        **SIZES,
        "_name_or_path": "Phi-3-mini-4k-instruct",
        "architectures": ["Phi3ForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_phi3.Phi3Config",
            "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
        },
        "attention_bias": False,
        "embd_pdrop": 0.0,
        "model_type": "phi3",
        "num_key_value_heads": 4,
        "original_max_position_embeddings": 4096,
        "pad_token_id": 500,
        "resid_pdrop": 0.0,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "sliding_window": 2047,
    },
    "DeepSeek-V3": {
        **SIZES,
        "architectures": ["DeepseekV3ForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_deepseek.DeepseekV3Config",
            "AutoModel": "modeling_deepseek.DeepseekV3Model",
            "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
        },
        "aux_loss_alpha": 0.001,
        "ep_size": 1,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "kv_lora_rank": 16,
        "model_type": "deepseek_v3",
        "moe_intermediate_size": 32,
        "moe_layer_freq": 1,
        "n_group": 2,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 2,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"},
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "v_head_dim": 16,
    },
    "Gemma 2": {
        **SIZES,
        "architectures": ["Gemma2ForCausalLM"],
        "attn_logit_softcapping": 50.0,
        "cache_implementation": "hybrid",
        "final_logit_softcapping": 30.0,
        "head_dim": 16,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "model_type": "gemma2",
        "pad_token_id": 0,
        "query_pre_attn_scalar": 16,
        "sliding_window": 4096,
        "sliding_window_size": 4096,
    },
    "Gemma 3 text, written by transformers 4.5x": {
        **SIZES,
        "_sliding_window_pattern": 6,
        "architectures": ["Gemma3ForCausalLM"],
        "head_dim": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": ["sliding_attention", "full_attention"],
        "model_type": "gemma3_text",
        "rope_local_base_freq": 10000,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "use_bidirectional_attention": False,
    },
    "GPT-2": {
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1,
        "bos_token_id": 500,
        "eos_token_id": 500,
        "gradient_checkpointing": False,
        "layer_norm_epsilon": 1e-05,
        "model_type": "gpt2",
        "n_ctx": 1024,
        "n_embd": 64,
        "n_head": 4,
        "n_inner": None,
        "n_layer": 2,
        "n_positions": 1024,
        "pruned_heads": {},
        "summary_activation": None,
        "summary_first_dropout": 0.1,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "torchscript": False,
        "vocab_size": 512,
    },
    "sampling and labels of long ago": {
        **LLAMA,
        "do_sample": True,
        "finetuning_task": None,
        "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
        "label2id": {"LABEL_0": 0, "LABEL_1": 1},
        "max_length": 4096,
        "num_labels": 2,
        "output_attentions": False,
        "return_dict": True,
        "temperature": 0.6,
        "tie_encoder_decoder": False,
        "tokenizer_class": "LlamaTokenizer",
        "top_p": 0.9,
        "use_bfloat16": False,
        "use_return_dict_in_generate": False,
    },
    "what versions of transformers wrote of their own": {
        **QWEN2,
        "_attn_implementation": "sdpa",
        "_attn_implementation_autoset": True,
        "_attn_implementation_internal": "flash_attention_2",
        "_commit_hash": None,
        "_experts_implementation": None,
        "_flash_attn_2_enabled": True,
        "base_model_tp_plan": {"layers.*.mlp.up_proj": "colwise"},
        "keys_to_ignore_at_inference": ["past_key_values"],
        "name_or_path": "x/y",
        "dtype": "bfloat16",
        "layer_types": ["full_attention", "full_attention"],
    },
    "turned to see both sides, with its trainer's notes": {
        **QWEN2,
        "is_causal": False,
        "training_notes": {"learning_rate": 1e-6, "data": ["a", "b"], "by": "me/mine"},
        "license": "apache-2.0",
        "update_frequency": 3,
    },
}


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
