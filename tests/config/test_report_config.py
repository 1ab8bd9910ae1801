"""Settings of the report in a study file."""

from pathlib import Path

import pytest
import yaml

from aqnpipe.config.study import load_study
from aqnpipe.errors import ConfigError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def config(monkeypatch):
    monkeypatch.chdir(ROOT)
    return yaml.safe_load((ROOT / "config" / "config.yaml").read_text()) | {"arms_file": "config/arms.yaml"}


def test_a_pair_of_arms_may_be_named(config):
    config["report"] |= {"language": "zh", "explore": {"treatment": "E5", "control": "pretrained", "noise_level": 0.1}}
    report = load_study(config, "study.yaml").config.report
    assert (report.language, report.explore.treatment, report.explore.noise_level) == ("zh", "E5", 0.1)


@pytest.mark.parametrize(
    ("report", "message"),
    [
        ({"language": "fr"}, r"report\.language"),
        (
            {"explore": {"treatment": "E99", "control": "E5"}},
            r"report\.explore\.treatment: found 'E99', expected ",
        ),
        ({"explore": {"treatment": "E5", "control": "E5"}}, r"explore\.control: found 'E5', expected another arm"),
        (
            {"explore": {"treatment": "E5", "control": "baseline", "noise_level": 0.07}},
            r"report\.explore\.noise_level: found 0\.07, expected one that the study evaluates: ",
        ),
        ({"explore": {"treatment": "E5"}}, r"report\.explore\.control: missing key"),
    ],
)
def test_a_mistake_is_one_line(config, report, message):
    config["report"] |= report
    with pytest.raises(ConfigError, match=message) as caught:
        load_study(config, "study.yaml")
    assert "\n" not in str(caught.value)


def test_arms_of_two_models_are_no_pair(config):
    config["models"]["large"] = {"source": "tiny-large"}
    config["arms"] = ["baseline", "E7a"]
    config["comparisons"] = []
    config["report"]["explore"] = {"treatment": "E7a", "control": "baseline"}
    with pytest.raises(
        ConfigError, match=r"control: found 'baseline', expected another arm than E7a, of the model large"
    ):
        load_study(config, "study.yaml")
