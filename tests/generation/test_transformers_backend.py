from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from aqnpipe.config.model import builtin_folder
from aqnpipe.errors import ModelError
from aqnpipe.generation.backend import Sampling
from aqnpipe.generation.transformers_backend import TransformersBackend
from aqnpipe.models.loading import load_model, load_tokenizer

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


def test_a_stop_text_ends_a_response_and_no_other():
    folder = builtin_folder("tiny")
    tokenizer = load_tokenizer(folder)
    backend = TransformersBackend(load_model(folder, dtype="float32", attention="eager"), tokenizer)
    questions = [f"Tom has {n} apples . He buys 7 more . How many apples now ?" for n in range(4)] + ["What"]
    prompts = tokenizer(questions)["input_ids"]
    whole = backend.generate(prompts, Sampling(max_response_tokens=28))
    ended = backend.generate(prompts, Sampling(max_response_tokens=28, stop_text="####"))
    decoded = [tokenizer.decode(completion.token_ids) for completion in whole]
    assert 0 < sum("####" in text for text in decoded) < len(decoded)
    for free, stopped, text in zip(whole, ended, decoded, strict=True):
        assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
        if "####" in text:
            assert tokenizer.decode(stopped.token_ids).endswith("####")
            assert stopped.finish_reason == "stop"
        else:
            assert stopped == free


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


def test_parts_of_a_batch_get_the_same_draws_as_in_the_whole_batch(model):
    """Prompts of equal length, so that the padding of a part equals that of the whole batch."""
    prompts = [[5, 6, 7], [9, 8, 7], [5, 6, 9], [11, 12, 13]]
    backend = TransformersBackend(model, TOKENIZER)
    sampling = Sampling(max_response_tokens=8, temperature=1.0, seed=4)
    whole = backend.generate(prompts, sampling)
    parts = [replace(sampling, first_row=row, num_rows=4) for row in (0, 2)]
    assert backend.generate(prompts[:2], parts[0]) + backend.generate(prompts[2:], parts[1]) == whole
    assert backend.generate(prompts[2:], sampling) != whole[2:]


def test_draws_are_those_of_multinomial(model):
    """One token: the reference computes the softmax of the last logits and lets torch draw from it."""
    prompts = [[5, 6, 7]] * 64
    completions = TransformersBackend(model, TOKENIZER).generate(
        prompts, Sampling(max_response_tokens=1, temperature=0.7, seed=4)
    )
    with torch.no_grad():
        logits = model(torch.tensor(prompts)).logits[:, -1]
    drawn = torch.multinomial((logits / 0.7).softmax(-1), 1, generator=torch.Generator().manual_seed(4))
    assert [[token] for c in completions for token in c.token_ids] == drawn.tolist()
    assert len({c.token_ids[0] for c in completions}) > 10


def test_the_generation_config_of_a_model_folder_is_ignored(make_model):
    model = make_model()
    backend = TransformersBackend(model, TOKENIZER)
    for temperature in (None, 1.0):
        sampling = Sampling(max_response_tokens=12, temperature=temperature)
        plain = backend.generate(PROMPTS, sampling)
        model.generation_config.update(repetition_penalty=5.0, do_sample=True, top_k=1, temperature=0.1, eos_token_id=5)
        assert backend.generate(PROMPTS, sampling) == plain
        assert model.generation_config.repetition_penalty == 5.0
        model.generation_config.update(repetition_penalty=1.0)


def test_log_probabilities_are_those_of_the_drawn_tokens(model):
    """Against one forward over prompt and response; greedy completions have none."""
    sampling = Sampling(max_response_tokens=8, temperature=0.7, seed=4, log_probabilities=True)
    completions = TransformersBackend(model, TOKENIZER).generate(PROMPTS, sampling)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *completion.token_ids]])).logits[0, len(prompt) - 1 : -1] / 0.7
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.log_probabilities), expected, atol=1e-5, rtol=0)
    without = Sampling(max_response_tokens=8, temperature=0.7, seed=4)
    plain = TransformersBackend(model, TOKENIZER).generate(PROMPTS, without)
    assert plain == completions
    assert {completion.log_probabilities for completion in plain} == {None}
    with pytest.raises(ValueError, match="found temperature None"):
        Sampling(max_response_tokens=8, log_probabilities=True)
