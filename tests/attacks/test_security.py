"""Hostile models, data and environments: nothing runs, nothing escapes its folder, messages and logs stay inert."""

import json
import math
import os
import pickle
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from transformers.utils import CHAT_TEMPLATE_DIR

from aqnpipe.cli.study import open_study
from aqnpipe.config.dataset import LocalDataset, PromptFormat
from aqnpipe.config.model import ModelConfig, builtin_folder, read_model_config
from aqnpipe.config.study import load_study_file
from aqnpipe.data.loader import load_problems
from aqnpipe.data.prompts import format_prompt
from aqnpipe.errors import AqnpipeError, ConfigError, DataError, ModelError, printable
from aqnpipe.models.loading import create_model, load_model, load_tokenizer, prepare_model
from aqnpipe.models.shapes import shape_from_config
from aqnpipe.models.untrusted import TEMPLATE_FOLDER

ROOT = Path(__file__).parents[2]


class Bomb:
    """Leaves a file when it is unpickled."""

    def __init__(self, trace):
        self.trace = str(trace)

    def __reduce__(self):
        return (Path.touch, (Path(self.trace),))


@pytest.fixture
def folder(tmp_path):
    """A copy of the built-in model, to be made hostile."""
    return Path(shutil.copytree(builtin_folder("tiny"), tmp_path / "hostile"))


def edit(path, **changes):
    content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    path.write_text(json.dumps({**content, **changes}), encoding="utf-8")


def test_a_pickle_is_neither_loaded_nor_taken(folder, tmp_path):
    trace = tmp_path / "it_ran"
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt"):
        (folder / name).write_bytes(pickle.dumps(Bomb(trace)))
    prepare_model(ModelConfig(source=str(folder)), tmp_path / "prepared")
    load_model(tmp_path / "prepared", dtype="float32", attention="eager")
    assert not {path.suffix for path in (tmp_path / "prepared").iterdir()} & {".bin", ".pt", ".py"}
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="pickle weights"):
        prepare_model(ModelConfig(source=str(folder)), tmp_path / "again")
    assert not trace.exists()


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_code_of_the_model_is_refused(folder, tmp_path, name):
    (folder / "modeling_evil.py").write_text(f"open({str(tmp_path / 'it_ran')!r}, 'w')")
    edit(folder / name, auto_map={"AutoModelForCausalLM": "modeling_evil.Evil", "AutoTokenizer": "modeling_evil.Evil"})
    with pytest.raises(ModelError, match="auto_map asks for code"):
        prepare_model(ModelConfig(source=str(folder)), tmp_path / "prepared")
    assert not (tmp_path / "it_ran").exists()
    assert not (tmp_path / "prepared").exists()


@pytest.mark.parametrize("key", ["_attn_implementation", "attn_implementation", "experts_implementation"])
@pytest.mark.parametrize("value", ["evil/kernel", "evil/kernel@main:attention", "../evil"])
def test_a_configuration_cannot_name_code_of_a_hub(folder, tmp_path, key, value):
    edit(folder / "config.json", **{key: value})
    for load in (
        lambda: prepare_model(ModelConfig(source=str(folder)), tmp_path / "prepared"),
        lambda: load_model(folder, dtype="float32", attention="eager"),
    ):
        with pytest.raises(ModelError, match=f"{key} is '{value}', expected the name of an implementation"):
            load()
    for inside in ({"text_config": {key: value}}, {"parts": [{key: value}]}, {key: {"text_config": value}}):
        edit(folder / "config.json", **{key: "eager", **inside})
        with pytest.raises(ModelError, match=f"{key} is"):
            load_model(folder, dtype="float32", attention="eager")


@pytest.mark.parametrize("value", ["eager", "sdpa", None])
def test_implementations_of_transformers_and_models_inside_without_layers_pass(folder, value):
    inside = {"attn_implementation": value, "num_hidden_layers": None}
    edit(folder / "config.json", _attn_implementation=value, vision_config=inside)
    load_model(folder, dtype="float32", attention="eager")
    edit(folder / "config.json", _attn_implementation="flash_attention_2")
    assert read_model_config(folder)["vision_config"] == inside


def test_as_many_layers_in_a_model_inside_are_one_line_too(folder):
    edit(folder / "config.json", text_config={"num_hidden_layers": 10**7})
    with pytest.raises(ModelError, match="num_hidden_layers is 10000000, expected at most 10,000"):
        load_model(folder, dtype="float32", attention="eager")


@pytest.mark.parametrize("layers", [10**7, 0, -1, "6", None])
def test_an_impossible_number_of_layers_is_one_line(folder, layers):
    edit(folder / "config.json", num_hidden_layers=layers)
    with pytest.raises(ModelError, match=r"num_hidden_layers is .*, expected a number from 1 to 10,000"):
        load_model(folder, dtype="float32", attention="eager")


@pytest.mark.parametrize("quantization", [{"quant_method": "gptq", "bits": 4}, {"quant_method": "vptq"}, {"bits": "x"}])
def test_a_quantization_that_cannot_be_read_is_one_line(folder, quantization):
    edit(folder / "config.json", quantization_config=quantization)
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(folder, dtype="float32", attention="eager")


def test_a_quantization_that_nobody_knows_is_not_left_out(folder):
    edit(folder / "config.json", quantization_config={"quant_method": "evil"})
    with pytest.raises(
        ModelError, match=r"quantization_config\.quant_method is 'evil', expected one that transformers"
    ):
        load_model(folder, dtype="float32", attention="eager")


THETAS = (0, -1, math.nan, math.inf, 10**400, "x")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("rms_norm_eps", epsilon) for epsilon in (math.nan, math.inf, -1e-6, "1e-6")),
        *(("rope_parameters", {"rope_theta": theta, "rope_type": "default"}) for theta in THETAS),
    ],
)
def test_a_number_that_no_model_can_have_is_one_line(folder, key, value):
    """Other numbers may be infinite, as in configurations of Mamba 2."""
    edit(folder / "config.json", **{key: value})
    with pytest.raises(ModelError, match=r"(rms_norm_eps|rope_theta) is .*, expected a number (from 0 to 1|above 0)"):
        load_model(folder, dtype="float32", attention="eager")
    edit(
        folder / "config.json", **{key: 1e-6 if key == "rms_norm_eps" else {"rope_theta": 1e4, "rope_type": "default"}}
    )
    edit(folder / "config.json", time_step_limit=[0.0, math.inf])
    load_model(folder, dtype="float32", attention="eager")


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda path: path.mkdir()])
def test_weights_that_are_no_file_are_not_read(folder, tmp_path, make):
    (folder / "model.safetensors").unlink()
    make(folder / "model.safetensors")
    for load in (
        lambda: prepare_model(ModelConfig(source=str(folder)), tmp_path / "prepared"),
        lambda: load_model(folder, dtype="float32", attention="eager"),
    ):
        with pytest.raises(ModelError, match=r"model\.safetensors: found a (folder|pipe, socket or device)"):
            load()


def test_a_link_cannot_copy_a_file_from_outside_and_links_of_a_cache_are_followed(folder, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("{{ messages }}", encoding="utf-8")
    (folder / "chat_template.jinja").symlink_to(secret)
    with pytest.raises(ModelError, match="a link to a file outside of its folder"):
        prepare_model(ModelConfig(source=str(folder)), tmp_path / "prepared")
    cached = tmp_path / "models--a--b" / "snapshots" / "revision"
    (cached.parents[1] / "blobs").mkdir(parents=True)
    cached.mkdir(parents=True)
    secret.rename(cached.parents[1] / "blobs" / "template")
    (folder / "chat_template.jinja").unlink()
    for path in folder.iterdir():
        shutil.copy(path, cached / path.name)
    (cached / "model.safetensors").rename(cached.parents[1] / "blobs" / "weights")
    (cached / "model.safetensors").symlink_to("../../blobs/weights")
    (cached / "chat_template.jinja").symlink_to("../../blobs/template")
    prepare_model(ModelConfig(source=str(cached)), tmp_path / "prepared")
    assert (tmp_path / "prepared" / "chat_template.jinja").read_text(encoding="utf-8") == "{{ messages }}"


@pytest.mark.parametrize(
    "shard", ["../secret.safetensors", "/etc/passwd", "a/../../x.safetensors", "missing", 5, "config.json"]
)
def test_an_index_must_stay_in_its_folder(folder, tmp_path, shard):
    (tmp_path / "secret.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    edit(folder / "model.safetensors.index.json", weight_map={"model.norm.weight": shard})
    with pytest.raises(ModelError, match="expected safetensors files in the same folder"):
        prepare_model(ModelConfig(source=str(folder)), tmp_path / "prepared")
    assert not (tmp_path / "prepared").exists()


def test_a_chat_template_cannot_reach_python(folder, tmp_path):
    trace = tmp_path / "it_ran"
    reach = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    write = f"{{{{ cycler.__init__.__globals__.os.system('touch {trace}') }}}}"
    for template in (reach, write, "{% include '/etc/passwd' %}"):
        edit(folder / "tokenizer_config.json", chat_template=template)
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
        tokenizer = load_tokenizer(folder)
        with pytest.raises(ModelError, match=r"chat template of .* cannot be used") as caught:
            format_prompt("What is 1 plus 1 ?", PromptFormat(style="chat"), tokenizer, ())
        assert "root:" not in str(caught.value)
    assert not trace.exists()


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "line"),
    [
        ({"chat_template.jinja": ENDLESS}, r"chat_template\.jinja: the chat template takes more than 2 s"),
        pytest.param(
            {"default": "{{ 'x' * 10**11 }}"},
            r"config\.json: default: the chat template takes more than (4,000 MB|2 s)",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"chat_template.jinja": "{% if messages|length > 9 %}{{ 'x' * 10**10 }}{% endif %}"},
            # To fill so much memory may take a busy machine longer than the other limit.
            r"chat_template\.jinja: the chat template takes more than (4,000 MB|2 s)",
            id="constants are computed also where nothing uses them",
        ),
        ({"additional_chat_templates/a.jinja": ENDLESS}, r"a\.jinja: the chat template takes more than 2 s"),
        ({"default": "x" * 1_000_001}, "a chat template of 1,000,001 characters, expected 1,000,000"),
    ],
)
def test_a_chat_template_without_end_is_one_line(folder, tmp_path, template, line):
    for name, text in template.items():
        if name.endswith(".jinja"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
        else:
            edit(folder / "tokenizer_config.json", chat_template=[{"name": name, "template": text}])
    with pytest.raises(ModelError, match=line):
        prepare_model(ModelConfig(source=str(folder)), tmp_path / "prepared")
    assert not (tmp_path / "prepared").exists()


def test_chat_templates_that_end_are_tried_and_taken(folder, tmp_path):
    usual = "{% for m in messages %}{{ bos_token }}{{ m.content | trim }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(usual, encoding="utf-8")
    edit(folder / "tokenizer_config.json", chat_template="{{ raise_exception('not without a system prompt') }}")
    prepare_model(ModelConfig(source=str(folder)), tmp_path / "prepared")
    assert (tmp_path / "prepared" / "chat_template.jinja").read_text(encoding="utf-8") == usual


@pytest.mark.slow
def test_the_check_of_a_study_tries_a_chat_template_before_it_uses_it(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    content = yaml.safe_load(Path("config/smoke.yaml").read_text(encoding="utf-8"))
    content |= {"models": {"base": {"source": str(folder)}}, "prompt": {"style": "chat"}}
    content["arms_file"] = str(ROOT / "config" / "arms.yaml")
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(ENDLESS, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja: the chat template takes more than 2 s"):
        open_study([tmp_path / "study.yaml"])
    usual = "{% for m in messages %}{{ m.content }}{% endfor %}"
    # With the tokens of the tokenizer, which the trial of a template alone does not have.
    own = f"{{% if bos_token != '<s>' %}}{ENDLESS}{{% endif %}}{usual}"
    (folder / "chat_template.jinja").write_text(own, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"prompt\.style: found chat, .* takes more than 2 s"):
        open_study([tmp_path / "study.yaml"])
    (folder / "chat_template.jinja").write_text(usual, encoding="utf-8")
    open_study([tmp_path / "study.yaml"])


DOUBLING = {"type": "Replace", "pattern": {"String": "e"}, "content": "ee"}


@pytest.mark.parametrize(
    ("key", "kind", "parts"), [("normalizer", "Sequence", "normalizers"), ("decoder", "Sequence", "decoders")]
)
def test_a_tokenizer_without_end_is_one_line(folder, tmp_path, key, kind, parts):
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    for number in (2, 50):
        content[key] = {"type": kind, parts: [DOUBLING] * number}
        (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
        if number == 2:
            prepare_model(ModelConfig(source=str(folder)), tmp_path / "prepared")
    with pytest.raises(ModelError, match=r"tokenizer\.json: the tokenizer takes more than (2 s|4,000 MB)"):
        prepare_model(ModelConfig(source=str(folder)), tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_additional_templates_are_where_transformers_looks_for_them():
    assert TEMPLATE_FOLDER == CHAT_TEMPLATE_DIR


@pytest.mark.parametrize(
    "template",
    ["{% for a in range(10**9) %}{% endfor %}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ 1 // 0 }}"],
)
def test_whatever_a_chat_template_raises_is_one_line(folder, template):
    edit(folder / "tokenizer_config.json", chat_template=template)
    with pytest.raises(ModelError, match=r"chat template of .* cannot be used") as caught:
        format_prompt("What is 1 plus 1 ?", PromptFormat(style="chat"), load_tokenizer(folder), ())
    assert "\n" not in str(caught.value)


def test_a_chat_template_that_is_no_text_is_one_line(folder, tmp_path):
    (folder / "chat_template.jinja").write_bytes(b"\xff{{ messages }}")
    with pytest.raises(ModelError, match=r"chat_template\.jinja: not UTF-8"):
        prepare_model(ModelConfig(source=str(folder)), tmp_path / "prepared")


@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "model.safetensors.index.json", "tokenizer_config.json", "tokenizer.json"),
        *("generation_config.json", "adapter_config.json"),
    ],
)
def test_settings_that_are_no_file_or_too_large_are_one_line(folder, tmp_path, name):
    def load():
        load_model(folder, dtype="float32", attention="eager")

    for attempt in (lambda: prepare_model(ModelConfig(source=str(folder)), tmp_path / "prepared"), load):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
        with pytest.raises(ModelError, match=r"found a pipe, socket or device|without config\.json"):
            attempt()
        (folder / name).unlink()
        with (folder / name).open("wb") as file:
            file.truncate(2**40)
        with pytest.raises(ModelError, match=r"1,099,511,627,776 bytes, expected at most 268,435,456"):
            attempt()


@pytest.mark.parametrize(
    ("name", "key", "entries"),
    [
        ("config.json", "rope_scaling", [1.0] * 50_001),
        ("generation_config.json", "eos_token_id", [*range(50_001)]),
        ("tokenizer_config.json", "added_tokens_decoder", {str(i): {"content": f"<{i}>"} for i in range(50_001)}),
    ],
)
def test_entries_without_end_are_one_line(folder, tmp_path, name, key, entries):
    """With a million factors of positions, transformers computed for minutes."""
    edit(folder / name, **{key: entries})
    with pytest.raises(ModelError, match=rf"{name}: {key} has 50,001 entries, expected at most 50,000"):
        prepare_model(ModelConfig(source=str(folder)), tmp_path / "prepared")


def empty_normalizer(folder):
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    content["normalizer"] = {"type": "Replace", "pattern": {"String": ""}, "content": "x" * 1000}
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")


@pytest.mark.parametrize(
    "spoil", [empty_normalizer, lambda folder: edit(folder / "tokenizer_config.json", model_max_length="x")]
)
def test_a_tokenizer_that_fails_on_text_fails_when_it_is_loaded(folder, spoil):
    load_tokenizer(folder)
    spoil(folder)
    with pytest.raises(ModelError, match=r"tokenizer of .* cannot be loaded: "):
        load_tokenizer(folder)


def test_a_list_of_usual_length_is_taken(folder, tmp_path):
    edit(folder / "generation_config.json", eos_token_id=[1, *range(40)], suppress_tokens=[*range(100)])
    prepare_model(ModelConfig(source=str(folder)), tmp_path / "prepared")


@pytest.mark.parametrize("depth", range(100, 1100, 50))
def test_settings_inside_settings_are_one_line_at_any_depth(folder, depth):
    text = (folder / "config.json").read_text().rstrip().removesuffix("}")
    (folder / "config.json").write_text(text + ',"a":' + '{"a":' * depth + "1" + "}" * (depth + 1))
    with suppress(ModelError):
        read_model_config(folder)


@pytest.mark.parametrize("size", [0, -1, float("nan"), "96", [96, 0], 2**31])
@pytest.mark.parametrize(
    "key", ["hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings"]
)
def test_an_impossible_size_is_one_line(folder, key, size):
    edit(folder / "config.json", **{key: size})
    with pytest.raises(ModelError, match=rf"{key} is .*, expected a whole number from 1 to 2,147,483,647"):
        read_model_config(folder)


@pytest.mark.parametrize("head_dim", [-1, 0.5, float("nan"), "x", [1]])
def test_an_impossible_width_of_heads_is_one_line(folder, head_dim):
    """A family may have a width of 0, so config.json alone is not refused."""
    edit(folder / "config.json", head_dim=head_dim)
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(folder, dtype="float32", attention="eager")


def test_sizes_that_a_family_may_have_are_taken(folder):
    edit(folder / "config.json", head_dim=0, intermediate_size=[96, 128], num_key_value_heads=None)
    assert read_model_config(folder)["intermediate_size"] == [96, 128]
    assert shape_from_config(read_model_config(folder)) is None


@pytest.mark.parametrize("changes", [{"hidden_act": ["silu"]}, {"hidden_act": "x"}, {"pad_token_id": 10**6}])
def test_settings_that_transformers_refuses_are_one_line(folder, changes):
    edit(folder / "config.json", **changes)
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(folder, dtype="float32", attention="eager")


def test_the_attention_of_a_study_counts_and_not_that_of_a_model(folder):
    edit(folder / "config.json", _attn_implementation="sdpa")
    model = load_model(folder, dtype="float32", attention="eager")
    assert model.config._attn_implementation == "eager"
    assert model.model.layers[0].self_attn.config._attn_implementation == "eager"
    assert create_model(folder, "meta", attention="eager").config._attn_implementation == "eager"


@pytest.mark.parametrize("results", ["a/../../elsewhere", "results/..", "a/.."])
def test_results_stay_in_the_working_directory(tmp_path, monkeypatch, results):
    monkeypatch.chdir(ROOT)
    content = yaml.safe_load(Path("config/smoke.yaml").read_text(encoding="utf-8"))
    (tmp_path / "study.yaml").write_text(yaml.safe_dump({**content, "results_dir": results}), encoding="utf-8")
    with pytest.raises(ConfigError, match="expected a folder below this one"):
        load_study_file(tmp_path / "study.yaml")


def test_a_key_that_stands_twice_is_refused(tmp_path):
    (tmp_path / "study.yaml").write_text("study: a\nseeds: [0]\nseeds: [1]\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="duplicate key 'seeds'"):
        load_study_file(tmp_path / "study.yaml")


def test_text_of_a_data_set_cannot_forge_or_colour_a_message(tmp_path):
    evil = "\x1b[2K\x1b[31mERROR: forged\r\nsecond line \u202e" + "x" * 1_000_000
    for split in ("train", "test"):
        line = json.dumps({"question": f"{split} {evil}", "answer": "no number " + evil})
        (tmp_path / f"{split}.jsonl").write_text(line + "\n", encoding="utf-8")
    with pytest.raises(DataError) as caught:
        load_problems(LocalDataset(source="local", path=str(tmp_path)), "train")
    text = str(caught.value)
    assert text.isprintable()
    assert len(text) < 1000


def test_messages_are_one_printable_line_whatever_they_hold():
    assert str(AqnpipeError("a\nb\x1b[0m\u202e\ud800")) == r"a\nb\x1b[0m\u202e\ud800"
    assert str(AqnpipeError("σ × 温度 é")) == "σ × 温度 é"
    assert printable("x" * 5000).endswith("(1000 characters more)")


def test_a_hostile_environment_runs_nothing(tmp_path):
    """Variables that ask for remote code, another hub, another place or colours change nothing."""
    home = tmp_path / "home"
    home.mkdir()
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "PYTHONPATH": os.pathsep.join(sys.path),
        "HOME": str(home),
        "HF_HUB_OFFLINE": "0",
        "TRUST_REMOTE_CODE": "1",
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "AQNPIPE_RESULTS": "../..",
        "LANG": "xx_YY.no-such",
        "COLUMNS": "-5",
        "NO_COLOR": "\x1b[31m",
    }
    done = subprocess.run(
        [sys.executable, "-c", "from aqnpipe.cli.main import main; main()", "check", "config/smoke.yaml"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("config/smoke.yaml: valid.")
    assert "\x1b" not in done.stdout + done.stderr
    assert list(home.iterdir()) == []
