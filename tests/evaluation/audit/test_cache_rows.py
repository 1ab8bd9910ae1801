"""Rows are followed by their keys; of equal rows by the tokens that they chose."""

from types import SimpleNamespace

import pytest
import torch

from aqnpipe.evaluation.audit.cache_rows import CacheRows, _assigned

ROWS, HEADS, CHANNELS = 5, 2, 4


def cache_of(*keys):
    return SimpleNamespace(layers=[SimpleNamespace(keys=layer) for layer in keys])


@pytest.fixture
def keys():
    torch.manual_seed(0)
    return torch.randn(ROWS, HEADS, 6, CHANNELS)


def unknown():
    return [0] * ROWS, None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [0, 4, 2], [3, 1], [4, 3, 2, 1, 0]])
def test_rows_are_found_again_after_they_moved(keys, order, dtype):
    followed = CacheRows(3)
    keys = keys.to(dtype)
    cache = cache_of(torch.zeros_like(keys), keys)
    followed.note_prompts(cache, [5] * ROWS, 6)
    followed.note_step(cache)
    assert followed.places(cache_of(torch.zeros_like(keys), keys[order]), unknown) == (order, 0)


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [0, 4, 2]])
def test_prompts_of_different_length_are_found_at_their_ends(keys, order):
    followed = CacheRows(0)
    followed.note_prompts(cache_of(keys), [1, 3, 5, 4, 2], 6)
    assert followed.places(cache_of(keys[order]), unknown) == (order, 0)


def test_keys_of_no_row_are_counted(keys):
    followed = CacheRows(0)
    followed.note_prompts(cache_of(keys), [5] * ROWS, 6)
    followed.note_step(cache_of(keys))
    other = keys[[0, 4, 2]].clone()
    other[1, 0, -1, 0] += 1
    assert followed.places(cache_of(other), unknown) == ([0, 1, 2], 1)


def test_the_first_layer_is_used_only_if_there_is_no_other(keys):
    for number in range(4):
        followed = CacheRows(number)
        followed.note_step(cache_of(torch.zeros_like(keys), keys, keys))
        assert followed.places(cache_of(torch.zeros_like(keys), keys[[3]], keys[[3]]), unknown) == ([3], 0)


def test_equal_rows_are_told_apart_by_the_tokens_that_they_chose():
    equal = torch.tensor([[True, True, True], [True, True, True]])
    assert _assigned(equal, [8, 7], [7, 9, 8]) == ([2, 0], 0)
    assert _assigned(equal, [8, 7], None) == ([0, 1], 0)


def test_a_cache_without_keys_is_not_followed():
    followed = CacheRows(0)
    followed.note_step(cache_of(None))
    assert not followed.is_followed
