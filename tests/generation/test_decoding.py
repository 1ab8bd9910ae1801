"""Decoding against transformers' own `generate`, and what a step computes once rows have ended."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM
from transformers.cache_utils import DynamicLayer

from aqnpipe.generation.decoding import decode, without_gaps
from aqnpipe.generation.grouped_attention import grouped_attention
from aqnpipe.generation.kv_cache import BatchMemory, InPlaceLayer

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
# Large weights, so that an untrained model has opinions and answers differ in length.
OPINIONATED = {"initializer_range": 0.4}


def most_probable(logits, rows):
    return logits.argmax(dim=-1)


def prompts(num_rows=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 12, (num_rows,), generator=generator).tolist()
    return [torch.randint(2, SIZES["vocab_size"], (length,), generator=generator).tolist() for length in lengths]


def llama(attention, **changes):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**(SIZES | OPINIONATED | changes), attn_implementation=attention)).eval()


def mistral(attention):
    """Its layers see the last 4 tokens alone."""
    torch.manual_seed(0)
    sizes = SIZES | OPINIONATED
    return MistralForCausalLM(MistralConfig(**sizes, sliding_window=4, attn_implementation=attention)).eval()


def library_answers(model, requested, end_token):
    """What transformers' `generate` gives for left-padded prompts, cut after the end token."""
    width = max(map(len, requested))
    ids = torch.tensor([[PADDING] * (width - len(one)) + one for one in requested])
    mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in requested])
    settings = GenerationConfig(
        max_new_tokens=LIMIT, pad_token_id=PADDING, eos_token_id=end_token, do_sample=False, disable_compile=True
    )
    found = model.generate(input_ids=ids, attention_mask=mask, generation_config=settings)[:, width:].tolist()
    return [one[: one.index(end_token) + 1] if end_token in one else one for one in found]


def answers(model, requested, end_token, limit=LIMIT, memory=None, **settings):
    settings |= {"is_over": lambda response: response[-1] == end_token, "padding_token": PADDING, "limit": limit}
    return decode(model, requested, most_probable, memory=memory or BatchMemory(), **settings)


def an_end_token(model, requested):
    """A token that ends some answers early, not all, and not all at once."""
    free = library_answers(model, requested, end_token=SIZES["vocab_size"] + 1)
    for token in range(2, SIZES["vocab_size"]):
        ends = {one.index(token) for one in free if token in one}
        if len(ends) > 2 and any(token not in one for one in free):
            return token
    raise AssertionError("no token ends answers of different length")


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
    found = answers(model, requested, end_token)
    assert found == library_answers(model, requested, end_token)
    assert len({len(one) for one in found}) > 2


def test_a_step_computes_the_rows_that_go_on_and_no_others(monkeypatch):
    model, requested = llama("sdpa"), prompts()
    end_token = an_end_token(model, requested)
    found = answers(model, requested, end_token)
    monkeypatch.setattr("aqnpipe.generation.decoding._PROMPT_TOKENS_AT_ONCE", 24)
    read, steps = [], []
    with_hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: (read if kwargs["position_ids"] is None else steps).append(kwargs["input_ids"]),
        with_kwargs=True,
    )
    assert answers(model, requested, end_token) == found
    with_hook.remove()
    # The forward that gives token t has the rows whose answers have a token t.
    assert [len(ids) for ids in steps] == [sum(len(one) > step for one in found) for step in range(1, LIMIT)]
    # Prompts are read by length, all of them, in portions with little padding.
    portions = [[ids[ids != PADDING].tolist() for ids in portion] for portion in read]
    assert [len(one) for portion in portions for one in portion] == sorted(map(len, requested))
    assert sorted(one for portion in portions for one in portion) == sorted(requested)
    assert len(portions) > 2
    assert all(ids.numel() <= 24 for ids in read)


def test_all_at_the_limit_and_all_at_once():
    model, requested = llama("sdpa"), prompts(3)
    assert [len(one) for one in answers(model, requested, end_token=-1, limit=5)] == [5, 5, 5]
    first = answers(model, requested[:1], end_token=-1, limit=1)
    assert answers(model, requested[:1], end_token=first[0][0]) == first


@given(st.lists(st.booleans(), max_size=40))
def test_gaps_are_filled_from_the_end(lives):
    found = without_gaps(lives)
    living = [place for place, lives_on in enumerate(lives) if lives_on]
    assert sorted(found) == living
    assert all(place == found[place] for place in living if place < len(living))


def test_memory_holds_what_transformers_own_cache_does():
    """Prompts of 4 and 2 tokens, then one token at a time; rows leave in between."""
    ours, theirs = InPlaceLayer(5, 4, 7, BatchMemory(), 0), DynamicLayer()
    torch.manual_seed(0)
    states = torch.randn(2, 5, 2, 4, 8)
    states[:, :3, :, 2:] = 0
    for first, some in ((0, states[:, :3, :, :2]), (3, states[:, 3:])):
        ours.turn_to(first, some.shape[1], 0)
        assert ours.get_seq_length() == 0
        for found, expected in zip(ours.update(*some), some, strict=True):
            assert torch.equal(found, expected)
    ours.turn_to(0, 5, 4)
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
    assert ours.keys.data_ptr() == ours._memory[0].data_ptr()


def test_memory_of_rows_that_begin_alike():
    """Three tokens in common, then one and two of their own."""
    ours = InPlaceLayer(3, 5, 6, BatchMemory(), 0)
    beginning, rest, token = torch.randn(2, 1, 2, 3, 8), torch.randn(2, 3, 2, 2, 8), torch.randn(2, 3, 2, 1, 8)
    rest[:, 0, :, 1] = 0
    ours.update(*beginning)
    ours.repeat_first_row(3)
    for first, some in ((0, rest[:, :1, :, :1]), (1, rest[:, 1:])):
        ours.turn_to(first, some.shape[1], 3)
        assert ours.get_seq_length() == 3
        expected = torch.cat([beginning.expand(-1, some.shape[1], -1, -1, -1), some], dim=3)
        assert torch.equal(torch.stack(ours.update(*some)), expected)
    ours.turn_to(0, 3, 5)
    expected = torch.cat([beginning.expand(-1, 3, -1, -1, -1), rest, token], dim=3)
    assert torch.equal(torch.stack(ours.update(*token)), expected)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("shared", [15, 16, 40])
def test_what_all_prompts_begin_with_is_read_once(attention, shared, monkeypatch):
    model, rests = llama(attention), prompts()
    beginning = torch.randint(2, SIZES["vocab_size"], (shared,), generator=torch.Generator().manual_seed(1)).tolist()
    requested = [[*beginning, place, *rest] for place, rest in enumerate(rests, start=2)]
    monkeypatch.setattr("aqnpipe.generation.decoding._PROMPT_TOKENS_AT_ONCE", 24)
    end_token = an_end_token(model, requested)
    expected = library_answers(model, requested, end_token)
    read = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(kwargs["input_ids"]) if kwargs["position_ids"] is None else None,
        with_kwargs=True,
    )
    assert answers(model, requested, end_token) == expected
    assert sum((ids != PADDING).sum() for ids in read) == sum(map(len, requested))
    read.clear()
    assert answers(model, requested, end_token, reads_beginning_once=True) == expected
    if shared < 16:
        assert sum((ids != PADDING).sum() for ids in read) == sum(map(len, requested))
    else:
        assert read[0].tolist() == [beginning]
        assert sum((ids != PADDING).sum() for ids in read) == shared + sum(len(one) + 1 for one in rests)
        assert len(read) > 3


def test_a_prompt_that_is_the_beginning_of_all_keeps_its_last_token():
    model = llama("sdpa")
    beginning = torch.randint(2, SIZES["vocab_size"], (20,), generator=torch.Generator().manual_seed(2)).tolist()
    for requested in ([beginning, [*beginning, 3, 4]], [beginning, beginning], [beginning]):
        expected = library_answers(model, requested, end_token=-1)
        assert answers(model, requested, end_token=-1, reads_beginning_once=True) == expected


def test_layers_with_a_window_read_every_prompt_whole():
    model, beginning = mistral("sdpa"), [5] * 20
    requested = [[*beginning, *rest] for rest in prompts()]
    expected = library_answers(model, requested, end_token=-1)
    assert answers(model, requested, end_token=-1, reads_beginning_once=True) == expected


def test_what_a_batch_leaves_in_memory_changes_nothing_of_the_next():
    """Smaller, larger and smaller again; all of the memory is made infinite in between."""
    model, memory = llama("sdpa"), BatchMemory()
    for number, seed in ((12, 0), (20, 1), (3, 2), (7, 3)):
        requested = prompts(number, seed)
        end_token = an_end_token(model, prompts())
        assert answers(model, requested, end_token, memory=memory) == library_answers(model, requested, end_token)
        for block in memory._blocks.values():
            block.fill_(torch.inf)


def test_memory_is_taken_once_and_anew_only_where_it_does_not_do():
    memory, like = BatchMemory(), torch.ones(1)
    first = memory.take(0, (4, 6), like)
    assert memory.take(0, (2, 11), like).data_ptr() == first.data_ptr()
    assert memory.take(1, (4, 6), like).data_ptr() != first.data_ptr()
    assert memory.take(0, (5, 5), like).shape == (5, 5)
    assert memory.take(0, (1, 2), like.bfloat16()).dtype == torch.bfloat16


def test_attention_is_as_it_was_before(model):
    model.config._attn_implementation = "sdpa"
    with pytest.raises(KeyError), grouped_attention(model.config):
        assert model.config._attn_implementation != "sdpa"
        raise KeyError
    assert model.config._attn_implementation == "sdpa"
    model.config._attn_implementation = "eager"
    with grouped_attention(model.config):
        assert model.config._attn_implementation == "eager"
