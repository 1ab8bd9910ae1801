"""A recorder that was saved and restored goes on to the same receipt, to the last bit."""

import torch

from aqnpipe.config.noise import Fault, OperatorNoise
from aqnpipe.noise.injection.phase import NoiseKey, phase_noise
from aqnpipe.noise.receipts.recorder import ReceiptRecorder
from aqnpipe.noise.receipts.recorder_state import RecorderState

NOISE = OperatorNoise(operators="matmul", error={"kind": "relative_gaussian", "scale": 0.05})
FAULT = Fault(type="saturation", layer=1, magnitude=0.3, sparsity=0.3, threshold="cached")


def recorder(model):
    return ReceiptRecorder(
        operator_noise=NOISE, faults=(FAULT,), expected_phases=("rollout",), num_layers=3, num_norms=7
    )


def forward(model, recorder, step):
    ids = torch.arange(5, 13).reshape(2, 4) + step
    with phase_noise(model, recorder, "actor_forward", NoiseKey(seed=0, step=step), backward=True):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    recorder.settle()
    return loss.item()


def test_saving_and_restoring_changes_neither_receipt_nor_computation(model):
    undisturbed = recorder(model)
    losses = [forward(model, undisturbed, step) for step in range(4)]
    first = recorder(model)
    for step in range(2):
        forward(model, first, step)
    saved = first.state().to_json()
    second = recorder(model)
    second.restore(RecorderState.from_json(saved))
    assert second.state().to_json() == saved
    assert [forward(model, second, step) for step in (2, 3)] == losses[2:], "the cached threshold was lost"
    assert second.receipt() == undisturbed.receipt()


def test_a_saved_state_is_a_copy(model):
    one = recorder(model)
    forward(model, one, 0)
    state = one.state()
    before = state.to_json()
    forward(model, one, 1)
    assert state.to_json() == before
    assert one.state().to_json() != before


def test_infinite_errors_survive(model):
    one = recorder(model)
    one.witness("rollout", torch.zeros(2), torch.tensor([0.0, torch.inf]))
    two = recorder(model)
    two.restore(RecorderState.from_json(one.state().to_json()))
    assert two.receipt().phases[0].reference_check_difference == torch.inf
