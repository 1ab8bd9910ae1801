"""Sabotage of the noise, of AQN and of the trainer: what runs is not what was requested."""

from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from hold import took_effect
from sabotage import AFTER_TRAINING, END, EVALUATE, TRAIN, Sabotage, of_group, patched
from torch.nn import functional

from aqnpipe.config.run import TrainingSpec
from aqnpipe.config.training import TrainingConfig
from aqnpipe.evaluation.shards import noise_of
from aqnpipe.generation import rollout_engines
from aqnpipe.generation.transformers_backend import TransformersBackend
from aqnpipe.machine.machine import Machine, Request
from aqnpipe.models import loading
from aqnpipe.models.layout import rms_norms, weight_of
from aqnpipe.noise import aqn
from aqnpipe.noise.injection.phase import phase_noise
from aqnpipe.noise.kernels import error_models
from aqnpipe.noise.schedule import sigma_at
from aqnpipe.training import callbacks
from aqnpipe.training.noise_plan import NoisePlan

_ADD = "aqnpipe.noise.kernels.error_models.add_relative_gaussian_"
_NO_ERROR = "they have no error"


def _half(tensor: Any, scale: float, source: Any) -> Any:
    return _original_add(tensor, scale / 2, source)


_original_add = error_models.add_relative_gaussian_
_original_linear = functional.linear


def _noisy_linear(*args: Any, **kwargs: Any) -> Any:
    took_effect()
    output = _original_linear(*args, **kwargs)
    return output + 0.05 * output.abs() * torch.randn_like(output)


_error_at = Request.error_at


def _not_in_layer_5(self: Request, part: int) -> Any:
    return None if part == 5 else _error_at(self, part)


def _only_forward(request: Request, *args: Any) -> Machine:
    return Machine(request._replace(backward=False), *args)


def _rollout_noise_in_validation(model: Any, spec: Any, phase: Any, key: Any, recorder: Any, **settings: Any) -> Any:
    return phase_noise(model, spec, "rollout", key, recorder, **settings)


@contextmanager
def _left_on_in_validation(_: Any) -> Any:
    """The patch of an operator is put there in the rollout and stays on."""
    whole = callbacks.ValidationCallback.on_step_end

    def on_step_end(self: Any, *args: Any, **kwargs: Any) -> None:
        with mock.patch("torch.nn.functional.linear", _noisy_linear):
            whole(self, *args, **kwargs)

    with mock.patch.object(callbacks.ValidationCallback, "on_step_end", on_step_end):
        yield


def _epoch_later(self: NoisePlan, step: int) -> float:
    noise = self.spec.aqn
    assert noise is not None
    later = min(step + self.num_steps // self.num_epochs, self.num_steps)
    return sigma_at(noise.schedule, later, self.num_steps, self.num_epochs)


def _always_first(self: NoisePlan, step: int) -> float:
    noise = self.spec.aqn
    assert noise is not None
    return sigma_at(noise.schedule, 0, self.num_steps, self.num_epochs)


_factors = aqn.target_factors


def _equal_factors(model: Any, noise: Any, layer_factors: Any) -> dict[str, float]:
    return dict.fromkeys(_factors(model, noise, layer_factors), 1.0)


def _next_layers_factors(model: Any, noise: Any, layer_factors: Any) -> dict[str, float]:
    count = len(layer_factors)
    return _factors(model, noise, {layer: layer_factors[(layer + 1) % count] for layer in layer_factors})


_noised_norms = aqn._noised_norm_weights


@contextmanager
def _never_restored(model: Any, *args: Any) -> Any:
    with _noised_norms(model, *args):
        yield
    took_effect()
    with torch.no_grad():
        for norm in rms_norms(model).values():
            weight_of(norm).add_(0.02)


@contextmanager
def _stale_engine(_: Any) -> Any:
    """A copy of the policy rolls out; it is made before the noise, because a model under noise refuses copies."""
    whole, copies = rollout_engines.TransformersRolloutEngine.roll_out, []

    def roll_out(self: Any, policy: Any, *args: Any) -> Any:
        took_effect()
        if not copies:
            # Its hooks refer to the trainer, which cannot be copied.
            stale = type(policy)(policy.config).to(policy.dtype)
            stale.load_state_dict(policy.state_dict())
            copies.append(stale)
        with mock.patch.object(
            rollout_engines, "TransformersBackend", lambda _, tokenizer: TransformersBackend(copies[0], tokenizer)
        ):
            return whole(self, policy, *args)

    with mock.patch.object(rollout_engines.TransformersRolloutEngine, "roll_out", roll_out):
        yield


@contextmanager
def _stale_weights(_: Any) -> Any:
    """The policy itself rolls out, with the linear weights of the start put in for the time."""
    whole, start = rollout_engines.TransformersRolloutEngine.roll_out, {}

    def roll_out(self: Any, policy: Any, *args: Any) -> Any:
        now = {name: value.clone() for name, value in policy.state_dict().items() if "norm" not in name}
        if not start:
            start.update(now)
        policy.load_state_dict(start, strict=False)
        took_effect()
        try:
            return whole(self, policy, *args)
        finally:
            policy.load_state_dict(now, strict=False)

    with mock.patch.object(rollout_engines.TransformersRolloutEngine, "roll_out", roll_out):
        yield


def _without_last(self: TrainingConfig, num_steps: int) -> list[int]:
    return list(range(1, num_steps))


def _of_seed_0(self: TrainingSpec) -> int:
    took_effect()
    return 0


_load = loading.load_model


def _as_bfloat16(folder: Any, **settings: Any) -> Any:
    return _load(folder, **{**settings, "dtype": "bfloat16"})


def _retouched(folder: Any, **settings: Any) -> Any:
    model = _load(folder, **settings)
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if name.endswith("down_proj.weight")).mul_(1.01)
    return model


def _as_bfloat16_and_back(folder: Any, **settings: Any) -> Any:
    return _load(folder, **{**settings, "dtype": "bfloat16"}).float()


def training(name: str, what: str, apply: Any, facts: int | None = None, cause: str = "") -> Sabotage:
    """A sabotage of one training run."""
    return Sabotage(name, what, apply, TRAIN, AFTER_TRAINING, facts, cause=cause)


def evaluating(name: str, what: str, apply: Any, facts: int | None = None, cause: str = "") -> Sabotage:
    """A sabotage of one evaluation."""
    return Sabotage(name, what, apply, EVALUATE, END, facts, cause=cause)


SABOTAGES = of_group(
    "noise and trainer",
    "",
    (
        training(
            "noise not installed",
            "the function that adds it does nothing",
            patched(_ADD, lambda t, s, r: t),
            2,
            cause=_NO_ERROR,
        ),
        training(
            "noise at half the scale",
            "half of the requested scale is added",
            patched(_ADD, _half),
            cause=r"error is 0\.(4[5-9]|5[0-5]) times the requested",
        ),
        training(
            "noise only in forward",
            "gradients get none",
            patched("aqnpipe.noise.injection.phase.Machine", _only_forward),
            cause=r"backward",
        ),
        training(
            "a layer left out",
            "the noise is never switched on in layer 5",
            patched("aqnpipe.machine.machine.Request.error_at", _not_in_layer_5),
            cause=r"layers? \[?5",
        ),
        training(
            "noise left on in validation",
            "a patched operator is not restored",
            _left_on_in_validation,
            5,
            cause=r"validation",
        ),
        training(
            "the rollout's noise in validation",
            "the validation runs in the rollout phase",
            patched("aqnpipe.training.callbacks.phase_noise", _rollout_noise_in_validation),
            # The validation comes after the counter has moved on: its rollout noise has the key of another step.
            cause=r"validation|rollout: the noise is keyed by step 1 at step 0",
        ),
        training(
            "sigma logged, not applied",
            "the schedule's sigma is recorded, the injector adds nothing",
            patched("aqnpipe.noise.aqn.add_absolute_gaussian_", lambda t, s, r: t),
            1,
            cause=r"sigma",
        ),
        training(
            "the injector always gets step 0 of 1",
            "sigma is 0 regardless of the schedule",
            patched("aqnpipe.training.noise_plan.NoisePlan.sigma", lambda self, step: 0.0),
            1,
            cause=r"sigma",
        ),
        training(
            "step counter not advanced",
            "sigma stays at its value of step 0",
            patched("aqnpipe.training.noise_plan.NoisePlan.sigma", _always_first),
            4,
            cause=r"sigma",
        ),
        training(
            "schedule off by one epoch",
            "sigma is the value of the next epoch",
            patched("aqnpipe.training.noise_plan.NoisePlan.sigma", _epoch_later),
            cause=r"sigma",
        ),
        training(
            "per-layer sigmas ignored",
            "every norm gets the same sigma",
            patched("aqnpipe.training.noise_plan.target_factors", _equal_factors),
            3,
            cause=r"AQN|sigma",
        ),
        training(
            "wrong layer",
            "every layer gets the sigma of the next one",
            patched("aqnpipe.training.noise_plan.target_factors", _next_layers_factors),
            cause=r"AQN|sigma",
        ),
        training(
            "a class check that matches nothing",
            "no module is recognised as a norm",
            patched("aqnpipe.models.layout.is_rms_norm", lambda module: False),
            2,
            cause=r"RMSNorm|norm",
        ),
        training(
            "AQN not restored",
            "the norm weights keep their noise after the rollout",
            patched("aqnpipe.noise.aqn._noised_norm_weights", _never_restored),
            cause=r"norm weights|norms",
        ),
        training(
            "stale rollout engine",
            "a copy of the policy made at the start draws the rollouts",
            _stale_engine,
            cause=r"rollout",
        ),
        training(
            "stale weights in the rollout",
            "rollouts use the linear weights of the start",
            _stale_weights,
            cause=r"rollout",
        ),
        training(
            "last step never validated",
            "the list of validation steps ends before the last step",
            patched("aqnpipe.config.training.TrainingConfig.validation_steps", _without_last),
            6,
            cause=r"not validated",
        ),
        training(
            "checkpoints not saved",
            "the callback that saves them does nothing",
            patched("aqnpipe.training.callbacks.CheckpointCallback.on_step_end", lambda self, *args, **kwargs: None),
            8,
            cause=r"checkpoint",
        ),
        Sabotage(
            "a seed used twice",
            "the run of seed 1 uses the random numbers of seed 0",
            patched("aqnpipe.config.run.TrainingSpec.random_seed", property(_of_seed_0)),
            (("train", "guided", 1),),
            (("evaluate", "guided", 1, 1), ("evaluate", "guided", 1), *END),
            9,
            cause=r"seed",
        ),
        evaluating(
            "noise absent in the evaluation",
            "the evaluation runs without the injection",
            patched("aqnpipe.generation.noisy_passes.phase_noise", lambda *args, **kwargs: nullcontext()),
            5,
            cause=r"noise|evaluation",
        ),
        evaluating(
            "noise in the evaluation does nothing",
            "the function that adds it does nothing",
            patched(_ADD, lambda t, s, r: t),
            cause=_NO_ERROR,
        ),
        evaluating(
            "noise left on in the evaluation",
            "torch's linear is still patched by an earlier run",
            lambda _: mock.patch("torch.nn.functional.linear", _noisy_linear),
            10,
            cause=r"noise|plain torch|other code",
        ),
        evaluating(
            "noise at the level without noise",
            "level 0 is evaluated with the noise of level 10 %",
            patched("aqnpipe.evaluation.shards.noise_of", lambda spec, level, seed: noise_of(spec, 0.1, seed)),
            cause=r"level 0",
        ),
        evaluating(
            "other number format evaluated",
            "the checkpoint is loaded as bfloat16",
            patched("aqnpipe.generation.backend_choice.load_model", _as_bfloat16),
            7,
            cause=r"bfloat16|float32",
        ),
        evaluating(
            "weights rounded on the way",
            "the checkpoint is loaded as bfloat16 and computed in float32",
            patched("aqnpipe.generation.backend_choice.load_model", _as_bfloat16_and_back),
            7,
            cause=r"in memory|weight",
        ),
        evaluating(
            "other weights evaluated",
            "one matrix is 1 % larger in memory than in the checkpoint",
            patched("aqnpipe.generation.backend_choice.load_model", _retouched),
            7,
            cause=r"in memory|weight",
        ),
    ),
)
