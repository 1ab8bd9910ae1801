import pytest
import torch

from aqnpipe.config.noise import AdaptiveNoise, LayerSigmas, LinearDecay, NoiseSpec
from aqnpipe.errors import ConfigError, ModelError, ReceiptError
from aqnpipe.machine import modules
from aqnpipe.machine.machine import NoiseKey
from aqnpipe.models.layout import layer_of, rms_norms
from aqnpipe.noise.aqn import noised_rollout, target_factors
from aqnpipe.noise.injection.phase import phase_noise
from aqnpipe.noise.receipts.recorder import ReceiptRecorder

AQN = AdaptiveNoise(schedule=LinearDecay(sigma_start=0.05, sigma_end=0.05))
GUIDED = AdaptiveNoise(schedule=AQN.schedule, layer_sigmas_from="target")


def new_recorder(num_steps=1, noise=AQN, layer_factors=None):
    return ReceiptRecorder(
        NoiseSpec(aqn=noise),
        expected_phases=(),
        num_layers=3,
        num_norms=7,
        num_steps=num_steps,
        num_epochs=1,
        layer_factors=layer_factors,
    )


def sync(model, recorder, sigma=0.05, step=0, factors=None, noise=AQN):
    factors = factors or target_factors(model, noise, None)
    with noised_rollout(model, noise, factors, recorder, sigma=sigma, seed=0, step=step):
        pass


def norm_weights(model):
    return {name: module.weight.detach().clone() for name, module in rms_norms(model).items()}


def test_dense_models_have_two_norms_per_layer_and_one_at_the_end(model):
    assert len(rms_norms(model)) == 2 * 3 + 1


def test_post_attention_only(model):
    names = rms_norms(model, "post_attention")
    assert len(names) == 3
    assert all(name.endswith("post_attention_layernorm") for name in names)


def test_a_model_without_norms_is_refused():
    with pytest.raises(ModelError, match="no RMSNorm matches"):
        rms_norms(torch.nn.Linear(2, 2))


def test_noise_is_there_inside_and_gone_outside_bit_for_bit(model):
    clean = norm_weights(model)
    everything = {name: p.detach().clone() for name, p in model.named_parameters()}
    recorder = new_recorder()
    with noised_rollout(model, AQN, dict.fromkeys(clean, 1.0), recorder, sigma=0.05, seed=0, step=0):
        inside = norm_weights(model)
        others = {n: p for n, p in model.named_parameters() if "norm" not in n}
        assert all(torch.equal(p, everything[n]) for n, p in others.items())
    added = torch.cat([inside[name] - clean[name] for name in clean])
    assert abs(added.std().item() / 0.05 - 1) < 5 / (2 * added.numel()) ** 0.5
    assert all(torch.equal(p, everything[name]) for name, p in model.named_parameters())
    (sync,) = recorder.receipt().weight_syncs
    assert sync.targets == 7
    assert sync.elements == added.numel()
    assert sync.sigma_measured == pytest.approx(added.square().mean().sqrt().item(), rel=1e-4)
    recorder.receipt().check()


def test_weights_come_back_after_an_exception(model):
    clean = norm_weights(model)
    with (
        pytest.raises(RuntimeError),
        noised_rollout(model, AQN, dict.fromkeys(clean, 1.0), new_recorder(), sigma=0.05, seed=0, step=0),
    ):
        raise RuntimeError
    assert all(torch.equal(weight, clean[name]) for name, weight in norm_weights(model).items())


def test_redrawn_at_each_sync_and_replayed_by_key(model):
    def draw(step):
        factors = dict.fromkeys(rms_norms(model), 1.0)
        with noised_rollout(model, AQN, factors, new_recorder(), sigma=0.05, seed=0, step=step):
            return torch.cat(list(norm_weights(model).values()))

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))


def test_per_layer_sigmas_reach_their_layers(make_model):
    model = make_model(hidden_size=256)
    layer_factors = {0: 1.0, 1: 2.0, 2: 0.5}
    factors = target_factors(model, AQN, layer_factors)
    clean = norm_weights(model)
    with noised_rollout(model, AQN, factors, new_recorder(), sigma=0.02, seed=0, step=0):
        noised = norm_weights(model)
    for layer, factor in layer_factors.items():
        added = torch.cat([noised[n] - clean[n] for n in clean if f"layers.{layer}." in n])
        expected = 0.02 * factor
        assert abs(added.std().item() / expected - 1) < 5 / (2 * added.numel()) ** 0.5
    assert factors["model.norm"] == 1.0


@pytest.mark.parametrize("layer_factors", [{0: 1.0, 1: 1.0}, {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0}])
def test_sigmas_of_another_model_are_refused(model, layer_factors):
    with pytest.raises(ConfigError, match="layer sigmas: found layers"):
        target_factors(model, AQN, layer_factors)


def test_noise_logged_but_not_added_is_refused(model, monkeypatch):
    monkeypatch.setattr("aqnpipe.noise.aqn.add_absolute_gaussian_", lambda *args: None)
    recorder = new_recorder()
    sync(model, recorder)
    with pytest.raises(ReceiptError, match=r"AQN step 0: measured sigma 0, requested 0\.05"):
        recorder.receipt().check()


def test_aqn_that_never_ran_is_refused():
    with pytest.raises(ReceiptError, match="0 weight syncs, expected one at each of 1 steps"):
        new_recorder().receipt().check()


def test_a_step_counter_that_does_not_advance_is_refused(model):
    decaying = AdaptiveNoise(schedule=LinearDecay(sigma_start=0.05, sigma_end=0.0))
    recorder = new_recorder(num_steps=2, noise=decaying)
    for step in range(2):
        sync(model, recorder, sigma=0.05, step=step, noise=decaying)  # sigma of step 0, twice
    with pytest.raises(ReceiptError, match=r"AQN step 1: the trainer used sigma 0\.05, the schedule gives 0\.025"):
        recorder.receipt().check()


def test_aqn_where_none_was_requested_is_refused(model):
    recorder = new_recorder()
    sync(model, recorder)
    receipt = recorder.receipt().model_copy(update={"aqn": None})
    with pytest.raises(ReceiptError, match="none was requested"):
        receipt.check()


def test_without_aqn_a_rollout_is_left_alone(model):
    clean, recorder = norm_weights(model), new_recorder(noise=None)
    with noised_rollout(model, None, {}, recorder, sigma=0.05, seed=0, step=0) as hidden_sigmas:
        assert hidden_sigmas == {}
        assert all(torch.equal(weight, clean[name]) for name, weight in norm_weights(model).items())
    assert recorder.receipt().weight_syncs == ()


def test_per_layer_sigmas_that_are_ignored_are_refused(make_model):
    model = make_model(hidden_size=256)
    requested = {0: 1.0, 1: 1.5, 2: 1.0}
    recorder = new_recorder(noise=GUIDED, layer_factors=requested)
    sync(model, recorder, factors=dict.fromkeys(rms_norms(model), 1.0), noise=GUIDED)  # as if nothing had read the file
    with pytest.raises(
        ReceiptError, match=r"norms in layer 1 got [01]\.\d+ times the schedule's sigma, requested 1\.500"
    ):
        recorder.receipt().check()
    honest = new_recorder(noise=GUIDED, layer_factors=requested)
    sync(model, honest, factors=target_factors(model, GUIDED, requested), noise=GUIDED)
    honest.receipt().check()


BY_HAND = LayerSigmas(base_sigma=0.05, layer_sigmas={0: 0.1, 2: 0.0})
CHOSEN = {
    "sigmas by hand": ({"sigmas": BY_HAND}, {0: 2.0, 1: 1.0, 2: 0.0, None: 1.0}),
    "one layer": ({"target_layers": (1,)}, {0: 0.0, 1: 1.0, 2: 0.0, None: 0.0}),
    "both": ({"target_layers": (0, 1), "sigmas": BY_HAND}, {0: 2.0, 1: 1.0, 2: 0.0, None: 0.0}),
    "one kind of norm": (
        {"exclude": ("*.post_attention_layernorm", "model.norm")},
        {0: 1.0, 1: 1.0, 2: 1.0, None: 0.0},
    ),
}


def rolled_out(model, noise, factors):
    """The receipt of one rollout with `factors`, whose forward pass is audited."""
    recorder = new_recorder(noise=noise)
    recorder.clean_norm_weights = norm_weights(model)
    with (
        noised_rollout(model, noise, factors, recorder, sigma=0.05, seed=0, step=0),
        phase_noise(model, NoiseSpec(aqn=noise), "rollout", NoiseKey(seed=0, step=0), recorder),
        torch.no_grad(),
    ):
        inside = norm_weights(model)
        model(torch.arange(2, 50).view(3, 16), use_cache=False)
    return inside, recorder.receipt()


@pytest.mark.parametrize(("settings", "expected"), CHOSEN.values(), ids=CHOSEN)
def test_noise_is_on_the_chosen_norms_alone(make_model, settings, expected):
    model = make_model(hidden_size=256)
    noise = AdaptiveNoise(schedule=AQN.schedule, **settings)
    clean, factors = norm_weights(model), target_factors(model, noise, None)
    inside, receipt = rolled_out(model, noise, factors)
    receipt.check()
    for name in clean:
        factor = 0.0 if "post" in name and "exclude" in settings else expected[layer_of(name)]
        found = (inside[name] - clean[name]).std().item() / 0.05
        assert found == pytest.approx(factor, rel=5 / (2 * 256) ** 0.5), name
    assert receipt.model_dump()["aqn"]["schedule"], "the request is part of the receipt"


@pytest.mark.parametrize("settings", [settings for settings, _ in CHOSEN.values()], ids=CHOSEN)
def test_noise_on_other_norms_than_the_chosen_is_refused(make_model, settings):
    model = make_model(hidden_size=256)
    noise = AdaptiveNoise(schedule=AQN.schedule, **settings)
    _, receipt = rolled_out(model, noise, dict.fromkeys(rms_norms(model), 1.0))
    with pytest.raises(ReceiptError, match="sampled weights are not as requested"):
        receipt.check()


def test_a_chosen_layer_without_noise_is_refused(make_model):
    model = make_model(hidden_size=256)
    noise = AdaptiveNoise(schedule=AQN.schedule, target_layers=(1, 2))
    recorder = new_recorder(noise=noise)
    factors = target_factors(model, noise, None)
    sync(model, recorder, factors={n: f * ("layers.1." not in n) for n, f in factors.items()}, noise=noise)
    with pytest.raises(ReceiptError, match=r"AQN: noise was requested in layers \[1\], none was measured there"):
        recorder.receipt().check()


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"target_layers": (3,)}, r"aqn.target_layers: found layers \[3\], the noise has targets in \[0, 1, 2\]"),
        ({"sigmas": LayerSigmas(base_sigma=1, layer_sigmas={7: 1})}, r"aqn.sigmas: found layers \[7\]"),
        ({"exclude": ("*.norms",)}, r"aqn.exclude: found '\*.norms', which matches none of 7 norms"),
        ({"exclude": ("*norm",)}, "aqn: no target has noise"),
    ],
)
def test_a_choice_that_a_model_cannot_have_is_refused(model, settings, problem):
    with pytest.raises(ConfigError, match=problem):
        target_factors(model, AdaptiveNoise(schedule=AQN.schedule, **settings), None)


HIDDEN = AdaptiveNoise(schedule=AQN.schedule, targets="hidden_states")


def roll_out(model, recorder, noise=HIDDEN, sigma=0.05, step=0, layer_factors=None, passes=1):
    """Forwards as a rollout; returns each layer's last output."""
    outputs = {}
    factors = target_factors(model, noise, layer_factors)
    with (
        noised_rollout(model, noise, factors, recorder, sigma=sigma, seed=0, step=step) as hidden_sigmas,
        phase_noise(
            model, NoiseSpec(aqn=noise), "rollout", NoiseKey(seed=0, step=step), recorder, hidden_sigmas=hidden_sigmas
        ),
        torch.no_grad(),
    ):
        handles = [
            layer.register_forward_hook(lambda _module, _args, output, index=index: outputs.update({index: output}))
            for index, layer in enumerate(model.model.layers)
        ]
        for _ in range(passes):
            model(torch.arange(2, 50).view(3, 16), use_cache=False)
    for handle in handles:
        handle.remove()
    return outputs


def test_noise_on_hidden_states_is_relative_and_measured_in_every_layer(model):
    recorder = new_recorder(noise=HIDDEN)
    noised = roll_out(model, recorder)
    receipt = recorder.receipt().check()
    (sync,) = receipt.weight_syncs
    assert sync.targets == 3
    assert {cell.layer for cell in receipt.weight_cells} == {0, 1, 2}
    clean = roll_out(model, new_recorder(noise=HIDDEN), sigma=0.0)
    relative = (noised[0] - clean[0]) / clean[0]
    assert abs(relative.std().item() / 0.05 - 1) < 5 / (2 * relative.numel()) ** 0.5


def test_hidden_noise_replays_and_is_redrawn_at_the_next_sync(model):
    first = roll_out(model, new_recorder(noise=HIDDEN))
    again = roll_out(model, new_recorder(noise=HIDDEN))
    later = roll_out(model, new_recorder(noise=HIDDEN), step=1)
    assert torch.equal(first[2], again[2])
    assert not torch.equal(first[2], later[2])


def test_a_layer_with_factor_zero_gets_no_hidden_noise(model):
    guided = AdaptiveNoise(schedule=AQN.schedule, targets="hidden_states", layer_sigmas_from="target")
    requested = {0: 0.0, 1: 1.0, 2: 0.0}
    recorder = new_recorder(noise=guided, layer_factors=requested)
    noised = roll_out(model, recorder, noise=guided, layer_factors=requested)
    receipt = recorder.receipt().check()
    assert {cell.layer for cell in receipt.weight_cells} == {1}
    clean = roll_out(model, new_recorder(noise=HIDDEN), sigma=0.0)
    assert torch.equal(noised[0], clean[0])
    assert not torch.equal(noised[1], clean[1])


def test_hidden_noise_that_was_requested_and_did_not_run_is_refused(model):
    recorder = new_recorder(noise=HIDDEN)
    with noised_rollout(model, HIDDEN, target_factors(model, HIDDEN, None), recorder, sigma=0.05, seed=0, step=0):
        pass  # sigmas not passed on to phase_noise
    with pytest.raises(ReceiptError, match="AQN step 0: measured sigma 0, requested"):
        recorder.receipt().check()


@pytest.mark.parametrize("bad", [None, 0, 3, 6])
def test_hidden_noise_of_another_size_in_a_single_pass_is_refused(model, monkeypatch, bad):
    layers, put, calls = 3, modules.apply_error_, []

    def twice(values, error, source):
        put(values, error, source)
        if len(calls) // layers == bad:
            put(values, error, source)
        calls.append(error)

    monkeypatch.setattr(modules, "apply_error_", twice)
    recorder = new_recorder(noise=HIDDEN)
    roll_out(model, recorder, passes=8)
    assert len(calls) == 8 * layers
    if bad is None:
        recorder.receipt().check()
    else:
        with pytest.raises(ReceiptError, match="AQN step 0: measured sigma"):
            recorder.receipt().check()


@pytest.mark.parametrize("noise", [AQN, HIDDEN], ids=["norms", "hidden states"])
def test_numbers_of_another_key_are_refused_although_they_have_the_size(model, monkeypatch, noise):
    recorder = new_recorder(noise=noise)
    if noise is AQN:
        monkeypatch.setattr("aqnpipe.noise.aqn.derive_seed", lambda *parts: 7)
        sync(model, recorder)
    else:
        monkeypatch.setattr(NoiseKey, "derived", lambda self, stream, *counters: 7)
        roll_out(model, recorder)
    (redraw,) = recorder.receipt().weight_syncs
    assert redraw.sigma_measured == pytest.approx(0.05, rel=0.2)
    assert redraw.wrong > 0.9 * redraw.recomputed > 0
    with pytest.raises(ReceiptError, match=r"AQN step 0: measured sigma 0\.0\d+, requested 0\.05"):
        recorder.receipt().check()
