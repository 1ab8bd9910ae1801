"""A run whose numbers break down ends with one line, and its broken state is not saved."""

import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_training import NOISE, run, training_spec, write_inputs
from torch import nn
from transformers import TrainerState

from aqnpipe.errors import AqnpipeError, TrainingError
from aqnpipe.models.loading import describe_model
from aqnpipe.models.prepared import write_prepared_model
from aqnpipe.training.callbacks import BreakdownGuard

pytestmark = pytest.mark.usefixtures("rewards_that_teach")


@pytest.fixture
def updates(monkeypatch):
    """Counts the optimiser's steps."""
    made = []
    original = torch.optim.AdamW.step

    def step(self, *args, **kwargs):
        made.append(self)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    return made


def assert_nothing_kept(folder):
    assert not (folder / "run").exists()
    assert not list(folder.rglob("model.safetensors"))


@pytest.mark.parametrize("quantity", ["loss", "grad_norm"])
def test_beyond_its_bound_a_quantity_stops_the_run_before_the_optimiser(inputs, tmp_path, updates, quantity):
    # The noise on the log-probabilities of policy and reference differs, so even the first loss is not 0.
    spec = training_spec(NOISE, kl_coefficient=0.1, **{f"stop_{quantity}": 1e-9})
    match = rf"^base/test seed 0: {quantity} is \S+, beyond stop_{quantity} 1e-09, at step 1, run stopped"
    with pytest.raises(TrainingError, match=match) as caught:
        run(spec, inputs, tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, AqnpipeError)  # exit code 2, see tests/runtime/test_jobs.py
    assert updates == []
    assert_nothing_kept(tmp_path)


def test_gradients_beyond_float16_stop_the_run_and_name_the_loss_scale(inputs, tmp_path, updates):
    spec = training_spec(NOISE, dtype="float16", loss_scale=2**40)
    match = r"^base/test seed 0: grad_norm is (inf|nan) at step 1, run stopped .* a lower training.loss_scale may help$"
    with pytest.raises(TrainingError, match=match):
        run(spec, inputs, tmp_path / "run")
    assert updates == []
    assert_nothing_kept(tmp_path)


def test_a_loss_that_is_no_number_stops_the_run_before_the_optimiser(inputs, tmp_path, updates, make_model):
    broken = write_inputs(tmp_path, make_model)
    weights = load_file(broken.model / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][0, 0] = math.nan
    save_file(weights, broken.model / "model.safetensors", metadata={"format": "pt"})
    write_prepared_model(broken.model, describe_model(broken.model, "made/up"))
    with pytest.raises(TrainingError, match=r"^base/test seed 0: loss is nan at step 1, run stopped"):
        run(training_spec(), broken, tmp_path / "out" / "run")
    assert updates == []
    assert_nothing_kept(tmp_path / "out")


def test_weights_that_the_optimiser_breaks_are_not_kept(inputs, tmp_path, updates):
    with pytest.raises(TrainingError, match=r"^base/test seed 0: \S+ is not finite after step 1, run stopped"):
        run(training_spec(learning_rate=1e38, max_grad_norm=1e30), inputs, tmp_path / "run")
    assert len(updates) == 1
    assert_nothing_kept(tmp_path)


@pytest.fixture
def guard():
    return BreakdownGuard("base/E5 seed 3", training_spec(stop_loss=10, stop_grad_norm=100).training)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10.5, -10.5])
def test_a_broken_loss_of_either_sign_is_named_with_run_and_step(guard, value):
    with pytest.raises(TrainingError, match=r"base/E5 seed 3: loss is \S+ .*at step 7"):
        guard.check("loss", value, 7)


def test_numbers_within_their_bounds_pass(guard):
    guard.check("loss", -10.0, 7)
    guard.check("grad_norm", 100.0, 7)
    with pytest.raises(TrainingError, match="grad_norm is nan at step 7"):
        guard.check("grad_norm", math.nan, 7)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_broken_weight_is_found_by_name(guard, value):
    model = nn.Sequential(nn.Linear(300, 4), nn.Linear(4, 2))
    guard.on_step_end(None, TrainerState(global_step=2), None, model=model)
    model[1].weight.data[1, 2] = value
    with pytest.raises(TrainingError, match=r"1\.weight is not finite after step 2"):
        guard.on_step_end(None, TrainerState(global_step=2), None, model=model)
