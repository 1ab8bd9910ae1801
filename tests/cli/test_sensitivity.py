"""`aqnpipe sensitivity`, and `aqnpipe sigmas` from what it and `aqnpipe diagnose` wrote."""

import json

import pytest
import yaml
from made_up_diagnoses import diagnosis
from made_up_parities import identity, operator, parity
from random_models import random_model_of
from typed import typed

from aqnpipe.artifacts.diagnoses import LayerMetrics, LayerSensitivity, SensitivityFile
from aqnpipe.artifacts.files import read_json, write_json
from aqnpipe.errors import AqnpipeError, ConfigError, DataError, ModelError, StorageError
from aqnpipe.report.charts import write_sensitivity_chart

FEW = ("--texts", 3, "--noise-seeds", 1)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sensitivity")
    result = typed("sensitivity", "tiny", *FEW, "--json", folder / "s.json", "--figure", folder / "s.svg")
    assert result.exit_code == 0, result.output
    return result, folder


def test_table_file_and_picture_cover_every_layer(measured):
    result, folder = measured
    file = read_json(folder / "s.json", SensitivityFile)
    assert [layer.layer for layer in file.layers] == [0, 1, 2, 3, 4, 5, None]
    assert (file.model, file.data, file.scale, file.num_texts) == ("tiny", "word_problems", 0.1, 3)
    assert file.accuracy is not None
    assert f"{file.layers[0].estimate:+.4f}" in result.stdout
    assert "output projection" in result.stdout
    picture = (folder / "s.svg").read_text()
    assert picture.startswith("<svg")
    assert "increase of the loss" in picture
    assert "change of the accuracy" in picture


def test_sigmas_take_the_sensitivity_from_the_file(measured, tmp_path):
    diagnosis = tmp_path / "d.json"
    assert typed("diagnose", "tiny", "--prompts", 2, "--json", diagnosis).exit_code == 0
    refused = typed("sigmas", diagnosis, "--strategy", "robust_first")
    assert isinstance(refused.exception, DataError)
    assert "aqnpipe sigmas --sensitivity" in str(refused.exception)
    file = measured[1] / "s.json"
    found = typed("sigmas", diagnosis, "--strategy", "robust_first", "--sensitivity", file)
    assert found.exit_code == 0
    assert "strategy: robust_first" in found.stdout


def test_lines_of_a_text_file_give_the_loss_alone(tmp_path):
    (tmp_path / "t.txt").write_text("Question: Tom has 3 apples.\n\nAnswer: 3\n")
    target = tmp_path / "s.json"
    arguments = ("--data", tmp_path / "t.txt", "--noise-seeds", 1, "--json", target)
    result = typed("sensitivity", "tiny", *arguments, "--fault", "type=dead_zone,layer=3,magnitude=0.3")
    assert result.exit_code == 0, result.output
    content = json.loads(target.read_text())
    assert (content["num_texts"], content["accuracy"]) == (2, None)
    assert content["simulated_faults"] == ["type=dead_zone,layer=3,magnitude=0.3"]


@pytest.fixture(scope="module")
def without_tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bare")
    random_model_of("llama", num_layers=2).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["tiny", "--scale", "1"], ConfigError, "--scale: found 1, expected below 1; did you mean 0.01?"),
        (["tiny", "--scale", "0"], ConfigError, "--scale: found 0, expected"),
        (["tiny", "--json", "nowhere/s.json"], StorageError, "--json: nowhere: found no such folder"),
        (["tiny", "--json", "."], StorageError, "--json .: found a folder"),
        (["tiny", "--figure", "s.pdf"], ConfigError, "--figure s.pdf: found suffix '.pdf', expected .svg or .png"),
        (["tiny", "--figure", "nowhere/s.svg"], StorageError, "--figure: nowhere: found no such folder"),
        (["tiny", "--device", "cuda:99"], ConfigError, "--device cuda:99: not usable here"),
        (
            ["tiny", "--data", "nowhere"],
            ConfigError,
            "--data: found 'nowhere', which is no file or folder here, expected",
        ),
        (["tiny", "--data", "nowhere.txt"], DataError, "--data nowhere.txt: no such file, expected texts as lines"),
        (["tiny", "--fault", "type=dead_zone"], AqnpipeError, "layer"),
        (["./nowhere"], ModelError, "nowhere"),
    ],
)
def test_bad_input_is_one_line_before_any_work(arguments, error, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "aqnpipe.diagnosis.sensitivity.layers.sensitivity", lambda *_, **__: pytest.fail("work has begun")
    )
    result = typed("sensitivity", *arguments)
    assert isinstance(result.exception, error), result.output
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)


def test_models_of_other_families_or_without_a_tokenizer_are_refused(without_tokenizer, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mamba", "architectures": ["MambaForCausalLM"]}')
    for folder, message in ((tmp_path, "Mamba"), (without_tokenizer, "found no tokenizer")):
        result = typed("sensitivity", folder)
        assert isinstance(result.exception, ModelError), result.output
        assert message in str(result.exception)


def test_picture_shows_a_single_text_without_accuracy_in_both_formats(tmp_path):
    layers = [
        LayerSensitivity(
            layer=layer,
            estimate=0.01,
            loss_increase=-0.01,
            loss_standard_error=None,
            accuracy_change=None,
            accuracy_standard_error=None,
        )
        for layer in (0, 1, None)
    ]
    file = SensitivityFile(
        scale=0.1,
        noise_seeds=(0,),
        num_texts=1,
        num_scored_tokens=3,
        num_questions=0,
        loss=1.0,
        accuracy=None,
        fragile_layers=(),
        rank_correlation=None,
        layers=tuple(layers),
        untested=(),
        model="a <b>",
        data="x.txt",
        device="cpu",
        dtype="float32",
        seconds=1.0,
    )
    for name in ("one.svg", "two.svg", "three.png"):
        write_sensitivity_chart(tmp_path / name, file)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert "accuracy" not in (tmp_path / "one.svg").read_text()
    assert (tmp_path / "three.png").read_bytes().startswith(b"\x89PNG")


OF_TWO_LAYERS = (operator("q_proj", 0), operator("q_proj", 1))


def sensitivity(scale):
    """Estimates of 0.3 and 0.1 nats at noise of 10 %, measured with noise of `scale`."""
    layers = [
        LayerSensitivity(
            layer=layer,
            estimate=estimate * (scale / 0.1) ** 2,
            loss_increase=0.1,
            loss_standard_error=None,
            accuracy_change=None,
            accuracy_standard_error=None,
        )
        for layer, estimate in ((0, 0.3), (1, 0.1), (None, 0.2))
    ]
    settings = {"num_texts": 1, "num_scored_tokens": 3, "num_questions": 0, "loss": 1.0, "accuracy": None}
    settings |= {"fragile_layers": (), "rank_correlation": None, "untested": (), "noise_seeds": (0,)}
    named = {"model": "tiny", "data": "x.txt", "device": "cpu", "dtype": "float32", "seconds": 1.0}
    return SensitivityFile(scale=scale, layers=tuple(layers), **settings, **named)


@pytest.fixture
def sigmas(tmp_path):
    """Runs the command on files of a model of two layers; `weights` are those of the diagnosis."""

    def run(*arguments, weights="a" * 64, scale=0.1, **changed):
        layers = tuple(LayerMetrics(layer=layer, scans={"layer": layer, "gain": 1.0}) for layer in (0, 1))
        write_json(tmp_path / "d.json", diagnosis().model_copy(update={"layers": layers, "weights_sha256": weights}))
        write_json(tmp_path / "s.json", sensitivity(scale))
        write_json(tmp_path / "p.json", parity(OF_TWO_LAYERS, **changed))
        files = ("--sensitivity", tmp_path / "s.json", "--parity", tmp_path / "p.json")
        return typed("sigmas", tmp_path / "d.json", *files, *arguments)

    return run


@pytest.mark.parametrize("scale", [0.1, 0.02, 0.4])
def test_the_cost_is_predicted_from_the_sensitivity_at_ten_percent(sigmas, scale):
    result = sigmas("--strategy", "damage_first", scale=scale)
    assert result.exit_code == 0, result.output
    reasons = yaml.safe_load(result.stdout)["reasons"]
    # An error of 20 % costs four times what 10 % does.
    assert "error 20 %, sensitivity 0.3, predicted cost 1.2 nats per token, number 1 of 2" in reasons["0"]
    assert "error 20 %, sensitivity 0.1, predicted cost 0.4 nats per token, number 2 of 2" in reasons["1"]


def refusal(result, kind):
    assert isinstance(result.exception, kind), result.output
    assert "\n" not in str(result.exception)
    return str(result.exception)


def test_a_parity_of_other_weights_is_refused_although_it_has_as_many_layers(sigmas):
    text = refusal(sigmas("--strategy", "damage_first", first=identity(weights_sha256="c" * 64)), ConfigError)
    assert "p.json: a parity of other weights: found SHA-256 cccccccccccc (tiny)" in text
    assert "aaaaaaaaaaaa" in text


def test_a_diagnosis_that_names_no_weights_is_refused_beside_a_parity(sigmas):
    text = refusal(sigmas("--strategy", "damage_first", weights=None), DataError)
    assert "d.json: no weights_sha256" in text


@pytest.mark.parametrize("strategy", ["published", "robust_first", "shuffled_layers"])
def test_a_parity_that_the_strategy_does_not_use_is_refused(sigmas, strategy):
    text = refusal(sigmas("--strategy", strategy), ConfigError)
    assert text == (
        f"--parity: found beside --strategy {strategy}, which does not use it; expected --strategy damage_first"
    )


def test_a_sensitivity_that_the_strategy_does_not_use_is_refused(tmp_path):
    text = refusal(typed("sigmas", tmp_path / "d.json", "--sensitivity", tmp_path / "s.json"), ConfigError)
    assert text.startswith("--sensitivity: found beside --strategy published, which does not use it; expected")
