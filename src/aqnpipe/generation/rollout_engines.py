"""Rollouts as the trainer sees them: the policy of this moment answers prompts, under the noise of its run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from aqnpipe.config.noise import NoiseSpec
from aqnpipe.errors import ReceiptError
from aqnpipe.generation.backend import Completion, Sampling
from aqnpipe.generation.noisy_passes import RolloutNoise
from aqnpipe.generation.transformers_backend import TransformersBackend
from aqnpipe.generation.vllm.engine import VllmEngine
from aqnpipe.generation.vllm.weights import send_weights
from aqnpipe.models.layout import norms_sha256, rms_norms
from aqnpipe.noise.aqn import noised_rollout
from aqnpipe.noise.injection.faults import ActiveFaults
from aqnpipe.noise.injection.phase import phase_noise
from aqnpipe.noise.injection.phase_state import NoiseKey
from aqnpipe.noise.receipts.merge import add_rollout
from aqnpipe.noise.receipts.recorder import ReceiptRecorder


@dataclass(frozen=True)
class Rollout:
    """One rollout to be drawn: its prompts and how tokens are chosen, its noise, AQN's sigma, and the key of the noise.

    `faults` are those of `spec` as earlier phases of the run left them. `factors` maps the names of AQN's targets to factors on `sigma`.
    """

    prompts: Sequence[Sequence[int]]
    sampling: Sampling
    spec: NoiseSpec
    faults: ActiveFaults
    key: NoiseKey
    sigma: float
    factors: Mapping[str, float]


class RolloutEngine(Protocol):
    """Draws the rollouts of a training run."""

    def roll_out(self, policy: nn.Module, recorder: ReceiptRecorder, rollout: Rollout) -> list[Completion]:
        """Return one completion per prompt, in order, by the weights that `policy` has now.

        They are drawn under the noise of the rollout, which `recorder` records. Raises
        ReceiptError if what was done cannot be told.
        """
        ...

    def close(self) -> None:
        """Give back what the engine holds."""
        ...


class TransformersRollouts:
    """Rollouts by the policy itself, in this process; AQN is on its norm weights meanwhile."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def roll_out(self, policy: nn.Module, recorder: ReceiptRecorder, rollout: Rollout) -> list[Completion]:
        """Return one completion per prompt, in order."""
        key = rollout.key
        with (
            noised_rollout(
                policy, rollout.spec.aqn, rollout.factors, recorder, sigma=rollout.sigma, seed=key.seed, step=key.step
            ) as hidden_sigmas,
            phase_noise(
                policy, rollout.spec, "rollout", key, recorder, faults=rollout.faults, hidden_sigmas=hidden_sigmas
            ),
        ):
            return TransformersBackend(policy, self._tokenizer).generate(rollout.prompts, rollout.sampling)

    def close(self) -> None:
        """Nothing is held."""


class VllmRollouts:
    """Rollouts by an engine of vLLM that is sent the policy's weights before each; AQN is on the engine's norms alone.

    `weights` gives the policy's weights by their plain names, adapters merged; `folder` is where they pass through.
    With `sleeps` the engine gives its memory back between rollouts.
    """

    def __init__(
        self,
        engine: VllmEngine,
        folder: Path,
        *,
        weights: Callable[[nn.Module], Mapping[str, Tensor]],
        dtype: torch.dtype,
        sleeps: bool = False,
    ) -> None:
        self._engine = engine
        self._file = folder / "weights.safetensors"
        self._weights = weights
        self._dtype = dtype
        self._sleeps = sleeps
        self._is_asleep = False

    def roll_out(self, policy: nn.Module, recorder: ReceiptRecorder, rollout: Rollout) -> list[Completion]:
        """Return one completion per prompt, in order."""
        clean_norms = self._send(policy)
        # The engine's own recorder requests what it is sent, so only this one can tell that it is something else.
        recorder.note_installed("rollout", **dict(rollout.spec))
        self._engine.begin_rollout(
            RolloutNoise(
                **dict(rollout.spec),
                fault_states=rollout.faults.states(),
                sigma=rollout.sigma,
                factors=dict(rollout.factors),
                clean_norms=clean_norms,
            )
        )
        completions = self._engine.generate(rollout.prompts, rollout.sampling, rollout.key)
        state, fault_states = self._engine.end_rollout()
        rollout.faults.restore(fault_states)
        if self._sleeps:
            self._engine.fall_asleep()
            self._is_asleep = True
        for sync in state.weight_syncs:
            if {sync.clean_sha256_before, sync.clean_sha256_after} != {clean_norms}:
                raise ReceiptError(
                    f"receipt refused: AQN step {sync.step}: the clean norm weights in vLLM's worker are not "
                    "the trainer's"
                )
        add_rollout(recorder, state)
        return completions

    def close(self) -> None:
        """End the processes of the engine."""
        self._engine.close()

    def _send(self, policy: nn.Module) -> str:
        """Send the engine the weights of `policy`; return the SHA-256 of its norm weights."""
        norms = {f"{name}.weight" for name in rms_norms(policy, "all_norms")}
        self._file.parent.mkdir(parents=True, exist_ok=True)
        digest = send_weights(self._weights(policy), norms, self._dtype, self._file)
        if self._is_asleep:
            self._engine.wake_up("weights")
        self._engine.load_weights(self._file, digest)
        self._file.unlink()
        if self._is_asleep:
            self._engine.wake_up("kv_cache")
            self._is_asleep = False
        return norms_sha256(policy)
