"""Which columns a tensor-parallel worker has, and how the measurements of workers become one: without vLLM."""

import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace as with_changes
from types import SimpleNamespace

import pytest
import sharded_layer
import torch
from torch import nn

from aqnpipe.config.noise import OperatorNoise, RelativeGaussian
from aqnpipe.errors import ReceiptError
from aqnpipe.generation.noisy_passes import PassNoise
from aqnpipe.generation.vllm.injection import replace
from aqnpipe.generation.vllm.modules import EngineLayer, Linear, Projection, find_shares, head_of, linear_of, share
from aqnpipe.generation.vllm.worker_merge import merged_workers
from aqnpipe.noise.kernels.shards import Shard
from aqnpipe.noise.receipts.receipt import RecorderState
from aqnpipe.noise.receipts.table import Row

SCALE = 0.1
ERROR = RelativeGaussian(scale=SCALE)
FAULTED = Row("evaluation", None, 0, "fault 0", num_channels=8, num_faulty_channels=1, calls=2, elements=16)
NOISE = PassNoise(operator_noise=OperatorNoise(error=ERROR, phases=("evaluation",), attention="fused"))
LEFT, RIGHT = Shard(0, 32, 64), Shard(32, 32, 64)


# -- columns -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "copies", "expected"),
    [(0, 1, Shard(0, 8, 32)), (3, 1, Shard(24, 8, 32)), (1, 2, Shard(0, 8, 16)), (2, 2, Shard(8, 8, 16))],
)
def test_shares_of_four_workers(rank, copies, expected):
    """Two heads of keys on four workers: workers 0 and 1 have the first, 2 and 3 the second."""
    assert share(rank, 4, 8, copies) == expected


def test_a_head_without_tensor_parallelism_is_whole_and_a_share_ends_before_its_padding():
    assert head_of(SimpleNamespace(tp_size=1, org_vocab_size=90)).projections[0].output_shard is None
    part = SimpleNamespace(org_vocab_start_index=64, num_org_elements=26)
    head = head_of(SimpleNamespace(tp_size=2, org_vocab_size=90, shard_indices=part))
    assert (head.width, head.projections[0].output_shard) == (26, Shard(64, 26, 90))


def test_a_whole_merged_module_has_a_projection_per_name():
    module = SimpleNamespace(tp_size=1, output_sizes=[8, 4, 4], output_size=16)
    linear = linear_of("self_attn.qkv_proj", module, {"qkv_proj": ["q_proj", "k_proj", "v_proj"]})
    assert [(each.name, each.width, each.output_shard) for each in linear.projections] == [
        ("q_proj", 8, None),
        ("k_proj", 4, None),
        ("v_proj", 4, None),
    ]
    assert not linear.is_summed


class Attention(nn.Module):
    def __init__(self, num_heads=2, head_size=16):
        super().__init__()
        self.num_heads, self.head_size, self.head_size_v = num_heads, head_size, head_size


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))


def layer_of(norms=None, *, num_heads=2, shared=True, activation_share=RIGHT):
    """Return a decoder layer of the second of two workers: its attention has 2 of 4 heads of 16 channels."""
    attention, mlp = nn.Module(), nn.Module()
    attention.qkv_proj, attention.o_proj, attention.attn = nn.Module(), nn.Module(), Attention(num_heads)
    for name, norm in (norms or {}).items():
        setattr(attention, name, norm)
    mlp.gate_up_proj, mlp.down_proj, mlp.act_fn = nn.Module(), nn.Module(), nn.Module()
    module = nn.Module()
    module.self_attn, module.mlp, module.input_layernorm = attention, mlp, Norm(64)
    keys = Shard(0, 16, 16)

    def column(name, shard):
        return Projection(name, shard.size, output_shard=shard if shared else None)

    def row(name, shard):
        return [Projection(name, 64, input_shard=shard if shared else None)]

    linears = [
        Linear(attention.qkv_proj, [column("q_proj", RIGHT), column("k_proj", keys), column("v_proj", keys)]),
        Linear(attention.o_proj, row("o_proj", RIGHT), is_summed=shared),
        Linear(mlp.gate_up_proj, [column("gate_proj", RIGHT), column("up_proj", RIGHT)]),
        Linear(mlp.down_proj, row("down_proj", activation_share), is_summed=shared),
    ]
    layer = EngineLayer(module, "model.layers.0", linears, attentions=[attention.attn], activations=[mlp.act_fn])
    layer.norms = {"input_layernorm": module.input_layernorm}
    layer.norms |= {f"self_attn.{name}": norm for name, norm in (norms or {}).items()}
    find_shares(layer)
    return layer


def test_attention_and_activation_have_the_columns_that_are_multiplied_next():
    layer = layer_of()
    assert layer.shards[layer.attentions[0]] == layer.shards[layer.activations[0]] == RIGHT
    assert layer.shards[layer.linears[0].projections[1].output] == Shard(0, 16, 16)
    # Row-parallel outputs and the norms of hidden states are whole on every worker.
    assert not {layer.linears[1].module, layer.norms["input_layernorm"]} & layer.shards.keys()
    assert layer.out_of_reach == []


def test_norms_of_heads_are_shares_and_those_of_all_heads_are_whole():
    heads = layer_of({"q_norm": Norm(16), "k_norm": Norm(16)})
    assert heads.shards[heads.norms["self_attn.q_norm"]] == RIGHT
    assert heads.out_of_reach == []
    gathered = layer_of({"q_norm": Norm(64)})
    assert gathered.norms["self_attn.q_norm"] not in gathered.shards
    assert gathered.out_of_reach == []


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        (lambda: layer_of({"q_norm": Norm(32)}), "self_attn.q_norm (unknown tensor-parallel share)"),
        (lambda: layer_of({"other_norm": Norm(16)}), "self_attn.other_norm (unknown tensor-parallel share)"),
        (lambda: layer_of(num_heads=4), "self_attn.attn (unknown tensor-parallel share)"),
        (lambda: layer_of(activation_share=LEFT), "mlp.act_fn (unknown tensor-parallel share)"),
    ],
)
def test_what_fits_no_share_is_out_of_reach(layer, says):
    assert layer().out_of_reach == [says]


def test_without_tensor_parallelism_there_are_no_shares():
    layer = layer_of({"q_norm": Norm(32)}, shared=False)
    assert (layer.shards, layer.out_of_reach) == ({}, [])


def test_a_replaced_attribute_comes_back():
    owner = SimpleNamespace(own="before")
    with ExitStack() as stack:
        replace(stack, owner, "own", "first")
        replace(stack, owner, "own", "second")
        replace(stack, owner, "new", "second")
        assert (owner.own, owner.new) == ("second", "second")
    assert vars(owner) == {"own": "before"}


@pytest.mark.slow
def test_two_processes_compute_what_one_does(tmp_path):
    """Column-parallel, row-parallel and head over gloo: the sum gets its noise after the all-reduce, once."""
    processes = [
        subprocess.Popen([sys.executable, sharded_layer.__file__, str(tmp_path), str(rank)]) for rank in range(2)
    ]
    assert [process.wait(timeout=300) for process in processes] == [0, 0]
    outer, logits = sharded_layer.whole_layer()
    (first, left, texts), (second, right, same) = (torch.load(tmp_path / f"worker{rank}.pt") for rank in range(2))
    assert torch.equal(first, second)
    assert torch.allclose(first, outer, rtol=1e-4, atol=1e-4)
    assert torch.allclose(torch.cat([left, right], -1), logits, rtol=1e-4, atol=1e-3)
    assert texts == same == ["worker 0", "the second worker, é"]


# -- measurements ------------------------------------------------------------------------------------------------------

SHARES = [{"linear.q_proj": [LEFT]}, {"linear.q_proj": [RIGHT]}]


def cell(operator, elements, calls=2, scale=SCALE):
    sums = {"measured_elements": elements, "squares": elements * scale**2}
    return Row("evaluation", None, 0, operator, error=ERROR, calls=calls, elements=elements, **sums)


AUDITED = {"several tokens": 1, "one token": 1}
PHASE = Row("evaluation", passes=2, audited_passes=AUDITED, recomputed=50, compared=100, keys={"seed 3, step 0": 1})
CELLS = (cell("mm", 1280, calls=4), cell("attention", 640))


def state(*rows):
    """One layer on one worker: a column-parallel product of 64 columns, and a row-parallel one that all have."""
    return RecorderState(rows=rows or (PHASE, *CELLS))


def merged(first, second, shares=SHARES):
    noise = PassNoise(
        operator_noise=OperatorNoise(
            error=ERROR, phases=("evaluation",), attention="fused", include_lm_head=False, operators="matmul"
        )
    )
    return merged_workers((first, second), shares, noise.recorder(1, 0))


def test_whole_results_are_counted_once_and_audits_are_added():
    found = merged(state(), state())
    assert {each.operator: (each.calls, each.elements, each.measured_elements) for each in found.cells} == {
        "mm": (4, 1280, 1280),
        "attention": (2, 640, 640),
    }
    (phase,) = found.phases
    assert (phase.passes, phase.calls) == (2, 6)
    assert phase.audited_passes == {"several tokens": 1, "one token": 1}
    assert (phase.recomputed, phase.compared) == (100, 200)
    assert phase.keys == {"seed 3, step 0": 1}


def test_several_workers_may_have_the_same_share():
    shard = Shard(0, 64, 64)
    assert merged(state(), state(), [{"linear.q_proj": [shard]}] * 2).cells == state().cells


def test_one_worker_alone_is_returned_as_it_is():
    alone = state()
    assert merged_workers([alone], [{}], NOISE.recorder(1, 0)) is alone


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (
            state(with_changes(PHASE, keys={"seed 4, step 0": 1}), *CELLS),
            "worker 1 of 2: evaluation: keys is seed 4, step 0, seed 3, step 0 on worker 0",
        ),
        (state(PHASE, CELLS[1]), "evaluation mm layer 0: calls is 0, 4 on worker 0"),
        (state(PHASE, CELLS[0]), "worker 1 of 2: evaluation: no attention was noised in layers"),
        (state(PHASE, cell("mm", 640, calls=4), CELLS[1]), "evaluation mm layer 0: elements is 640, 1280 on worker 0"),
        (state(PHASE), "worker 1 of 2: evaluation: noise was requested but never reached layers"),
        (state(Row("evaluation", passes=3), *CELLS), "evaluation: passes is 3, 2 on worker 0"),
        (state(PHASE, *CELLS, FAULTED), "evaluation fault 0 layer 0: calls is "),
        (state(PHASE, cell("mm", 1280, calls=4, scale=1e-5), CELLS[1]), "worker 1 of 2: .*scale 1e-05"),
        (
            state(with_changes(PHASE, contradictions={"the values used have no noise": 1}), *CELLS),
            "worker 1 of 2: evaluation: the values used have no noise",
        ),
    ],
)
def test_a_worker_that_differs_is_refused_by_its_rank(other, says):
    with pytest.raises(ReceiptError, match=says) as refused:
        merged(state(), other)
    assert "\n" not in str(refused.value)
    assert refused.value.problems


@pytest.mark.parametrize(
    ("shares", "says"),
    [
        ([{"linear.q_proj": [LEFT]}, {"linear.q_proj": [LEFT]}], "noise on columns 0 to 32 of 64, expected all of"),
        ([{"linear.q_proj": [LEFT]}, {}], "linear.q_proj: noise on a share on some workers, but not on worker 1"),
        ([{"linear.q_proj": [Shard(0, 40, 64)]}, {"linear.q_proj": [RIGHT]}], "columns 0 to 40, 32 to 64 of 64"),
    ],
)
def test_shares_that_are_not_together_the_whole_are_refused(shares, says):
    with pytest.raises(ReceiptError, match=says):
        merged(state(), state(), shares)
