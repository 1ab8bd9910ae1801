"""Rows of a weight that lies on several tensor-parallel workers, without vLLM: every worker's part of the exchange."""

import sys
from types import SimpleNamespace

import pytest
import torch

from aqnpipe.noise.kernels.shards import Shard
from aqnpipe.parity.forms import EmbeddingForm, Operator, SumForm
from aqnpipe.parity.recorder import Recorder
from aqnpipe.parity.sample import Sample, Token
from aqnpipe.parity.vllm.shares import SharedEmbeddingForm, SharedLinearForm, embedding_form

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
