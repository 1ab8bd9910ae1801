"""YAML files of users: numbers as written in any language, strict types, and files that extend each other."""

import os
from pathlib import Path

import pytest
import yaml

from aqnpipe.config.study import load_study_files
from aqnpipe.config.training import LoraConfig
from aqnpipe.config.yaml_file import load_yaml, read_yaml_file, typed_scalars
from aqnpipe.errors import ConfigError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("1E6", 1e6),
        ("-.5e3", -500.0),
        ("1.2e-4", 1.2e-4),
        ("1e", "1e"),
        ("e5", "e5"),
        ("'1e-6'", "1e-6"),
    ],
)
def test_numbers_are_read_as_in_any_language(tmp_path, text, value):
    (tmp_path / "x.yaml").write_text(f"x: {text}\n")
    read = read_yaml_file(tmp_path / "x.yaml")["x"]
    assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize(("text", "rank"), [("8", 8), ("8.0", 8), ("1e2", 100)])
def test_a_whole_number_may_be_written_as_a_float(tmp_path, text, rank):
    (tmp_path / "x.yaml").write_text(f"rank: {text}\nalpha: 16\n")
    assert load_yaml(tmp_path / "x.yaml", LoraConfig) == LoraConfig(rank=rank, alpha=16.0)


@pytest.mark.parametrize("text", ["'8'", "8.5", "true", "null", "[8]"])
def test_nothing_else_becomes_a_whole_number(tmp_path, text):
    (tmp_path / "x.yaml").write_text(f"rank: {text}\nalpha: 16\n")
    with pytest.raises(ConfigError, match=r"x\.yaml: rank: found .*, expected a whole number$"):
        load_yaml(tmp_path / "x.yaml", LoraConfig)


def test_all_mistakes_are_named_and_further_ones_counted(tmp_path):
    (tmp_path / "x.yaml").write_text("rank: 0\nalpha: x\ndropout: 2\ntarget_modules: []\n")
    with pytest.raises(ConfigError) as caught:
        load_yaml(tmp_path / "x.yaml", LoraConfig)
    assert str(caught.value).endswith(
        "x.yaml: rank: found 0, expected at least 1; alpha: found 'x', expected a number; dropout: found 2, expected a "
        "number below 1 (did you mean 0.02?); and 1 more mistake"
    )


def test_text_from_the_command_line_has_the_types_of_yaml():
    given = {"training": {"learning_rate": "1e-6", "lora": "null"}, "seeds": ["0", "1"], "study": "a", "empty": ""}
    assert typed_scalars(given) == {
        "training": {"learning_rate": 1e-6, "lora": None},
        "seeds": [0, 1],
        "study": "a",
        "empty": None,
    }


def test_later_files_and_overrides_extend_a_study(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    (tmp_path / "more.yaml").write_text(yaml.safe_dump({"training": {"temperature": 0.5}, "seeds": [5]}))
    study = load_study_files(
        [Path("config/smoke.yaml"), tmp_path / "more.yaml"], {"training": {"learning_rate": "1e-5"}}
    )
    assert (study.config.training.temperature, study.config.training.learning_rate) == (0.5, 1e-5)
    assert study.config.training.prompts_per_step == 4
    assert study.config.seeds == (5,)


def test_numbers_have_no_leading_zeros(tmp_path):
    path = tmp_path / "numbers.yaml"
    path.write_text("[0, -0, 10, +3, 1_000, 0x1F, 0.5, 08:00x, '010', v1:30]\n")
    assert read_yaml_file(path) == [0, 0, 10, 3, 1000, 31, 0.5, "08:00x", "010", "v1:30"]
    for number in ("010", "-07", "0_1", "00", "1:30", "-1:30"):
        path.write_text(f"a: {number}\n")
        with pytest.raises(ConfigError, match=r"numbers\.yaml:1:4: not valid YAML: found .* without leading zeros"):
            read_yaml_file(path)
        with pytest.raises(ConfigError, match=r"--config: found .* without leading zeros"):
            typed_scalars({"a": [number]})


def test_a_pipe_that_nobody_writes_is_no_file(tmp_path):
    """What a shell gives for <(command) is one too, and is read."""
    os.mkfifo(tmp_path / "x.yaml")
    with pytest.raises(ConfigError, match=r"x\.yaml: found a pipe, socket or device, expected a file"):
        read_yaml_file(tmp_path / "x.yaml")
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as file:
        file.write("a: 1")
    assert read_yaml_file(Path(f"/dev/fd/{reader}")) == {"a": 1}
    os.close(reader)
