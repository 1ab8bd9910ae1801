"""A study for vLLM is refused before it starts if vLLM cannot compute it."""

from pathlib import Path

import pytest
import yaml

from aqnpipe.config.plan import StudyPlan
from aqnpipe.config.study import load_study
from aqnpipe.errors import ConfigError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def config(monkeypatch):
    monkeypatch.chdir(ROOT)
    changes = {"arms_file": "config/arms.yaml", "generation": {"backend": "vllm"}}
    return yaml.safe_load((ROOT / "config" / "config.yaml").read_text()) | changes


def test_noise_on_the_products_of_attention_is_refused_on_vllm(config):
    with pytest.raises(ConfigError, match=r"models\.base\.attention: found eager, generation\.backend vllm needs sdpa"):
        load_study(config)


def test_clean_evaluations_may_use_either_attention_and_reach_the_job(config):
    config["evaluation"]["noise_levels"] = [0.0]
    config["comparisons"] = []
    config["report"].pop("explore", None)
    config["generation"]["rollout_backend"] = "transformers"
    spec = StudyPlan(load_study(config)).evaluation_spec(model="base", arm="pretrained", seed="0", step="0")
    assert spec["generation"]["backend"] == "vllm"


def test_noise_that_vllm_cannot_roll_out_under_is_refused(config):
    config["evaluation"]["noise_levels"] = [0.0]
    config["comparisons"] = []
    config["report"].pop("explore", None)
    with pytest.raises(ConfigError, match=r"arm E5: vLLM cannot draw its rollouts: operator_noise.attention is dec"):
        load_study(config)


def test_an_unknown_backend_is_refused(config):
    config["generation"]["backend"] = "another"
    with pytest.raises(ConfigError, match=r"generation\.backend"):
        load_study(config)
