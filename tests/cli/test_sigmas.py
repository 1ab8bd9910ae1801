"""`aqnpipe sigmas` with a measured error and a sensitivity: what fits together, by hand, and what is refused."""

import pytest
import yaml
from made_up_diagnoses import diagnosis
from made_up_parities import identity, operator, parity
from typer.testing import CliRunner

from aqnpipe.artifacts.diagnoses import LayerMetrics, LayerSensitivity, SensitivityFile
from aqnpipe.artifacts.files import write_json
from aqnpipe.cli.main import app
from aqnpipe.errors import ConfigError, DataError

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
        return CliRunner().invoke(app, [str(part) for part in ("sigmas", tmp_path / "d.json", *files, *arguments)])

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
