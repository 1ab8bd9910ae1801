"""Models are prepared with safe files alone, loaded whole, and known again where they learned nothing."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.utils import logging as transformers_logging

from aqnpipe.config.model import ModelConfig, builtin_folder
from aqnpipe.errors import ModelError
from aqnpipe.models import loading
from aqnpipe.models.loading import is_untrained, load_model, load_tokenizer, prepare_model, weights_sha256
from aqnpipe.models.prepared import ADAPTERS_FILE, read_prepared_model


@pytest.fixture
def local(tmp_path) -> Path:
    """A local model folder: the tiny model with files beside it that must not be taken along."""
    folder = tmp_path / "source"
    shutil.copytree(builtin_folder("tiny"), folder)
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    (folder / "modeling_own.py").write_text("raise SystemExit")
    return folder


def edit_json(path: Path, **changes) -> None:
    content = json.loads(path.read_text())
    content.update(changes)
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def refuse(source: Path | str, output: Path, message: str) -> None:
    """Check that preparing fails in one line and leaves nothing."""
    before = sorted(output.parent.iterdir())
    with pytest.raises(ModelError, match=message) as caught:
        prepare_model(ModelConfig(source=str(source)), output)
    assert "\n" not in str(caught.value)
    assert sorted(output.parent.iterdir()) == before


def test_builtin_model_is_copied_and_described(tmp_path):
    output = tmp_path / "models" / "base"
    prepared = prepare_model(ModelConfig(source="tiny"), output)
    assert read_prepared_model(output) == prepared
    assert (prepared.source, prepared.architecture, prepared.num_layers) == ("tiny", "Qwen2ForCausalLM", 6)
    assert prepared.hidden_size == 128
    assert prepared.weights_sha256 == weights_sha256(builtin_folder("tiny"))
    model = load_model(output, dtype="float32", attention="eager")
    assert sum(parameter.numel() for parameter in model.parameters()) == prepared.num_parameters
    assert not model.training
    assert list(output.parent.iterdir()) == [output]


def test_local_folder_gives_the_same_model_without_foreign_files(local, tmp_path):
    output = tmp_path / "out"
    prepared = prepare_model(ModelConfig(source=str(local)), output)
    builtin = prepare_model(ModelConfig(source="tiny"), tmp_path / "builtin")
    assert prepared == builtin.model_copy(update={"source": str(local)})
    names = {path.name for path in output.iterdir()}
    assert names == {path.name for path in (tmp_path / "builtin").iterdir()}
    assert not any(name.endswith((".bin", ".py")) for name in names)


def test_preparing_again_replaces_the_folder(local, tmp_path):
    output = tmp_path / "out"
    prepare_model(ModelConfig(source="tiny"), output)
    (output / "stale.txt").write_text("old")
    prepare_model(ModelConfig(source=str(local)), output)
    assert read_prepared_model(output).source == str(local)
    assert not (output / "stale.txt").exists()


def test_failure_keeps_an_older_folder(local, tmp_path):
    output = tmp_path / "out"
    prepare_model(ModelConfig(source="tiny"), output)
    (local / "model.safetensors").write_bytes(b"broken")
    refuse(local, output, r"/model\.safetensors: not a valid safetensors file")
    assert read_prepared_model(output).source == "tiny"


def test_pickle_weights_are_refused(local, tmp_path):
    (local / "model.safetensors").unlink()
    refuse(local, tmp_path / "out", r"found pickle weights \(pytorch_model\.bin\), which are never loaded")
    (local / "pytorch_model.bin").unlink()
    refuse(local, tmp_path / "out", r"found no weights, expected \*\.safetensors")


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_remote_code_is_refused(local, tmp_path, name):
    edit_json(local / name, auto_map={"AutoModelForCausalLM": "modeling_own.Own"})
    refuse(local, tmp_path / "out", f"{name}: auto_map asks for code")


def test_incomplete_folders_are_refused(local, tmp_path):
    output = tmp_path / "out"
    refuse(tmp_path / "nowhere", output, "no such folder, expected a model folder")
    (local / "tokenizer.json").unlink()
    refuse(local, output, "found no tokenizer")
    shutil.copy(builtin_folder("tiny") / "tokenizer.json", local)
    edit_json(local / "config.json", architectures=None)
    refuse(local, output, "config.json has no architectures")
    (local / "config.json").write_text("{")
    refuse(local, output, r"config\.json: not valid JSON")


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("config.json", {"hidden_act": "x"}, "cannot be created: .*x"),
        ("config.json", {"model_type": "no-such-family"}, "cannot be created: .*no-such-family"),
        ("config.json", {"quantization_config": {"quant_method": "x"}}, "quant_method is 'x'"),
        ("tokenizer.json", {"model": {"type": "BPE"}}, "tokenizer of .* cannot be loaded"),
        ("tokenizer_config.json", {"tokenizer_class": []}, "tokenizer of .* cannot be loaded: unhashable type"),
    ],
)
def test_what_transformers_cannot_make_is_refused_before_anything_else_runs(local, tmp_path, name, content, line):
    edit_json(local / name, **content)
    refuse(local, tmp_path / "out", line)
    assert not (tmp_path / "out").exists()


def test_hub_model_takes_data_files_only(local, tmp_path, monkeypatch):
    import huggingface_hub

    requested = {}

    def fake_download(hub_id, *, revision, allow_patterns):
        requested.update(hub_id=hub_id, revision=revision, patterns=allow_patterns)
        return str(local)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake_download)
    prepared = prepare_model(ModelConfig(source="some/model", revision="v1"), tmp_path / "out")
    assert (prepared.source, prepared.revision) == ("some/model", "v1")
    assert (requested["hub_id"], requested["revision"]) == ("some/model", "v1")
    assert not [pattern for pattern in requested["patterns"] if pattern.endswith((".bin", ".py", ".pt", "*"))]


def test_hub_failure_is_one_clear_error(tmp_path, monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def no_network(*arguments, **options):
        raise LocalEntryNotFoundError("cannot reach the hub\nmore lines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_network)
    refuse("some/model", tmp_path / "out", r"'some/model': no such folder here, and not fetched .*cannot reach the hub")


def test_weights_that_do_not_fit_are_refused(local):
    weights = load_file(local / "model.safetensors")
    lost = weights.pop("model.layers.3.mlp.down_proj.weight")
    save_file(weights, local / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"missing keys in its weights: model\.layers\.3\.mlp\.down_proj\.weight"):
        load_model(local, dtype="float32", attention="eager")
    weights |= {"model.layers.3.mlp.down_proj.weight": lost, "model.layers.9.extra": torch.zeros(2)}
    save_file(weights, local / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"unexpected keys in its weights: model\.layers\.9\.extra"):
        load_model(local, dtype="float32", attention="eager")


def test_loading_what_is_no_model_is_one_clear_error(tmp_path):
    with pytest.raises(ModelError, match="no such folder"):
        load_model(tmp_path / "none", dtype="float32", attention="eager")
    with pytest.raises(ModelError, match=r"tokenizer of .* cannot be loaded"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_bar_of_loading_is_for_terminals(is_terminal, monkeypatch, capsys):
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.enable_progress_bar()
    try:
        monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
        load_model(builtin_folder("tiny"), dtype="float32", attention="sdpa")
    finally:
        if not was_enabled:
            transformers_logging.disable_progress_bar()
    said = capsys.readouterr()
    assert ("Loading weights" in said.err) == is_terminal
    assert said.out == ""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dtype_and_attention_are_as_requested(dtype):
    model = load_model(builtin_folder("tiny"), dtype=dtype, attention="sdpa")
    assert {parameter.dtype for parameter in model.parameters()} == {getattr(torch, dtype)}
    assert model.config._attn_implementation == "sdpa"


def test_tokenizer_without_pad_pads_with_eos_and_without_either_fails(local):
    edit_json(local / "tokenizer_config.json", pad_token=None)
    tokenizer = load_tokenizer(local)
    assert tokenizer.pad_token == tokenizer.eos_token == "<|endoftext|>"
    edit_json(local / "tokenizer_config.json", eos_token=None)
    with pytest.raises(ModelError, match="neither pad nor eos"):
        load_tokenizer(local)


def test_a_tokenizer_that_makes_its_library_panic_is_one_clear_error(local, monkeypatch):
    class PanicException(BaseException):
        """As pyo3 defines it: no Exception, so that nothing catches it by accident."""

    def panic(*args, **settings):
        raise PanicException("called `Option::unwrap()` on a `None` value")

    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.from_pretrained", panic)
    with pytest.raises(ModelError, match=r"tokenizer of .* cannot be loaded: called `Option"):
        load_tokenizer(local)


@pytest.mark.parametrize(
    "changes",
    [{"return_dict": False}, {"output_hidden_states": True}, {"use_cache": False}],
)
def test_what_a_pass_returns_is_not_the_configurations_choice(local, changes):
    edit_json(local / "config.json", **changes)
    model = load_model(local, dtype="float32", attention="sdpa")
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        output = model(ids)
        tokens = model.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert output.logits.shape[:2] == (1, 3)
    assert (output.attentions, output.hidden_states) == (None, None)
    assert tokens.shape == (1, 5)


def test_unreadable_record_is_one_clear_error(tmp_path):
    with pytest.raises(ModelError, match=r"no aqnpipe_model\.json"):
        read_prepared_model(tmp_path)
    (tmp_path / loading.PREPARED_MODEL_FILE).write_text("{}")
    with pytest.raises(ModelError, match="no checksum in it"):
        read_prepared_model(tmp_path)


@pytest.fixture
def model(tmp_path):
    return written(tmp_path / "model", "model.safetensors", {"a": torch.arange(4.0), "b": torch.ones(2, 2)})


def written(folder, name, tensors):
    folder.mkdir()
    save_file(tensors, folder / name)
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weights_of_the_model_are_untrained(tmp_path, model, dtype):
    tensors = {"a": torch.arange(4.0).to(dtype), "b": torch.ones(2, 2).to(dtype)}
    assert is_untrained(written(tmp_path / "same", "model.safetensors", tensors), model)
    tensors["b"][1, 1] = 2
    assert not is_untrained(written(tmp_path / "other", "model.safetensors", tensors), model)


def test_other_names_and_missing_files_are_not_untrained(tmp_path, model):
    assert not is_untrained(written(tmp_path / "names", "model.safetensors", {"a": torch.arange(4.0)}), model)
    assert not is_untrained(tmp_path / "gone", model)


def test_adapters_are_untrained_while_their_second_factor_is_zero(tmp_path, model):
    tensors = {"x.lora_A.weight": torch.ones(2, 2), "x.lora_B.weight": torch.zeros(2, 2)}
    assert is_untrained(written(tmp_path / "start", ADAPTERS_FILE, tensors), model)
    tensors["x.lora_B.weight"] += 1
    assert not is_untrained(written(tmp_path / "trained", ADAPTERS_FILE, tensors), model)
