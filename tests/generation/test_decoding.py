"""Decoding against transformers' own `generate`, and what a step computes once rows have ended."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizer import build_tokenizer
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM
from transformers.cache_utils import DynamicLayer

from aqnpipe.generation.backend import StopText
from aqnpipe.generation.transformers_backend import BufferPool, InPlaceLayer, compacted, decode, grouped_attention

PADDING, LIMIT = 0, 16
SIZES = {
    "vocab_size": 24,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": PADDING,
}
# Large weights, so that an untrained model has clear preferences and its responses differ in length.
CONFIDENT = {"initializer_range": 0.4}


def most_probable(logits, rows):
    return logits.argmax(dim=-1)


def prompts(num_rows=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 12, (num_rows,), generator=generator).tolist()
    return [torch.randint(2, SIZES["vocab_size"], (length,), generator=generator).tolist() for length in lengths]


def llama(attention, **changes):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**(SIZES | CONFIDENT | changes), attn_implementation=attention)).eval()


def mistral(attention):
    """Its layers attend to the last 4 tokens only."""
    torch.manual_seed(0)
    sizes = SIZES | CONFIDENT
    return MistralForCausalLM(MistralConfig(**sizes, sliding_window=4, attn_implementation=attention)).eval()


def library_responses(model, requested, end_token):
    """Responses of transformers' `generate` to left-padded prompts, cut after the end token."""
    width = max(map(len, requested))
    ids = torch.tensor([[PADDING] * (width - len(prompt)) + prompt for prompt in requested])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in requested])
    settings = GenerationConfig(
        max_new_tokens=LIMIT, pad_token_id=PADDING, eos_token_id=end_token, do_sample=False, disable_compile=True
    )
    found = model.generate(input_ids=ids, attention_mask=mask, generation_config=settings)[:, width:].tolist()
    return [response[: response.index(end_token) + 1] if end_token in response else response for response in found]


def responses(model, requested, end_token, limit=LIMIT, pool=None, **settings):
    settings |= {"is_finished": lambda response: response[-1] == end_token, "padding_token": PADDING, "limit": limit}
    return decode(model, requested, most_probable, pool=pool or BufferPool(), **settings)


def an_end_token(model, requested):
    """A token that ends some responses early: not all, and not all at the same step."""
    free = library_responses(model, requested, end_token=SIZES["vocab_size"] + 1)
    for token in range(2, SIZES["vocab_size"]):
        ends = {response.index(token) for response in free if token in response}
        if len(ends) > 2 and any(token not in response for response in free):
            return token
    raise AssertionError("no token ends responses of different length")


@pytest.mark.parametrize(
    "make",
    [
        partial(llama, "sdpa"),
        partial(llama, "eager"),
        partial(llama, "sdpa", num_key_value_heads=4),
        partial(mistral, "sdpa"),
        partial(mistral, "eager"),
    ],
    ids=["grouped", "eager", "no shared heads", "window", "window, eager"],
)
def test_tokens_are_those_of_transformers_generate(make):
    model, requested = make(), prompts()
    end_token = an_end_token(model, requested)
    found = responses(model, requested, end_token)
    assert found == library_responses(model, requested, end_token)
    assert len({len(response) for response in found}) > 2


def test_a_step_computes_only_the_active_rows(monkeypatch):
    model, requested = llama("sdpa"), prompts()
    end_token = an_end_token(model, requested)
    found = responses(model, requested, end_token)
    monkeypatch.setattr("aqnpipe.generation.transformers_backend._MAX_PREFILL_TOKENS", 24)
    read, steps = [], []
    with_hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: (read if kwargs["position_ids"] is None else steps).append(kwargs["input_ids"]),
        with_kwargs=True,
    )
    assert responses(model, requested, end_token) == found
    with_hook.remove()
    # The forward for token t contains the rows whose responses have a token t.
    assert [len(ids) for ids in steps] == [sum(len(response) > step for response in found) for step in range(1, LIMIT)]
    # All prompts are read, by length, in groups with little padding.
    groups = [[ids[ids != PADDING].tolist() for ids in group] for group in read]
    assert [len(prompt) for group in groups for prompt in group] == sorted(map(len, requested))
    assert sorted(prompt for group in groups for prompt in group) == sorted(requested)
    assert len(groups) > 2
    assert all(ids.numel() <= 24 for ids in read)


def test_all_rows_end_at_the_limit_or_in_the_same_step():
    model, requested = llama("sdpa"), prompts(3)
    assert [len(response) for response in responses(model, requested, end_token=-1, limit=5)] == [5, 5, 5]
    first = responses(model, requested[:1], end_token=-1, limit=1)
    assert responses(model, requested[:1], end_token=first[0][0]) == first


@given(st.lists(st.booleans(), max_size=40))
def test_gaps_are_filled_from_the_end(active):
    found = compacted(active)
    expected = [place for place, is_active in enumerate(active) if is_active]
    assert sorted(found) == expected
    assert all(place == found[place] for place in expected if place < len(expected))


def test_buffers_contain_what_transformers_own_cache_does():
    """Prompts of 4 and 2 tokens, then one token at a time; rows leave in between."""
    ours, theirs = InPlaceLayer(5, 4, 7, BufferPool(), 0), DynamicLayer()
    torch.manual_seed(0)
    states = torch.randn(2, 5, 2, 4, 8)
    states[:, :3, :, 2:] = 0
    for first, some in ((0, states[:, :3, :, :2]), (3, states[:, 3:])):
        ours.select_rows(first, some.shape[1], 0)
        assert ours.get_seq_length() == 0
        for found, expected in zip(ours.update(*some), some, strict=True):
            assert torch.equal(found, expected)
    ours.select_rows(0, 5, 4)
    theirs.update(*states)
    rows = 5
    for kept in ([0, 1, 2, 3, 4], [4, 1, 2], [2, 1]):
        ours.reorder_cache(torch.tensor(kept))
        theirs.reorder_cache(torch.tensor(kept))
        rows = len(kept)
        states = torch.randn(2, rows, 2, 1, 8)
        for found, expected in zip(ours.update(*states), theirs.update(*states), strict=True):
            assert torch.equal(found, expected)
    assert ours.get_seq_length() == theirs.get_seq_length() == 7
    assert ours.keys.data_ptr() == ours._buffers[0].data_ptr()


def test_buffers_of_rows_with_a_common_prefix():
    """Three common tokens, then one or two per row."""
    ours = InPlaceLayer(3, 5, 6, BufferPool(), 0)
    beginning, rest, token = torch.randn(2, 1, 2, 3, 8), torch.randn(2, 3, 2, 2, 8), torch.randn(2, 3, 2, 1, 8)
    rest[:, 0, :, 1] = 0
    ours.update(*beginning)
    ours.repeat_first_row(3)
    for first, some in ((0, rest[:, :1, :, :1]), (1, rest[:, 1:])):
        ours.select_rows(first, some.shape[1], 3)
        assert ours.get_seq_length() == 3
        expected = torch.cat([beginning.expand(-1, some.shape[1], -1, -1, -1), some], dim=3)
        assert torch.equal(torch.stack(ours.update(*some)), expected)
    ours.select_rows(0, 3, 5)
    expected = torch.cat([beginning.expand(-1, 3, -1, -1, -1), rest, token], dim=3)
    assert torch.equal(torch.stack(ours.update(*token)), expected)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("shared", [15, 16, 40])
def test_a_common_prefix_is_read_once(attention, shared, monkeypatch):
    model, rests = llama(attention), prompts()
    beginning = torch.randint(2, SIZES["vocab_size"], (shared,), generator=torch.Generator().manual_seed(1)).tolist()
    requested = [[*beginning, place, *rest] for place, rest in enumerate(rests, start=2)]
    monkeypatch.setattr("aqnpipe.generation.transformers_backend._MAX_PREFILL_TOKENS", 24)
    end_token = an_end_token(model, requested)
    expected = library_responses(model, requested, end_token)
    read = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(kwargs["input_ids"]) if kwargs["position_ids"] is None else None,
        with_kwargs=True,
    )
    assert responses(model, requested, end_token) == expected
    assert sum((ids != PADDING).sum() for ids in read) == sum(map(len, requested))
    read.clear()
    assert responses(model, requested, end_token, share_prefix=True) == expected
    if shared < 16:
        assert sum((ids != PADDING).sum() for ids in read) == sum(map(len, requested))
    else:
        assert read[0].tolist() == [beginning]
        assert sum((ids != PADDING).sum() for ids in read) == shared + sum(len(rest) + 1 for rest in rests)
        assert len(read) > 3


def test_a_prompt_that_is_a_prefix_of_all_keeps_its_last_token():
    model = llama("sdpa")
    beginning = torch.randint(2, SIZES["vocab_size"], (20,), generator=torch.Generator().manual_seed(2)).tolist()
    for requested in ([beginning, [*beginning, 3, 4]], [beginning, beginning], [beginning]):
        expected = library_responses(model, requested, end_token=-1)
        assert responses(model, requested, end_token=-1, share_prefix=True) == expected


def test_layers_with_a_window_share_no_prefix():
    model, beginning = mistral("sdpa"), [5] * 20
    requested = [[*beginning, *rest] for rest in prompts()]
    expected = library_responses(model, requested, end_token=-1)
    assert responses(model, requested, end_token=-1, share_prefix=True) == expected


def test_leftovers_in_buffers_do_not_change_the_next_batch():
    """Smaller, larger and smaller again; all buffers are filled with infinity in between."""
    model, pool = llama("sdpa"), BufferPool()
    for number, seed in ((12, 0), (20, 1), (3, 2), (7, 3)):
        requested = prompts(number, seed)
        end_token = an_end_token(model, prompts())
        assert responses(model, requested, end_token, pool=pool) == library_responses(model, requested, end_token)
        for block in pool._blocks.values():
            block.fill_(torch.inf)


def test_buffers_are_reused_and_replaced_only_if_they_do_not_fit():
    pool, like = BufferPool(), torch.ones(1)
    first = pool.take(0, (4, 6), like)
    assert pool.take(0, (2, 11), like).data_ptr() == first.data_ptr()
    assert pool.take(1, (4, 6), like).data_ptr() != first.data_ptr()
    assert pool.take(0, (5, 5), like).shape == (5, 5)
    assert pool.take(0, (1, 2), like.bfloat16()).dtype == torch.bfloat16


def test_attention_is_as_it_was_before(model):
    model.config._attn_implementation = "sdpa"
    with pytest.raises(KeyError), grouped_attention(model.config):
        assert model.config._attn_implementation != "sdpa"
        raise KeyError
    assert model.config._attn_implementation == "sdpa"
    model.config._attn_implementation = "eager"
    with grouped_attention(model.config):
        assert model.config._attn_implementation == "eager"


TOKENIZER = build_tokenizer()
TEXT = "Question:"


class Counting:
    """A tokenizer that counts how often it decodes more than one token."""

    def __init__(self):
        self.calls = 0

    def decode(self, token_ids, **settings):
        self.calls += len(token_ids) > 1
        return TOKENIZER.decode(token_ids, **settings)


def first_complete(stop, token_ids):
    return next((n for n in range(len(token_ids) + 1) if stop.is_complete(token_ids[:n])), None)


@given(before=st.text("ab Question:#\n1", max_size=30), after=st.text("ab :\n", max_size=5))
@settings(deadline=None)
def test_the_first_token_that_completes_the_text_is_detected(before, after):
    token_ids = TOKENIZER(f"{before}{TEXT}{after}")["input_ids"]
    expected = next(n for n in range(len(token_ids) + 1) if TEXT in TOKENIZER.decode(token_ids[:n]))
    assert first_complete(StopText(TOKENIZER, TEXT), token_ids) == expected


@given(st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=40))
@settings(deadline=None)
def test_no_response_without_the_text_ends(token_ids):
    stop = StopText(TOKENIZER, ":")
    decoded = [TOKENIZER.decode(token_ids[:n], skip_special_tokens=True) for n in range(len(token_ids) + 1)]
    assert first_complete(stop, token_ids) == next((n for n, text in enumerate(decoded) if ":" in text), None)


def test_only_tokens_that_may_complete_the_text_are_decoded_in_context():
    tokenizer = Counting()
    stop = StopText(tokenizer, TEXT)
    words = TOKENIZER("Tom has 5 apples . Question Question")["input_ids"]
    assert first_complete(stop, words) is None
    assert tokenizer.calls == 0
    assert first_complete(stop, TOKENIZER("a: Question:")["input_ids"]) is not None
    assert tokenizer.calls == 2


def test_an_empty_text_is_a_bug():
    with pytest.raises(ValueError, match="this is a bug"):
        StopText(TOKENIZER, "")
