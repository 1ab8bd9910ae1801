"""The exchange between a run and vLLM in rollouts, with a stand-in for vLLM: order, weights, measurements."""

import os
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from aqnpipe.config.noise import AdaptiveNoise, Fault, NoiseSpec
from aqnpipe.errors import ModelError, ReceiptError
from aqnpipe.generation.backend import Completion, Sampling
from aqnpipe.generation.rollout_engines import Rollout, VllmRolloutEngine
from aqnpipe.generation.vllm import weights as weight_sync
from aqnpipe.generation.vllm.sealed_memory import SealedMemory, read_sealed
from aqnpipe.generation.vllm.weights import for_engine, load_sent_weights, shared_weights
from aqnpipe.machine.machine import NoiseKey
from aqnpipe.models.adapters import MergedForEngine
from aqnpipe.models.layout import norms_sha256
from aqnpipe.noise.injection.faults import ActiveFaults, ActiveFaultState
from aqnpipe.noise.receipts.merge import add_rollout
from aqnpipe.noise.receipts.receipt_content import WeightSync
from aqnpipe.noise.receipts.recorder import ReceiptRecorder
from aqnpipe.noise.receipts.table import AQN as AQN_ROW

AQN = AdaptiveNoise(schedule={"kind": "constant", "sigma": 0.05})
FAULT = Fault(type="saturation", layer=0, magnitude=0.5, threshold="cached")


def recorder(spec):
    return ReceiptRecorder(spec, expected_phases=("rollout",), num_layers=3, num_norms=7)


def sync(before="clean", after="clean", step=0):
    return WeightSync(
        step=step,
        sigma_scheduled=0.05,
        sigma_requested=0.05,
        sigma_measured=0.05,
        targets=7,
        elements=224,
        squared_error_ratio=1.0,
        expected_ratio=1.0,
        ratio_error=0.1,
        clean_sha256_before=before,
        clean_sha256_after=after,
    )


class FakeEngine:
    """Records its calls; a rollout reports AQN on norms with the hash `norms`, and `fault_states` after it."""

    def __init__(self, norms=None, fault_states=()):
        self.calls, self.norms, self.fault_states = [], norms, fault_states

    def load_weights(self, sealed):
        self.loaded = read_sealed(sealed)
        self.calls.append("load")

    def begin_rollout(self, noise):
        self.noise = noise
        self.calls.append("begin")

    def generate(self, prompts, sampling, key):
        self.calls.append("generate")
        return [Completion([1], "stop", [0.0]) for _ in prompts]

    def end_rollout(self):
        state = recorder(self.noise).state()
        if self.noise.aqn is not None:
            syncs = (sync(self.noise.clean_norms, self.norms or self.noise.clean_norms),)
            state = state.model_copy(update={"weight_syncs": syncs})
        return state, self.fault_states

    def fall_asleep(self):
        self.calls.append("sleep")

    def wake_up(self, what):
        self.calls.append(f"wake {what}")


def rollouts(engine, sleeps=False, dtype=torch.float32):
    return VllmRolloutEngine(engine, weights=MergedForEngine(dtype), dtype=dtype, sleeps=sleeps)


def rollout(spec):
    return Rollout(
        prompts=[[1, 2]],
        sampling=Sampling(4, temperature=1.0),
        spec=spec,
        faults=ActiveFaults.of(spec.faults),
        key=NoiseKey(seed=0, step=0),
        sigma=0.05,
        factors={"model.norm": 1.0},
    )


def test_a_sleeping_engine_wakes_for_weights_before_they_are_sent_and_for_its_cache_afterwards(model):
    engine, spec = FakeEngine(), NoiseSpec()
    rollout_engine = rollouts(engine, sleeps=True)
    for _ in range(2):
        rollout_engine.roll_out(model, recorder(spec), rollout(spec))
    once = ["begin", "generate", "sleep"]
    assert engine.calls == ["load", *once, "wake weights", "load", "wake kv_cache", *once]


def test_norms_that_are_not_the_trainers_are_refused(model):
    spec = NoiseSpec(aqn=AQN)
    for engine in (FakeEngine(), FakeEngine(norms="other")):
        recorded = recorder(spec)
        if engine.norms is None:
            rollouts(engine).roll_out(model, recorded, rollout(spec))
            assert recorded.weight_syncs[-1].clean_sha256_before == norms_sha256(model)
            continue
        with pytest.raises(ReceiptError, match="AQN step 0: the clean norm weights in vLLM's worker are not"):
            rollouts(engine).roll_out(model, recorded, rollout(spec))


def test_weights_are_sent_once_in_the_format_of_the_engine_and_norms_in_their_own(model):
    engine, spec = FakeEngine(), NoiseSpec()
    rollouts(engine, dtype=torch.bfloat16).roll_out(model, recorder(spec), rollout(spec))
    weights = model.state_dict()
    assert engine.loaded.keys() == weights.keys() - {"lm_head.weight"}
    for name, sent in engine.loaded.items():
        expected = weights[name] if "norm" in name else weights[name].bfloat16()
        assert sent.dtype == expected.dtype
        assert torch.equal(sent, expected)


class Stubborn(nn.Module):
    """A model that does not load one of its weights."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(2)
        self.head = nn.Linear(2, 2, bias=False)

    def load_weights(self, weights):
        for name, tensor in weights:
            if name != "head.weight":
                self.get_parameter(name).data.copy_(tensor)
            # A loader may compute in the memory that it was given; the comparison must not notice.
            tensor.fill_(7.0)


def test_a_weight_that_the_model_did_not_load_is_refused():
    model = Stubborn()
    engine = SimpleNamespace(model=model, weights=lambda: dict(model.named_parameters()))
    weights = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    with SealedMemory() as memory, SealedMemory() as other:
        for name, weight in weights.items():
            memory.add(name, weight)
            other.add(name, weight + 1 if name == "head.weight" else weight)
        load_sent_weights(engine, memory.seal())
        with pytest.raises(ReceiptError, match=r"1 of 2 parameters of vLLM's Stubborn differ .* sent: head\.weight"):
            load_sent_weights(engine, other.seal())


def test_what_loading_changed_is_freed_before_the_weights_are_read_again(monkeypatch):
    model, first = Stubborn(), []

    def read(sealed):
        assert all(tensor() is None for tensor in first)
        found = read_sealed(sealed)
        first.extend(map(weakref.ref, found.values()))
        return found

    monkeypatch.setattr(weight_sync, "read_sealed", read)
    with SealedMemory() as memory:
        for name, weight in model.named_parameters():
            memory.add(name, weight)
        load_sent_weights(SimpleNamespace(model=model, weights=lambda: dict(model.named_parameters())), memory.seal())
    assert len(first) == 4


def test_a_node_without_room_for_a_copy_is_refused_before_anything_is_written(model, monkeypatch):
    """Two bytes per weight in bfloat16; tied weights count once."""
    needed = 2 * sum(weight.numel() for weight in model.parameters())
    engine, spec, free = FakeEngine(), NoiseSpec(), SimpleNamespace(available=needed - 1)
    monkeypatch.setattr(weight_sync.psutil, "virtual_memory", lambda: free)
    rollout_engine = rollouts(engine, dtype=torch.bfloat16)
    with pytest.raises(
        ModelError, match=r"a copy of the weights takes \S+ GB, .* free; generation\.rollout_backend: tr"
    ):
        rollout_engine.roll_out(model, recorder(spec), rollout(spec))
    assert not engine.calls
    free.available = needed
    rollout_engine.roll_out(model, recorder(spec), rollout(spec))


def test_processes_that_cannot_open_each_others_memory_are_of_different_nodes(monkeypatch):
    nodes = [weight_sync._node()]
    monkeypatch.setattr("os.getuid", lambda: 12345)
    nodes.append(weight_sync._node())
    for kind in ("user", "pid"):
        inode = {f"/proc/self/ns/{kind}": SimpleNamespace(st_ino=1)}
        with monkeypatch.context() as patch:
            patch.setattr("os.stat", lambda path, inode=inode, stat=os.stat: inode.get(path) or stat(path))
            nodes.append(weight_sync._node())
    assert len(set(nodes)) == 4


@pytest.mark.parametrize(
    ("value", "other", "same"), [(0.0, -0.0, False), (float("nan"), float("nan"), True), (1.0, 1.0, True)]
)
def test_weights_are_compared_by_their_bits(value, other, same):
    """0.0 == -0.0 and NaN != NaN, but the bits say otherwise."""
    for shape in ((), (2,)):
        written, own = ({"a": torch.full(shape, number)} for number in (value, other))
        passes = [written, own]
        if same:
            with shared_weights(lambda passes=passes: iter(passes.pop(0).items()), lambda value: [value]):
                pass
            continue
        with (
            pytest.raises(ReceiptError, match="not those of this worker's policy: a"),
            shared_weights(lambda passes=passes: iter(passes.pop(0).items()), lambda value: [value]),
        ):
            pass


def shared_by_two(model, others):
    """Share weights between this process, which writes, and a second worker of the node with the weights `others`."""
    own, answers = [], []

    def exchange(value):
        own.append(value)
        return [value, value]

    with shared_weights(lambda: for_engine(model.state_dict().items(), set(), torch.float32), exchange) as sealed:
        written = own[-1]

        def of_the_second(value):
            """The first worker is another process, which wrote the memory."""
            answers.append(value)
            first = [(own[0][0], own[0][1] - 1), ((own[0][0], own[0][1] - 1), written[1]), None][len(answers) - 1]
            return [first, value]

        with shared_weights(lambda: for_engine(others.items(), set(), torch.float32), of_the_second) as of_second:
            assert of_second == sealed
    assert answers[1][1] is None


def test_workers_of_a_node_share_one_copy_and_each_compares_it_with_its_own_weights(model):
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    shared_by_two(model, weights)
    name = "model.layers.1.mlp.up_proj.weight"
    for others in (weights | {name: -weights[name]}, {n: t for n, t in weights.items() if n != name}):
        with pytest.raises(ReceiptError, match=f"not those of this worker's policy: {name}"):
            shared_by_two(model, others)


def test_what_an_engine_recorded_is_added_to_the_run():
    spec = NoiseSpec(aqn=AQN, faults=(FAULT,))
    run, engine = recorder(spec), recorder(spec)
    run.weight_syncs.append(sync(step=0))
    run.add("rollout", layer=0, operator=AQN_ROW, squares=3.0, elements=4)
    run.add("rollout", passes=1)
    run.add("actor_forward", passes=1)
    engine.weight_syncs.append(sync(step=1))
    engine.add("rollout", layer=0, operator=AQN_ROW, squares=5.0, elements=4)
    engine.add("rollout", passes=1)
    add_rollout(run, engine.state())
    after = run.state()
    assert [sync.step for sync in after.weight_syncs] == [0, 1]
    assert [(factor.layer, factor.squares, factor.elements) for factor in after.weight_cells] == [(0, 8.0, 8)]
    assert {phase.phase: phase.passes for phase in after.phases} == {"rollout": 2, "actor_forward": 1}


def test_thresholds_that_an_engine_cached_are_those_of_the_run_afterwards(model):
    spec = NoiseSpec(faults=(FAULT,))
    states = (ActiveFaultState(num_channels=8, threshold=2.5),)
    engine, requested = FakeEngine(fault_states=states), rollout(spec)
    rollout_engine = rollouts(engine)
    rollout_engine.roll_out(model, recorder(spec), requested)
    assert engine.noise.fault_states == (ActiveFaultState(num_channels=0, threshold=None),)
    assert requested.faults.states() == states
    rollout_engine.roll_out(model, recorder(spec), requested)
    assert engine.noise.fault_states == states
