"""Rollout engines: they generate responses with the current weights of the policy, under the noise of its run."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from aqnpipe.config.noise import NoiseSpec
from aqnpipe.errors import ReceiptError
from aqnpipe.generation.backend import Completion, Sampling
from aqnpipe.generation.noisy_passes import PassNoise
from aqnpipe.generation.transformers_backend import TransformersBackend
from aqnpipe.generation.vllm.engine import VllmEngine
from aqnpipe.generation.vllm.weights import for_engine
from aqnpipe.machine.machine import NoiseKey
from aqnpipe.models.layout import norms_sha256, rms_norms
from aqnpipe.models.routers import Routers
from aqnpipe.models.sharding import gathered_weights
from aqnpipe.noise.aqn import noised_rollout
from aqnpipe.noise.injection.faults import ActiveFaults
from aqnpipe.noise.injection.phase import phase_noise
from aqnpipe.noise.receipts.recorder import ReceiptRecorder, merge_states


@dataclass(frozen=True)
class Rollout:
    """The request for one rollout: prompts, sampling, noise and faults, the key of the noise, and AQN's sigma.

    `faults` are the faults of `spec`, with the thresholds that earlier phases of the run cached; the rollout updates
    them. `factors` maps the names of AQN's targets to factors on `sigma`.
    """

    prompts: Sequence[Sequence[int]]
    sampling: Sampling
    spec: NoiseSpec
    faults: ActiveFaults
    key: NoiseKey
    sigma: float
    factors: Mapping[str, float]


class RolloutEngine(Protocol):
    """Generates the rollouts of a training run."""

    def roll_out(self, policy: nn.Module, recorder: ReceiptRecorder, rollout: Rollout) -> list[Completion]:
        """Return one completion per prompt, in order, generated with the current weights of `policy`.

        The noise of the rollout is applied and recorded in `recorder`. Raises ReceiptError if measurements are missing.
        """
        ...

    def close(self) -> None:
        """Free the resources of the engine."""
        ...


class TransformersRolloutEngine:
    """Rollouts by the policy itself, in this process; during a rollout AQN noise is on the policy's norm weights."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def roll_out(self, policy: nn.Module, recorder: ReceiptRecorder, rollout: Rollout) -> list[Completion]:
        """Return one completion per prompt, in order."""
        key = rollout.key
        with (
            gathered_weights(policy),
            noised_rollout(
                policy, rollout.spec.aqn, rollout.factors, recorder, sigma=rollout.sigma, seed=key.seed, step=key.step
            ) as hidden_sigmas,
            phase_noise(
                policy, rollout.spec, "rollout", key, recorder, faults=rollout.faults, hidden_sigmas=hidden_sigmas
            ),
        ):
            backend = TransformersBackend(policy, self._tokenizer)
            return backend.generate(rollout.prompts, rollout.sampling, routers=Routers(policy))

    def close(self) -> None:
        """Do nothing: there are no resources to free."""


class VllmRolloutEngine:
    """Rollouts by vLLM, which receives the policy's weights before each; only vLLM's copy of the norms gets AQN noise.

    `weights` returns the policy's weights by their plain names, adapters merged, one after the other. With `sleeps`
    vLLM frees its memory between rollouts. `cuda_graphs`: those of the engine read norms in its own format, `dtype`.
    """

    def __init__(
        self,
        engine: VllmEngine,
        *,
        weights: Callable[[nn.Module], Iterable[tuple[str, Tensor]]],
        dtype: torch.dtype,
        sleeps: bool = False,
        cuda_graphs: bool = False,
    ) -> None:
        self._vllm = engine
        self._weights = weights
        self._dtype = dtype
        self._sleeps = sleeps
        self._cuda_graphs = cuda_graphs
        self._is_asleep = False

    def roll_out(self, policy: nn.Module, recorder: ReceiptRecorder, rollout: Rollout) -> list[Completion]:
        """Return one completion per prompt, in order."""
        clean_norms = self._send(policy)
        # The recorder in the worker compares with the spec that it receives, so the spec itself is compared here.
        recorder.note_installed("rollout", **dict(rollout.spec))
        self._vllm.begin_pass(
            PassNoise(
                **dict(rollout.spec),
                phase="rollout",
                fault_states=rollout.faults.states(),
                sigma=rollout.sigma,
                factors=dict(rollout.factors),
                clean_norms=clean_norms,
            )
        )
        completions = self._vllm.generate(rollout.prompts, rollout.sampling, rollout.key)
        measured = self._vllm.end_pass()
        rollout.faults.restore(measured.fault_states)
        if self._sleeps:
            self._vllm.fall_asleep()
            self._is_asleep = True
        for sync in measured.state.weight_syncs:
            if sync.digests != {clean_norms}:
                raise ReceiptError(
                    f"receipt invalid: AQN step {sync.step}: the clean norm weights in vLLM's worker are not "
                    "the trainer's"
                )
        recorder.restore(merge_states([recorder.state(), measured.state]))
        return completions

    def close(self) -> None:
        """End the processes of vLLM."""
        self._vllm.close()

    def _send(self, policy: nn.Module) -> str:
        """Send the weights of `policy` to vLLM; return the SHA-256 of its norm weights."""
        norms = set() if self._cuda_graphs else {f"{name}.weight" for name in rms_norms(policy, "all_norms")}
        if self._is_asleep:
            self._vllm.wake_up("weights")
        self._vllm.load_weights(for_engine(self._weights(policy), norms, self._dtype))
        if self._is_asleep:
            self._vllm.wake_up("kv_cache")
            self._is_asleep = False
        return norms_sha256(policy, self._dtype if self._cuda_graphs else None)
