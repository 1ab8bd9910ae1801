"""Sabotage of GRPO itself: advantages, the loss and its reference are not those of the study."""

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from hold import replaced, took_effect
from optimiser_sabotages import AFTER, TRAIN, arguments
from sabotage import Apply, Sabotage, of_group
from trl import GRPOTrainer

_LOSS = "trl.trainer.grpo_trainer.GRPOTrainer._compute_loss"
_SCORED = "trl.trainer.grpo_trainer.GRPOTrainer._generate_and_score_completions"
_LOG_PROBABILITIES = "aqnpipe.training.trainer.NoisyGRPOTrainer._get_per_token_logps_and_entropies"
_GROUP = 4


def _loss(
    change: Callable[[Any, dict[str, Any]], dict[str, Any]] = lambda trainer, inputs: inputs, **settings: Any
) -> Apply:
    """The loss is computed with changed inputs, or with other attributes of the trainer."""

    def make(original: Any) -> Any:
        def compute(self: Any, model: Any, inputs: dict[str, Any]) -> Any:
            took_effect()
            values = {name: value(self) if callable(value) else value for name, value in settings.items()}
            before = {name: getattr(self, name) for name in values}
            vars(self).update(values)
            try:
                return original(self, model, change(self, dict(inputs)))
            finally:
                vars(self).update(before)

        return compute

    return replaced((_LOSS, make))


def _loss_plus(extra: Callable[[Any, Any, dict[str, Any], Any], Any]) -> Apply:
    def make(original: Any) -> Any:
        def compute(self: Any, model: Any, inputs: dict[str, Any]) -> Any:
            took_effect()
            return extra(self, model, inputs, original(self, model, inputs))

        return compute

    return replaced((_LOSS, make))


def _scored(change: Callable[[Any, dict[str, Any]], None]) -> Apply:
    """Rollouts that were scored are changed."""

    def make(original: Any) -> Any:
        def scored(self: Any, inputs: Any) -> Any:
            found = original(self, inputs)
            took_effect()
            change(self, found)
            return found

        return scored

    return replaced((_SCORED, make))


def _advantages(change: Callable[[Any, torch.Tensor], torch.Tensor]) -> Apply:
    def put(trainer: Any, found: dict[str, Any]) -> None:
        found["advantages"] = change(trainer, found["advantages"])

    return _scored(put)


def _from_rewards(formula: Callable[[torch.Tensor], torch.Tensor]) -> Apply:
    """Advantages are `formula(rewards [groups, completions])`."""

    @contextmanager
    def apply(study: Any) -> Any:
        rewards: list[torch.Tensor] = []
        whole = GRPOTrainer._calculate_rewards

        def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
            found = whole(self, *args, **kwargs)
            rewards[:] = [found.sum(1).view(-1, _GROUP)]
            return found

        changed = _advantages(lambda trainer, old: formula(rewards[0]).flatten().to(old))
        with mock.patch.object(GRPOTrainer, "_calculate_rewards", noted), changed(study):
            yield

    return apply


def _tensor(name: str, change: Callable[[Any, torch.Tensor], torch.Tensor]) -> Apply:
    def put(trainer: Any, found: dict[str, Any]) -> None:
        if name in found:
            found[name] = change(trainer, found[name])

    return _scored(put)


def _mask_of_truncated(trainer: Any, found: dict[str, Any]) -> None:
    ended = (found["completion_ids"] == trainer._tokenizer.eos_token_id).any(1, keepdim=True)
    found["completion_mask"] = found["completion_mask"] * ended


def _mask_without_end(trainer: Any, found: dict[str, Any]) -> None:
    found["completion_mask"] = found["completion_mask"] * (found["completion_ids"] != trainer._tokenizer.eos_token_id)


def _logps(change: Callable[..., Any]) -> Apply:
    """`change(trainer, original, model, ids, mask, count, settings)` in place of log-probabilities."""

    def make(original: Any) -> Any:
        def logps(self: Any, model: Any, ids: Any, mask: Any, count: int, *args: Any, **kwargs: Any) -> Any:
            return change(
                self, lambda m=model, i=ids, k=mask: original(self, m, i, k, count, *args, **kwargs), model, ids, mask
            )

        return logps

    return replaced((_LOG_PROBABILITIES, make))


def _policy_as_reference(trainer: Any, logps: Any, model: Any, ids: Any, mask: Any) -> Any:
    if model is not trainer.ref_model:
        return logps()
    took_effect()
    trainer.ref_model.load_state_dict(trainer.policy.state_dict())
    return logps()


def _moving_reference(trainer: Any, logps: Any, model: Any, ids: Any, mask: Any) -> Any:
    """The reference follows the policy from the second epoch on."""
    if model is trainer.ref_model and trainer.state.global_step >= 2:
        took_effect()
        with torch.no_grad():
            for mine, other in zip(trainer.ref_model.parameters(), trainer.policy.parameters(), strict=True):
                mine.lerp_(other, 0.5)
    return logps()


def _reference_of_other_rows(trainer: Any, logps: Any, model: Any, ids: Any, mask: Any) -> Any:
    found, *rest = logps()
    if model is not trainer.ref_model:
        return (found, *rest)
    took_effect()
    return (found.roll(1, 0), *rest)


def _without_mask(trainer: Any, logps: Any, model: Any, ids: Any, mask: Any) -> Any:
    """Padding of prompts is attended."""
    took_effect()
    return logps(k=torch.ones_like(mask))


def _at_temperature_1(trainer: Any, logps: Any, model: Any, ids: Any, mask: Any) -> Any:
    took_effect()
    before, trainer.temperature = trainer.temperature, 1.0
    try:
        return logps()
    finally:
        trainer.temperature = before


def _shifted(trainer: Any, logps: Any, model: Any, ids: Any, mask: Any) -> Any:
    """The probabilities are of the tokens before."""
    took_effect()
    return logps(i=ids.roll(1, -1))


def _reference_in_bfloat16(trainer: Any, logps: Any, model: Any, ids: Any, mask: Any) -> Any:
    if model is not trainer.ref_model:
        return logps()
    took_effect()
    found, *rest = logps()
    return (found.bfloat16().float(), *rest)


def _kl(estimate: Callable[[torch.Tensor], torch.Tensor]) -> Apply:
    """The KL term is another function of the difference of log-probabilities (reference - policy)."""

    @contextmanager
    def apply(study: Any) -> Any:
        policy: list[torch.Tensor] = []

        def noting(trainer: Any, logps: Any, model: Any, ids: Any, mask: Any) -> Any:
            found, *rest = logps()
            policy[:] = [found]
            return (found, *rest)

        def extra(trainer: Any, model: Any, inputs: dict[str, Any], loss: Any) -> Any:
            difference = inputs["ref_per_token_logps"] - policy[0]
            change = estimate(difference) - (difference.exp() - difference - 1)
            share = trainer.current_gradient_accumulation_steps / trainer.args.steps_per_generation
            normaliser = inputs["num_items_in_batch"] * share
            return loss + trainer.beta * (change * inputs["completion_mask"]).sum() / normaliser

        with _logps(noting)(study), _loss_plus(extra)(study):
            yield

    return apply


def _penalty(trainer: Any, model: Any, inputs: dict[str, Any], loss: Any) -> Any:
    trainer_loss = loss * 1.0
    weights = next(iter(model.parameters()))
    return trainer_loss + 1e-3 * weights.square().sum()


def training(name: str, what: str, apply: Any, cause: str = "") -> Sabotage:
    """A sabotage of a training run."""
    return Sabotage(name, what, apply, TRAIN, AFTER, cause=cause, variant="trained")


_ADVANTAGE = r"advantage"
_KL = r"KL|kl_coefficient|beta"
_RATIO = r"log.?prob|logps|ratio|old"

SABOTAGES = of_group(
    "trainer: loss",
    r"loss",
    (
        training("advantages negated", "good responses are discouraged", _advantages(lambda t, a: -a), _ADVANTAGE),
        training(
            "advantages not scaled",
            "the group's deviation is not divided out",
            arguments(scale_rewards="none"),
            rf"{_ADVANTAGE}|scale_rewards",
        ),
        training(
            "advantages scaled by the batch",
            "one deviation for all groups",
            arguments(scale_rewards="batch"),
            rf"{_ADVANTAGE}|scale_rewards",
        ),
        training(
            "advantages shuffled", "they belong to other responses", _advantages(lambda t, a: a.roll(1)), _ADVANTAGE
        ),
        training(
            "advantages of another group",
            "each prompt has those of the next",
            _advantages(lambda t, a: a.roll(_GROUP)),
            _ADVANTAGE,
        ),
        training(
            "advantages against the others",
            "the mean leaves the response itself out: all are larger by n/(n - 1)",
            _from_rewards(
                lambda r: (r - (r.sum(1, keepdim=True) - r) / (_GROUP - 1)) / (r.std(1, keepdim=True) + 1e-4)
            ),
            rf"{_ADVANTAGE}|loss is scaled",
        ),
        training(
            "advantages by the population",
            "the deviation divides by n in place of n - 1: all are larger",
            _from_rewards(lambda r: (r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True, correction=0) + 1e-4)),
            rf"{_ADVANTAGE}|loss is scaled",
        ),
        training("rewards in place of advantages", "no baseline", _from_rewards(lambda r: r), _ADVANTAGE),
        training(
            "advantages of one sign",
            "bad responses are not discouraged",
            _advantages(lambda t, a: a.clamp_min(0)),
            _ADVANTAGE,
        ),
        training("KL negated", "distance from the reference is rewarded", _loss(beta=lambda self: -self.beta), _KL),
        training("KL left out", "its coefficient is 0 in the loss", _loss(beta=0.0), _KL),
        training("KL ten times larger", "its coefficient is another", arguments(beta=0.5), _KL),
        training("KL without correction", "the plain difference of log-probabilities (k1)", _kl(lambda d: -d), _KL),
        training("KL squared", "half of the squared difference (k2)", _kl(lambda d: d.square() / 2), _KL),
        training(
            "KL in the other direction",
            "policy and reference swapped in the estimate",
            _kl(lambda d: (-d).exp() + d - 1),
            _KL,
        ),
        training(
            "no clipping", "ratios are not bounded", _loss(epsilon_low=1e9, epsilon_high=1e9), r"clip|epsilon|ratio"
        ),
        training("clipping twice as wide", "the argument of TRL is another", arguments(epsilon=0.2), r"clip|epsilon"),
        training(
            "clipping on one side", "ratios above 1 are not bounded", _loss(epsilon_high=1e9), r"clip|epsilon|ratio"
        ),
        training(
            "ratios always 1",
            "old log-probabilities are the present ones",
            _loss(lambda t, i: {**i, "old_per_token_logps": None}),
            _RATIO,
        ),
        training(
            "old log-probabilities of other rows",
            "each row has those of the one before",
            _tensor("old_per_token_logps", lambda t, v: v.roll(1, 0)),
            _RATIO,
        ),
        training(
            "ratio of sequences",
            "one ratio per response",
            _loss(importance_sampling_level="sequence"),
            r"importance_sampling_level|ratio",
        ),
        training(
            "mean per response", "loss type grpo: long responses count less", arguments(loss_type="grpo"), r"loss"
        ),
        training("mean per micro-batch", "loss type bnpo", arguments(loss_type="bnpo"), r"loss"),
        training("constant denominator", "loss type dr_grpo", arguments(loss_type="dr_grpo"), r"loss"),
        training(
            "loss divided once more",
            "by the number of micro-batches",
            _loss_plus(lambda t, m, i, loss: loss / 2),
            r"loss|gradient",
        ),
        training(
            "padding counts",
            "the mask of responses is 1 everywhere",
            _tensor("completion_mask", lambda t, v: torch.ones_like(v)),
            r"mask|token",
        ),
        training(
            "truncated responses masked",
            "they do not count in the loss",
            _scored(_mask_of_truncated),
            r"mask|truncated|token",
        ),
        training("end tokens masked", "the model does not learn to stop", _scored(_mask_without_end), r"mask|token"),
        training(
            "first token masked",
            "the mask begins one token late",
            _tensor("completion_mask", lambda t, v: v * (torch.arange(v.shape[1]) > 0)),
            r"mask|token",
        ),
        training(
            "policy as reference", "the reference is the current policy", _logps(_policy_as_reference), r"reference|KL"
        ),
        training("moving reference", "it follows the policy", _logps(_moving_reference), r"reference|KL"),
        training(
            "reference of other rows",
            "each row has those of the one before",
            _logps(_reference_of_other_rows),
            r"reference|KL",
        ),
        training(
            "reference in bfloat16",
            "its log-probabilities have two digits",
            _logps(_reference_in_bfloat16),
            r"reference|KL",
        ),
        training(
            "padding attended",
            "the actor sees the padding of prompts",
            _logps(_without_mask),
            r"mask|padding|log.?prob|logits",
        ),
        training(
            "log-probabilities at temperature 1",
            "they are not those of the sampler",
            _logps(_at_temperature_1),
            r"temperature|log.?prob",
        ),
        training("log-probabilities shifted", "those of the tokens before", _logps(_shifted), r"token|log.?prob"),
        training("a penalty of the weights", "added to the loss", _loss_plus(_penalty), r"loss|gradient"),
        training(
            "iterations doubled",
            "each rollout is used twice",
            arguments(num_iterations=2),
            r"num_iterations|iteration",
        ),
    ),
)
