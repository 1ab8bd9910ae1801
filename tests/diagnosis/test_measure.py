import math

import numpy as np
import pytest
import torch
from scipy import stats

from aqnpipe.config.diagnosis import DiagnosisConfig
from aqnpipe.diagnosis.capture import capture_layer_inputs, inference, run_layer
from aqnpipe.diagnosis.measure import (
    add_input_noise,
    changed_share,
    fisher_kurtosis,
    measure,
    ties_at_maximum,
)
from aqnpipe.errors import ModelError


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


def test_ties_at_the_maximum_by_hand():
    assert ties_at_maximum(torch.tensor([1.0, -3.0, 3.0, 2.0, 3.0])) == 2
    assert ties_at_maximum(torch.tensor([1.0, -3.0, 2.0])) == 0
    assert ties_at_maximum(torch.zeros(5)) == 0


def test_changed_share_counts_within_the_channels_that_change():
    reference = torch.zeros(1, 4, 3)
    repeat = reference.clone()
    repeat[0, :, 0] = 1.0  # a noisy channel changes at all 4 tokens
    assert changed_share(reference, repeat) == 1.0
    repeat[0, 2, 1] = 1.0  # another at 1 of 4: (4 + 1) / 8
    assert changed_share(reference, repeat) == pytest.approx(5 / 8)
    assert changed_share(reference, reference) == 0.0


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
    assert (measured.changed_share == 0).all()


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
    assert (twice.elements == 2 * once.elements).all()
    assert twice.forward_equivalents == 2 * once.forward_equivalents
