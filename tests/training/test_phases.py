"""AQN is on the norm weights in the rollout and nowhere else; sabotage of either condition must fail the run."""

from contextlib import contextmanager, nullcontext

import pytest
import torch
from tiny_training import AQN, NOISE, run, training_spec
from torch import nn

from aqnpipe.artifacts.files import read_json
from aqnpipe.errors import ReceiptError
from aqnpipe.generation import rollout_engines
from aqnpipe.models.layout import rms_norms
from aqnpipe.noise.receipts.receipt import Receipt
from aqnpipe.training import callbacks, trainer


def with_noise_in(monkeypatch, module, phase):
    """Make `phase` compute with other norm weights, and restore them before the next phase."""
    original = module.phase_noise

    @contextmanager
    def noisy(model, spec, name, *args, **kwargs):
        norms = [norm.weight.data for norm in rms_norms(model).values()] if name == phase else []
        clean = [weight.clone() for weight in norms]
        for weight in norms:
            weight.add_(0.01)
        with original(model, spec, name, *args, **kwargs):
            yield
        for weight, value in zip(norms, clean, strict=True):
            weight.copy_(value)

    monkeypatch.setattr(module, "phase_noise", noisy)


def test_every_phase_is_compared_with_the_weights_that_the_optimiser_left(inputs, tmp_path):
    receipt = read_json(run(training_spec(NOISE, AQN), inputs, tmp_path / "run") / "receipt.json", Receipt)
    found = {record.phase: (record.norms_checked, record.norms_noised) for record in receipt.phases}
    # Two steps of two micro-batches; validation after the last.
    assert found == {
        "rollout": (2, 2), "reference": (4, 0), "actor_forward": (4, 0), "backward": (0, 0), "validation": (1, 0),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("phase", "aqn"),
    [
        ("reference", AQN),
        ("actor_forward", AQN),
        ("validation", AQN),
        ("actor_forward", {**AQN, "targets": "hidden_states"}),
    ],
)
def test_noise_on_the_norms_outside_the_rollout_fails_the_run(inputs, tmp_path, monkeypatch, phase, aqn):
    with_noise_in(monkeypatch, callbacks if phase == "validation" else trainer, phase)
    message = rf"{phase}: computed with noise on the norm weights in \d of \d forward passes"
    if phase == "reference":
        message = "the reference model has other weights than the model before training"
    with pytest.raises(ReceiptError, match=message):
        run(training_spec(aqn=aqn), inputs, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_noise_on_the_norms_of_a_run_without_aqn_fails_it(inputs, tmp_path, monkeypatch):
    with_noise_in(monkeypatch, rollout_engines, "rollout")
    with pytest.raises(ReceiptError, match=r"rollout: (AQN: .*norm|computed with noise on the norm weights)"):
        run(training_spec(), inputs, tmp_path / "run")


def test_aqn_that_stays_on_after_the_rollout_fails_the_run(inputs, tmp_path, monkeypatch):
    copy_ = torch.Tensor.copy_
    monkeypatch.setattr(
        torch.Tensor, "copy_", lambda self, *args: self if isinstance(self, nn.Parameter) else copy_(self, *args)
    )
    with pytest.raises(ReceiptError, match=r"actor_forward: AQN: \S*norm|norm\.weight\): AQN noise"):
        run(training_spec(aqn=AQN), inputs, tmp_path / "run")


def test_phases_without_a_comparison_of_norms_fail_the_run(inputs, tmp_path, monkeypatch):
    monkeypatch.setattr(callbacks.CleanWeightsCallback, "on_train_begin", lambda *args, **kwargs: None)
    monkeypatch.setattr(callbacks.CleanWeightsCallback, "on_step_end", lambda *args, **kwargs: None)
    with pytest.raises(ReceiptError, match="rollout: its norm weights were never compared with the clean ones"):
        run(training_spec(), inputs, tmp_path / "run")


def test_noise_forgotten_in_one_phase_fails_the_run(inputs, tmp_path, monkeypatch):
    original = trainer.phase_noise
    monkeypatch.setattr(
        trainer,
        "phase_noise",
        lambda model, spec, phase, *args, **kwargs: (
            nullcontext() if phase == "reference" else original(model, spec, phase, *args, **kwargs)
        ),
    )
    with pytest.raises(ReceiptError, match="reference: it was never seen, in step 0"):
        run(training_spec(NOISE), inputs, tmp_path / "run")


def test_backward_noise_forgotten_fails_the_run(inputs, tmp_path, monkeypatch):
    original = trainer.phase_noise
    monkeypatch.setattr(
        trainer,
        "phase_noise",
        lambda model, spec, phase, *args, **kwargs: original(
            model, spec, phase, *args, **{**kwargs, "backward": False}
        ),
    )
    with pytest.raises(ReceiptError, match=r"backward: noise was requested but never reached layers \[0, 1\]"):
        run(training_spec(NOISE), inputs, tmp_path / "run")


IN_TRAINING = {**AQN, "targets": "hidden_states", "actor_forward": True}


@pytest.mark.parametrize(
    "settings",
    [{}, {"gradient_checkpointing": True, "num_steps": 4, "steps_per_rollout": 2}],
    ids=["plain", "mini-batches, checkpointing"],
)
def test_aqn_in_the_forward_passes_of_training_is_measured(inputs, tmp_path, settings):
    folder = run(training_spec(aqn=IN_TRAINING, **settings), inputs, tmp_path / "run")
    receipt = read_json(folder / "receipt.json", Receipt)
    measured = {(cell.phase, cell.layer): cell.sigma_measured for cell in receipt.weight_cells}
    places = {(phase, layer) for phase in ("rollout", "actor_forward") for layer in range(2)}
    assert measured == dict.fromkeys(places, pytest.approx(1.0, abs=0.1))
    audited = {record.phase: record.recomputed for record in receipt.phases}
    assert audited["actor_forward"] > 0
    assert audited["reference"] == audited["validation"] == 0


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        # None of the noise is there.
        (lambda sigmas: {}, "AQN: the hidden states of layer 0: .* no noise"),
        # It has another size.
        (lambda sigmas: {layer: 2 * sigma for layer, sigma in sigmas.items()}, "error is 2.00 times the requested"),
        # It is in one layer alone.
        (lambda sigmas: {1: sigmas[1]} if sigmas else {}, "AQN: the hidden states of layer 0: .* no noise"),
    ],
    ids=["missing", "twice the size", "one layer"],
)
def test_aqn_in_training_other_than_requested_fails_the_run(inputs, tmp_path, monkeypatch, change, problem):
    plain = trainer.noised_actor

    @contextmanager
    def changed(*args):
        with plain(*args) as sigmas:
            yield change(sigmas)

    monkeypatch.setattr(trainer, "noised_actor", changed)
    with pytest.raises(ReceiptError, match=problem):
        run(training_spec(aqn=IN_TRAINING), inputs, tmp_path / "run")


@pytest.mark.parametrize("phase", ["reference", "actor_forward", "validation"])
def test_noise_on_hidden_states_outside_the_rollout_fails_the_run(inputs, tmp_path, monkeypatch, phase):
    module = callbacks if phase == "validation" else trainer
    original = module.phase_noise
    monkeypatch.setattr(
        module,
        "phase_noise",
        lambda model, spec, name, *args, **kwargs: original(
            model, spec, name, *args, **{**kwargs, **({"hidden_sigmas": {1: 0.05}} if name == phase else {})}
        ),
    )
    with pytest.raises(ReceiptError, match=r"AQN noised the hidden states of layers \[1\] outside the rollout"):
        run(training_spec(aqn={**AQN, "targets": "hidden_states"}, validate_every=1), inputs, tmp_path / "run")
