"""What counts as a pass over the given tokens, without vLLM."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from aqnpipe.errors import ModelError
from aqnpipe.parity.vllm.tokens import SEQUENCE, GivenTokens, requests_of

SEQUENCES = [[5, 6, 7, 8], [5, 9, 7]]


@pytest.fixture
def given():
    """The last two tokens of both sequences are decoded."""
    return GivenTokens(SEQUENCES, 2)


def test_tokens_are_placed_by_their_request_although_both_sequences_have_the_same_token_there(given):
    assert given.take([(0, 2), (1, 1)], [5, 6, 5], [0, 1, 0]) == [(0, 0), (0, 1), (1, 0)]
    # vLLM may order its requests anew.
    assert given.take([(1, 1), (0, 1)], [9, 7], [1, 2]) == [(1, 1), (0, 2)]
    assert given.take([(1, 1), (0, 1)], [7, 8], [2, 3]) == [(1, 2), (0, 3)]
    given.check()


def test_only_the_next_given_token_can_be_chosen(given):
    given.take([(0, 2), (1, 1)], [5, 6, 5], [0, 1, 0])
    chosen = given.only_next(torch.tensor([[9.0] * 10, [0.0] * 10]))
    assert chosen.argmax(-1).tolist() == [7, 9]
    assert chosen.isneginf().sum(-1).tolist() == [9, 9]


def test_a_pass_of_vllm_itself_is_none_of_the_capture(given):
    assert given.take([], [0, 0, 0], [0, 0, 0]) == []
    logits = torch.ones(3, 10)
    assert given.only_next(logits) is logits
    with pytest.raises(ModelError, match="vLLM ran 0 tokens of sequence 0, expected its 4"):
        given.check()


@pytest.mark.parametrize(
    ("requests", "ids", "positions", "says"),
    [
        ([(0, 2)], [5, 7], [0, 1], r"sequence 0: found ids \[5, 7\] at position 0, expected \[5, 6\] at position 0"),
        ([(0, 2)], [5, 6], [1, 2], "at position 1, expected"),
        ([(0, 3)], [5, 6, 7], [0, 1, 2], "3 tokens in a forward pass, expected 1 from position 2 on"),
        ([(-1, 1)], [5], [0], "a request that is none of the capture"),
        ([(1, 4)], [5, 9, 7, 0], [0, 1, 2, 3], "sequence 1: found ids"),
    ],
)
def test_other_tokens_are_refused(given, requests, ids, positions, says):
    assert given.take(requests, ids, positions) == []
    with pytest.raises(ModelError, match=says):
        given.check()


def test_tokens_that_are_computed_twice_are_refused(given):
    given.take([(0, 2)], [5, 6], [0, 1])
    assert given.take([(0, 2)], [5, 6], [0, 1]) == []
    with pytest.raises(ModelError, match="at position 0, expected"):
        given.check()


def test_logits_that_are_not_one_row_per_request_are_refused(given):
    given.take([(0, 2)], [5, 6], [0, 1])
    given.only_next(torch.ones(2, 10))
    with pytest.raises(ModelError, match="logits of 2 tokens, expected one for each"):
        given.check()


def runner(**requests):
    """Return a model runner of vLLM's kind, whose requests have some tokens of a sequence."""
    arguments = {name: SimpleNamespace(extra_args={SEQUENCE: pair[0]}) for name, pair in requests.items()}
    ends = np.cumsum([0, *(count for _, count in requests.values()), 0])
    return SimpleNamespace(
        input_batch=SimpleNamespace(req_ids=list(requests)),
        query_start_loc=SimpleNamespace(np=ends),
        requests={name: SimpleNamespace(sampling_params=found) for name, found in arguments.items()},
    )


def test_requests_are_read_in_the_order_of_the_pass():
    assert requests_of(runner(b=(1, 3), a=(0, 1))) == [(1, 3), (0, 1)]
    assert requests_of(runner()) == []


def test_a_model_runner_of_another_kind_is_refused():
    with pytest.raises(ModelError, match="VLLM_USE_V2_MODEL_RUNNER=0"):
        requests_of(SimpleNamespace())
