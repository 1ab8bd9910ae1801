import math

import numpy as np
import polars as pl
import pytest
import torch
from scipy import stats

from aqnpipe.artifacts.diagnoses import LayerTable
from aqnpipe.config.diagnosis import DiagnosisConfig
from aqnpipe.config.noise import Fault
from aqnpipe.diagnosis.api import diagnose_model
from aqnpipe.diagnosis.capture import capture_layer_inputs, inference, run_layer
from aqnpipe.diagnosis.scans import (
    Measurements,
    add_input_noise,
    first_below,
    fisher_kurtosis,
    measure,
    published_findings,
    robust_z,
    run_scans,
    saturation_roles,
    score,
)
from aqnpipe.errors import ModelError
from aqnpipe.noise.injection.faults import simulated_faults

NUM_LAYERS = 8


def measurements(**changes) -> Measurements:
    """Eight quiet layers whose metrics differ a little, with single columns replaced."""
    values = {
        "instability": np.zeros(NUM_LAYERS),
        "gain": np.array([1.0, 1.1, 0.9, 1.05, 0.95, 1.0, 1.1, 0.9]),
        "kurtosis": 13 * 1.01 ** np.arange(NUM_LAYERS) - 3,
    }
    assert changes.keys() <= values.keys()
    return Measurements(**{**values, **changes}, forward_equivalents=1.0)


def at(layer: int, value: float, base: float = 0.0) -> np.ndarray:
    column = np.full(NUM_LAYERS, base)
    column[layer] = value
    return column


def published(measured: Measurements, config: DiagnosisConfig | None = None):
    findings = published_findings(score(measured), config or DiagnosisConfig())
    return [(finding.scan, finding.layer) for finding in findings]


def test_quiet_layers_give_no_findings():
    assert published(measurements()) == []


@pytest.mark.parametrize("layer", [0, 3, NUM_LAYERS - 1])
def test_ambient_takes_the_first_jump(layer):
    assert published(measurements(instability=at(layer, 0.2))) == [("ambient", layer)]


def test_ambient_takes_the_edge_not_the_maximum_where_noise_spreads():
    spreading = np.array([0, 0, 0, 0.2, 0.21, 0.22, 0.23, 0.5])
    assert published(measurements(instability=spreading)) == [("ambient", 3)]


def test_ambient_passes_a_device_that_is_evenly_noisy():
    assert published(measurements(instability=np.full(NUM_LAYERS, 0.3))) == []


def test_gain_takes_the_lowest_layer_and_reports_its_z():
    gains = np.array([1.0, 1.1, 0.9, 1.05, 0.2, 1.0, 1.1, 0.5])
    # median 1.0, MAD = median(0 .1 .1 .05 .8 0 .1 .5) = 0.1
    findings = published_findings(score(measurements(gain=gains)), DiagnosisConfig())
    assert [(finding.scan, finding.layer) for finding in findings] == [("gain", 4)]
    assert findings[0].z == pytest.approx(-0.8 / (1.4826 * 0.1))


def test_kurtosis_takes_the_first_drop_from_its_first_layer_on():
    low_from_5 = np.array([10.0, 11.0, 10.5, 10.0, 11.0, 1.0, 1.1, 1.0])
    assert published(measurements(kurtosis=low_from_5)) == [("kurtosis", 5)]
    low_from_1 = np.array([10.0, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6])
    assert published(measurements(kurtosis=low_from_1)) == []
    assert published(measurements(kurtosis=low_from_1), DiagnosisConfig(first_kurtosis_layer=1)) == [("kurtosis", 1)]


def test_negative_kurtosis_has_a_logarithm():
    assert np.isfinite(score(measurements(kurtosis=np.linspace(-1.9, 5, NUM_LAYERS))).log_kurtosis_drop_z[1:]).all()


def test_kurtosis_rise_is_the_other_direction():
    rising = measurements(kurtosis=np.array([10.0, 11.0, 10.5, 90.0, 95.0, 94.0, 90.0, 92.0]))
    assert ("kurtosis_rise", 3) in published(rising)


def test_roles_follow_the_drop_until_kurtosis_recovers():
    kurtosis = np.array([97.0, 97.0, 1.0, 1.5, 2.0, 80.0, 1.0])
    # log(kurtosis + 3): 4.6 before, 1.39 at the source; half way is 3.0 (kurtosis 17)
    assert saturation_roles(kurtosis, 2) == [
        "healthy",
        "healthy",
        "source",
        "sat_prop",
        "sat_prop",
        "healthy",
        "healthy",
    ]
    assert saturation_roles(kurtosis, None) == ["healthy"] * 7
    assert saturation_roles(kurtosis, 0) == ["source"] + ["healthy"] * 6
    assert saturation_roles(kurtosis, 5)[5:] == ["source", "healthy"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_healthy_layers_repeat(make_model, prompt_ids, small_config, dtype):
    table, findings, _ = run_scans(make_model().to(dtype), prompt_ids, small_config)
    assert table["instability"].to_list() == [0.0] * 5
    assert "ambient" not in [finding.scan for finding in findings]


def test_noise_is_found_by_the_published_scan(make_model, prompt_ids, small_config):
    model = make_model()
    with simulated_faults(model, [Fault(type="noise", layer=3, magnitude=0.1, sparsity=0.1)]):
        table, findings, _ = run_scans(model, prompt_ids, small_config)
    assert [finding.layer for finding in findings if finding.scan == "ambient"] == [3]
    assert np.flatnonzero(table["instability"].to_numpy()).tolist() == [3]


@pytest.mark.parametrize("kind", ["saturation", "bias"])
def test_a_layer_that_clamps_is_a_source_by_what_the_exact_probes_find(make_model, prompt_ids, small_config, kind):
    fault = Fault(type=kind, layer=2, magnitude=0.4)
    found = diagnose_model(make_model(), prompt_ids, small_config, faults=[fault], names_kernels=False)
    assert found.table["role"].to_list()[:3] == ["healthy", "healthy", "source" if kind == "saturation" else "healthy"]
    assert "source" not in found.table["role"].to_list()[3:]


def test_scans_are_deterministic_and_leave_the_model_alone(make_model, prompt_ids, small_config):
    model = make_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(1)
    first, _, _ = run_scans(model, prompt_ids, small_config)
    torch.manual_seed(2)
    second, _, _ = run_scans(model, prompt_ids, small_config)
    other_seed, _, _ = run_scans(model, prompt_ids, small_config.model_copy(update={"seed": 1}))
    assert first.equals(second)
    assert not first["gain"].equals(other_seed["gain"])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_table_keeps_its_schema_and_has_nulls_where_undefined(make_model, prompt_ids, small_config):
    table, _, _ = run_scans(make_model(num_layers=1), prompt_ids, small_config)
    LayerTable.validate(table)
    assert table["log_kurtosis_drop_z"].to_list() == [None]
    assert table.schema["layer"] == pl.Int64


def test_robust_z_by_hand():
    # median 3, |x - 3| = 2 1 0 1 97: MAD 1; z = (x - 3)/1.4826
    z = robust_z(np.array([1.0, 2.0, 3.0, 4.0, 100.0]))
    assert z == pytest.approx([-2 / 1.4826, -1 / 1.4826, 0, 1 / 1.4826, 97 / 1.4826])


def test_floor_is_one_percent_of_the_median():
    # MAD 0, median -10: spread 0.1
    assert robust_z(np.array([-10.0, -10.0, -10.0, -9.0]))[-1] == pytest.approx(1 / (1.4826 * 0.1))


def test_floor_is_one_millionth_where_the_median_is_zero():
    assert robust_z(np.array([0.0, 0.0, 0.0, 2e-6]))[-1] == pytest.approx(2 / 1.4826)


def test_layers_all_alike_have_z_zero():
    assert (robust_z(np.zeros(6)) == 0).all()


def test_first_below_takes_the_first_and_skips_nan_and_start():
    z = np.array([np.nan, -5.0, -1.0, -3.0, -9.0])
    assert first_below(z, -2.0) == 1
    assert first_below(z, -2.0, start=2) == 3
    assert first_below(z, -10.0) is None


def test_layers_run_alone_reproduce_the_whole_forward(make_model, prompt_ids):
    model = make_model(num_layers=3)
    with inference(model):
        inputs = capture_layer_inputs(model, prompt_ids[0].unsqueeze(0))
        hidden_states = model(prompt_ids[0][None], output_hidden_states=True, use_cache=False).hidden_states
        alone = [run_layer(model, index, inputs[index].hidden, inputs[index].kwargs) for index in range(3)]
    assert torch.equal(inputs[0].hidden, hidden_states[0])
    assert torch.equal(alone[0], inputs[1].hidden)
    assert torch.equal(alone[1], inputs[2].hidden)


def test_capture_leaves_no_hooks_even_after_an_exception(make_model):
    model = make_model(num_layers=2)
    with pytest.raises(IndexError):
        capture_layer_inputs(model, torch.tensor([10**6]))
    assert not any(layer._forward_pre_hooks for layer in model.model.layers)


def test_inference_restores_the_mode(make_model):
    model = make_model(num_layers=1).train()
    with inference(model):
        assert not model.training
        assert not torch.is_grad_enabled()
    assert model.training


def test_nan_output_is_refused_by_name(make_model, prompt_ids, small_config):
    model = make_model(num_layers=3)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.fill_(math.nan)
    with pytest.raises(ModelError, match=r"decoder layer 1 .* NaN or infinity"):
        measure(model, prompt_ids, small_config)


def test_no_prompts_are_refused(make_model, small_config):
    with pytest.raises(ModelError, match="no prompt or an empty prompt"):
        measure(make_model(num_layers=1), [], small_config)


def test_kurtosis_is_scipys_and_defined_for_constants():
    values = torch.randn(2, 30, 40, generator=torch.Generator().manual_seed(0)) ** 3
    assert fisher_kurtosis(values) == pytest.approx(stats.kurtosis(values.numpy().astype(np.float64), axis=None))
    # one of four values differs: m4/m2^2 - 3 = ((3/4)(1/4)^4 + (1/4)(3/4)^4)/(3/16)^2 - 3 = -2/3
    assert fisher_kurtosis(torch.tensor([0.0, 0.0, 0.0, 1.0])) == pytest.approx(-2 / 3)
    assert fisher_kurtosis(torch.zeros(10)) == -2.0


def test_input_noise_has_the_asked_share_of_the_inputs_std():
    hidden = 3 * torch.randn(1, 100, 100, generator=torch.Generator().manual_seed(0))
    noised = add_input_noise(hidden, 0.1, torch.Generator().manual_seed(1))
    ratio = (noised - hidden).std() / hidden.std()
    assert math.isclose(ratio, 0.1, rel_tol=5 / math.sqrt(2 * hidden.numel()))


def test_constant_input_still_gets_noise():
    noised = add_input_noise(torch.zeros(1, 100, 100), 0.1, torch.Generator().manual_seed(1))
    assert math.isclose(noised.std(), 0.1, rel_tol=5 / math.sqrt(2 * 10_000))


def test_gain_of_a_layer_without_branches_is_one_and_kurtosis_that_of_its_input(make_model, prompt_ids, small_config):
    model = make_model(num_layers=2)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    measured = measure(model, prompt_ids, small_config)
    embedded = [model.get_input_embeddings()(ids).detach().double().numpy() for ids in prompt_ids]
    assert measured.gain == pytest.approx([1, 1])
    assert measured.kurtosis == pytest.approx([np.mean([stats.kurtosis(e, axis=None) for e in embedded])] * 2)
    assert (measured.instability == 0).all()


def test_forward_equivalents_count_layer_runs_and_captures(make_model, prompt_ids):
    model, calls = make_model(num_layers=4), []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda *_: calls.append(1))
    measured = measure(model, prompt_ids, DiagnosisConfig(num_repeats=2, gain_trials=3))
    assert measured.forward_equivalents == len(calls) / 4 == 3 * (1 + 2 + 3)


def test_gain_trials_draw_fresh_noise(make_model, prompt_ids):
    model = make_model(num_layers=2)
    single, double = (measure(model, prompt_ids, DiagnosisConfig(gain_trials=trials)) for trials in (1, 2))
    assert (single.gain != double.gain).all()


def test_several_diagnoses_are_averaged(make_model, prompt_ids, small_config):
    """The second diagnosis has other random numbers, and the result is the mean of both."""
    model = make_model()
    once = measure(model, prompt_ids, small_config)
    twice = measure(model, prompt_ids, small_config.model_copy(update={"num_diagnoses": 2}))
    second = 2 * twice.gain - once.gain
    assert (second != once.gain).all()
    assert np.allclose(second, once.gain, rtol=0.2)
    assert np.allclose(twice.kurtosis, once.kurtosis)
    assert twice.forward_equivalents == 2 * once.forward_equivalents
