"""Passes over fixed tokens: log-probabilities against a plain computation, and substitution of layers and operators."""

from types import SimpleNamespace

import pytest
import torch

from aqnpipe.config.noise import AdaptiveNoise, ModuleNoise, NoiseSpec, OperatorNoise, RelativeGaussian
from aqnpipe.noise.aqn import target_factors
from aqnpipe.training.distance.passes import Drawn, NotMeasurableError, Passes, masked, sequences_of
from aqnpipe.training.distance.substitution import (
    Band,
    bands,
    noise_by_layers,
    noise_in,
    operators_of,
    rounding_by_operator,
)

TEMPERATURE = 0.7
SEQUENCES = [
    Drawn([5, 6, 7], [8, 9, 1], [-0.5, -0.25, -0.125]),
    Drawn([11, 12, 13, 14, 15], [16, 17, 18, 19], [-1.0, -2.0, -3.0, -4.0]),
]
NOISE = OperatorNoise(error=RelativeGaussian(scale=0.05))
AQN = AdaptiveNoise.model_validate({"schedule": {"kind": "linear", "sigma_start": 0.05, "sigma_end": 0.01}})


@pytest.fixture
def passes(model):
    return Passes(model, TEMPERATURE, end_token=1, padding_token=0, limit=4)


def plan(model, **parts):
    spec = NoiseSpec(**parts)
    factors = target_factors(model, spec.aqn, None) if spec.aqn else {}
    return SimpleNamespace(
        seed=3,
        spec=spec,
        aqn_factors=factors,
        sigma=lambda step: 0.05 if spec.aqn else 0.0,
        num_steps=4,
        num_epochs=1,
    )


def by_hand(model):
    """Log-probabilities of every response token, each sequence alone."""
    found = []
    for drawn in SEQUENCES:
        ids = torch.tensor([drawn.prompt + drawn.response])
        with torch.no_grad():
            scores = (model(input_ids=ids).logits[0].double() / TEMPERATURE).log_softmax(-1)
        start = len(drawn.prompt)
        found += [float(scores[start + place - 1, token]) for place, token in enumerate(drawn.response)]
    return torch.tensor(found, dtype=torch.float64)


def micro_batch():
    """The sequences as TRL pads them: prompts on the left, responses on the right."""
    return {
        "prompt_ids": torch.tensor([[0, 0, 5, 6, 7], [11, 12, 13, 14, 15]]),
        "prompt_mask": torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]),
        "completion_ids": torch.tensor([[8, 9, 1, 0], [16, 17, 18, 19]]),
        "completion_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]),
        "sampling_per_token_logps": torch.tensor([[-0.5, -0.25, -0.125, 0.0], [-1.0, -2.0, -3.0, -4.0]]),
    }


def test_the_sequences_of_a_micro_batch_have_no_padding():
    batch = micro_batch()
    assert sequences_of(batch, 4) == SEQUENCES
    assert sequences_of(batch, 1) == SEQUENCES[:1]
    sampled = masked(batch["sampling_per_token_logps"], batch, 4)
    assert sampled.tolist() == [-0.5, -0.25, -0.125, -1.0, -2.0, -3.0, -4.0]


def test_every_pass_gives_the_log_probabilities_of_the_tokens(passes, model):
    expected = by_hand(model)
    for found in (
        passes.in_one_pass(SEQUENCES),
        passes.decoded(SEQUENCES),
        passes.micro_batch(micro_batch(), 4),
    ):
        assert torch.allclose(found, expected, atol=1e-5)
    # One pass each, and one for each of the four tokens of the longest response.
    assert passes.forwards == 2 + 4
    assert torch.allclose(passes.micro_batch(micro_batch(), 1), expected[:3], atol=1e-5)


def test_passes_leave_no_trace(passes, model, monkeypatch):
    """Not even with dropout, which draws from the run's generator in its trained passes."""
    model.train()
    for layer in model.model.layers:
        monkeypatch.setattr(layer.self_attn, "attention_dropout", 0.5)
    state, weights = torch.get_rng_state(), [weight.clone() for weight in model.parameters()]
    clean = passes.in_one_pass(SEQUENCES)
    decoded = passes.decoded(SEQUENCES)
    rounding_by_operator(passes, SEQUENCES, clean, decoded)
    noise_by_layers(passes, SEQUENCES, clean, plan(model, operator_noise=NOISE, aqn=AQN), 0)
    assert torch.equal(passes.in_one_pass(SEQUENCES), clean)
    assert torch.allclose(passes.micro_batch(micro_batch(), 4), clean, atol=1e-5)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    for weight, before in zip(model.parameters(), weights, strict=True):
        assert torch.equal(weight, before)
        assert weight.grad is None
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_numbers_that_are_not_finite_are_refused(passes, model):
    model.model.layers[1].mlp.down_proj.weight.data[0, 0] = torch.nan
    for measure in (passes.in_one_pass, passes.decoded, lambda _: passes.micro_batch(micro_batch(), 4)):
        with pytest.raises(NotMeasurableError, match="a log-probability is not finite"):
            measure(SEQUENCES)


@pytest.mark.parametrize("response", [[], [5, 6], [5, 1, 6, 7], [5, 6, 7, 8, 9]], ids=str)
def test_responses_that_decoding_would_not_end_there_are_not_measured(passes, response):
    """As after a mistake in the mask of a batch: the audit of the run has to say so, not a traceback of the probe."""
    drawn = [Drawn([5, 6, 7], [5, 1], [-0.5] * 2), Drawn([5, 6], response, [-0.5] * len(response))]
    with pytest.raises(NotMeasurableError, match="does not end where decoding ends"):
        passes.decoded(drawn)


def test_layers_are_in_at_most_four_groups_and_one_for_what_is_outside():
    assert [(band.first, band.last) for band in bands(3)] == [(0, 0), (1, 1), (2, 2), (None, None)]
    assert [(band.first, band.last) for band in bands(10)] == [(0, 2), (3, 5), (6, 8), (9, 9), (None, None)]
    assert [Band(1, 2).has(layer) for layer in (0, 1, 2, 3, None)] == [False, True, True, False, False]
    assert [Band(None, None).has(layer) for layer in (0, None)] == [False, True]


def test_noise_in_a_band_is_the_run_s_noise_there_and_nowhere_else(model):
    noise = NOISE.model_copy(update={"layers": (0, 2), "layer_scales": {0: 0.1, 2: 0.2}})
    modules = ModuleNoise.model_validate({"modules": "minimal", "error": {"kind": "relative_gaussian", "scale": 0.1}})
    faults = [{"type": "saturation", "layer": 2, "magnitude": 0.3}]
    requested = plan(model, operator_noise=noise, module_noise=modules, aqn=AQN, faults=faults)
    spec, factors = noise_in(model, requested, Band(1, 2))
    assert spec.operator_noise.layers == (2,)
    assert spec.operator_noise.layer_scales == {2: 0.2}
    assert not spec.operator_noise.include_lm_head
    assert {name.split(".")[2] for name in spec.module_noise.modules} == {"1", "2"}
    assert len(spec.faults) == 1
    assert {name: factor for name, factor in factors.items() if factor} == {
        name: 1.0 for name in factors if ".layers.1." in name or ".layers.2." in name
    }
    outside, _ = noise_in(model, requested, Band(None, None))
    assert outside.operator_noise.include_lm_head
    assert outside.operator_noise.layers == outside.faults == ()
    assert outside.module_noise.modules == ("model.norm",)
    nothing, _ = noise_in(model, plan(model, operator_noise=noise), Band(1, 1))
    assert nothing.operator_noise is None


def test_the_layer_with_the_noise_explains_it(passes, model):
    clean = passes.in_one_pass(SEQUENCES)
    noise = OperatorNoise(error=RelativeGaussian(scale=0.05), layers=(1,), include_lm_head=False)
    everywhere, found = noise_by_layers(passes, SEQUENCES, clean, plan(model, operator_noise=noise), 0)
    assert [(row.first_layer, row.last_layer, row.share) for row in found] == [(1, 1, 1.0)]
    assert everywhere == pytest.approx(found[0].rms)
    assert everywhere > 1e-4


def test_hidden_states_under_aqn_belong_to_their_layer(passes, model):
    hidden = AdaptiveNoise.model_validate({**AQN.model_dump(), "targets": "hidden_states"})
    _, factors = noise_in(model, plan(model, aqn=hidden), Band(1, 1))
    assert list(factors.values()) == [0.0, 1.0, 0.0]
    everywhere, found = noise_by_layers(
        passes, SEQUENCES, passes.in_one_pass(SEQUENCES), plan(model, aqn=hidden), step=2
    )
    assert everywhere > 1e-4
    assert [(row.first_layer, row.last_layer) for row in found] == [(0, 0), (1, 1), (2, 2)]


def test_an_operator_that_rounds_otherwise_for_single_tokens_explains_decoding(passes, model, monkeypatch):
    """up_proj of one layer is off by 1 % where it gets one token; decoding differs by that, and nothing else does."""
    module = model.model.layers[1].mlp.up_proj
    plain = module.forward
    monkeypatch.setattr(module, "forward", lambda x: plain(x) * (1.01 if x.shape[1] == 1 else 1.0))
    whole, decoded = passes.in_one_pass(SEQUENCES), passes.decoded(SEQUENCES)
    rows = rounding_by_operator(passes, SEQUENCES, whole, decoded)
    assert rows[0].operator == "up_proj"
    assert rows[0].share == pytest.approx(1, abs=1e-3)
    assert rows[0].rms == pytest.approx(float((decoded - whole).square().mean().sqrt()), rel=1e-2)
    assert rows[1].rms < rows[0].rms / 100
    assert {row.operator for row in rows} == set(operators_of(model))


def test_the_kinds_of_operators_are_the_names_of_their_modules(model):
    found = operators_of(model)
    assert list(found) == [
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        *("input_layernorm", "post_attention_layernorm", "norm", "lm_head"),
    ]
    assert [len(modules) for modules in found.values()] == [3] * 9 + [1, 1]
