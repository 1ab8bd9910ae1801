"""Passes over fixed tokens: log-probabilities against a plain computation."""

import pytest
import torch

from aqnpipe.training.distance.passes import Drawn, NotMeasurableError, Passes, masked, sequences_of

TEMPERATURE = 0.7
SEQUENCES = [
    Drawn([5, 6, 7], [8, 9, 1], [-0.5, -0.25, -0.125]),
    Drawn([11, 12, 13, 14, 15], [16, 17, 18, 19], [-1.0, -2.0, -3.0, -4.0]),
]


@pytest.fixture
def passes(model):
    return Passes(model, TEMPERATURE, end_token=1, padding_token=0, limit=4)


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
    passes.decoded(SEQUENCES)
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
