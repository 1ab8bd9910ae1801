"""A recorder that was saved and restored goes on to the same receipt, to the last bit."""

import json
import math

import torch

from aqnpipe.config.noise import Fault, NoiseSpec, OperatorNoise
from aqnpipe.machine.machine import NoiseKey
from aqnpipe.noise.injection.faults import ActiveFaults
from aqnpipe.noise.injection.phase import phase_noise
from aqnpipe.noise.receipts.receipt import RecorderState
from aqnpipe.noise.receipts.recorder import ReceiptRecorder

NOISE = OperatorNoise(operators="matmul", error={"kind": "relative_gaussian", "scale": 0.05})
FAULT = Fault(type="saturation", layer=1, magnitude=0.3, sparsity=0.3, threshold="cached")
SPEC = NoiseSpec(operator_noise=NOISE, faults=(FAULT,))


def new_recorder():
    return ReceiptRecorder(SPEC, expected_phases=("rollout",), num_layers=3, num_norms=7)


def forward(model, recorder, step, faults):
    ids = torch.arange(5, 13).reshape(2, 4) + step
    key = NoiseKey(seed=0, step=step)
    with phase_noise(model, SPEC, "actor_forward", key, recorder, faults=faults, backward=True):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    model.zero_grad()
    recorder.settle()
    return loss.item()


def test_saving_and_restoring_changes_neither_receipt_nor_computation(model):
    undisturbed, faults = new_recorder(), ActiveFaults.of(SPEC.faults)
    losses = [forward(model, undisturbed, step, faults) for step in range(4)]
    first, faults = new_recorder(), ActiveFaults.of(SPEC.faults)
    for step in range(2):
        forward(model, first, step, faults)
    saved = first.state().model_dump_json()
    second, faults = new_recorder(), ActiveFaults.of(SPEC.faults, faults.states())
    second.restore(RecorderState.model_validate_json(saved))
    assert second.state().model_dump_json() == saved
    assert [forward(model, second, step, faults) for step in (2, 3)] == losses[2:], "the cached threshold was lost"
    assert second.receipt() == undisturbed.receipt()


def test_a_saved_state_is_a_copy(model):
    recorder = new_recorder()
    forward(model, recorder, 0, None)
    state = recorder.state()
    before = state.model_dump_json()
    forward(model, recorder, 1, None)
    assert state.model_dump_json() == before
    assert recorder.state().model_dump_json() != before


def test_infinite_errors_survive():
    saved = new_recorder()
    saved.add("rollout", recomputed=2, largest_deviation=math.inf, compared=2, largest_difference=math.inf)
    restored = new_recorder()
    restored.restore(RecorderState.model_validate_json(saved.state().model_dump_json()))
    record = restored.receipt().phases[0]
    assert record.largest_difference == record.largest_deviation == math.inf


def test_sets_are_written_in_order():
    """The order of a set of texts is another one in every process, and a run has the same bytes in all of them."""
    recorder = new_recorder()
    for number in range(100):
        recorder.add("rollout", modules={f"layer{number:02}"}, audited_whole={f"kind{number:02}"})
        recorder.add("rollout", gradients={99 - number}, formats={f"format{number:02}"})
    record = json.loads(recorder.receipt().model_dump_json())["rows"][0]
    assert record["modules"] == [f"layer{number:02}" for number in range(100)]
    assert record["audited_whole"] == [f"kind{number:02}" for number in range(100)]
    assert record["formats"] == [f"format{number:02}" for number in range(100)]
    assert record["gradients"] == list(range(100))
