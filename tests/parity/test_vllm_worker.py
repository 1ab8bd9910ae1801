"""What runs in vLLM's workers for a capture, without vLLM: given tokens, and rows of weights that workers share."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from aqnpipe.errors import ModelError
from aqnpipe.noise.kernels.shards import Shard
from aqnpipe.parity.forms import EmbeddingForm, Operator, SumForm
from aqnpipe.parity.recorder import Recorder
from aqnpipe.parity.sample import Sample, Token
from aqnpipe.parity.vllm.worker import (
    SEQUENCE,
    GivenTokens,
    SharedEmbeddingForm,
    SharedLinearForm,
    embedding_form,
    requests_of,
)

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


WHOLE = torch.arange(1.0, 25.0).reshape(6, 4)
BIAS = torch.arange(1.0, 7.0)


@pytest.fixture
def as_worker(monkeypatch):
    """Function (rank, number of workers) that makes this process one of them; a sum is then its own part of it."""

    def become(rank, num_workers):
        group = SimpleNamespace(rank_in_group=rank, world_size=num_workers)
        fake = SimpleNamespace(get_tp_group=lambda: group, tensor_model_parallel_all_reduce=lambda part: part)
        monkeypatch.setitem(sys.modules, "vllm.distributed", fake)

    return become


@pytest.mark.parametrize(
    "shares",
    [
        [Shard(0, 3, 6), Shard(3, 3, 6)],
        # A padded vocabulary: the last worker has fewer rows.
        [Shard(0, 4, 6), Shard(4, 2, 6)],
        # Few heads of keys and values: two workers have the same rows, of which one counts.
        [Shard(0, 3, 6), Shard(0, 3, 6), Shard(3, 3, 6), Shard(3, 3, 6)],
    ],
)
def test_the_parts_of_all_workers_add_up_to_the_rows(as_worker, shares):
    channels = torch.tensor([5, 0, 3, 3])
    weight, bias, rows = torch.zeros(4, 4), torch.zeros(4), torch.zeros(4, 4)
    for rank, shard in enumerate(shares):
        as_worker(rank, len(shares))
        own = slice(shard.start, shard.start + shard.size)
        # Rows behind the own ones pad the vocabulary.
        padded = torch.cat((WHOLE[own], torch.full((2, 4), 99.0)))
        part, part_of_bias = SharedLinearForm(WHOLE[own], BIAS[own], output_shard=shard).rows(channels)
        weight, bias = weight + part, bias + part_of_bias
        rows += SharedEmbeddingForm(padded, shard=shard).rows(channels)
    assert torch.equal(weight, WHOLE[channels])
    assert torch.equal(rows, WHOLE[channels])
    assert bias.tolist() == [6, 1, 4, 4]


def test_columns_of_a_row_parallel_weight_are_gathered_and_its_bias_is_whole(monkeypatch):
    others = WHOLE[:, 2:]
    fake = SimpleNamespace(tensor_model_parallel_all_gather=lambda own: torch.cat((own, others[[4, 1]]), -1))
    monkeypatch.setitem(sys.modules, "vllm.distributed", fake)
    form = SharedLinearForm(WHOLE[:, :2], BIAS, input_shard=Shard(0, 2, 4))
    weight, bias = form.rows(torch.tensor([4, 1]))
    assert torch.equal(weight, WHOLE[[4, 1]])
    assert bias.tolist() == [5, 2]


def test_a_recorder_keeps_the_whole_and_edits_the_own_columns():
    """Of two workers, the second: both have one head of two channels."""
    mine = torch.arange(2.0, 6.0).reshape(1, 2, 1, 2)

    def gather(own):
        return torch.cat((own - 100, own), -1)

    def edit(_, rows, values):
        seen.append(values.clone())
        return 10 * values

    shard, seen = Shard(2, 2, 4), []
    recorder = Recorder(Sample((2,)), edit=edit, gather=gather)
    recorder.begin((1, 2), [Token(0, 0, 0, 0), Token(0, 1, 0, 1)])
    operator = Operator("layers.0.rotary_q", "rotary_q", 0, SumForm(), shard=shard, input_shards=(shard, shard))
    recorder.see(operator, [mine / 2, mine / 2], mine)
    assert seen[0].tolist() == [[-98, -97, 2, 3], [-96, -95, 4, 5]]
    assert mine.tolist() == [[[[20, 30]], [[40, 50]]]]


def test_an_embedding_that_is_not_shared_is_a_plain_one():
    assert type(embedding_form(torch.nn.Embedding(4, 2))) is EmbeddingForm
