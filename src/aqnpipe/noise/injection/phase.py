"""Runs a model for one phase on a simulated machine, measures it, and always restores everything.

- `Machine` puts operator noise on results, in the kernels of torch; see `aqnpipe.machine`.
- `ModuleErrors` puts module noise and AQN's noise on hidden states on whole modules, by hooks.
- `_rounded` rounds the keys and values that attention reads from a cache, and `CacheAudit` verifies all of them.
- `FaultInjection` applies the simulated faults to the outputs of their sites, after all noise, in every phase.
- `Audit` observes drawn passes from above the kernels, recomputes results, and compares; see `aqnpipe.proof`.

The recorder gets what each of them has seen, and makes the receipt of it.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from aqnpipe.config.custom_code import CustomError
from aqnpipe.config.measured_noise import MeasuredError
from aqnpipe.config.noise import (
    CacheFormat,
    FakeQuantization,
    MantissaTruncation,
    ModuleNoise,
    NoiseSpec,
    OperatorNoise,
    Phase,
    machine_stream,
)
from aqnpipe.errors import ModelError
from aqnpipe.machine.machine import Machine, NoiseKey, Request
from aqnpipe.machine.modules import ModuleError, ModuleErrors
from aqnpipe.models.layout import refuse_norms_without_weight
from aqnpipe.models.parts import PlaceHook, Update, hooks_around
from aqnpipe.noise.injection.faults import ActiveFaults, FaultInjection, on_input, on_output, simulated_fault_hooks
from aqnpipe.noise.injection.measurements import PhaseMeasurements
from aqnpipe.noise.injection.sites import FIRST_MODULE, ModelSites, audit_request, module_errors
from aqnpipe.noise.kernels.quantization import round_as_cached
from aqnpipe.noise.receipts.recorder import ReceiptRecorder
from aqnpipe.noise.receipts.table import CACHE
from aqnpipe.proof.audit import Audit
from aqnpipe.proof.kv_cache import CacheAudit

_MAY_ROUND = (MantissaTruncation, FakeQuantization, CustomError)
"""Errors that may leave nothing but numbers of another format."""


@contextmanager
def phase_noise(
    model: nn.Module | ModelSites,
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
    active in every phase; `Fault.order` is their order relative to AQN's noise. `backward`: a backward pass is in the
    body, whose gradients have noise too if "backward" is among the spec's phases. `hidden_sigmas`: AQN on hidden
    states, relative noise on the output of each decoder layer.

    `model`: the sites of an engine's model may stand in its place. Everything is removed on exit, also after an
    exception. Raises ModelError if a phase is active already; ValueError
    if `faults` are not those of the spec.
    """
    faults = ActiveFaults.of(spec.faults) if faults is None else faults
    if tuple(active.fault for active in faults) != spec.faults:
        raise ValueError(f"active faults {[active.fault for active in faults]} are not those of the spec {spec.faults}")
    sites = model if isinstance(model, ModelSites) else ModelSites(model)
    running = _RunningPhase(sites, spec, phase, key, recorder, faults, backward, hidden_sigmas or {})
    recorder.note_installed(
        phase,
        operator_noise=spec.operator_noise,
        module_noise=spec.module_noise,
        kv_cache=spec.kv_cache,
        faults=spec.faults,
    )
    with ExitStack() as stack:
        running.install(stack)
        yield
    running.settle()
    recorder.settle()


@dataclass(eq=False)
class _RunningPhase:
    """One phase on one model. `forward_index` counts the passes of the model in this phase."""

    sites: ModelSites
    spec: NoiseSpec
    phase: Phase
    key: NoiseKey
    recorder: ReceiptRecorder
    faults: ActiveFaults
    backward: bool
    hidden_sigmas: Mapping[int, float]
    forward_index: int = -1

    def __post_init__(self) -> None:
        sites, spec, phase, key, recorder = self.sites, self.spec, self.phase, self.key, self.recorder
        recorder.note_key(phase, *key)
        self.model = sites.model
        self._layers, self._parts = sites.layers, sites.parts
        noise, modules = spec.operator_noise_in(phase), spec.module_noise_in(phase)
        self._module_noise: ModuleNoise | None = modules
        self._modules = sites.modules(modules) if modules is not None else {}
        if modules is not None:
            recorder.add(phase, largest_selected=len(self._modules))
        if noise is not None:
            self._refuse_unfitting(noise)
        noises_gradients = self.backward and noise is not None and "backward" in noise.phases
        seed, step = recorder.position(key.seed, key.step)
        due = NoiseKey(seed, step if phase != "validation" else key.step, key.micro_step, key.rank)
        asked = audit_request(sites, phase, due, recorder, self.faults, backward=noises_gradients)
        self._measurements = PhaseMeasurements(
            asked,
            phase,
            len(self._layers),
            list(self._modules),
            recorder,
            partial(sites.requested_sigma, recorder, due.step),
        )
        self._audit = Audit(asked, self._measurements.receipt, len(self._parts))
        request = Request(
            noise.error if noise is not None else None,
            key,
            len(self._parts),
            phase,
            backward=noises_gradients,
            elementwise=noise is not None and noise.operators == "all",
            errors=noise.errors_by_part(len(self._layers)) if noise is not None else {},
            machine=machine_stream(phase),
        )
        self._machine = Machine(sites.request(request), self._audit.observe_outside, self._measurements.note)
        self._module_errors = ModuleErrors(
            self._errors_of_modules(),
            key,
            self._machine.places.passed,
            self._measurements.note_module,
            self._machine.exactly,
        )
        self._cache_noise = spec.cache_noise_in(phase)
        self._requested_cache = recorder.requested.cache_noise_in(phase)
        self._connect_audit()
        rounds = any(part is not None and isinstance(part.error, _MAY_ROUND) for part in (noise, modules))
        self._observation = sites.observation(phase, rounds=rounds, rounds_cache=self._cache_noise is not None)

    def _refuse_unfitting(self, noise: OperatorNoise) -> None:
        """Raise ModelError for layers that the model does not have, and for norms that no parity measures.

        Noise that is requested of another form of attention than the model's makes the receipt invalid.
        """
        beyond = sorted({layer for layer in [*(noise.layers or ()), *noise.layer_scales] if layer >= len(self._layers)})
        if beyond:
            raise ModelError(f"operator noise of layers {beyond}: the model has layers 0 to {len(self._layers) - 1}")
        if isinstance(noise.error, MeasuredError):
            refuse_norms_without_weight(self.model)
        kernel, expected = self.sites.kernel, self.sites.attention or noise.attention
        if expected != noise.attention and not isinstance(noise.error, FakeQuantization):
            self.recorder.note_mismatch(
                f"{self.phase}: operator_noise.attention is {noise.attention}, and the model has {kernel} attention, "
                f"expected {expected}"
            )

    def _errors_of_modules(self) -> dict[int, ModuleError]:
        found = module_errors(self.sites, self.phase, self._module_noise, self.hidden_sigmas)
        return {place: ModuleError(one.operator, one.error, one.stream, one.shards) for place, one in found.items()}

    def _connect_audit(self) -> None:
        audit, measurements, exactly = self._audit, self._measurements, self._machine.exactly
        audit.exactly = exactly
        audit.before_observed = lambda: measurements.compare_norms(self.model, exactly)
        audit.on_compared = measurements.measure
        audit.checks_exact = True
        audit.reads_one_token = lambda args, kwargs: self.sites.reads_one_token(self.forward_index + 1, args, kwargs)

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def install(self, stack: ExitStack) -> None:
        """Start the machine and register all hooks; `stack` removes them."""

        def keep(*handles: Any) -> None:
            for handle in handles:
                stack.callback(handle.remove)

        sites, roots = self.sites, self.sites.roots
        sites.install_before(stack, self._machine)
        stack.enter_context(self._machine.running(roots, self._parts))
        sites.install_behind(stack)
        keep(*sites.passes(self._enter_model, self._leave_model))
        keep(*self._audit.add_model(roots, self._parts, sites.names))
        stack.enter_context(self._audit.running())
        expects_backward = self.backward and torch.is_grad_enabled()
        for part, module in self._parts.items():
            note = partial(self._note_gradient, part) if expects_backward else None
            keep(*hooks_around(module, note, None, partial(self._leave_part, part), is_first=False))
        if self._cache_noise is not None:
            keep(*sites.put_in_front_of_caches(partial(_rounded, self._cache_noise.format)))
        if self._requested_cache is not None:
            # Nearer to attention than what rounds.
            note_cache = partial(self.recorder.add, self.phase, operator=CACHE)
            audit = CacheAudit(
                self._requested_cache.format,
                self._measurements.receipt.draws,
                note_cache,
                reads_back=sites.reads_back_cache,
            )
            keep(*sites.put_in_front_of_caches(audit.compared))
        self._module_errors.start()
        stack.callback(self._module_errors.close)
        for ordinal, module in enumerate(self._modules.values()):
            put = partial(self._module_errors.put, FIRST_MODULE + ordinal)
            if self._module_noise is not None and self._module_noise.point == "input":
                keep(module.register_forward_pre_hook(PlaceHook(partial(on_input, put))))
            else:
                keep(module.register_forward_hook(PlaceHook(partial(on_output, put))))
        for name in simulated_fault_hooks(self.model):
            self.recorder.note_mismatch(f"{name}: a simulated fault was there, none was requested")
        FaultInjection(self, self.faults, self.hidden_sigmas, sites.site, sites.shared).install(stack)

    def _enter_model(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        self.forward_index += 1
        self._observation.begin(args, kwargs)
        if self.forward_index == 0:
            self.recorder.watch_norms(self.phase, self.model)

    def _leave_model(self, module: nn.Module, args: Any, output: Any) -> None:
        if output is not None:
            with self._machine.exactly():
                self._observation.end(output)
            # The table of answers says that every question of an evaluation was read.
            step = None if self.phase == "evaluation" else self.key.step
            self.recorder.add(self.phase, step, passes=1, **self._observation.columns)

    def _leave_part(self, part: int, module: nn.Module, args: Any, output: Any) -> None:
        is_noised = part in self._measurements.noised_parts
        self._measurements.noised_parts.discard(part)
        if not self.recomputing:
            self._observation.leave_part(output, is_noised=is_noised)

    def _note_gradient(self, part: int, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        needed = any(isinstance(value, Tensor) and value.requires_grad for value in tree_leaves((args, dict(kwargs))))
        self.recorder.add(self.phase, gradients={part} if needed else set())

    def settle(self) -> None:
        """Give the recorder what the audit found."""
        self._measurements.settle(self._machine.counts)

    # -- what faults and noise on hidden states need -------------------------------------------------------------------

    @property
    def recomputing(self) -> bool:
        """Return whether a backward pass computes a layer again."""
        return torch._C._current_autograd_node() is not None

    def seed(self, stream: str, *counters: int) -> int:
        """Return the seed of `stream` in this forward pass: it depends on the place alone, so it can be replayed."""
        return self.key.derived(stream, self.forward_index, *counters)

    def noised_hidden(self, layer: int, sigma: float, hidden: Tensor) -> Tensor:
        """Return a decoder layer's hidden states with AQN's relative noise; gradients pass straight through."""
        return self._module_errors.put(layer, hidden)


def _rounded(
    number_format: CacheFormat, layer: int, keys: Tensor, values: Tensor, update: Update
) -> tuple[Tensor, Tensor]:
    return update(round_as_cached(keys, number_format), round_as_cached(values, number_format))
