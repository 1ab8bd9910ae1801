from types import SimpleNamespace

import pytest
import torch

from aqnpipe.errors import ModelError
from aqnpipe.generation.backend import Sampling
from aqnpipe.generation.transformers_backend import TransformersBackend

TOKENIZER = SimpleNamespace(eos_token_id=1, pad_token_id=0)
PROMPTS = [[5, 6, 7], [9], [5, 6, 7, 8, 9, 10, 11]]


def test_batched_greedy_equals_one_by_one_by_hand(model):
    """The reference decodes by repeated forwards without cache or padding."""
    completions = TransformersBackend(model, TOKENIZER).generate(PROMPTS, Sampling(max_response_tokens=6))
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        ids = list(prompt)
        for _ in range(6):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] == 1:
                break
        assert completion.token_ids == ids[len(prompt) :]


def test_an_end_token_ends_a_completion_and_is_kept(make_model):
    model = make_model()
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.model.norm.weight.fill_(1.0)
        bias = torch.nn.Linear(32, 64)
        torch.nn.init.zeros_(bias.weight)
        torch.nn.init.zeros_(bias.bias)
        bias.bias[1] = 5.0
        model.lm_head = bias
    (completion,) = TransformersBackend(model, TOKENIZER).generate([[5]], Sampling(max_response_tokens=4))
    assert completion.token_ids == [1]
    assert completion.finish_reason == "stop"


def test_length_is_a_finish_reason(model):
    completions = TransformersBackend(model, TOKENIZER).generate(PROMPTS, Sampling(max_response_tokens=3))
    assert all(len(c.token_ids) == 3 for c in completions if c.finish_reason == "length")
    assert {c.finish_reason for c in completions} <= {"stop", "length"}


def test_sampling_is_keyed_by_its_seed_alone(model):
    backend = TransformersBackend(model, TOKENIZER)

    def draw(seed):
        torch.randn(3)  # history must not matter
        return [
            c.token_ids for c in backend.generate(PROMPTS, Sampling(max_response_tokens=8, temperature=1.0, seed=seed))
        ]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_global_random_state_and_training_mode_are_left_alone(model):
    model.train()
    state = torch.random.get_rng_state()
    TransformersBackend(model, TOKENIZER).generate(PROMPTS, Sampling(max_response_tokens=2, temperature=1.0))
    assert torch.equal(state, torch.random.get_rng_state())
    assert model.training


def test_no_prompts_no_completions(model):
    assert TransformersBackend(model, TOKENIZER).generate([], Sampling(max_response_tokens=2)) == []


def test_a_tokenizer_without_end_token_is_refused(model):
    with pytest.raises(ModelError, match="end token"):
        TransformersBackend(model, SimpleNamespace(eos_token_id=None, pad_token_id=0))
