"""Sabotage of the optimiser: learning rates, gradients and updates that are not the study's."""

from collections.abc import Callable
from typing import Any

import torch
from hold import replaced, took_effect, with_result
from sabotage import COMPARE, Apply, Sabotage, of_group
from torch import nn

_ARGUMENTS = "aqnpipe.training.run.grpo_arguments"
_OPTIMISER = "transformers.trainer.Trainer.create_optimizer"
_SCHEDULER = "transformers.trainer.Trainer.create_scheduler"
_STEP = "accelerate.optimizer.AcceleratedOptimizer.step"
_MICRO_STEP = "aqnpipe.training.trainer.NoisyGRPOTrainer.training_step"
_CLIP = "transformers.trainer.Trainer._clip_grad_norm"
TRAIN = (("train", "guided", 0),)
AFTER = (("evaluate", "guided", 0, 2), ("evaluate", "guided", 0), *COMPARE)


def arguments(**settings: Any) -> Apply:
    """TRL gets other arguments than the study's."""

    def change(found: Any) -> Any:
        for name, value in settings.items():
            if not hasattr(found, name):
                raise AttributeError(f"TRL has no argument {name}")
            setattr(found, name, value)
        return found

    return with_result(_ARGUMENTS, change)


def _groups(change: Callable[[Any, Any], None]) -> Apply:
    """`change(trainer, optimiser)` after the optimiser was made."""

    def make(original: Any) -> Any:
        def create(self: Any, *args: Any, **kwargs: Any) -> Any:
            is_new = self.optimizer is None
            optimiser = original(self, *args, **kwargs)
            if is_new:
                took_effect()
                change(self, optimiser)
            return self.optimizer

        return create

    return replaced((_OPTIMISER, make))


def _all_groups(**values: Any) -> Apply:
    def change(trainer: Any, optimiser: Any) -> None:
        for group in optimiser.param_groups:
            group.update(values)

    return _groups(change)


def _other_optimiser(make: Callable[[Any, Any], Any]) -> Apply:
    def change(trainer: Any, optimiser: Any) -> None:
        trainer.optimizer = make(optimiser.param_groups, trainer.args.learning_rate)

    return _groups(change)


def _adam_with_l2(groups: Any, rate: float) -> Any:
    return torch.optim.Adam([{k: g[k] for k in ("params", "weight_decay", "betas", "eps")} for g in groups], lr=rate)


def _sgd(groups: Any, rate: float) -> Any:
    return torch.optim.SGD([{"params": g["params"], "weight_decay": g["weight_decay"]} for g in groups], lr=rate)


def _without_one(trainer: Any, optimiser: Any) -> None:
    named = {id(weight): name for name, weight in trainer.model.named_parameters()}
    for group in optimiser.param_groups:
        group["params"] = [w for w in group["params"] if "layers.2.mlp.up_proj" not in named[id(w)]]


def _decay_on_all(trainer: Any, optimiser: Any) -> None:
    for group in optimiser.param_groups:
        group["weight_decay"] = trainer.args.weight_decay


def _norms_faster(trainer: Any, optimiser: Any) -> None:
    named = {id(weight): name for name, weight in trainer.model.named_parameters()}
    for group in list(optimiser.param_groups):
        slow = [w for w in group["params"] if "norm" not in named[id(w)]]
        fast = [w for w in group["params"] if "norm" in named[id(w)]]
        if fast:
            group["params"] = slow
            settings = {key: value for key, value in group.items() if key not in ("params", "lr")}
            optimiser.add_param_group({"params": fast, "lr": trainer.args.learning_rate * 3, **settings})


def _steps(act: Callable[[Any, int, Callable[[], Any]], Any]) -> Apply:
    """`act(optimiser, number, step)` in place of a step of the optimiser."""

    def make(original: Any) -> Any:
        number = 0

        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal number
            number += 1
            return act(self, number, lambda: original(self, *args, **kwargs))

        return step

    return replaced((_STEP, make))


def _second_step_skipped(optimiser: Any, number: int, step: Any) -> Any:
    if number == 2:
        return took_effect()
    return step()


def _last_step_twice(optimiser: Any, number: int, step: Any) -> Any:
    step()
    if number == 4:
        took_effect()
        step()


def _state_lost(optimiser: Any, number: int, step: Any) -> Any:
    if number == 3:
        took_effect()
        optimiser.optimizer.state.clear()
    return step()


def _rounded_after(optimiser: Any, number: int, step: Any) -> Any:
    step()
    took_effect()
    with torch.no_grad():
        for group in optimiser.param_groups:
            for weight in group["params"]:
                weight.copy_(weight.bfloat16())


def _gradients_rounded(optimiser: Any, number: int, step: Any) -> Any:
    took_effect()
    for group in optimiser.param_groups:
        for weight in group["params"]:
            if weight.grad is not None:
                weight.grad = weight.grad.bfloat16().float()
    return step()


def _gradients_negated(optimiser: Any, number: int, step: Any) -> Any:
    took_effect()
    for group in optimiser.param_groups:
        for weight in group["params"]:
            if weight.grad is not None:
                weight.grad.neg_()
    return step()


def _gradient_of_one_lost(optimiser: Any, number: int, step: Any) -> Any:
    took_effect()
    optimiser.param_groups[0]["params"][5].grad = None
    return step()


def _averaged(optimiser: Any, number: int, step: Any) -> Any:
    """The weights drift to a running mean."""
    before = [weight.detach().clone() for group in optimiser.param_groups for weight in group["params"]]
    step()
    took_effect()
    weights = [weight for group in optimiser.param_groups for weight in group["params"]]
    with torch.no_grad():
        for weight, old in zip(weights, before, strict=True):
            weight.lerp_(old, 0.5)


def _scheduler_twice(original: Any) -> Any:
    def create(self: Any, *args: Any, **kwargs: Any) -> Any:
        scheduler = original(self, *args, **kwargs)
        step = scheduler.step

        def twice() -> None:
            took_effect()
            step()
            step()

        scheduler.step = twice
        return scheduler

    return create


def _micro_steps(act: Callable[[Any, int, Callable[[], Any]], Any]) -> Apply:
    def make(original: Any) -> Any:
        number = 0

        def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal number
            number += 1
            return act(self, number, lambda: original(self, *args, **kwargs))

        return training_step

    return replaced((_MICRO_STEP, make))


def _zeroed_early(trainer: Any, number: int, step: Any) -> Any:
    if number % 2 == 0:
        took_effect()
        trainer.model.zero_grad()
    return step()


def _gradients_dropped(trainer: Any, number: int, step: Any) -> Any:
    before = [None if w.grad is None else w.grad.clone() for w in trainer.model.parameters()]
    loss = step()
    if number % 2 == 0:
        took_effect()
        for weight, gradient in zip(trainer.model.parameters(), before, strict=True):
            weight.grad = gradient
    return loss


def _layer_twice(trainer: Any, number: int, step: Any) -> Any:
    """Gradients of one layer count twice, as with two registered hooks."""
    names = {name for name, _ in trainer.policy.named_parameters() if ".layers.2." in name}
    before = {n: w.grad.clone() for n, w in trainer.policy.named_parameters() if n in names and w.grad is not None}
    loss = step()
    took_effect()
    for name, weight in trainer.policy.named_parameters():
        if name in names:
            weight.grad.mul_(2).sub_(before.get(name, 0))
    return loss


def _with_dropout(trainer: Any, number: int, step: Any) -> Any:
    """Dropout in the attention of the policy while it trains."""
    took_effect()
    for module in trainer.policy.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.1
    return step()


def _never_zeroed(original: Any) -> Any:
    def zero_grad(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        if any(weight.grad is not None for weight in self.parameters()):
            took_effect()

    return zero_grad


def _clipped(act: Callable[[Any, Any], Any]) -> Apply:
    def make(original: Any) -> Any:
        def clip(self: Any, model: Any) -> Any:
            took_effect()
            return act(self, model)

        return clip

    return replaced((_CLIP, make))


def _norm_of(model: Any) -> Any:
    return torch.nn.utils.get_total_norm([w.grad for w in model.parameters() if w.grad is not None])


def _clipped_by_value(trainer: Any, model: Any) -> Any:
    norm = _norm_of(model)
    torch.nn.utils.clip_grad_value_(model.parameters(), trainer.args.max_grad_norm / 100)
    return norm


def _clipped_by_parameter(trainer: Any, model: Any) -> Any:
    norm = _norm_of(model)
    for weight in model.parameters():
        torch.nn.utils.clip_grad_norm_([weight], trainer.args.max_grad_norm / 4)
    return norm


def _not_clipped(trainer: Any, model: Any) -> Any:
    return _norm_of(model)


def _frozen(name: str) -> Apply:
    def change(model: Any) -> Any:
        for own, weight in model.named_parameters():
            if name in own:
                weight.requires_grad_(False)
        return model

    return with_result("aqnpipe.training.run.load_policy", change)


def training(name: str, what: str, apply: Any, cause: str = "") -> Sabotage:
    """A sabotage of a training run."""
    return Sabotage(name, what, apply, TRAIN, AFTER, cause=cause, variant="trained")


_RATE = r"learning.rate|lr_scheduler|warmup"
_GRADIENT = r"gradients?\b(?! of the loss)|grad_norm"
_UPDATE = r"update|optimi[sz]er|Adam|weight_decay|beta|epsilon"

SABOTAGES = of_group(
    "trainer: optimiser",
    _UPDATE,
    (
        training(
            "learning rate doubled",
            "in the optimiser's parameter groups",
            _groups(lambda t, o: [g.update(lr=g["lr"] * 2, initial_lr=g["lr"] * 2) for g in o.param_groups]),
            _RATE,
        ),
        training(
            "learning rate not scheduled",
            "constant in place of linear",
            arguments(lr_scheduler_type="constant_with_warmup"),
            _RATE,
        ),
        training("learning rate by cosine", "in place of linear", arguments(lr_scheduler_type="cosine"), _RATE),
        training("no warm-up", "warmup_steps is 0", arguments(warmup_steps=0), _RATE),
        training(
            "schedule twice as fast", "the scheduler steps twice", replaced((_SCHEDULER, _scheduler_twice)), _RATE
        ),
        training("norms learn faster", "a group of their own with three times the rate", _groups(_norms_faster), _RATE),
        training("no weight decay", "weight_decay is 0", arguments(weight_decay=0.0), r"weight.decay"),
        training(
            "weight decay of everything", "norms and biases decay too", _groups(_decay_on_all), r"weight.decay|update"
        ),
        training("betas by default", "0.9 and 0.999", _all_groups(betas=(0.9, 0.999)), r"beta"),
        training("large epsilon", "Adam's epsilon is 1e-3", _all_groups(eps=1e-3), r"eps|update"),
        training("SGD", "in place of AdamW", _other_optimiser(_sgd)),
        training("Adam with L2", "weight decay is added to the gradient", _other_optimiser(_adam_with_l2)),
        training("AMSGrad", "AdamW keeps the largest second moment", _all_groups(amsgrad=True)),
        training(
            "a parameter not in the optimiser",
            "one matrix never changes",
            _groups(_without_one),
            r"parameter|frozen|optimi[sz]er|changed|trained",
        ),
        training(
            "a frozen matrix",
            "it needs no gradient",
            _frozen("layers.4.mlp.gate_proj"),
            r"parameter|frozen|optimi[sz]er|changed|trained",
        ),
        training(
            "frozen norms", "they need no gradient", _frozen("norm"), r"parameter|frozen|optimi[sz]er|changed|trained"
        ),
        training(
            "a step skipped",
            "the second step does nothing",
            _steps(_second_step_skipped),
            r"updates?\b|optimi[sz]er|step",
        ),
        training(
            "a step twice", "the last step is done twice", _steps(_last_step_twice), r"updates?\b|optimi[sz]er|step"
        ),
        training("state of the optimiser lost", "the moments are 0 again in the second epoch", _steps(_state_lost)),
        training("weights in bfloat16", "they are rounded after each step", _steps(_rounded_after)),
        training("weights averaged", "half of each update is taken back", _steps(_averaged)),
        training("gradients in bfloat16", "they are rounded before the step", _steps(_gradients_rounded), _GRADIENT),
        training("gradients negated", "the optimiser climbs", _steps(_gradients_negated), _GRADIENT),
        training(
            "a gradient lost",
            "one matrix has none in each step",
            _steps(_gradient_of_one_lost),
            rf"{_GRADIENT}|parameter|changed",
        ),
        training(
            "gradients not zeroed",
            "they add up over the steps",
            replaced(("torch.nn.Module.zero_grad", _never_zeroed)),
            _GRADIENT,
        ),
        training(
            "gradients zeroed early",
            "only the last micro-batch counts",
            _micro_steps(_zeroed_early),
            rf"{_GRADIENT}|micro-?batch",
        ),
        training(
            "a micro-batch dropped",
            "its gradients are thrown away",
            _micro_steps(_gradients_dropped),
            rf"{_GRADIENT}|micro-?batch",
        ),
        training(
            "gradients of one layer doubled",
            "the hook of layer 2 is registered twice",
            _micro_steps(_layer_twice),
            rf"{_GRADIENT}|micro-?batch",
        ),
        training("dropout on", "10 % in attention", _micro_steps(_with_dropout), r"dropout|log.?prob|logits"),
        training(
            "gradients not clipped", "they keep their norm", _clipped(_not_clipped), r"clip|max_grad_norm|gradient"
        ),
        training(
            "gradients clipped by value",
            "in place of their norm",
            _clipped(_clipped_by_value),
            r"clip|max_grad_norm|gradient",
        ),
        training(
            "gradients clipped one by one",
            "each parameter has its own norm",
            _clipped(_clipped_by_parameter),
            r"clip|max_grad_norm|gradient",
        ),
        training("clipping ten times wider", "max_grad_norm is 3", arguments(max_grad_norm=3.0), r"clip|max_grad_norm"),
    ),
)
