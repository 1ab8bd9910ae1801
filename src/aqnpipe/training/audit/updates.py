"""Audit of the optimiser: the gradient that it used, the learning rate, and what it did to the weights.

Hooks of torch's optimiser observe each update where it happens. For sampled elements of the weights the update is
computed again in float64 by AdamW's rule (Loshchilov and Hutter 2019), and the gradient from the gradients of the
micro-batches. A few elements are followed through all steps: between two updates neither weights nor moments change.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from aqnpipe.artifacts.training_facts import (
    CLIPPING,
    CONTINUITY,
    STEP_GRADIENT,
    UPDATE,
    ConstantRate,
    learning_rate_problem,
)
from aqnpipe.config.run import TrainingSpec
from aqnpipe.models.sharding import gathered_weights
from aqnpipe.models.shares import is_sharded, is_share, local
from aqnpipe.seeding import derive_seed
from aqnpipe.training.audit.measure import ElementSample, Errors, rounding_of, unobserved
from aqnpipe.training.audit.settings import decay_problems, weight_decays
from aqnpipe.training.ranks import gathered

_FOLLOWED = 24
"""Tensors with an element that is followed through all steps."""
_NORM_ERROR = 2e-3
"""Relative error of a gradient norm that the trainer sums in float32, or in bfloat16 for weights in bfloat16."""

Moments = tuple[Tensor, Tensor, Tensor]
"""Weights, first and second moments of sampled elements, float64."""


class Updates:
    """Observes every update of one optimiser."""

    def __init__(self, spec: TrainingSpec, model: nn.Module, errors: Errors, report: Callable[[str], None]) -> None:
        self.steps = 0
        self.settings: dict[str, str | float] = {}
        self.rates: list[ConstantRate] = []
        self._spec = spec
        self._model = model
        self._errors = errors
        self._report = report
        self._trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        self._decays = weight_decays(model, spec.training.weight_decay)
        shapes = {name: weight.shape for name, weight in self._trained.items()}
        seed = derive_seed(spec.random_seed, "audit of updates")
        self._followed = ElementSample.draw(shapes, seed, 1, names=_FOLLOWED)
        self._all = ElementSample.draw(shapes, seed, 2)
        self._last: list[list[float]] = []
        self._summed = torch.zeros(len(self._followed.elements), dtype=torch.float64)
        self._sizes = torch.zeros_like(self._summed)
        self._passes = [0] * len(self._followed.elements)
        self._arrived: list[tuple[int, Tensor]] = []
        self._before: tuple[ElementSample, Moments, Tensor] | None = None
        self._depth = 0
        self._is_audited: Callable[[int], bool] = lambda step: True

    @property
    def last_values(self) -> list[list[float]]:
        """Weights and moments of the followed elements after the last update."""
        return self._last

    def restore(self, steps: int, rates: tuple[ConstantRate, ...], last: list[list[float]]) -> None:
        """Continue after `steps` updates."""
        self.steps, self.rates, self._last = steps, list(rates), last

    def attach(self, optimizer: torch.optim.Optimizer, is_audited: Callable[[int], bool]) -> None:
        """Observe `optimizer` and the gradients of the followed elements from now on."""
        self._is_audited = is_audited
        held = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
        for name, weight in self._trained.items():
            if id(weight) not in held:
                self._report(f"{name} is trained by the study and not given to the optimiser")
        with gathered_weights(self._model):
            # The gradients of a sharded weight arrive at the gathered one, whose object FSDP keeps.
            arriving = dict(self._model.named_parameters())
            for place, element in enumerate(self._followed.elements):
                arriving[element.name].register_hook(self._gradient_hook(place, element.index))
        optimizer.register_step_pre_hook(self._before_update)
        optimizer.register_step_post_hook(self._after_update)

    def _gradient_hook(self, place: int, index: tuple[int, ...]) -> Callable[[Tensor], None]:
        def note(gradient: Tensor) -> None:
            with unobserved():
                self._arrived.append((place, gradient.detach()[index].double()))

        return note

    def end_micro_batch(self) -> None:
        """Sum the gradients that arrived, so that memory stays constant."""
        arrived, self._arrived = self._arrived, []
        if not arrived:
            return
        with unobserved():
            values = torch.stack([value for _, value in arrived]).cpu()
        for (place, _), value in zip(arrived, values.tolist(), strict=True):
            self._summed[place] += value
            self._sizes[place] += abs(value)
            self._passes[place] += 1

    def _before_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # torch calls the hooks twice for one update if the step of an optimiser's class was replaced.
        self._depth += 1
        if self._depth > 1:
            return
        step = self.steps + 1
        self.end_micro_batch()
        self._note_rates(optimizer, step)
        if self._is_audited(step):
            for problem in decay_problems(optimizer, self._trained, self._decays):
                self._report(f"step {step}: {problem}")
        if len(self._last) == 3:
            before = self._moments(optimizer, self._followed)
            changed = torch.stack(before) - torch.tensor(self._last, dtype=torch.float64)
            if not self._errors.add(CONTINUITY, changed, 1e-300):
                self._report(self._discontinuity(changed, step))
        elif self.steps == 0:
            moments = self._moments(optimizer, self._followed)
            self._errors.add(CONTINUITY, torch.stack(moments[1:]), 1e-300)
        self._check_gradients(optimizer, step)
        sample = self._all if self._is_audited(step) else self._followed
        self._before = (sample, self._moments(optimizer, sample), self._gradients(sample))

    def _after_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._depth -= 1
        if self._depth > 0 or self._before is None:
            return
        self.steps += 1
        (sample, before, gradients), self._before = self._before, None
        self._check_update(optimizer, sample, before, gradients, self._moments(optimizer, sample))
        self._last = [values.tolist() for values in self._moments(optimizer, self._followed)]

    def _note_rates(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        groups = optimizer.param_groups
        rates = sorted({float(group["lr"]) for group in groups if group["params"]})
        for rate in rates:
            problem = learning_rate_problem(self._spec, step, rate)
            if problem is not None:
                self._report(problem)
        last = self.rates[-1] if self.rates else None
        if last is not None and last.learning_rate == rates[-1]:
            self.rates[-1] = ConstantRate(learning_rate=rates[-1], steps=last.steps + 1)
        else:
            self.rates.append(ConstantRate(learning_rate=rates[-1], steps=1))
        decays = {
            float(group["weight_decay"])
            for group in groups
            if any(weight.ndim > 1 for weight in group["params"])
        }  # fmt: skip
        betas = {tuple(group["betas"]) for group in groups if "betas" in group}
        (beta1, beta2), *others = sorted(betas) or [(math.nan, math.nan)]
        if others or len(decays) > 1:
            self._report(f"groups of the optimiser have different settings: betas {sorted(betas)}, decays {decays}")
        self.settings = {
            "kind": type(optimizer).__name__,
            "beta1": beta1,
            "beta2": beta2,
            "weight_decay": max(decays, default=0.0),
            "epsilon": max((float(group.get("eps", math.nan)) for group in groups), default=math.nan),
        }

    def _check_gradients(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Compare the gradient that the optimiser gets with the sum over micro-batches and the mean over workers."""
        used = self._gradients(self._followed)
        summed, sizes, passes = self._summed.clone(), self._sizes.clone(), list(self._passes)
        self._summed.zero_()
        self._sizes.zero_()
        self._passes = [0] * len(passes)
        audited, workers = self._is_audited(step), self._spec.training.num_workers
        if audited:
            self._check_coverage(passes, step)
        if workers > 1:
            if not audited:
                return
            every = gathered((summed.tolist(), sizes.tolist()))
            summed = torch.tensor([values for values, _ in every], dtype=torch.float64).mean(dim=0)
            sizes = torch.tensor([values for _, values in every], dtype=torch.float64).mean(dim=0)
        squares = float(summed.square().sum())
        factor = float((used * summed).sum()) / squares if squares > 0 else 1.0
        slack = self._factor_slack(summed, sizes, max(passes))
        dtypes = {weight.dtype for weight in self._trained.values()}
        rounding = 100 * max(map(rounding_of, dtypes)) if torch.bfloat16 not in dtypes else 0.05
        correct = self._errors.add(STEP_GRADIENT, used - factor * summed, rounding * sizes * max(factor, 1e-30) + 1e-30)
        if not correct or factor > 1 + slack or factor <= 0:
            self._report(self._gradient_cause(used, summed, factor, slack, step))
        elif audited:
            self._check_clipping(factor if squares > 0 else 1.0, slack, step)

    def _factor_slack(self, summed: Tensor, sizes: Tensor, micro_batches: int) -> float:
        """Return by how much rounding alone may move the factor between the gradient used and the sum over batches.

        The sum is rounded after every micro-batch, worker and scaling: in bfloat16 by up to 0.4 % of the summed sizes.
        """
        training, squares = self._spec.training, float(summed.square().sum())
        if not squares:
            return _NORM_ERROR
        roundings = micro_batches + training.num_workers
        unit = max(rounding_of(weight.dtype) for weight in self._trained.values()) / 2
        return _NORM_ERROR + roundings * unit * float((sizes * summed.abs()).sum()) / squares

    def _check_coverage(self, passes: list[int], step: int) -> None:
        training = self._spec.training
        # The number of micro-batches by tokens depends on the completions; `RolloutBook` sees that each is used once.
        expected = training.accumulation_steps if training.tokens_per_micro_batch is None else max(passes)
        names = [element.name for element in self._followed.elements]
        for name, found in zip(names, passes, strict=True):
            # An expert that gets no token has no gradient, nor has a bias that only selects experts.
            may_lack = "expert" in name or name.endswith("correction_bias")
            if found != expected and not (found < expected and may_lack):
                self._report(
                    f"{name} got the gradients of {found} micro-batches in step {step}, the study asks for {expected}"
                )
                return

    def _check_clipping(self, factor: float, slack: float, step: int) -> None:
        with unobserved():
            gradients = [weight.grad for weight in self._trained.values() if weight.grad is not None]
            shares, whole = [local(g) for g in gradients if is_share(g)], [g for g in gradients if not is_share(g)]
            divided = sum(gathered(_squares(shares))) if is_sharded(self._model) else 0.0
            norm = math.sqrt(_squares(whole) + divided)
        limit = self._spec.training.max_grad_norm
        is_clipped = factor < 1 - slack
        error = abs(norm - limit) if is_clipped else max(0.0, norm - limit)
        # In bfloat16 the factor itself is rounded to two digits.
        allowed = 2 * _NORM_ERROR + 2 * max(rounding_of(weight.dtype) for weight in self._trained.values())
        if not self._errors.add(CLIPPING, torch.tensor([error]), allowed * limit):
            self._report(
                f"gradient clipping: norm {norm:.4g} after a scaling by {factor:.4g} in step {step}, the study asks "
                f"for at most {limit:g}"
            )

    def _check_update(
        self,
        optimizer: torch.optim.Optimizer,
        sample: ElementSample,
        before: Moments,
        gradients: Tensor,
        after: Moments,
    ) -> None:
        group_of = {id(weight): group for group in optimizer.param_groups for weight in group["params"]}
        training, step = self._spec.training, self.steps
        rate = self.rates[-1].learning_rate
        weights, first, second = before
        decays = torch.tensor(
            [
                float(group_of.get(id(self._trained[e.name]), {}).get("weight_decay", 0.0)) for e in sample.elements
            ],
            dtype=torch.float64,
        )  # fmt: skip
        first = training.adam_beta1 * first + (1 - training.adam_beta1) * gradients
        second = training.adam_beta2 * second + (1 - training.adam_beta2) * gradients.square()
        root = (second / (1 - training.adam_beta2**step)).sqrt() + 1e-8
        change = -rate * first / (1 - training.adam_beta1**step) / root
        has_gradient = torch.tensor([self._trained[e.name].grad is not None for e in sample.elements])
        expected = torch.where(has_gradient, weights * (1 - rate * decays) + change, weights)
        rounding = torch.tensor(
            [rounding_of(self._trained[e.name].dtype) for e in sample.elements], dtype=torch.float64
        )
        # A relative error of the change: bfloat16 moments have two digits.
        allowed = 1.5 * rounding * weights.abs() + (2e-4 + 12 * rounding) * change.abs() + 1e-12 * rate
        if not self._errors.add(UPDATE, after[0] - expected, allowed):
            self._report(self._update_cause(sample, weights, after[0], expected, change))

    def _moments(self, optimizer: torch.optim.Optimizer, sample: ElementSample) -> Moments:
        def moment(key: str) -> Callable[[str], Tensor | None]:
            return lambda name: optimizer.state.get(self._trained[name], {}).get(key)

        return (
            sample.read(lambda name: self._trained[name]),
            sample.read(moment("exp_avg")),
            sample.read(moment("exp_avg_sq")),
        )

    def _gradients(self, sample: ElementSample) -> Tensor:
        return sample.read(lambda name: self._trained[name].grad)

    def _discontinuity(self, changed: Tensor, step: int) -> str:
        what = "the weights" if changed[0].any() else "the optimiser's moments"
        names = [e.name for e, *parts in zip(self._followed.elements, *changed.tolist(), strict=True) if any(parts)]
        cause = ": AQN noise was not taken off" if self._spec.arm.aqn and any("norm" in name for name in names) else ""
        return f"{what} changed between step {step - 1} and step {step}, outside the optimiser ({names[0]}){cause}"

    def _gradient_cause(self, used: Tensor, summed: Tensor, factor: float, slack: float, step: int) -> str:
        if not summed.any():
            return f"the optimiser got a gradient in step {step} that no micro-batch computed (not set to zero before?)"
        if not used.any():
            return f"the optimiser got no gradient in step {step}: set to zero after the backward pass"
        if factor > 1 + slack:
            return (
                f"the optimiser's gradient in step {step} is {factor:.4g} times the sum of its micro-batches: not set "
                "to zero before the step, or scaled"
            )
        return (
            f"the optimiser's gradient in step {step} is not the sum of its micro-batches: gradients of another step "
            "remained, or some were lost"
        )

    def _update_cause(
        self, sample: ElementSample, before: Tensor, after: Tensor, expected: Tensor, change: Tensor
    ) -> str:
        step = self.steps
        moving = change.abs() > 0
        if not (after != before)[moving].any():
            return f"update {step} changed no weight: the optimiser step was skipped"
        still = [
            e.name
            for e, is_moving, same, wanted, start in zip(
                sample.elements, moving.tolist(), (after == before).tolist(), expected.tolist(), before.tolist(),
                strict=True,
            )
            if is_moving and same and abs(wanted - start) > 2 * rounding_of(self._trained[e.name].dtype) * abs(start)
        ]  # fmt: skip
        if still:
            return f"update {step} left {still[0]} unchanged: it is frozen"
        scale = float(((after - before) * (expected - before)).sum() / (expected - before).square().sum())
        return (
            f"update {step} is not AdamW's with the study's settings (about {scale:.3g} of the expected change): "
            "another learning rate, weight decay, beta or optimiser state"
        )


def _squares(gradients: list[Tensor]) -> float:
    """Return the sum of the squared elements of all gradients."""
    held = [gradient.float() for gradient in gradients if gradient.numel()]
    norms = torch._foreach_norm(held) if held else []
    return float(torch.stack([value.double().cpu() for value in norms]).square().sum()) if norms else 0.0
