"""Merged receipts: equal to those of a single recorder; refusals name the worker."""

import copy

import pytest
import torch

from aqnpipe.config.noise import Fault, NoiseSpec, OperatorNoise
from aqnpipe.errors import ReceiptError
from aqnpipe.machine.machine import NoiseKey
from aqnpipe.noise.aqn import noised_rollout, target_factors
from aqnpipe.noise.injection.phase import phase_noise
from aqnpipe.noise.receipts.receipt import RecorderState
from aqnpipe.noise.receipts.recorder import ReceiptRecorder, merge_states, merged_receipt

NOISE = OperatorNoise.model_validate({"operators": "matmul", "error": {"kind": "relative_gaussian", "scale": 0.05}})
SCHEDULE = {"kind": "linear", "sigma_start": 0.05, "sigma_end": 0.05}
FAULT = Fault.model_validate({"type": "saturation", "layer": 1, "magnitude": 0.3, "sparsity": 0.5})
MODES = {
    mode: NoiseSpec.model_validate(spec)
    for mode, spec in {
        "clean": {},
        "operators": {"operator_noise": NOISE},
        "norms": {"aqn": {"schedule": SCHEDULE}},
        "hidden": {"aqn": {"schedule": SCHEDULE, "targets": "hidden_states"}},
        "fault": {"operator_noise": NOISE, "faults": (FAULT,)},
    }.items()
}


def recorder_for(mode):
    return ReceiptRecorder(
        MODES[mode],
        expected_phases=("rollout", "actor_forward"),
        num_layers=3,
        num_norms=7,
        num_steps=2,
        num_epochs=1,
    )


def record(recorder, spec, model, rank):
    """Two steps of what a worker does: a rollout of a length of its own, then a forward and backward pass."""
    factors = target_factors(model, spec.aqn, None) if spec.aqn else {}
    for step in range(2):
        key = NoiseKey(seed=0, step=step, rank=rank)
        tokens = torch.randint(2, 64, (4, 8), generator=torch.Generator().manual_seed(10 * step + rank))
        sigma = 0.05 if spec.aqn else 0.0
        with (
            noised_rollout(model, spec.aqn, factors, recorder, sigma=sigma, seed=0, step=step) as sigmas,
            torch.no_grad(),
            phase_noise(model, spec, "rollout", key, recorder, hidden_sigmas=sigmas),
        ):
            for _ in range(3 + rank):
                model(tokens, use_cache=False)
        with phase_noise(model, spec, "actor_forward", key, recorder, backward=True):
            model(tokens, use_cache=False).logits.square().mean().backward()
        recorder.add("backward", passes=1)
        model.zero_grad()


@pytest.fixture(scope="module")
def measurements_of(make_model):
    """Return (recorder, states of two workers) for a mode; each mode is recorded once."""
    kept = {}

    def get(mode):
        if mode not in kept:
            torch.manual_seed(0)
            model = make_model(num_layers=3)
            workers = []
            for rank in range(2):
                recorder = recorder_for(mode)
                record(recorder, MODES[mode], model, rank)
                workers.append(recorder.state())
            kept[mode] = workers
        return recorder_for(mode), copy.deepcopy(kept[mode])

    return get


def flow_of(row):
    return [row.calls, row.elements, row.zeroed, row.leaked, row.squares, row.zeroed_squares]


@pytest.mark.parametrize("mode", MODES)
def test_the_merged_receipt_equals_that_of_a_single_recorder(mode, measurements_of, make_model):
    torch.manual_seed(0)
    model = make_model(num_layers=3)
    both = recorder_for(mode)
    for rank in range(2):
        record(both, MODES[mode], model, rank)
    merged = merged_receipt(*measurements_of(mode))
    assert merged.num_workers == 2
    expected = both.receipt()
    for ours, theirs in zip(merged.cells, expected.cells, strict=True):
        assert (ours.calls, ours.elements) == (theirs.calls, theirs.elements)
        # Each worker observes passes of its own, so more of them than a single recorder.
        assert ours.measured_elements >= theirs.measured_elements
    for ours, theirs in zip(merged.phases, expected.phases, strict=True):
        assert (ours.passes, ours.calls, ours.largest_difference) == (
            theirs.passes, theirs.calls, theirs.largest_difference,
        )  # fmt: skip
        assert (ours.recomputed > 0) == (theirs.recomputed > 0)
    assert merged.fault_cells == expected.fault_cells
    for ours, theirs in zip(merged.gradient_flows, expected.gradient_flows, strict=True):
        assert flow_of(ours) == pytest.approx(flow_of(theirs), rel=1e-12)


@pytest.mark.parametrize("mode", ["norms", "hidden"])
def test_redraws_of_all_workers_are_added_up(measurements_of, mode):
    recorder, workers = measurements_of(mode)
    merged = merged_receipt(recorder, workers)
    assert [(sync.step, sync.calls) for sync in merged.weight_syncs] == [(0, 2), (1, 2)]
    for number, sync in enumerate(merged.weight_syncs):
        each = [worker.weight_syncs[number] for worker in workers]
        for name in ("elements", "recomputed"):
            assert getattr(sync, name) == sum(getattr(one, name) for one in each) > 0
        assert sync.sigma_requested == pytest.approx(each[0].sigma_requested)
        assert sync.sigma_measured**2 == pytest.approx(sum(one.sigma_measured**2 for one in each) / 2)


def test_measured_scales_of_workers_are_merged_by_their_elements(measurements_of):
    """3 elements with relative errors of 0.1, one with 0.3: sqrt((3*0.01 + 0.09)/4) = 0.17320508."""
    _, states = measurements_of("operators")
    for state, count, square in ((states[0], 3, 0.01), (states[1], 1, 0.09)):
        cell = state.cells[0]
        cell.measured_elements, cell.squares = count, count * square
    cell = merge_states(states).cells[0]
    assert cell.measured == pytest.approx(0.17320508, rel=1e-8)


def refusal(measurements_of, mode, change):
    recorder, workers = measurements_of(mode)
    state: RecorderState = workers[1]
    workers[1] = state.model_copy(update=change(state))
    with pytest.raises(ReceiptError) as refused:
        merged_receipt(recorder, workers)
    return str(refused.value)


def test_a_worker_without_its_noise_is_refused(measurements_of):
    def silent(state):
        return {"rows": [row for row in state.rows if row.phase != "rollout" or row.error is None]}

    assert "worker 1 of 2: rollout: noise was requested but never reached layers" in refusal(
        measurements_of, "operators", silent
    )


def test_a_worker_whose_noise_stopped_half_way_is_refused(measurements_of):
    """The noise has the right size, so only the count of calls shows the mistake."""

    def short(state):
        for cell in state.cells:
            if cell.phase == "actor_forward":
                cell.calls -= cell.calls // 2
        return {}

    text = refusal(measurements_of, "operators", short)
    assert "worker 1 of 2: actor_forward mm layer 0: 7 noised calls in 2 runs, worker 0 had 14 in 2" in text


def test_a_worker_with_fewer_passes_is_refused(measurements_of):
    def idle(state):
        for row in state.rows:
            if row.phase == "backward" and row.passes:
                row.passes = 1
        return {}

    assert "worker 1 of 2: backward: passes is 1, 2 on worker 0" in refusal(measurements_of, "operators", idle)


def test_a_worker_that_lacks_a_phase_is_refused(measurements_of):
    def absent(state):
        return {"rows": [row for row in state.rows if row.phase != "actor_forward"]}

    assert "worker 1 of 2: phase actor_forward never ran" in refusal(measurements_of, "clean", absent)


@pytest.mark.parametrize("mode", ["norms", "hidden"])
def test_workers_with_different_clean_weights_or_sigmas_are_refused(measurements_of, mode):
    def other_weights(state):
        state.weight_syncs[1].digests = {"0" * 64}
        return {}

    assert "worker 1 of 2: AQN step 1: digests is 000000000000" in refusal(measurements_of, mode, other_weights)

    def other_sigma(state):
        sync = state.weight_syncs[0]
        sync.drawn_squares = sync.elements * 0.04**2
        return {}

    assert "worker 1 of 2: AQN step 0: sigma_requested is 0.04, 0.05" in refusal(measurements_of, mode, other_sigma)


def test_a_worker_that_missed_a_sync_is_refused(measurements_of):
    def forget(state):
        return {"rows": [row for row in state.rows if row is not state.weight_syncs[-1]]}

    assert "worker 1 of 2: AQN step 1: calls is 0, 1 on worker 0" in refusal(measurements_of, "norms", forget)


@pytest.mark.parametrize("without", [(1,), (0, 1)])
def test_gradients_of_one_worker_may_all_be_zero_but_not_those_of_all(measurements_of, without):
    """The rewards of all groups of a worker may be equal: the gradients of the others have the size of the noise."""
    recorder, workers = measurements_of("operators")
    for rank in without:
        for cell in workers[rank].cells:
            if cell.phase == "backward":
                cell.zeros, cell.measured_elements, cell.error_sum, cell.squares = cell.measured_elements, 0, 0.0, 0.0
    if len(without) < len(workers):
        scale, elements = merged_receipt(recorder, workers).measured_scale("backward")
        assert elements > 0
        assert scale == pytest.approx(0.05, rel=0.1)
        return
    with pytest.raises(ReceiptError, match="receipt invalid: backward noise has no size"):
        merged_receipt(recorder, workers)
