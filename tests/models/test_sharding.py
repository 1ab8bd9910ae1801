"""Models whose weights are divided among two workers: gradients, noise and receipts are those of data parallelism."""

import json
from collections import OrderedDict

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from two_workers import logs, run_together

from aqnpipe.errors import ReceiptError
from aqnpipe.models import adapters
from aqnpipe.models.sharding import (
    GatheringFirst,
    element_of,
    gathered_weights,
    own_share,
    split_groups,
    whole,
    whole_state_dict,
)

CASES = {
    "clean": {"noisy": False, "checkpointing": False, "tied": True},
    "noisy": {"noisy": True, "checkpointing": False, "tied": True},
    "noisy, checkpointed, untied": {"noisy": True, "checkpointing": True, "tied": False},
}


SUMS = ("error_sum", "squares", "rounding_squares", "largest_deviation")


@pytest.fixture(scope="module")
def computed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gradients")
    jobs = [
        {"kind": "gradients", "folder": str(folder / name / kind), "sharded": kind == "fsdp", **case}
        for name, case in CASES.items()
        for kind in ("data", "fsdp")
    ]
    assert run_together(jobs, folder) == [0, 0], logs(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_loss_and_every_gradient_are_those_of_data_parallelism_bit_for_bit(name, computed):
    for rank in (0, 1):
        data, shared = (load_file(computed / name / kind / f"{rank}.safetensors") for kind in ("data", "fsdp"))
        assert data.keys() == shared.keys()
        assert len(data) > 30
        assert all(torch.equal(data[key], shared[key]) for key in data)
        assert data["model.layers.1.input_layernorm.weight"].abs().sum() > 0
    # Gradients are averaged over the workers; the losses are of different batches.
    other = load_file(computed / name / "fsdp" / "0.safetensors")
    assert not torch.equal(other.pop("loss"), shared.pop("loss"))
    assert all(torch.equal(other[key], shared[key]) for key in other)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_noise_and_receipts_are_at_the_same_places(name, computed):
    for rank in (0, 1):
        data, shared = (json.loads((computed / name / kind / f"{rank}.json").read_text()) for kind in ("data", "fsdp"))
        assert len(data["rows"]) == len(shared["rows"])
        for mine, theirs in zip(data["rows"], shared["rows"], strict=True):
            # Gradients arrive in another order, so sums of their errors differ in the last digit.
            sums = [{key: row.pop(key, 0.0) for key in SUMS} for row in (mine, theirs)]
            assert sums[0] == pytest.approx(sums[1], rel=1e-9)
            assert mine == theirs
            assert "escaped" not in theirs
        assert any("error" in row for row in data["rows"]) == CASES[name]["noisy"]


SENT = {
    "tied": {"tied": True, "adapters": False},
    "untied": {"tied": False, "adapters": False},
    "adapters": {"tied": True, "adapters": True},
}


@pytest.fixture(scope="module")
def sent(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    jobs = [
        {"kind": "weights", "folder": str(folder / name / kind), "sharded": kind == "fsdp", **case}
        for name, case in SENT.items()
        for kind in ("data", "fsdp")
    ]
    assert run_together(jobs, folder) == [0, 0], logs(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", SENT)
def test_an_engine_gets_the_weights_of_data_parallelism_bit_for_bit(name, sent):
    """Adapters merged, tied weights once; after an update the new ones, although some were gathered before it."""
    for when in ("before", "after"):
        data, *others = (
            load_file(sent / name / kind / f"{when}{rank}.safetensors") for kind in ("data", "fsdp") for rank in (0, 1)
        )
        assert ("lm_head.weight" in data) is not SENT[name]["tied"]
        assert {key for key, weight in data.items() if weight.dtype == torch.float32} == {
            key for key in data if "norm" in key
        }
        for other in others:
            assert other.keys() == data.keys()
            assert all(torch.equal(other[key], data[key]) for key in data)
    earlier = load_file(sent / name / "fsdp" / "before0.safetensors")
    assert not any(torch.equal(earlier[key], data[key]) for key in data if "bias" not in key)


def test_gathered_copies_are_freed_before_the_merge_loss_reads_them(monkeypatch):
    called = []
    for name in ("free_gathered", "merge_loss", "distinct_weights"):
        monkeypatch.setattr(adapters, name, lambda *_, name=name: called.append(name))
    adapters.MergedForEngine(torch.bfloat16)(nn.Linear(1, 1))
    assert called == ["free_gathered", "merge_loss", "distinct_weights"]


def test_a_gathered_weight_without_the_share_of_this_worker_is_refused(monkeypatch):
    class Share:
        def __init__(self, whole, rows):
            self.gathered, self.rows = whole, rows

        def detach(self):
            return self

        def full_tensor(self):
            return self.gathered

        def to_local(self):
            return self.rows

    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    gathered = torch.arange(10.0).view(5, 2)
    gathered[3, 0], gathered[4, 0] = 0.0, float("nan")
    assert whole(Share(gathered, gathered[3:])) is gathered
    with pytest.raises(ReceiptError, match="without this worker's share"):
        # -0.0 for 0.0.
        whole(Share(gathered, gathered[3:] * torch.tensor([-1.0, 1.0])))
    with pytest.raises(ReceiptError, match=r"shape \(5, 2\) was gathered without this worker's share"):
        whole(Share(gathered, gathered[3:] + 1))


def test_shares_are_rounded_before_they_are_gathered(monkeypatch):
    """Half of the traffic of float32, and the bits of a weight that is gathered first and rounded then."""
    sent = []

    class Share:
        def __init__(self, whole):
            self.gathered = whole

        def detach(self):
            return self

        def to(self, dtype):
            return Share(self.gathered.to(dtype))

        def full_tensor(self):
            sent.append(self.gathered.dtype)
            return self.gathered

        def to_local(self):
            return self.gathered[3:]

    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    gathered = torch.linspace(0, 1, 10).view(5, 2)
    assert torch.equal(whole(Share(gathered), torch.bfloat16), gathered.bfloat16())
    assert sent == [torch.bfloat16]
    assert whole(gathered, torch.bfloat16).dtype == torch.float32


def test_the_hook_that_gathers_stays_first_whatever_is_prepended():
    module, called = nn.Linear(1, 1), []

    def gather(*_):
        called.append("first")

    gather.__module__ = "torch.distributed.fsdp._fully_shard._fsdp_state"
    module.register_forward_pre_hook(gather)
    module._forward_pre_hooks = GatheringFirst(module._forward_pre_hooks)
    for name in ("second", "third"):
        module.register_forward_pre_hook(lambda *_, name=name: called.append(name), prepend=True)
    module.register_forward_pre_hook(lambda *_: called.append("last"))
    module(torch.ones(1))
    assert called == ["first", "third", "second", "last"]
    assert isinstance(module._forward_pre_hooks, OrderedDict)


def test_a_model_that_is_not_sharded_is_left_alone():
    model = nn.Linear(2, 3)
    with gathered_weights(model):
        assert whole_state_dict(model).keys() == {"weight", "bias"}
    assert own_share(model, "weight", model.weight) is model.weight
    assert element_of(model.weight, (2, 1)) == (model.weight[2, 1].double(), False)


def test_a_share_is_a_part_of_the_rows_and_other_workers_have_0(monkeypatch):
    """Five rows on two workers: three and two, as torch.chunk divides them."""

    class Share:
        shape = (5, 2)

        def __init__(self, rows):
            self.rows = rows

        def to_local(self):
            return self.rows

    weight = torch.arange(10.0).view(5, 2)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    for rank, rows in enumerate(weight.chunk(2)):
        monkeypatch.setattr("torch.distributed.get_rank", lambda rank=rank: rank)
        found = [float(element_of(Share(rows), (row, 1))[0]) for row in range(5)]
        assert found == [[1, 3, 5, 0, 0], [0, 0, 0, 7, 9]][rank]


def test_groups_of_an_optimiser_are_split_by_kind():
    class Share:
        def to_local(self): ...

    share, plain = Share(), torch.zeros(1)
    groups = [{"params": [share, plain], "lr": 1.0}, {"params": [plain], "lr": 2.0}]
    assert split_groups(groups) == [
        {"params": [share], "lr": 1.0},
        {"params": [plain], "lr": 1.0},
        {"params": [plain], "lr": 2.0},
    ]
