"""Evaluations and trainings by different generation backends are not compared."""

from types import SimpleNamespace

import pytest

from aqnpipe.artifacts.runs import RunRecord
from aqnpipe.comparison.evaluations import OF_ROLLOUTS, _setting, setting_difference


def evaluation(name, **setting):
    return SimpleNamespace(setting=setting, source=SimpleNamespace(name=name))


def record(**generation):
    return RunRecord(
        stage="evaluate",
        identity={},
        config={},
        code_digest="",
        inputs_sha256={},
        versions={},
        device="cpu",
        generation=generation,
    )


def test_the_backend_of_an_evaluation_is_a_setting_and_the_number_of_its_workers_is_not():
    one, two = (record(backend="vllm", vllm="0.32", enforce_eager=True, workers=number) for number in (1, 2))
    assert _setting(one) == _setting(two)
    first, second = (
        evaluation(name, **_setting(made)) for name, made in (("a", one), ("b", record(backend="transformers")))
    )
    assert setting_difference(first, second) == "generation.backend is vllm for a and transformers for b"


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ({OF_ROLLOUTS: "vllm 0.32"}, None),
        ({}, None),
        ({OF_ROLLOUTS: "transformers"}, f"{OF_ROLLOUTS} is vllm 0.32 for E5 and transformers for other"),
    ],
)
def test_rollouts_by_another_backend_differ_and_the_model_before_training_has_none(other, difference):
    found = setting_difference(evaluation("E5", **{OF_ROLLOUTS: "vllm 0.32"}), evaluation("other", **other))
    assert found == difference


def test_evaluations_on_other_numbers_of_shards_are_not_compared():
    shared, alone = (
        record(backend="vllm", vllm="0.32").model_copy(update={"config": {"generation": {"tensor_parallel": number}}})
        for number in (2, 1)
    )
    found = setting_difference(evaluation("a", **_setting(shared)), evaluation("b", **_setting(alone)))
    assert found == "config.generation.tensor_parallel is 2 for a and 1 for b"
