"""A model that computes under another specification than its receipt requests is refused, whatever differs."""

import pytest
import torch

from aqnpipe.config.noise import (
    AbsoluteGaussian,
    AdaptiveNoise,
    ConstantSigma,
    FakeQuantization,
    Fault,
    ModuleNoise,
    NoiseSpec,
    OperatorNoise,
    RelativeGaussian,
)
from aqnpipe.machine.machine import NoiseKey
from aqnpipe.noise.aqn import noised_rollout, target_factors
from aqnpipe.noise.injection.faults import ActiveFaults
from aqnpipe.noise.injection.phase import phase_noise
from aqnpipe.noise.receipts.receipt import RecorderState
from aqnpipe.noise.receipts.recorder import ReceiptRecorder, mismatches

KEY = NoiseKey(seed=0, step=0)
RELATIVE = RelativeGaussian(scale=0.05)
DEAD_ZONE = Fault(type="dead_zone", layer=1, magnitude=0.2)
HIDDEN = AdaptiveNoise(schedule=ConstantSigma(sigma=0.1), targets="hidden_states")


def operators(error=RELATIVE, **settings):
    return OperatorNoise(error=error, **{"phases": ("rollout",), **settings})


def modules(scope="linear", **settings):
    return ModuleNoise(modules=scope, error=RELATIVE, **settings)


REQUESTED = NoiseSpec(operator_noise=operators(), module_noise=modules(), faults=(DEAD_ZONE,))


def problems(model, installed, requested, phase="rollout", expected_phases=("rollout",)):
    """Return the problems of a receipt that requests one specification while the model computes under the other."""
    recorder = ReceiptRecorder(requested, expected_phases=expected_phases, num_layers=3, num_norms=7)
    with torch.no_grad(), phase_noise(model, installed, phase, KEY, recorder):
        model(torch.randint(2, 64, (4, 12), generator=torch.Generator().manual_seed(0)), use_cache=False)
    return recorder.receipt().problems()


def with_operators(**settings):
    return REQUESTED.model_copy(update={"operator_noise": operators(**settings)})


def with_modules(*arguments, **settings):
    return REQUESTED.model_copy(update={"module_noise": modules(*arguments, **settings)})


def with_faults(*faults):
    return REQUESTED.model_copy(update={"faults": faults})


def dead_zone(**settings):
    return with_faults(DEAD_ZONE.model_copy(update=settings))


def test_the_same_specification_has_no_problems(model):
    assert problems(model, REQUESTED, REQUESTED.model_copy(deep=True)) == []


@pytest.mark.parametrize(
    ("installed", "problem"),
    [
        (with_operators(error=RelativeGaussian(scale=0.06)), "noised with relative_gaussian 0.06, which was not"),
        (with_operators(error=AbsoluteGaussian(scale=0.05)), "noised with absolute_gaussian 0.05, which was not"),
        (with_operators(layer_scales={1: 0.1}), "layer 1: noised with relative_gaussian 0.1, which was not requested"),
        (with_operators(layers=(0, 2)), "rollout: noise was requested but never reached layers [1]"),
        (with_operators(include_lm_head=False), "rollout: lm_head was not noised although requested"),
        (REQUESTED.model_copy(update={"operator_noise": None}), "noise was requested but never reached layers [0, 1"),
        (REQUESTED.model_copy(update={"module_noise": None}), "rollout: module noise reached 0 of 0 modules"),
        (NoiseSpec(), "fault dead_zone in layer 1 (layer_output) did not run"),
        (with_faults(DEAD_ZONE, DEAD_ZONE.model_copy(update={"layer": 2})), "1 were requested"),
    ],
)
def test_measurements_contradict_the_request(model, installed, problem):
    assert any(problem in found for found in problems(model, installed, REQUESTED))


def test_noise_where_none_was_requested_is_measured(model):
    for installed in (NoiseSpec(operator_noise=operators()), NoiseSpec(module_noise=modules())):
        found = problems(model, installed, NoiseSpec())
        assert any("noised with relative_gaussian 0.05, which was not requested" in line for line in found), found


# Measured figures alone would not show these.
@pytest.mark.parametrize(
    ("installed", "mismatch"),
    [
        (with_operators(operators="all"), 'operator_noise.operators: installed "all", requested "matmul"'),
        (with_operators(phases=("rollout", "validation")), "operator_noise.phases: installed"),
        (with_modules("mlp"), 'module_noise.modules: installed "mlp", requested "linear"'),
        (with_modules(("*.q_proj",)), 'module_noise.modules: installed ["*.q_proj"], requested "linear"'),
        (with_modules(point="output"), 'module_noise.point: installed "output", requested "input"'),
        (dead_zone(layer=2), "faults[0].layer: installed 2, requested 1"),
        (dead_zone(type="saturation"), 'faults[0].type: installed "saturation", requested "dead_zone"'),
        (dead_zone(magnitude=0.1), "faults[0].magnitude: installed 0.1, requested 0.2"),
        (dead_zone(sparsity=0.5, seed=1), "faults[0].seed: installed 1, requested 0"),
        (dead_zone(threshold="cached"), 'faults[0].threshold: installed "cached", requested "dynamic"'),
    ],
)
def test_another_installed_setting_is_refused(model, installed, mismatch):
    found = problems(model, installed, REQUESTED)
    assert any(line.startswith("rollout: ") and mismatch in line for line in found), found


def test_another_number_format_or_operand_is_refused(make_model):
    model = make_model(intermediate_size=64)
    requested = NoiseSpec(operator_noise=operators(FakeQuantization(format="mxfp4")))
    for error, mismatch in (
        (FakeQuantization(format="nvfp4"), 'error.format: installed "nvfp4", requested "mxfp4"'),
        (FakeQuantization(format="mxfp4", activations=True), "error.activations: installed true, requested false"),
    ):
        found = problems(model, NoiseSpec(operator_noise=operators(error)), requested)
        assert f"rollout: operator_noise.{mismatch}" in found
        assert any("recomputed values are not the requested ones" in line for line in found)


def test_a_phase_with_the_noise_of_another_phase_is_refused(model):
    found = problems(model, with_operators(phases=("validation",)), REQUESTED, "validation", ("validation",))
    assert any("noised with relative_gaussian 0.05, which was not requested" in line for line in found), found


def test_another_aqn_is_refused(model):
    requested = AdaptiveNoise(schedule=HIDDEN.schedule, targets="post_attention")
    recorder = ReceiptRecorder(
        NoiseSpec(aqn=requested), expected_phases=(), num_layers=3, num_norms=7, num_steps=1, num_epochs=1
    )
    spec = NoiseSpec(aqn=HIDDEN)
    factors = target_factors(model, HIDDEN, None)
    with (
        torch.no_grad(),
        noised_rollout(model, HIDDEN, factors, recorder, sigma=0.1, seed=0, step=0) as sigmas,
        phase_noise(model, spec, "rollout", KEY, recorder, hidden_sigmas=sigmas),
    ):
        model(torch.arange(2, 50).view(3, 16), use_cache=False)
    problems = recorder.receipt().problems()
    assert problems[0] == 'AQN: aqn.targets: installed "hidden_states", requested "post_attention"'
    assert all("a module had an error that was not requested" in problem for problem in problems[1:]), problems


def test_faults_other_than_those_of_the_specification_raise(model):
    recorder = ReceiptRecorder(REQUESTED, expected_phases=("rollout",), num_layers=3, num_norms=7)
    for faults in (
        ActiveFaults(),
        ActiveFaults.of([DEAD_ZONE.model_copy(update={"magnitude": 0.3})]),
        ActiveFaults.of([DEAD_ZONE, DEAD_ZONE]),
    ):
        with (
            pytest.raises(ValueError, match="are not those of the spec"),
            phase_noise(model, REQUESTED, "rollout", KEY, recorder, faults=faults),
        ):
            pass
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_mismatches_survive_saving_and_are_absent_from_a_receipt_without_any(model):
    recorder = ReceiptRecorder(REQUESTED, expected_phases=(), num_layers=3, num_norms=7)
    assert "mismatches" not in recorder.receipt().model_dump_json()
    recorder.note_installed("rollout", faults=())
    restored = ReceiptRecorder(REQUESTED, expected_phases=(), num_layers=3, num_norms=7)
    restored.restore(RecorderState.model_validate_json(recorder.state().model_dump_json()))
    (mismatch,) = restored.receipt().mismatches
    assert mismatch.startswith("rollout: faults: installed [], requested [{")


def test_each_differing_setting_is_one_line():
    installed = NoiseSpec(operator_noise=operators(layers=(1,), error=RelativeGaussian(scale=0.1)))
    assert mismatches("operator_noise", installed.operator_noise, operators()) == [
        "operator_noise.error.scale: installed 0.1, requested 0.05",
        "operator_noise.layers: installed [1], requested null",
    ]
    assert mismatches("operator_noise", operators(), operators()) == []
