from contextlib import nullcontext

import pytest

from aqnpipe.config.noise import AdaptiveNoise, NoiseSpec
from aqnpipe.models.layout import rms_norms
from aqnpipe.noise.aqn import noised_rollout, target_factors
from aqnpipe.noise.injection.measurements import PhaseMeasurements
from aqnpipe.noise.receipts.recorder import ReceiptRecorder
from aqnpipe.proof.request import AuditRequest

AQN = AdaptiveNoise(schedule={"kind": "linear", "sigma_start": 0.05, "sigma_end": 0.05})
SIGMA, SEED, STEP = 0.05, 3, 2


@pytest.fixture
def compared(model):
    """Function (factors, changes) -> what `compare_norms` finds while AQN has `factors`."""
    requested = NoiseSpec(aqn=AQN)
    num_norms = len(rms_norms(model))
    recorder = ReceiptRecorder(
        requested, expected_phases=("rollout",), num_layers=2, num_norms=num_norms, norms_watched=True
    )

    def compared(factors=None, sigma=SIGMA, phase="rollout", seed=SEED, step=STEP):
        recorder.note_clean_norms(model)
        factors = target_factors(model, AQN, None) | (factors or {})
        asked = AuditRequest(None, seed, (step, 0, 0), phase, None, False)
        measurements = PhaseMeasurements(asked, phase, 2, [], recorder, lambda name: sigma)
        with noised_rollout(model, AQN, factors, recorder, sigma=SIGMA, seed=SEED, step=STEP):
            measurements.compare_norms(model, nullcontext)
        return measurements.norms

    return compared


def test_the_noise_of_the_step_is_recomputed(compared, model):
    found = compared()
    sizes = [norm.weight.numel() for norm in rms_norms(model).values()]
    assert not found.contradictions
    assert found.recomputed == sum(min(size, 64) for size in sizes)


@pytest.mark.parametrize("place", [0, -1])
def test_half_the_noise_on_one_norm_names_it(compared, model, place):
    # The measured size over all norms would hide it.
    name = list(rms_norms(model))[place]
    (found,) = compared({name: 0.5}).contradictions
    assert found.startswith(f"AQN: {name}: ")


@pytest.mark.parametrize("field", ["seed", "step"])
def test_numbers_of_another_seed_or_step_are_found_in_every_norm(compared, model, field):
    found = compared(**{field: 9})
    assert len(found.contradictions) == len(rms_norms(model))


def test_noise_outside_of_rollouts_is_found(compared, model):
    found = compared(phase="actor_forward")
    assert len(found.contradictions) == len(rms_norms(model))
    assert all("clean weights" in found or "the noise of step" in found for found in found.contradictions)


def test_noise_where_none_was_requested_is_found(compared, model):
    found = compared(sigma=0.0)
    assert all(text.endswith("clean weights") for text in found.contradictions)
    assert len(found.contradictions) == len(rms_norms(model))
