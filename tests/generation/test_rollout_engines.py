"""The exchange between a run and vLLM in rollouts, with a stand-in for vLLM: order, weights, measurements."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from aqnpipe.config.noise import AdaptiveNoise, Fault, NoiseSpec
from aqnpipe.errors import ReceiptError
from aqnpipe.generation.backend import Completion, Sampling
from aqnpipe.generation.noisy_passes import PassMeasurements
from aqnpipe.generation.rollout_engines import Rollout, VllmRolloutEngine
from aqnpipe.generation.vllm import weights as weight_sync
from aqnpipe.generation.vllm.engine import VllmEngine
from aqnpipe.generation.vllm.weights import Digests, load_sent, opened
from aqnpipe.machine.machine import NoiseKey
from aqnpipe.models.adapters import MergedForEngine
from aqnpipe.models.layout import norms_sha256
from aqnpipe.noise.injection.faults import ActiveFaults, ActiveFaultState
from aqnpipe.noise.receipts.recorder import ReceiptRecorder, merge_states
from aqnpipe.noise.receipts.table import AQN as AQN_ROW
from aqnpipe.noise.receipts.table import SYNC, Row

AQN = AdaptiveNoise(schedule={"kind": "constant", "sigma": 0.05})
FAULT = Fault(type="saturation", layer=0, magnitude=0.5, threshold="cached")


def recorder(spec):
    return ReceiptRecorder(spec, expected_phases=("rollout",), num_layers=3, num_norms=7)


def sync(before="clean", after="clean", step=0):
    return Row("rollout", step, operator=SYNC, calls=1, sigma=0.05, targets=7, elements=224, digests={before, after})


class FakeEngine:
    """Records its calls; a rollout reports AQN on norms with the hash `norms`, and `fault_states` after it."""

    def __init__(self, norms=None, fault_states=()):
        self.calls, self.norms, self.fault_states = [], norms, fault_states

    def load_weights(self, weights):
        self.loaded = dict(weights)
        self.calls.append("load")

    def begin_pass(self, noise):
        self.noise = noise
        self.calls.append("begin")

    def generate(self, prompts, sampling, key):
        self.calls.append("generate")
        return [Completion([1], "stop", [0.0]) for _ in prompts]

    def end_pass(self):
        state = recorder(self.noise).state()
        if self.noise.aqn is not None:
            syncs = (sync(self.noise.clean_norms, self.norms or self.noise.clean_norms),)
            state = state.model_copy(update={"rows": (*state.rows, *syncs)})
        return PassMeasurements(3, 7, state, self.fault_states)

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
            assert recorded.state().weight_syncs[-1].digests == {norms_sha256(model)}
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


def test_an_engine_with_graphs_gets_norms_in_its_own_format(model):
    """Its graphs read the memory that norms had at the start, so they cannot change their format."""
    with torch.no_grad():
        model.model.norm.weight.add_(2**-20)
    engine, spec = FakeEngine(), NoiseSpec()
    graphs = VllmRolloutEngine(engine, weights=MergedForEngine(torch.bfloat16), dtype=torch.bfloat16, cuda_graphs=True)
    graphs.roll_out(model, recorder(spec), rollout(spec))
    assert {tensor.dtype for tensor in engine.loaded.values()} == {torch.bfloat16}
    assert engine.noise.clean_norms == norms_sha256(model.bfloat16()) == norms_sha256(model, torch.bfloat16)


class Stubborn(nn.Module):
    """A model that does not load the weights named `ignored`, and computes in the memory that it was given."""

    def __init__(self, ignored=None):
        super().__init__()
        self.norm = nn.RMSNorm(2, dtype=torch.bfloat16)
        self.head = nn.Linear(2, 2, bias=False)
        self.ignored = ignored

    def load_weights(self, weights):
        for name, tensor in weights:
            if name != self.ignored:
                self.get_parameter(name).data.copy_(tensor)
            tensor.fill_(7.0)


class Worker:
    """Stands in for vLLM's worker, through the buffer: `calls` are those that it answers."""

    def __init__(self, model, calls=("load", "digests")):
        self.model, self.calls, self.loads = model, calls, 0
        self.engine = SimpleNamespace(model=model, weights=lambda: dict(model.named_parameters()))

    def answer(self, method, *args):
        if method == "aqnpipe_load_weights" and "load" in self.calls:
            self.loads += 1
            load_sent(self.engine, opened(*args, torch.device("cpu")))
        if method == "aqnpipe_digests" and "digests" in self.calls:
            return [{"digests": {n: Digests(*args).of(w) for n, w in self.engine.weights().items()}}]
        return [{}]

    def load(self, weights):
        engine = SimpleNamespace(_workers=[{"model": "Stubborn"}], call_workers=self.answer)
        VllmEngine.load_weights(engine, weights)


SENT = {"norm.weight": torch.tensor([1.0001, -0.0]), "head.weight": torch.tensor([[1.0, 2.0], [3.0, float("nan")]])}


def test_an_engine_loads_what_the_trainer_sends_and_norms_in_the_trainers_format():
    worker = Worker(Stubborn())
    worker.load(iter(SENT.items()))
    for name, sent in SENT.items():
        held = worker.model.get_parameter(name)
        assert held.dtype == torch.float32
        assert torch.equal(held.data.view(torch.int32), sent.view(torch.int32))


@pytest.mark.parametrize(
    ("worker", "sent", "message"),
    [
        (Worker(Stubborn("head.weight")), SENT, r"1 of 2 parameters of vLLM's Stubborn differ .* sent: head\.weight$"),
        (Worker(Stubborn(), calls=["digests"]), SENT, r"2 of 2 parameters of vLLM's Stubborn differ"),
        (Worker(Stubborn(), calls=["load"]), SENT, "not every one of 1 vLLM workers says what it holds"),
        (Worker(Stubborn()), {"head.weight": SENT["head.weight"]}, r"has 2 .* sent 1; on one side only: norm\.weight$"),
    ],
)
def test_an_engine_with_other_weights_is_refused(worker, sent, message):
    with pytest.raises(ReceiptError, match=f"^weight sync: .*{message}"):
        worker.load(iter(sent.items()))


def test_weights_that_are_overwritten_after_they_were_loaded_are_refused(monkeypatch):
    """Each is right in its buffer; the proof is of what the engine holds at the end."""
    monkeypatch.setattr(weight_sync, "BUFFER_BYTES", 16)
    worker = Worker(Stubborn())
    worker.load(iter(SENT.items()))
    assert worker.loads == 2
    shifting = worker.engine.weights

    def of_last():
        worker.model.norm.weight.data[0] += 2**-22
        return shifting()

    worker.engine.weights = of_last
    with pytest.raises(ReceiptError, match=r"1 of 2 parameters .*: norm\.weight"):
        worker.load(iter(SENT.items()))


def test_weights_are_sent_some_at_a_time_and_a_large_one_alone(monkeypatch):
    monkeypatch.setattr(weight_sync, "BUFFER_BYTES", 16)
    weights = [("a", torch.ones(2)), ("b", torch.ones(2)), ("c", torch.ones(9)), ("d", torch.ones(1))]
    assert [[name for name, _ in some] for some in weight_sync.in_buffers(iter(weights))] == [["a", "b"], ["c"], ["d"]]
    assert not list(weight_sync.in_buffers([]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_a_digest_depends_on_every_bit_and_on_the_place_of_each_value(dtype):
    values = torch.arange(2**20 + 5).remainder(251).to(dtype)
    digests, found = Digests(3), set()
    for place in (0, 1, 2**20 - 1, 2**20, 2**20 + 4):
        bits = values.clone()
        bits.view(torch.uint8)[place * dtype.itemsize] ^= 1
        found.add(digests.of(bits))
    others = {digests.of(each) for each in (values, values.flip(0), values[None], values.view(torch.uint8).clone())}
    assert len(found) == 5
    assert len(found | others) == 9 - (dtype is torch.uint8)
    assert Digests(3).of(values) == digests.of(values.clone()) != Digests(4).of(values)


def test_the_digest_is_the_sum_of_words_times_random_numbers():
    """By hand: words of 16 bits, each times the number of its place, modulo 2^64, times that of the first chunk."""
    factors = torch.empty(2**20, dtype=torch.int64).random_(generator=torch.Generator().manual_seed(5))[:3].tolist()
    words = torch.tensor([1.0, -2.0, 0.5], dtype=torch.bfloat16).view(torch.int16).tolist()
    expected = sum(map(int.__mul__, words, factors)) * (factors[0] | 1) % 2**64
    said = Digests(5).of(torch.tensor([1.0, -2.0, 0.5], dtype=torch.bfloat16))
    assert said == f"torch.bfloat16 [3] {expected - (expected >= 2**63) * 2**64}"


def test_what_an_engine_recorded_is_added_to_the_run():
    spec = NoiseSpec(aqn=AQN, faults=(FAULT,))
    run, engine = recorder(spec), recorder(spec)
    run.row("rollout", 0, None, SYNC).include([sync(step=0)])
    run.add("rollout", layer=0, operator=AQN_ROW, squares=3.0, elements=4)
    run.add("rollout", passes=1)
    run.add("actor_forward", passes=1)
    engine.row("rollout", 1, None, SYNC).include([sync(step=1)])
    engine.add("rollout", layer=0, operator=AQN_ROW, squares=5.0, elements=4)
    engine.add("rollout", passes=1)
    after = merge_states([run.state(), engine.state()])
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
