"""Adapters in a model: their files, their base, the comparison with memory, and what merging loses."""

import shutil

import pytest
import torch
from replacing import replace_in
from safetensors.torch import load_file, save_file
from tiny_tokenizer import build_tokenizer
from transformers import AutoModelForCausalLM, Llama4TextConfig
from typed import typed

from aqnpipe.config.training import LoraConfig
from aqnpipe.errors import ModelError, ReceiptError
from aqnpipe.models.adapters import (
    MergedForEngine,
    adapted_modules,
    adapter_weights,
    add_adapters,
    load_adapters,
    merge_loss,
    merged_weights,
    refuse_merge_loss,
    refuse_other_adapters,
    save_adapters,
)
from aqnpipe.models.layout import layer_sites, select_modules, site_module
from aqnpipe.models.loading import describe_model
from aqnpipe.models.prepared import (
    ADAPTERS_FILE,
    HEADER_KEY,
    AdaptersHeader,
    find_base,
    read_adapters_header,
    write_prepared_model,
)

LORA = LoraConfig(rank=4, alpha=8, target_modules=("q_proj", "down_proj"))


def header(**changes) -> AdaptersHeader:
    settings = {
        "base_source": "made/up",
        "base_weights_sha256": "0" * 64,
        "dtype": "float32",
        "rank": LORA.rank,
        "alpha": LORA.alpha,
        "target_modules": LORA.target_modules,
    }
    return AdaptersHeader(**{**settings, **changes})


def adapted_model(make_model, update=1e-6, dtype=torch.bfloat16, lora=LORA):
    """A model whose adapters have been trained: every value of B is `update` or -`update`."""
    model = make_model(num_layers=2).to(dtype)
    add_adapters(model, lora, seed=0)
    generator = torch.Generator().manual_seed(0)
    for name, weight in adapter_weights(model).items():
        weight.data = weight.data.float()
        if "lora_B" in name:
            weight.data = (torch.randint(0, 2, weight.shape, generator=generator) * 2.0 - 1) * update
    return model


def test_the_file_holds_float32_adapters_and_their_header(make_model, tmp_path):
    model = adapted_model(make_model)
    save_adapters(model, tmp_path, header())
    saved = load_file(tmp_path / ADAPTERS_FILE)
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    assert saved.keys() == adapter_weights(model).keys()
    assert "model.layers.1.mlp.down_proj.lora_A.weight" in saved
    assert read_adapters_header(tmp_path) == header()
    again = tmp_path / "again"
    again.mkdir()
    save_adapters(model, again, header())
    assert (again / ADAPTERS_FILE).read_bytes() == (tmp_path / ADAPTERS_FILE).read_bytes()
    save_adapters(model, again, header(base_weights_sha256="1" * 64))
    assert (again / ADAPTERS_FILE).read_bytes() != (tmp_path / ADAPTERS_FILE).read_bytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_come_back_bit_for_bit_in_the_format_they_were_trained_in(make_model, tmp_path, dtype):
    model = adapted_model(make_model, update=1e-3)
    for weight in adapter_weights(model).values():
        weight.data = weight.data.to(getattr(torch, dtype))
    save_adapters(model, tmp_path, header(dtype=dtype))
    loaded = make_model(num_layers=2).to(torch.bfloat16)
    state = torch.random.get_rng_state()
    load_adapters(loaded, tmp_path)
    assert torch.equal(torch.random.get_rng_state(), state)
    for name, weight in adapter_weights(loaded).items():
        assert weight.dtype == getattr(torch, dtype)
        assert torch.equal(weight, adapter_weights(model)[name])
    refuse_other_adapters(loaded, tmp_path)


def test_other_adapters_in_memory_are_refused(make_model, tmp_path):
    model = adapted_model(make_model)
    save_adapters(model, tmp_path, header())
    with pytest.raises(ModelError, match="adapters not applied: 0 of its 8 matrices are in memory"):
        refuse_other_adapters(make_model(num_layers=2), tmp_path)
    some = adapted_modules(model)["model.layers.1.mlp.down_proj"]
    some.scaling["default"] = 1.0
    with pytest.raises(ModelError, match=r"adapters scaled: model.layers.1.mlp.down_proj by 1, expected .* = 2"):
        refuse_other_adapters(model, tmp_path)
    some.scaling["default"] = 2.0
    weight = some.lora_B["default"].weight
    weight.data[0, 0] = torch.nextafter(weight.data[0, 0], torch.tensor(1.0))
    with pytest.raises(ModelError, match=r"down_proj.lora_B.weight in memory is not the adapter of this checkpoint"):
        refuse_other_adapters(model, tmp_path)


def test_damaged_files_are_one_clear_error(make_model, tmp_path):
    save_adapters(adapted_model(make_model), tmp_path, header())
    path = tmp_path / ADAPTERS_FILE
    tensors, metadata = load_file(path), {HEADER_KEY: header().model_dump_json()}
    for changed, problem in (
        ({**tensors, "model.layers.9.mlp.down_proj.lora_A.weight": torch.zeros(1)}, "on one side only: model.layers.9"),
        ({name: tensor[:1] for name, tensor in tensors.items()}, r"has shape \(1, \d+\), expected \(4, \d+\)"),
    ):
        save_file(changed, path, metadata=metadata)
        with pytest.raises(ModelError, match=problem):
            load_adapters(make_model(num_layers=2), tmp_path)
    save_file(tensors, path)
    with pytest.raises(ModelError, match="malformed header"):
        read_adapters_header(tmp_path)
    path.write_bytes(b"broken")
    with pytest.raises(ModelError, match="not a valid safetensors file"):
        read_adapters_header(tmp_path)


def prepared(folder, make_model, seed=0):
    """Write a prepared model into `folder`; return its record."""
    tokenizer = build_tokenizer()
    make_model(num_layers=2, vocab_size=len(tokenizer), seed=seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    record = describe_model(folder, "made/up")
    write_prepared_model(folder, record)
    return record


@pytest.fixture
def checkpoint(make_model, tmp_path):
    """A checkpoint of adapters in the results of a study, beside its base and another model."""
    base = prepared(tmp_path / "models" / "base", make_model)
    prepared(tmp_path / "models" / "large", make_model, seed=1)
    folder = tmp_path / "runs" / "base" / "arm" / "seed0" / "checkpoints" / "step2"
    folder.mkdir(parents=True)
    for path in (tmp_path / "models" / "base").iterdir():
        if path.suffix == ".json" and path.name != "aqnpipe_model.json":
            shutil.copy(path, folder)
    save_adapters(adapted_model(make_model), folder, header(base_weights_sha256=base.weights_sha256))
    write_prepared_model(folder, describe_model(folder, "base/arm seed 0 step 2"))
    return folder


def test_the_base_is_found_by_the_digest_of_its_weights(checkpoint, tmp_path):
    assert find_base(checkpoint) == tmp_path / "models" / "base"
    (tmp_path / "models" / "base").rename(tmp_path / "models" / "renamed")
    assert find_base(checkpoint) == tmp_path / "models" / "renamed"


def test_a_missing_base_another_one_and_another_configuration_are_one_line(checkpoint, make_model, tmp_path):
    base = tmp_path / "models" / "base"
    replace_in(base / "config.json", ('"rope_theta": 10000.0', '"rope_theta": 20000.0'))
    write_prepared_model(base, describe_model(base, "made/up"))
    with pytest.raises(ModelError, match=r"trained on 'made/up' .*base has these weights, but another config.json"):
        find_base(checkpoint)
    shutil.rmtree(base)
    with pytest.raises(
        ModelError, match=r"adapters only, trained on 'made/up' .* no prepared model .*large has "
    ) as other:
        find_base(checkpoint)
    shutil.rmtree(tmp_path / "models")
    with pytest.raises(ModelError, match=r"no folder models above it contains one") as missing:
        find_base(checkpoint)
    assert all("\n" not in str(error.value) and error.value.exit_code == 2 for error in (other, missing))


def test_a_linear_with_an_adapter_is_one_site_and_one_module_of_a_scope(make_model):
    plain, model = make_model(num_layers=2), adapted_model(make_model)
    assert layer_sites(model.model.layers[0]).modules.keys() == layer_sites(plain.model.layers[0]).modules.keys()
    assert site_module(model, 1, "down_proj") is model.model.layers[1].mlp.down_proj
    assert site_module(model, 1, "up_proj") is model.model.layers[1].mlp.up_proj
    chosen = select_modules(model, "mlp")
    parts = ("base_layer", "lora_A.default", "lora_B.default")
    assert {name for name in chosen if "layers.1.mlp" in name} == {f"model.layers.1.mlp.down_proj.{p}" for p in parts}
    assert len(select_modules(plain, "mlp")) == len(chosen) - 4  # two layers with two linears more


def test_the_command_diagnose_refuses_adapters_and_names_their_base(checkpoint):
    result = typed("diagnose", str(checkpoint))
    assert isinstance(result.exception, ModelError)
    assert str(checkpoint.parents[5] / "models" / "base") in str(result.exception)


def test_merging_is_computed_in_float32_and_rounded_once(make_model):
    model = adapted_model(make_model, update=1e-3)
    projection = model.model.layers[1].mlp.down_proj
    update = projection.lora_B["default"].weight @ projection.lora_A["default"].weight * 2
    exact = projection.base_layer.weight.float() + update
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(merged_weights(model)[name], exact)
    assert torch.equal(merged_weights(model, torch.bfloat16)[name], exact.to(torch.bfloat16))
    assert merged_weights(model).keys() == make_model(num_layers=2).state_dict().keys()


def test_what_merging_loses_is_the_relative_error_of_the_update(make_model):
    """A weight of 1 has neighbours 1/128 above and 1/256 below it in bfloat16: 0.005 arrives as 1/128, 0.003 as 0."""
    model = make_model(num_layers=2).to(torch.bfloat16)
    assert merge_loss(model, torch.bfloat16) is None
    add_adapters(model, LoraConfig(rank=1, alpha=1, target_modules=("q_proj",)), seed=0)
    assert merge_loss(model, torch.bfloat16) is None  # B is 0
    modules = list(adapted_modules(model).values())
    for module, update in zip(modules, (0.005, 0.003), strict=True):
        module.base_layer.weight.data.fill_(1.0)
        module.lora_A["default"].weight.data = torch.ones_like(module.lora_A["default"].weight.data.float())
        module.lora_B["default"].weight.data = torch.full_like(module.lora_B["default"].weight.data.float(), update)
    expected = (((1 / 128 - 0.005) ** 2 + 0.003**2) / (0.005**2 + 0.003**2)) ** 0.5
    assert merge_loss(model, torch.bfloat16) == pytest.approx(expected, rel=1e-3)
    assert merge_loss(model, torch.float32) < 1e-4


@pytest.mark.parametrize("update", [1e-6, 1e-4])
def test_an_update_at_the_learning_rate_of_the_7b_study_is_lost_in_bfloat16(make_model, update):
    model = adapted_model(make_model, update=update)
    loss = merge_loss(model, torch.bfloat16)
    assert loss > 0.3
    with pytest.raises(ReceiptError, match=r"in bfloat16 weights \d+% of their update is lost .*backend: transformers"):
        refuse_merge_loss(loss, torch.bfloat16)
    refuse_merge_loss(merge_loss(model, torch.float32), torch.float32)


def test_an_engine_gets_no_weights_that_lost_the_first_update(make_model):
    weights, model = MergedForEngine(torch.bfloat16), adapted_model(make_model, update=0.0)
    assert dict(weights(model))["model.layers.0.self_attn.q_proj.weight"].dtype == torch.bfloat16
    for weight in adapter_weights(model).values():
        weight.data += 1e-6
    with pytest.raises(ReceiptError, match="update is lost"):
        weights(model)
    exact = dict(MergedForEngine(torch.float32)(model))
    assert exact["model.layers.0.self_attn.q_proj.weight"].dtype == torch.float32


def test_a_router_that_returns_more_than_a_product_gets_no_adapter():
    config = Llama4TextConfig(
        **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "intermediate_size_mlp": 48, "head_dim": 8},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4},
        **{"pad_token_id": 0, "interleave_moe_layer_step": 1},
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with pytest.raises(ModelError, match=r"feed_forward.router is a Llama4Router that returns a tuple"):
        add_adapters(model, LoraConfig(rank=1, alpha=2, target_modules=("q_proj", "router")), seed=0)
    assert not adapted_modules(model)
    add_adapters(model, LoraConfig(rank=1, alpha=2, target_modules=("q_proj",)), seed=0)
    assert len(adapted_modules(model)) == 2
