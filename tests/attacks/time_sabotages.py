"""Sabotage in time: the noise of some steps or passes is missing, or they compute in another number format."""

from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from hold import took_effect
from noise_sabotages import evaluating, training
from sabotage import Apply, of_group

from aqnpipe.generation import rollout_engines
from aqnpipe.generation.transformers_backend import InPlaceLayer, _Batch
from aqnpipe.noise.injection.phase import phase_noise

_TRAINER = "aqnpipe.training.trainer.phase_noise"


def _from_step_2(phases: tuple[str, ...]) -> Apply:
    """Without noise from the second step on; "backward": the gradients alone."""

    @contextmanager
    def noise(model: Any, spec: Any, phase: Any, key: Any, recorder: Any, **settings: Any) -> Any:
        if key.step >= 1:
            took_effect()
            if phase in phases:
                yield
                return
            if "backward" in phases:
                settings["backward"] = False
        with phase_noise(model, spec, phase, key, recorder, **settings):
            yield

    return lambda _: mock.patch(_TRAINER, noise)


def _clean_prompts(target: str) -> Apply:
    """Noise begins when prompts have been read."""
    return lambda _: _behind_prompts(target)


@contextmanager
def _behind_prompts(target: str) -> Any:
    whole, waiting = _Batch.prefill, []

    @contextmanager
    def later(*args: Any, **settings: Any) -> Any:
        with ExitStack() as stack:
            waiting.append(lambda: stack.enter_context(phase_noise(*args, **settings)))
            yield

    def prefill(self: Any) -> Any:
        logits = whole(self)
        if waiting:
            took_effect()
            waiting.pop()()
        return logits

    with (
        mock.patch(target, later),
        mock.patch.object(_Batch, "prefill", prefill),
    ):
        yield


def _in_bfloat16(target: str, phase: str) -> Apply:
    """One phase computes under autocast."""

    @contextmanager
    def noise(model: Any, spec: Any, now: Any, *args: Any, **settings: Any) -> Any:
        with phase_noise(model, spec, now, *args, **settings):
            if now != phase:
                yield
                return
            took_effect()
            with torch.autocast("cpu", torch.bfloat16):
                yield

    return lambda _: mock.patch(target, noise)


def _cache_in_bfloat16(self: InPlaceLayer, keys: Any, values: Any, *args: Any, **settings: Any) -> Any:
    took_effect()
    keys, values = (states.bfloat16().float() for states in (keys, values))
    return _update(self, keys, values, *args, **settings)


_update = InPlaceLayer.update


@contextmanager
def _rounded_logits(_: Any) -> Any:
    """The logits of the actor are rounded before anybody sees them."""

    @contextmanager
    def noise(model: Any, *args: Any, **settings: Any) -> Any:
        def rounded(module: Any, inputs: Any, logits: Any) -> Any:
            took_effect()
            return logits.bfloat16().float()

        with phase_noise(model, *args, **settings):
            handle = model.lm_head.register_forward_hook(rounded)
            yield
            handle.remove()

    with mock.patch(_TRAINER, noise):
        yield


@contextmanager
def _dropout_in_rollouts(_: Any) -> Any:
    whole = rollout_engines.TransformersRolloutEngine.roll_out

    def roll_out(self: Any, policy: Any, *args: Any) -> Any:
        attentions = [module for module in policy.modules() if hasattr(module, "attention_dropout")]
        for module in attentions:
            took_effect()
            module.attention_dropout = 0.1
        with mock.patch.object(policy, "eval", policy.train):
            completions = whole(self, policy, *args)
        for module in attentions:
            module.attention_dropout = 0.0
        return completions

    with mock.patch.object(rollout_engines.TransformersRolloutEngine, "roll_out", roll_out):
        yield


@contextmanager
def _rollouts_in_training_mode(_: Any) -> Any:
    """The policy stays in training mode; nothing in it has a dropout rate."""
    whole = rollout_engines.TransformersRolloutEngine.roll_out

    def roll_out(self: Any, policy: Any, *args: Any) -> Any:
        took_effect()
        with mock.patch.object(policy, "eval", policy.train):
            return whole(self, policy, *args)

    with mock.patch.object(rollout_engines.TransformersRolloutEngine, "roll_out", roll_out):
        yield


def _within(phase: str, change: Apply) -> Apply:
    """The trainer computes one phase within `change` of its model."""

    @contextmanager
    def noise(model: Any, spec: Any, now: Any, *args: Any, **settings: Any) -> Any:
        with phase_noise(model, spec, now, *args, **settings), change(model) if now == phase else nullcontext():
            yield

    return lambda _: mock.patch(_TRAINER, noise)


@contextmanager
def _another_kernel(model: Any) -> Any:
    took_effect()
    before = model.config._attn_implementation
    model.config._attn_implementation = "eager" if before == "sdpa" else "sdpa"
    yield
    model.config._attn_implementation = before


@contextmanager
def _other_mode(model: Any) -> Any:
    took_effect()
    before = model.training
    model.train(not before)
    yield
    model.train(before)


@contextmanager
def _deterministic_algorithms(model: Any) -> Any:
    took_effect()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@contextmanager
def _precision_from_the_shell(_: Any) -> Any:
    took_effect()
    with mock.patch.dict("os.environ", {"ACCELERATE_MIXED_PRECISION": "bf16"}):
        yield


def _missing(phases: str) -> str:
    return rf"{phases}: .*, in step 1"


SABOTAGES = of_group(
    "place: time",
    "",
    (
        training(
            "reference without noise from step 2",
            "its noise is not installed any more",
            _from_step_2(("reference",)),
            cause=_missing("reference"),
        ),
        training(
            "actor without noise from step 2",
            "its noise is not installed any more",
            _from_step_2(("actor_forward",)),
            cause=_missing("actor_forward"),
        ),
        training(
            "backward without noise from step 2",
            "gradients get none any more",
            _from_step_2(("backward",)),
            cause=_missing("backward"),
        ),
        training(
            "no noise in training from step 2",
            "neither reference nor actor nor backward pass have any",
            _from_step_2(("reference", "actor_forward")),
            cause=_missing("(reference|actor_forward)"),
        ),
        training(
            "prompts of rollouts read without noise",
            "the noise begins with the first new token",
            _clean_prompts("aqnpipe.generation.rollout_engines.phase_noise"),
            cause=r"rollout: 0 sequences were read from their first token on",
        ),
        training(
            "rollout in bfloat16",
            "autocast is on",
            _in_bfloat16("aqnpipe.generation.rollout_engines.phase_noise", "rollout"),
            cause=r"rollout.*bfloat16|log-probabilit",
        ),
        training(
            "actor in bfloat16",
            "autocast is on",
            _in_bfloat16(_TRAINER, "actor_forward"),
            cause=r"actor_forward.*bfloat16",
        ),
        training(
            "cache of bfloat16",
            "keys and values are rounded",
            lambda _: mock.patch.object(InPlaceLayer, "update", _cache_in_bfloat16),
            cause=r"cache of bfloat16|noise|rollout",
        ),
        training(
            "logits rounded to bfloat16",
            "a hook on the output projection rounds them",
            _rounded_logits,
            cause=r"logits of bfloat16|lm_head",
        ),
        training(
            "dropout in rollouts",
            "the policy stays in training mode, with a rate",
            _dropout_in_rollouts,
            cause=r"dropout",
        ),
        training(
            "rollouts in training mode",
            "the policy is never put into evaluation mode",
            _rollouts_in_training_mode,
            cause=r"rollout: computed in training mode",
        ),
        training(
            "actor in evaluation mode",
            "`eval()` is called on its modules",
            _within("actor_forward", _other_mode),
            cause=r"actor_forward: computed in evaluation mode",
        ),
        training(
            "reference in training mode",
            "`train()` is called on its modules",
            _within("reference", _other_mode),
            cause=r"reference: computed in training mode",
        ),
        training(
            "another attention kernel in the actor",
            "the config is changed for its passes",
            _within("actor_forward", _another_kernel),
            cause=r"actor_forward: .* attention",
        ),
        training(
            "another attention kernel in the reference",
            "the config is changed for its passes",
            _within("reference", _another_kernel),
            cause=r"reference: .* attention",
        ),
        training(
            "deterministic algorithms in the actor",
            "torch may use no others for its passes",
            _within("actor_forward", _deterministic_algorithms),
            cause=r"actor_forward: computed in deterministic algorithms",
        ),
        evaluating(
            "prompts of an evaluation read without noise",
            "the noise begins with the first new token",
            _clean_prompts("aqnpipe.generation.noisy_passes.phase_noise"),
            cause=r"evaluation: a first forward pass began at position",
        ),
        training(
            "mixed precision from the shell",
            "a variable of the environment switches it on",
            _precision_from_the_shell,
            cause=r"ACCELERATE_MIXED_PRECISION",
        ),
    ),
)
