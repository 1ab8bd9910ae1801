"""The exchange between a run and vLLM in rollouts, with a stand-in for vLLM: order, weights, measurements."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from aqnpipe.config.noise import AdaptiveNoise, Fault, NoiseSpec
from aqnpipe.errors import ReceiptError
from aqnpipe.generation.backend import Completion, Sampling
from aqnpipe.generation.rollout_engines import Rollout, VllmRolloutEngine
from aqnpipe.generation.vllm.weights import load_sent_weights, send_weights
from aqnpipe.models.layout import norms_sha256
from aqnpipe.noise.injection.faults import ActiveFaults, ActiveFaultState
from aqnpipe.noise.injection.phase_state import NoiseKey
from aqnpipe.noise.receipts.merge import add_rollout
from aqnpipe.noise.receipts.receipt_content import WeightSync
from aqnpipe.noise.receipts.recorder import ReceiptRecorder
from aqnpipe.noise.receipts.recorder_state import FactorSums

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

    def load_weights(self, path, sha256):
        self.calls.append("load" if load_file(path) else "nothing")

    def begin_rollout(self, noise):
        self.noise = noise
        self.calls.append("begin")

    def generate(self, prompts, sampling, key):
        self.calls.append("generate")
        return [Completion([1], "stop", [0.0]) for _ in prompts]

    def end_rollout(self):
        state = recorder(self.noise).state()
        if self.noise.aqn is not None:
            state.weight_syncs = [sync(self.noise.clean_norms, self.norms or self.noise.clean_norms)]
        return state, self.fault_states

    def fall_asleep(self):
        self.calls.append("sleep")

    def wake_up(self, what):
        self.calls.append(f"wake {what}")


def rollouts(engine, folder, sleeps=False):
    return VllmRolloutEngine(
        engine, folder, weights=lambda model: model.state_dict(), dtype=torch.float32, sleeps=sleeps
    )


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


def test_a_sleeping_engine_wakes_for_weights_before_they_are_sent_and_for_its_cache_afterwards(model, tmp_path):
    engine, spec = FakeEngine(), NoiseSpec()
    rollout_engine = rollouts(engine, tmp_path, sleeps=True)
    for _ in range(2):
        rollout_engine.roll_out(model, recorder(spec), rollout(spec))
    once = ["begin", "generate", "sleep"]
    assert engine.calls == ["load", *once, "wake weights", "load", "wake kv_cache", *once]
    assert list(tmp_path.iterdir()) == []


def test_norms_that_are_not_the_trainers_are_refused(model, tmp_path):
    spec = NoiseSpec(aqn=AQN)
    for engine in (FakeEngine(), FakeEngine(norms="other")):
        recorded = recorder(spec)
        if engine.norms is None:
            rollouts(engine, tmp_path).roll_out(model, recorded, rollout(spec))
            assert recorded.last_weight_sync.clean_sha256_before == norms_sha256(model)
            continue
        with pytest.raises(ReceiptError, match="AQN step 0: the clean norm weights in vLLM's worker are not"):
            rollouts(engine, tmp_path).roll_out(model, recorded, rollout(spec))


def test_weights_are_sent_once_in_the_format_of_the_engine_and_norms_in_their_own(model, tmp_path):
    norms = {"model.norm.weight"}
    send_weights(model.state_dict(), norms, torch.bfloat16, tmp_path / "weights")
    sent = load_file(tmp_path / "weights")
    assert "lm_head.weight" not in sent
    assert {name for name, tensor in sent.items() if tensor.dtype == torch.float32} == norms
    assert len(sent) == len(model.state_dict()) - 1


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


def test_a_weight_that_the_model_did_not_load_is_refused(tmp_path):
    model = Stubborn()
    engine = SimpleNamespace(model=model, weights=lambda: dict(model.named_parameters()))
    path = tmp_path / "weights"
    weights = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    load_sent_weights(engine, path, send_weights(weights, set(), torch.float32, path))
    digest = send_weights(weights | {"head.weight": weights["head.weight"] + 1}, set(), torch.float32, path)
    with pytest.raises(ReceiptError, match=r"1 of 2 parameters of vLLM's Stubborn differ from .* sent: head\.weight"):
        load_sent_weights(engine, path, digest)


def test_what_an_engine_recorded_is_added_to_the_run():
    spec = NoiseSpec(aqn=AQN, faults=(FAULT,))
    run, engine = recorder(spec), recorder(spec)
    run.add_weight_sync(sync(step=0))
    run.measure_sigma_factor(FactorSums(0, 3.0, 4))
    run.count_forward("rollout")
    run.count_forward("actor_forward")
    engine.add_weight_sync(sync(step=1))
    engine.measure_sigma_factor(FactorSums(0, 5.0, 4))
    engine.count_forward("rollout")
    add_rollout(run, engine.state())
    after = run.state()
    assert [sync.step for sync in after.weight_syncs] == [0, 1]
    assert [(factor.layer, factor.squares, factor.elements) for factor in after.weight_factors] == [(0, 8.0, 8)]
    assert {phase.phase: phase.forwards for phase in after.phases} == {"rollout": 2, "actor_forward": 1}


def test_thresholds_that_an_engine_cached_are_those_of_the_run_afterwards(model, tmp_path):
    spec = NoiseSpec(faults=(FAULT,))
    states = (ActiveFaultState(num_channels=8, threshold=2.5),)
    engine, requested = FakeEngine(fault_states=states), rollout(spec)
    rollout_engine = rollouts(engine, tmp_path)
    rollout_engine.roll_out(model, recorder(spec), requested)
    assert engine.noise.fault_states == (ActiveFaultState(num_channels=0, threshold=None),)
    assert requested.faults.states() == states
    rollout_engine.roll_out(model, recorder(spec), requested)
    assert engine.noise.fault_states == states
