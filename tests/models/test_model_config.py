import subprocess
import sys

import pytest
from pydantic import ValidationError
from transformers import BloomConfig, FalconConfig, GPT2Config, GPTJConfig, GPTNeoConfig, MptConfig, OPTConfig

from aqnpipe.config.model import ModelConfig, num_layers_of, read_model_config, source_kind
from aqnpipe.errors import ModelError


def test_kinds_of_sources(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert source_kind("tiny") == source_kind("tiny-large") == "builtin"
    assert source_kind("Qwen/Qwen2.5-1.5B-Instruct") == "hub"
    assert source_kind("./missing") == source_kind("/missing/model") == "folder"
    (tmp_path / "models" / "mine").mkdir(parents=True)
    assert source_kind("models/mine") == source_kind("models") == "folder"


@pytest.mark.parametrize("source", ["tinny", "", "a/b/c", "owner/", "owner/na me"])
def test_what_can_be_no_model_is_refused(source):
    with pytest.raises(
        ModelError, match="expected tiny, tiny-large, tiny-comparison, tiny-mixture, an existing folder, or a hub id"
    ):
        source_kind(source)
    with pytest.raises(ValidationError, match="expected tiny, tiny-large"):
        ModelConfig(source=source)


def test_number_of_layers(tmp_path):
    assert num_layers_of("tiny") == num_layers_of("tiny-large") == 6
    assert num_layers_of("Qwen/Qwen2.5-1.5B-Instruct") == 28
    assert num_layers_of("some/model") is None
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 28}')
    assert num_layers_of(str(tmp_path)) == 28


@pytest.mark.parametrize(
    "config",
    [GPT2Config(), GPTJConfig(), BloomConfig(), MptConfig(), GPTNeoConfig(), OPTConfig(), FalconConfig()],
    ids=lambda config: config.model_type,
)
def test_sizes_have_their_common_names_in_every_family(tmp_path, config):
    config.save_pretrained(tmp_path)
    read = read_model_config(tmp_path)
    for name in ("num_hidden_layers", "hidden_size", "num_attention_heads"):
        assert read[name] == getattr(config, name)
    assert num_layers_of(str(tmp_path)) == config.num_hidden_layers
    assert read.get("max_position_embeddings") == getattr(config, "max_position_embeddings", None)


@pytest.mark.parametrize("content", ["{}", '{"num_hidden_layers": "six"}', '{"num_hidden_layers": 0}', "[]", "{"])
def test_config_without_layers_is_one_clear_error(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config\.json") as caught:
        num_layers_of(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_folder_without_config_is_one_clear_error(tmp_path):
    with pytest.raises(ModelError, match=r"found a folder without config\.json, expected a model folder"):
        num_layers_of(str(tmp_path))
    with pytest.raises(ModelError, match="found no such folder"):
        num_layers_of("./not/here")
    (tmp_path / "adapter_config.json").touch()
    with pytest.raises(ModelError, match="found the adapters of PEFT alone, expected the whole model"):
        read_model_config(tmp_path)


def test_configuration_needs_no_torch():
    code = (
        "import sys, aqnpipe.config.model as m, aqnpipe.config.dataset, aqnpipe.models.loading;"
        "m.num_layers_of('tiny'); assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("source", ["tiny", "./model"])
def test_only_the_hub_has_revisions(source):
    """A folder would be used as it is, whatever the revision."""
    with pytest.raises(ValidationError, match=r"revision: found 'v1', expected none: .* is not from the hub"):
        ModelConfig(source=source, revision="v1")
    assert ModelConfig(source="some/model", revision="v1").revision == "v1"
