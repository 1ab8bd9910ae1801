"""`aqnpipe.noisy`: a noisy machine for the code in its body, with a receipt.

with aqnpipe.noisy(model, scale=0.05, seed=0) as receipt:
    model.generate(**inputs)
receipt.check()
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from numbers import Integral, Real
from typing import Any, get_args

import numpy as np
from pydantic import ValidationError
from torch import nn

from aqnpipe.artifacts.measured_errors import with_figures
from aqnpipe.config.base import describe_validation_error
from aqnpipe.config.custom_code import CustomError
from aqnpipe.config.measured_noise import MeasuredError
from aqnpipe.config.noise import ErrorModel, OperatorNoise, OperatorSet, Phase, RelativeGaussian
from aqnpipe.errors import ConfigError
from aqnpipe.machine.machine import Machine, NoiseKey, Request
from aqnpipe.models.layout import decoder_layers, refuse_norms_without_weight
from aqnpipe.models.parts import Parts, parts_of
from aqnpipe.noise.kernels.custom import refuse_unusable
from aqnpipe.proof.audit import Audit
from aqnpipe.proof.receipt import MachineReceipt
from aqnpipe.proof.request import AuditRequest
from aqnpipe.seeding import derive_seed

_REPLICATING = (nn.DataParallel, nn.parallel.DistributedDataParallel)
_KEY_LIMIT = 2**63
"""Seeds and steps are packed into 64 bits with a sign."""


class NoiseReceipt(MachineReceipt):
    """Request and measurements of `noisy`, over all contexts that share this receipt."""

    def __init__(self, model: nn.Module, request: AuditRequest) -> None:
        super().__init__(request, np.random.default_rng(derive_seed(request.seed, "noisy audit")))
        self._model = model
        self.next_step = 0

    def is_of(self, model: nn.Module, request: AuditRequest) -> bool:
        """Return whether this receipt can continue with a context of this model and noise."""
        return self._model is model and self.requested == request


@contextmanager
def noisy(
    model: nn.Module,
    scale: float | None = None,
    *,
    error: ErrorModel | None = None,
    seed: int = 0,
    step: int | None = None,
    operators: OperatorSet = "matmul",
    layers: Sequence[int] | None = None,
    include_lm_head: bool = True,
    backward: bool = False,
    receipt: NoiseReceipt | None = None,
) -> Iterator[NoiseReceipt]:
    """Compute the body on a noisy machine; the context gives the receipt, to be checked after the body.

    Every matrix product of the process has the error, in whatever code, unless `layers` or `include_lm_head` leave
    places out.

    - model: any module; its layers are the places of the noise.
    - scale: standard deviation relative to the value of each element.
    - error: an error model in place of `scale`. A measured error is of a decoder of transformers, operator by operator.
    - seed: the same seed gives the same noise.
    - step: number of this context among those that share a receipt; counted if it is not given.
    - operators: `matmul`, or `all` with softmax, activations and norms.
    - layers: layers with noise; default: all.
    - include_lm_head: whether the output projection has it.
    - backward: gradients get noise too, and a backward pass must run in the body.
    - receipt: continue an earlier one, of the same model and noise.

    Raises ConfigError for contradicting arguments, ModelError for a model that noise cannot reach.
    """
    _refuse_wrong_kinds(model, seed, step, include_lm_head, backward, receipt)
    _refuse_contradictions(scale, error, operators)
    parts = parts_of(model)
    selected = _selected(parts, layers, include_lm_head)
    stream: Phase = "actor_forward" if backward else "evaluation"
    if isinstance(error, CustomError):
        refuse_unusable(error)
        error = error.planned()
    if isinstance(error, MeasuredError):
        error = _with_figures(model, error, operators, backward)
    try:
        requested = OperatorNoise(
            error=error if error is not None else RelativeGaussian(scale=float(scale or 0.0)),
            phases=(stream, "backward") if backward else (stream,),
            operators=operators,
            layers=None if layers is None else tuple(int(layer) for layer in layers),
            include_lm_head=include_lm_head,
        )
    except ValidationError as problem:
        raise ConfigError(f"noisy: {describe_validation_error(problem)}") from problem
    # Each operator of each layer has a measured error of its own.
    errors = requested.errors_by_part(len(decoder_layers(model))) if isinstance(error, MeasuredError) else None
    elementwise = operators == "all"
    start = (0, 0, 0)
    asked = AuditRequest(requested.error, int(seed), start, stream, selected, backward, None, elementwise, errors)
    if receipt is None:
        receipt = NoiseReceipt(model, asked)
    elif not receipt.is_of(model, asked):
        raise ConfigError("noisy: the receipt is of another model, noise or seed, expected the one that it began with")
    step = receipt.next_step if step is None else int(step)
    receipt.next_step = step + 1
    modules = dict(enumerate(parts.modules.values()))
    machine, audit = machine_and_audit(asked._replace(position=(step, 0, 0)), receipt, len(modules))
    with ExitStack() as stack:
        stack.callback(lambda: receipt.count(machine.counts))
        stack.enter_context(machine.running(parts.roots, modules))
        for handle in audit.add_model(parts.roots, modules, dict(enumerate(parts.modules))):
            stack.callback(handle.remove)
        stack.enter_context(audit.running())
        before = receipt.forward.gradient_passes, receipt.backward.passes
        yield receipt
        if backward and receipt.forward.gradient_passes > before[0] and receipt.backward.passes == before[1]:
            receipt.note(
                "backward: a context ended without a backward pass, which computes exact gradients behind it; expected "
                "backward() within the context, or no_grad()",
            )


def machine_and_audit(asked: AuditRequest, receipt: MachineReceipt, outside: int) -> tuple[Machine, Audit]:
    """Return a machine that does what is `asked`, and its audit, which says what it finds in `receipt`."""
    audit = Audit(asked, receipt, outside)
    request = Request(
        asked.error,
        NoiseKey(asked.seed, *asked.position),
        outside,
        asked.stream,
        asked.selected,
        asked.backward,
        asked.operators,
        asked.elementwise,
        asked.errors,
    )
    machine = Machine(request, audit.observe_outside)
    audit.exactly = machine.exactly
    return machine, audit


def _with_figures(model: Any, error: MeasuredError, operators: str, backward: bool) -> MeasuredError:
    """Return a measured error with its figures. Raises ConfigError for arguments that it cannot have."""
    if backward or operators != "matmul":
        raise ConfigError("noisy: a measured error is of matmul operators in forward passes, found other arguments")
    return with_figures_of(model, error)


def with_figures_of(model: Any, error: MeasuredError) -> MeasuredError:
    """Return a measured error with its figures; ConfigError if the parity is of another model than this decoder."""
    refuse_norms_without_weight(model)
    dtype: Any = str(next(model.parameters()).dtype).removeprefix("torch.")
    config = model.config
    return with_figures(error, dtype=dtype, attention=config._attn_implementation, config=config.to_dict())


def _selected(parts: Parts, layers: Any, include_lm_head: bool) -> frozenset[int] | None:
    """Return the numbers of the places with noise; None for all, also outside the parts."""
    paths = list(parts.modules)
    heads = [number for number, path in enumerate(paths) if not path.rpartition(".")[2].isdigit()]
    of_layers = [number for number in range(len(paths)) if number not in heads]
    chosen = _chosen_layers(layers, len(of_layers), include_lm_head)
    if chosen is None and include_lm_head:
        return None
    numbers = of_layers if chosen is None else [of_layers[layer] for layer in chosen]
    return frozenset(numbers) | (frozenset(heads) if include_lm_head else frozenset())


def _refuse_contradictions(scale: Any, error: Any, operators: Any) -> None:
    if (scale is None) == (error is None):
        raise ConfigError(f"noisy: found scale={scale!r} and error={error!r}, expected exactly one of the two")
    if scale is not None and not (isinstance(scale, Real) and 0 < float(scale) < 1):
        raise ConfigError(f"noisy: scale is {scale!r}, expected a number above 0 and below 1")
    if error is not None and not isinstance(error, get_args(ErrorModel)):
        raise ConfigError(f"noisy: error is {error!r}, expected an error model of aqnpipe.config.noise")
    if operators not in get_args(OperatorSet):
        raise ConfigError(f"noisy: operators is {operators!r}, expected {' or '.join(get_args(OperatorSet))}")


def _refuse_wrong_kinds(model: Any, seed: Any, step: Any, include_lm_head: Any, backward: Any, receipt: Any) -> None:
    """Raise ConfigError for an argument of another kind than expected."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"noisy: model is {model!r}, expected a model in memory (torch.nn.Module)")
    if isinstance(model, _REPLICATING):
        raise ConfigError(f"noisy: model is a {type(model).__name__}, expected the model inside it (model.module)")
    for name, value in (("seed", seed), ("step", 0 if step is None else step)):
        if not (_is_whole(value) and -_KEY_LIMIT <= value < _KEY_LIMIT):
            raise ConfigError(f"noisy: {name} is {value!r}, expected a whole number of at most 63 bits")
    for name, value in (("include_lm_head", include_lm_head), ("backward", backward)):
        if not isinstance(value, bool):
            raise ConfigError(f"noisy: {name} is {value!r}, expected True or False")
    if not isinstance(receipt, NoiseReceipt | None):
        raise ConfigError(f"noisy: receipt is {receipt!r}, expected what an earlier noisy context gave")


def _chosen_layers(layers: Any, num_layers: int, include_lm_head: bool) -> tuple[int, ...] | None:
    """Return `layers` as indices; ConfigError unless they are layers of the model, or leave nothing with noise."""
    if layers is None:
        return None
    found = tuple(layers) if isinstance(layers, Iterable) else (None,)
    if not all(_is_whole(layer) and 0 <= layer < num_layers for layer in found):
        raise ConfigError(f"noisy: layers is {layers!r}, expected a list of numbers from 0 to {num_layers - 1}")
    if not found and not include_lm_head:
        raise ConfigError("noisy: layers is empty and include_lm_head is False, expected a place for the noise")
    return tuple(int(layer) for layer in found)


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
