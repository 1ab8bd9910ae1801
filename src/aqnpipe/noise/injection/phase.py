"""Installs noise and simulated faults on a model for one phase, measures them, and always removes them.

The path from an operator to the receipt:

1. `phase_noise` registers hooks that keep `PhaseState` up to date: which layer computes, and its random key.
2. While a noised decoder layer computes, `OperatorWatch` intercepts its operators and calls `OperatorErrors.call`.
3. That runs the operator and puts the error on its output in place (`PhaseState.put_error`). Operands with gradients
   are wrapped first, so that their exact gradients get an error too.
4. The recorder gets a sample of the output before and after the error, and makes the receipt of all samples.

A norm with a measured error gets it by a hook on its module. `ModuleErrors` adds noise to whole modules by forward
hooks. `FaultInjection` applies the simulated faults to the outputs of their sites, after all noise, in every phase.
`ReferenceCheck` recomputes linear modules in plain torch, independently of the injection.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from aqnpipe.config.measured_noise import MeasuredError
from aqnpipe.config.noise import FakeQuantization, MantissaTruncation, NoiseSpec, OperatorNoise, Phase, PlacedError
from aqnpipe.config.own_noise import OwnError
from aqnpipe.errors import ModelError
from aqnpipe.models.calls import ForwardPasses, num_tokens
from aqnpipe.models.layout import (
    is_norm,
    is_rms_norm,
    layer_of,
    norms_outside_layers,
    refuse_norms_without_weight,
)
from aqnpipe.noise.injection.checkpoint_replay import ACTIVE_MARK, install_on_checkpoints
from aqnpipe.noise.injection.fault_injection import FaultInjection
from aqnpipe.noise.injection.faults import ActiveFaults, simulated_fault_hooks
from aqnpipe.noise.injection.hooked_modules import HookedModules
from aqnpipe.noise.injection.hooks import keep
from aqnpipe.noise.injection.module_errors import ModuleErrors
from aqnpipe.noise.injection.operator_errors import OperatorErrors
from aqnpipe.noise.injection.operator_watch import OperatorWatch
from aqnpipe.noise.injection.pass_observation import PassObservation
from aqnpipe.noise.injection.phase_state import NoiseKey, PhaseState, Place
from aqnpipe.noise.receipts.recorder import ReceiptRecorder

__all__ = ["NoiseKey", "phase_noise"]

_MAY_ROUND = (MantissaTruncation, FakeQuantization, OwnError)
"""Errors that may leave nothing but numbers of another format."""


@contextmanager
def phase_noise(
    model: nn.Module,
    spec: NoiseSpec,
    phase: Phase,
    key: NoiseKey,
    recorder: ReceiptRecorder,
    *,
    faults: ActiveFaults | None = None,
    backward: bool = False,
    hidden_sigmas: Mapping[int, float] | None = None,
) -> Iterator[None]:
    """Run `phase` on `model` with exactly the noise and the faults of `spec`, and record measurements in `recorder`.

    `faults`: the faults of the spec with the thresholds cached in earlier phases (default: none cached). They are
    active in every phase; `Fault.order` is their order relative to AQN's noise. `backward`: the graph built inside also
    adds noise to gradients, if "backward" is among the spec's phases. `hidden_sigmas`: AQN on hidden states, relative
    noise on the output of each decoder layer.

    Layers under gradient checkpointing are recomputed with the same noise, also after the context has ended. Everything
    is removed on exit, also after an exception. Raises ModelError if another injection is active on the model or the
    model is compiled; ValueError if `faults` are not those of the spec.
    """
    if hasattr(model, ACTIVE_MARK):
        raise ModelError(f"noise is already installed on this {type(model).__name__}; injections do not nest")
    if any(isinstance(m, torch._dynamo.OptimizedModule) or m._compiled_call_impl is not None for m in model.modules()):
        raise ModelError(
            f"this {type(model).__name__} is compiled (torch.compile): compiled code would run without the noise, "
            "expected an uncompiled model"
        )
    faults = ActiveFaults.of(spec.faults) if faults is None else faults
    if tuple(active.fault for active in faults) != spec.faults:
        raise ValueError(f"active faults {[active.fault for active in faults]} are not those of the spec {spec.faults}")
    state = PhaseState(model, phase, key, recorder)
    if spec.operator_noise is not None:
        _refuse_layers_beyond(spec.operator_noise, len(state.layers))
    injection = _Injection(state, spec, faults, backward, hidden_sigmas or {})
    recorder.note_installed(
        phase, operator_noise=spec.operator_noise, module_noise=spec.module_noise, faults=spec.faults
    )
    with ExitStack() as stack:
        setattr(model, ACTIVE_MARK, state)
        stack.callback(delattr, model, ACTIVE_MARK)
        injection.install(stack)
        yield
    recorder.settle()


def _refuse_layers_beyond(noise: OperatorNoise, num_layers: int) -> None:
    """Raise ModelError if the noise names layers that the model does not have."""
    beyond = sorted({layer for layer in [*(noise.layers or ()), *noise.layer_scales] if layer >= num_layers})
    if beyond:
        raise ModelError(f"operator noise of layers {beyond}: the model has layers 0 to {num_layers - 1}")


class _Injection:
    """One phase on one model: registers the hooks of every part and keeps the `PhaseState` up to date."""

    def __init__(
        self,
        state: PhaseState,
        spec: NoiseSpec,
        faults: ActiveFaults,
        backward: bool,
        hidden_sigmas: Mapping[int, float],
    ) -> None:
        self.state = state
        self.operator_noise = spec.operator_noise_in(state.phase)
        modules = spec.module_noise_in(state.phase)
        self.backward = backward
        noises_gradients = backward and self.operator_noise and "backward" in self.operator_noise.phases
        self.operator_errors = OperatorErrors(state, bool(noises_gradients))
        self.watch = (
            OperatorWatch(state, self.operator_noise, self.operator_errors) if self.operator_noise is not None else None
        )
        self.module_errors = ModuleErrors(state, modules) if modules is not None else None
        self.fault_injection = FaultInjection(state, faults, hidden_sigmas)
        self.modules = HookedModules(state.model)
        noises = (self.operator_noise, modules)
        rounds = any(noise is not None and isinstance(noise.error, _MAY_ROUND) for noise in noises)
        self.observation = PassObservation(state.model, state.phase, state.key.step, rounds=rounds)
        self.norm_places: dict[int, Place] = {}
        self.around_norms: list[Place] = []

    @property
    def _measures_norms(self) -> bool:
        return self.operator_noise is not None and self.operator_noise.has_measured_norms

    def install(self, stack: ExitStack) -> None:
        """Register all hooks; `stack` removes them."""
        state = self.state
        if self.watch is not None:
            self.watch.install(stack)
        for handle in ForwardPasses(state.model, self._enter_model, self._leave_model).hooks():
            keep(stack, handle)
        for index, layer in enumerate([*state.layers, state.head]):
            self._install_place(stack, index, layer)
        if self.operator_noise is not None and isinstance(self.operator_noise.error, MeasuredError):
            refuse_norms_without_weight(state.model)
        if self._measures_norms:
            # Ahead of module noise, which comes after the error of the module itself.
            for index, (name, norm) in enumerate(norms_outside_layers(state.model).items(), len(state.layers) + 2):
                self._install_outside_norm(stack, index, name, norm)
        self._install_on_modules(stack, state.model, "")
        state.recorder.note_foreign_faults(simulated_fault_hooks(state.model))
        for index in range(len(state.layers)):
            self.fault_injection.install(stack, index)
        state.audit.install(stack, expects_backward=self.backward and torch.is_grad_enabled())
        if torch.is_grad_enabled():
            install_on_checkpoints(state, stack, self._install_on_layer)

    def _install_on_layer(self, index: int, layer: nn.Module, name: str, stack: ExitStack) -> None:
        """Register every hook of one decoder layer, for its recomputation after the phase."""
        if self.watch is not None:
            stack.callback(self.watch.stop)
        self._install_place(stack, index, layer)
        self._install_on_modules(stack, layer, name)
        self.fault_injection.install(stack, index)

    def _install_place(self, stack: ExitStack, index: int, layer: nn.Module) -> None:
        keep(stack, layer.register_forward_pre_hook(partial(self._enter_layer, index)))
        keep(stack, layer.register_forward_hook(self._leave_layer, always_call=True))

    def _install_outside_norm(self, stack: ExitStack, index: int, name: str, norm: nn.Module) -> None:
        """Register the measured error of a norm outside the layers, which is a place of its own."""
        keep(stack, norm.register_forward_pre_hook(partial(self._enter_norm, index)))
        keep(stack, norm.register_forward_hook(partial(self.operator_errors.after_measured_norm, name)))
        keep(stack, norm.register_forward_hook(self._leave_norm, always_call=True))

    def _install_on_modules(self, stack: ExitStack, root: nn.Module, prefix: str) -> None:
        """Register the hooks of single modules within `root` (qualified name `prefix`)."""
        norms = self.operator_noise is not None and self.operator_noise.operators == "all"
        for name, module in root.named_modules(prefix=prefix):
            if norms and is_rms_norm(module) and layer_of(name) is not None:
                keep(stack, module.register_forward_pre_hook(self.operator_errors.before_norm))
                keep(stack, module.register_forward_hook(self.operator_errors.after_norm))
            if self._measures_norms and is_norm(module) and layer_of(name) is not None:
                measured = partial(self.operator_errors.after_measured_norm, name.rpartition(".")[2])
                keep(stack, module.register_forward_hook(measured))
            if self.module_errors is not None:
                self.module_errors.install(stack, module, name)

    def _enter_model(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        state = self.state
        if torch.compiler.is_compiling():
            raise ModelError(f"{type(state.model).__name__} is being compiled; noise and torch.compile do not combine")
        self.modules.refuse_others()
        state.start_forward(num_tokens(args, kwargs))
        self.observation.begin(args, kwargs)
        state.recorder.count_forward(state.phase)
        state.outside = state.place = self._place(None, len(state.layers) + 1, None)
        self.norm_places = {}
        if state.forward_index == 0:
            state.recorder.watch_norms(state.phase, state.model)

    def _leave_model(self, module: nn.Module, args: Any, output: Any) -> None:
        self.state.is_computing = False
        if output is not None:
            observer = self.state.audit.observer
            with observer.unobserved() if observer is not None else nullcontext():
                self.observation.end(output)
            self.state.recorder.note_passes(self.observation.row)

    def _enter_layer(self, index: int, module: nn.Module, args: Any) -> None:
        state = self.state
        layer = index if index < len(state.layers) else None
        error = self.operator_noise.error_in(layer) if self.operator_noise is not None else None
        if error is not None or self.module_errors is not None or self.fault_injection.is_in(layer):
            state.refuse_outside_forward("the output projection" if layer is None else f"layer {layer}")
        state.place = self._place(layer, index, error)
        if error is not None and self.watch is not None:
            self.watch.enter_layer(index)

    def _enter_norm(self, index: int, module: nn.Module, args: Any) -> None:
        noise, state = self.operator_noise, self.state
        if noise is not None and noise.error_in(None) is not None:
            state.refuse_outside_forward("a norm outside the layers")
        self.around_norms.append(state.place)
        if index not in self.norm_places:
            self.norm_places[index] = self._place(None, index, noise.error_in(None) if noise is not None else None)
        # A second call in the same forward goes on counting calls, so that it has random numbers of its own.
        state.place = self.norm_places[index]

    def _leave_norm(self, module: nn.Module, args: Any, output: Any) -> None:
        self.state.place = self.around_norms.pop()

    def _leave_layer(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.watch is not None:
            self.watch.leave_layer()
        if not self.state.recomputing:
            self.observation.leave_part(output, is_noised=self.state.place.is_noised)
        self.state.place = self.state.outside

    def _place(self, layer: int | None, index: int, error: PlacedError | None) -> Place:
        # A place without noise needs no key, and the hash for a key takes time.
        if error is None and self.module_errors is None:
            return Place(layer)
        return Place(layer, self.state.seed(self.state.phase, index), error)
