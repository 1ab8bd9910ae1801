"""Audit of the optimiser: its settings, the gradient that it used, the learning rate, and that it alone made updates.

Hooks of torch's optimiser observe each update where it happens. A few elements of the weights are followed through all
steps: the gradient must be the sum of those of the micro-batches, and between two updates neither weights nor moments
may change. That AdamW computes an update by its rule is a property of the pinned torch
(`tests/training/test_adamw_contract.py`).
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from aqnpipe.artifacts.training_facts import CLIPPING, CONTINUITY, RATES, STEP_GRADIENT, expected_learning_rate
from aqnpipe.config.run import TrainingSpec
from aqnpipe.models.sharding import gathered_weights, is_sharded, is_share, local
from aqnpipe.reference.decoder import unobserved
from aqnpipe.seeding import derive_seed
from aqnpipe.training.audit.measure import ElementSample, Ledger, rounding_of
from aqnpipe.training.audit.settings import check_optimizer, weight_decays
from aqnpipe.training.ranks import gathered

_FOLLOWED = 24
"""Tensors with an element that is followed through all steps."""
_NORM_ERROR = 2e-3
"""Relative error of a gradient norm that the trainer sums in float32, or in bfloat16 for weights in bfloat16."""

_RATE_ERROR = 1e-9
"""Relative error of a learning rate: both sides compute it in float64."""


class Updates:
    """Observes every update of one optimiser. arrived: gradients of followed elements, since the last micro-batch."""

    def __init__(self, spec: TrainingSpec, model: nn.Module, ledger: Ledger, is_audited: Callable[[int], bool]) -> None:
        self._spec, self._model, self._is_audited = spec, model, is_audited
        self._ledger, self._report = ledger, ledger.report
        self._trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        decays = weight_decays(model, spec.training.weight_decay)
        self._decays = {name: (weight, decays[name]) for name, weight in self._trained.items()}
        shapes = {name: weight.shape for name, weight in self._trained.items()}
        seed = derive_seed(spec.random_seed, "audit of updates")
        self._followed = ElementSample.draw(shapes, seed, 1, names=_FOLLOWED)
        self.arrived: list[tuple[int, Tensor]] = []
        self._clear()
        self._depth = 0

    def _clear(self) -> None:
        """Begin a step: sums of the gradients of each followed element, of their sizes, and micro-batches with one."""
        self._summed, self._sizes, self._passes = torch.zeros(3, len(self._followed.elements), dtype=torch.float64)

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Observe `optimizer` and the gradients of the followed elements from now on."""
        held = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
        for name, weight in self._trained.items():
            if id(weight) not in held:
                self._report(f"{name} is trained by the study and not given to the optimiser")
        with gathered_weights(self._model):
            # The gradients of a sharded weight arrive at the gathered one, whose object FSDP keeps.
            arriving = dict(self._model.named_parameters())
            for number, element in enumerate(self._followed.elements):
                arriving[element.name].register_hook(partial(self._note, number, element.place))
        optimizer.register_step_pre_hook(self._before_update)
        optimizer.register_step_post_hook(self._after_update)

    def _note(self, number: int, place: tuple[int, ...], gradient: Tensor) -> None:
        with unobserved():
            self.arrived.append((number, gradient.detach()[place].double() / self._spec.loss_scale))

    def end_micro_batch(self) -> None:
        """Sum the gradients that arrived, so that memory stays constant."""
        arrived, self.arrived = self.arrived, []
        if not arrived:
            return
        with unobserved():
            values = torch.stack([value for _, value in arrived]).cpu()
            numbers = torch.tensor([number for number, _ in arrived])
            for sums, added in ((self._summed, values), (self._sizes, values.abs()), (self._passes, values**0)):
                sums.index_add_(0, numbers, added)

    def _before_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # torch calls the hooks twice for one update if the step of an optimiser's class was replaced.
        self._depth += 1
        if self._depth > 1:
            return
        step = self._ledger.steps + 1
        self.end_micro_batch()
        self._check_rates(optimizer, step)
        check_optimizer(optimizer, self._spec, self._decays, self._ledger)
        if len(self._ledger.last_values) == 3:
            before = self._moments(optimizer)
            changed = before - torch.tensor(self._ledger.last_values, dtype=torch.float64)
            if not self._ledger.compare(CONTINUITY, changed, 1e-300):
                self._report(self._discontinuity(changed, step))
        elif self._ledger.steps == 0:
            self._ledger.compare(CONTINUITY, self._moments(optimizer)[1:], 1e-300)
        self._check_gradients(step)

    def _after_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._depth -= 1
        if self._depth > 0:
            return
        self._ledger.steps += 1
        with unobserved():
            # Weights without a gradient, such as those of an expert that got no token, have fewer updates.
            counts = [state["step"] for state in optimizer.state.values() if "step" in state]
            counted = int(torch.stack(counts).max()) if counts else 0
        if counted != self._ledger.steps:
            self._report(f"update {self._ledger.steps} changed no weight: the optimiser counts {counted} updates")
        self._ledger.last_values = self._moments(optimizer).tolist()

    def _check_rates(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Compare the learning rates of all groups with the study's schedule."""
        expected = expected_learning_rate(self._spec, step)
        rates = sorted({float(group["lr"]) for group in optimizer.param_groups if group["params"]})
        wrong = [rate for rate in rates if not math.isclose(rate, expected, rel_tol=_RATE_ERROR)]
        self._ledger.note(RATES, 1, 2.0 if wrong else 0.0)
        for rate in wrong:
            self._report(f"learning rate {rate:.6g} at step {step}, the study's schedule gives {expected:.6g}")

    def _check_gradients(self, step: int) -> None:
        """Compare the gradient that the optimiser gets with the sum over micro-batches and the mean over workers."""
        used = self._followed.read(lambda name: self._trained[name].grad)
        summed, sizes, passes = self._summed, self._sizes, self._passes.int().tolist()
        self._clear()
        audited, workers = self._is_audited(step), self._spec.training.num_workers
        if audited:
            self._check_coverage(passes, step)
        if workers > 1:
            if not audited:
                return
            every = torch.tensor(gathered((summed.tolist(), sizes.tolist())), dtype=torch.float64)
            summed, sizes = every.mean(dim=0)
        squares = float(summed.square().sum())
        factor = float((used * summed).sum()) / squares if squares > 0 else 1.0
        slack = self._factor_slack(summed, sizes, max(passes))
        dtypes = {weight.dtype for weight in self._trained.values()}
        rounding = 100 * max(map(rounding_of, dtypes)) if torch.bfloat16 not in dtypes else 0.05
        allowed = rounding * sizes * max(factor, 1e-30) + 1e-30
        is_sum = self._ledger.compare(STEP_GRADIENT, used - factor * summed, allowed)
        if not is_sum or factor > 1 + slack or factor <= 0:
            self._report(_gradient_cause(summed, factor, slack, step))
        elif audited:
            self._check_clipping(factor if squares > 0 else 1.0, slack, step)

    def _factor_slack(self, summed: Tensor, sizes: Tensor, micro_batches: int) -> float:
        """Return by how much rounding alone may move the factor between the gradient used and the sum over batches.

        The sum is rounded after every micro-batch, worker and scaling: in bfloat16 by up to 0.4 % of the summed sizes.
        """
        squares = float(summed.square().sum())
        if not squares:
            return _NORM_ERROR
        roundings = micro_batches + self._spec.training.num_workers
        unit = max(rounding_of(weight.dtype) for weight in self._trained.values()) / 2
        return _NORM_ERROR + roundings * unit * float((sizes * summed.abs()).sum()) / squares

    def _check_coverage(self, passes: list[int], step: int) -> None:
        training = self._spec.training
        # The number of micro-batches by tokens depends on the completions; `RolloutBook` sees that each is used once.
        expected = training.accumulation_steps if training.tokens_per_micro_batch is None else max(passes)
        for element, found in zip(self._followed.elements, passes, strict=True):
            # An expert that gets no token has no gradient, nor has a bias that only selects experts.
            may_lack = "expert" in element.name or element.name.endswith("correction_bias")
            if found != expected and not (found < expected and may_lack):
                got = f"{element.name} got the gradients of {found} micro-batches in step {step}"
                return self._report(f"{got}, the study asks for {expected}")

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
        if not self._ledger.compare(CLIPPING, torch.tensor([error]), allowed * limit):
            self._report(
                f"gradient clipping: norm {norm:.4g} after a scaling by {factor:.4g} in step {step}, the study asks "
                f"for at most {limit:g}"
            )

    def _moments(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """Return weight, first and second moment of the followed elements, float64 [3, elements]."""

        def moment(name: str, key: str) -> Tensor | None:
            found: Tensor | None = optimizer.state.get(self._trained[name], {}).get(key)
            return found

        moments = (partial(moment, key="exp_avg"), partial(moment, key="exp_avg_sq"))
        of_names: list[Callable[[str], Tensor | None]] = [self._trained.get, *moments]
        return torch.stack([self._followed.read(of_name) for of_name in of_names])

    def _discontinuity(self, changed: Tensor, step: int) -> str:
        what = "the weights" if changed[0].any() else "the optimiser's moments"
        names = [e.name for e, *parts in zip(self._followed.elements, *changed.tolist(), strict=True) if any(parts)]
        cause = ": AQN noise was not taken off" if self._spec.arm.aqn and any("norm" in name for name in names) else ""
        return f"{what} changed between step {step - 1} and step {step}, outside the optimiser ({names[0]}){cause}"


def _gradient_cause(summed: Tensor, factor: float, slack: float, step: int) -> str:
    what = f"the optimiser's gradient in step {step} is"
    if summed.any() and factor > 1 + slack:
        return f"{what} {factor:.4g} times the sum of its micro-batches: not set to zero before the step, or scaled"
    return f"{what} not the sum of its micro-batches: gradients of another step remained, or some were lost"


def _squares(gradients: list[Tensor]) -> float:
    """Return the sum of the squared elements of all gradients."""
    held = [gradient.float() for gradient in gradients if gradient.numel()]
    norms = torch._foreach_norm(held) if held else []
    return float(torch.stack([value.double().cpu() for value in norms]).square().sum()) if norms else 0.0
