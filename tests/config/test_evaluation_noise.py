"""Named noises of an evaluation: passes, levels that stand for them, comparisons that name them, mistakes."""

import pytest

from aqnpipe.config.evaluation import EvaluationConfig, EvaluationNoise
from aqnpipe.config.noise import CacheNoise, NoiseSpec
from aqnpipe.config.study import load_study
from aqnpipe.errors import ConfigError

TRUNCATED = {"operator_noise": {"error": {"kind": "mantissa_truncation", "mantissa_bits": 3}}}
IN_MLP = {"module_noise": {"modules": ["*.down_proj"], "error": {"kind": "relative_gaussian", "scale": 0.1}}}
IN_LAYER = {"operator_noise": {"layers": [2], "error": {"kind": "absolute_gaussian", "scale": 0.1}}}


def content(noises=None, comparisons=(), **changes):
    evaluation = {"noise_levels": [0.0, 0.1], "noise_seeds": [3, 4], "max_response_tokens": 8, "batch_size": 20}
    study = {
        "study": "mine",
        "checkpoints": {"a": "tiny", "b": "tiny-large"},
        "dataset": {"source": "generated", "num_test": 20},
        "evaluation": evaluation | ({"noises": noises} if noises is not None else {}),
        "comparisons": list(comparisons),
        "report": {"title": "t", "question": "q"},
    }
    return study | changes


def evaluation_of(noises) -> EvaluationConfig:
    return load_study(content(noises)).config.evaluation


def test_random_noises_are_drawn_with_every_noise_seed_and_roundings_once():
    evaluation = evaluation_of({"cut": TRUNCATED, "mlp": IN_MLP, "fp4": "w4a16_nvfp4"})
    assert evaluation.passes() == [(0.0, 3), (0.1, 3), (0.1, 4), (1.0, 3), (2.0, 3), (2.0, 4), (3.0, 3)]
    assert evaluation.noise_names() == {1.0: "cut", 2.0: "mlp", 3.0: "fp4"}


def test_the_noise_at_a_level_is_the_one_that_its_name_stands_for():
    evaluation = evaluation_of({"layer": IN_LAYER, "mlp": IN_MLP})
    noise = evaluation.noise_at(1.0, "eager")
    operators, modules = noise.operator_noise, noise.module_noise
    assert (operators.layers, operators.phases, operators.attention, modules) == (
        (2,),
        ("evaluation",),
        "decomposed",
        None,
    )
    assert evaluation.noise_at(1.0, "sdpa").operator_noise.attention == "fused"
    noise = evaluation.noise_at(2.0, "eager")
    operators, modules = noise.operator_noise, noise.module_noise
    assert (operators, modules.modules, modules.phases) == (None, ("*.down_proj",), ("evaluation",))
    assert evaluation.noise_at(0.0, "eager") == NoiseSpec()
    assert evaluation.noise_at(0.1, "eager").operator_noise.error.scale == 0.1


@pytest.mark.parametrize(
    ("name", "number_format", "activations"),
    [
        ("w4a16_mxfp4", "mxfp4", False),
        ("w4a16_nvfp4", "nvfp4", False),
        ("w4a4_mxfp4", "mxfp4", True),
        ("w4a4_nvfp4", "nvfp4", True),
        ("fp8", "fp8", True),
        ("fp8_block", "fp8_block", True),
    ],
)
def test_presets_quantize_weights_or_weights_and_activations_and_spare_the_output_projection(
    name, number_format, activations
):
    noise = evaluation_of({"x": name}).noise_at(1.0, "eager").operator_noise
    assert (noise.error.format, noise.error.weights, noise.error.activations) == (number_format, True, activations)
    assert not noise.include_lm_head


@pytest.mark.parametrize("number_format", ["fp8", "int8"])
def test_presets_of_a_cache_round_keys_and_values_alone_and_once(number_format):
    evaluation = evaluation_of({"x": f"kv8_{number_format}"})
    noise = evaluation.noise_at(1.0, "sdpa")
    assert noise == NoiseSpec(kv_cache=CacheNoise(format=number_format, phases=("evaluation",)))
    assert not evaluation.is_random(1.0)
    assert evaluation.fits_vllm
    assert evaluation_of({"x": {"kv_cache": number_format}}).noise_at(1.0, "sdpa") == noise


def test_a_cache_beside_noise_on_operators_is_one_noise():
    noise = evaluation_of({"x": {**IN_LAYER, "kv_cache": "int8"}}).noise_at(1.0, "eager")
    assert (noise.operator_noise.layers, noise.kv_cache.format) == ((2,), "int8")


def test_comparisons_name_a_noise():
    levels = {"kind": "levels", "arm": "a", "claim": "c", "noise_level": "mlp"}
    study = load_study(content({"cut": TRUNCATED, "mlp": IN_MLP}, [levels]))
    assert study.comparisons()[0].noise_level == 2.0


def test_without_declared_comparisons_named_noises_are_compared_too():
    found = {(c.kind, c.noise_level, c.claim) for c in load_study(content({"cut": TRUNCATED})).comparisons()}
    assert ("arms", 1.0, "a and b differ in accuracy under the noise cut") in found
    assert ("levels", 1.0, "the noise cut costs a accuracy") in found
    assert ("degradation", 1.0, "a and b differ in what the noise cut costs them") in found


def test_attention_follows_the_model_and_another_one_is_refused():
    given = {"operator_noise": IN_LAYER["operator_noise"] | {"attention": "fused"}}
    with pytest.raises(ConfigError) as refused:
        evaluation_of({"x": given})
    assert str(refused.value) == (
        "config: evaluation.noises.x.operator_noise.attention: found 'fused', expected no value: model a computes "
        "attention eager, decomposed"
    )
    on_sdpa = {"a": {"source": "tiny", "attention": "sdpa"}}
    config = load_study(content({"x": given}, checkpoints=on_sdpa)).config
    # As a job reads it again, without the other machines on which the study evaluates.
    evaluation = EvaluationConfig.model_validate(config.evaluation.model_dump(mode="json", exclude={"machines"}))
    assert evaluation.noise_at(1.0, "sdpa").operator_noise.attention == "fused"
    with pytest.raises(ConfigError, match="found fused, the model computes attention eager"):
        evaluation.noise_at(1.0, "eager")


def test_measured_noises_are_drawn_with_every_noise_seed():
    noise = {"operator_noise": {"error": {"kind": "measured", "from": "parity.json", "multiple": 2}}}
    assert EvaluationNoise.model_validate(noise).is_random
