"""A study for vLLM is refused before it starts if vLLM cannot compute it."""

from pathlib import Path

import pytest
import yaml

from aqnpipe.config.generation import why_not_shared
from aqnpipe.config.plan import StudyPlan
from aqnpipe.config.study import load_study

ROOT = Path(__file__).parents[2]
FIXED = {"kind": "relative_gaussian", "scale": 0.1, "redraw": "never"}


@pytest.fixture
def config(monkeypatch):
    monkeypatch.chdir(ROOT)
    changes = {"arms_file": "config/arms.yaml", "generation": {"backend": "vllm"}}
    return yaml.safe_load((ROOT / "config" / "config.yaml").read_text()) | changes


def test_clean_evaluations_may_use_either_attention_and_reach_the_job(config):
    config["evaluation"]["noise_levels"] = [0.0]
    config["comparisons"] = []
    config["report"].pop("explore", None)
    config["generation"]["rollout_backend"] = "transformers"
    spec = StudyPlan(load_study(config)).evaluation_spec(model="base", arm="pretrained", seed="0", step="0")
    assert spec["generation"]["backend"] == "vllm"


@pytest.mark.parametrize(("attention", "computed"), [("eager", "decomposed"), ("sdpa", "fused")])
@pytest.mark.parametrize("named", [None, "auto"])
def test_noise_on_attention_follows_the_model(config, tmp_path, attention, computed, named):
    arms = yaml.safe_load((ROOT / "config" / "arms.yaml").read_text())
    if named:
        arms["arms"]["E5"]["operator_noise"]["attention"] = named
    (tmp_path / "arms.yaml").write_text(yaml.safe_dump(arms))
    config |= {"arms_file": str(tmp_path / "arms.yaml"), "generation": {"backend": "transformers"}}
    config["models"]["base"]["attention"] = attention
    plan = StudyPlan(load_study(config))
    assert plan.training_spec("E5", 0)["arm"]["operator_noise"]["attention"] == computed
    assert plan.study.arms["E5"].operator_noise.attention == computed


def test_vllm_draws_rollouts_with_divided_weights_too(config):
    config["models"]["base"]["attention"] = "sdpa"
    config["training"] |= {"num_workers": 2, "parallelism": "fsdp"}
    assert load_study(config).config.generation.requested_for_rollouts == "vllm"


@pytest.mark.parametrize(
    ("noises", "fits"),
    [({}, True), ({"w4a16": "w4a16_mxfp4"}, True), ({"fixed": {"operator_noise": {"error": FIXED}}}, False)],
)
def test_noises_that_fit_vllm(config, noises, fits):
    config["generation"] = {"backend": "auto"}
    config["evaluation"]["noises"] = noises
    config["comparisons"] = []
    config["report"].pop("explore", None)
    assert load_study(config).config.evaluation.fits_vllm is fits


def on_shards(config, number, backend="vllm"):
    """The study evaluated by vLLM, whose workers share every layer."""
    config["models"]["base"]["attention"] = "sdpa"
    config["generation"] = {"backend": backend, "rollout_backend": "transformers", "tensor_parallel": number}
    return config


def test_shards_reach_evaluations_and_a_change_of_their_number_repeats_no_run(config):
    alone, shared = (StudyPlan(load_study(on_shards(config, number))) for number in (1, 2))
    place = {"model": "base", "arm": "E5", "seed": "0", "step": "8"}
    assert [plan.evaluation_spec(**place)["generation"]["tensor_parallel"] for plan in (alone, shared)] == [1, 2]
    assert alone.training_spec("E5", 0) == shared.training_spec("E5", 0)


@pytest.mark.parametrize(
    ("changes", "number", "reason"),
    [
        ({}, 2, None),
        ({}, 4, None),
        ({}, 12, "intermediate_size of 8960 does not divide by 12"),
        ({}, 8, "12 attention heads do not divide by 8"),
        ({"num_key_value_heads": 4}, 6, "4 heads of keys and values neither divide by 6 nor 6 by them"),
        ({"num_key_value_heads": None}, 3, "intermediate_size of 8960"),
        ({"num_key_value_heads": None, "intermediate_size": None}, 3, None),
    ],
)
def test_what_workers_can_share(changes, number, reason):
    """The sizes of Qwen2.5-1.5B; heads of keys and values may be copied."""
    sizes = {"num_attention_heads": 12, "num_key_value_heads": 2, "intermediate_size": 8960} | changes
    found = why_not_shared(sizes, number)
    assert found == reason if reason is None else reason in found
