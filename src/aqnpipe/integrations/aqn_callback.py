"""`aqnpipe.AQNCallback`: AQN in a stock trainer of TRL, with a receipt.

Callbacks do not surround generation, so this one takes the place of the policy's `generate` during training.
tests/training/test_trl_contract.py pins that TRL draws its rollouts there.
"""

from contextlib import ExitStack
from functools import partial
from typing import Any

from pydantic import ValidationError
from transformers import TrainerCallback

from aqnpipe.config.base import describe_validation_error
from aqnpipe.config.noise import AdaptiveNoise, AqnTargets, NoiseSpec, Schedule
from aqnpipe.errors import ConfigError, ReceiptError
from aqnpipe.machine.machine import IN_USE, NoiseKey
from aqnpipe.models.layout import decoder_layers, num_rms_norms
from aqnpipe.noise.aqn import noised_rollout, target_factors
from aqnpipe.noise.injection.phase import phase_noise
from aqnpipe.noise.receipts.recorder import ReceiptRecorder
from aqnpipe.noise.schedule import sigma_at


class AQNCallback(TrainerCallback):
    """Puts noise on the RMSNorm weights of a policy while it draws rollouts, and takes it off before the loss.

    For TRL's `GRPOTrainer` and `RLOOTrainer`. Rollouts of one step have the same noise, evaluations have none. Training
    ends with ReceiptError unless every rollout had it; `print(callback.summary())` shows what was measured.

    - schedule: sigma over the optimiser steps, such as `LinearDecay(sigma_start=0.05, sigma_end=0.01)`.
    - targets: `auto`, `all_norms`, `post_attention` or `hidden_states`, as in a study.
    - seed: the same seed gives the same noise.
    """

    def __init__(self, schedule: Schedule, *, targets: AqnTargets = "auto", seed: int = 0) -> None:
        try:
            self._aqn = AdaptiveNoise(schedule=schedule, targets=targets)
        except ValidationError as error:
            raise ConfigError(f"AQNCallback: {describe_validation_error(error)}") from error
        if self._aqn.schedule.kind == "own" or not isinstance(seed, int):
            found = f"schedule {self._aqn.schedule.kind} and seed {seed!r}"
            raise ConfigError(f"AQNCallback: {found}, expected no schedule of your own, and a whole number")
        self._seed, self._given_back = seed, ExitStack()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the place of `generate`. Raises ConfigError or ModelError if the policy cannot have the noise."""
        self._given_back.close()
        model: Any = kwargs["model"]
        network = model.get_base_model() if hasattr(model, "get_base_model") else model
        elsewhere = ("use_vllm", "use_transformers_continuous_batching", "deepspeed", "fsdp")
        found = [name for name in elsewhere if getattr(args, name, None)]
        if not hasattr(type(network), "generate") or "generate" in vars(network):
            found.append(f"{type(network).__name__} without its class's generate (two callbacks, broken-off training)")
        if found:
            raise ConfigError(f"AQNCallback: found {found[0]}, expected a policy that generates with whole weights")
        self._steps = {"num_steps": state.max_steps, "num_epochs": state.num_train_epochs}
        sigma_at(self._aqn.schedule, 0, **self._steps)
        self._factors = target_factors(network, self._aqn, None)
        sizes: Any = {"num_norms": num_rms_norms(network), "num_layers": len(decoder_layers(network)), **self._steps}
        # TRL decides in which steps rollouts are drawn.
        sizes |= {"expected_phases": (), "steps_per_rollout": 0, "norms_watched": True, "seed": self._seed}
        self._recorder = ReceiptRecorder(NoiseSpec(aqn=self._aqn), **sizes)
        self._network, self._state, self._step, self._micro_steps = network, state, -1, 0
        network.generate = partial(self._generate, network.generate)
        self._given_back.callback(delattr, network, "generate")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the step and its clean weights: what is generated in it is a rollout."""
        self._state, self._step, self._rank, self._rollouts = state, state.global_step, args.process_index, 0
        self._recorder.begin_step(self._step)
        self._recorder.note_clean_norms(self._network)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count a micro-batch."""
        self._micro_steps += 1

    on_step_end = on_substep_end

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Give `generate` back. Raises ReceiptError unless every rollout had the noise."""
        self._given_back.close()
        self.receipt = self._recorder.receipt()
        per_rollout = getattr(args, "steps_per_generation", self._micro_steps or 1) * getattr(args, "num_iterations", 1)
        drawn = sum(sync.calls for sync in self.receipt.weight_syncs)
        due = max(1, -(-self._micro_steps // per_rollout))
        if drawn < due:
            raise ReceiptError(
                f"AQNCallback: {drawn} of {due} rollouts came from the policy's generate, so others had no noise; "
                "expected a trainer that makes all of them there, as GRPOTrainer and RLOOTrainer do"
            )
        self.receipt.check()

    def summary(self) -> str:
        """Return sigma by step, requested and measured, and whether the weights were restored."""
        syncs = self.receipt.weight_syncs
        drawn, restored = (sum(sync.calls for sync in of) for of in (syncs, [one for one in syncs if one.is_restored]))
        rows = [f"{sync.step:4}  {sync.sigma_requested:9.4f}  {sync.sigma_measured:8.4f}" for sync in syncs]
        last = f"norm weights were restored bit for bit after {restored} of {drawn} rollouts"
        return "\n".join(["step  requested  measured", *rows, last])

    def _generate(self, own_generate: Any, *args: Any, **kwargs: Any) -> Any:
        if self._state.global_step != self._step or not self._network.training:
            return own_generate(*args, **kwargs)
        network, recorder, aqn, step, seed = self._network, self._recorder, self._aqn, self._step, self._seed
        sigma, key = sigma_at(aqn.schedule, step, **self._steps), NoiseKey(seed, step, self._rollouts, self._rank)
        self._rollouts += 1
        rollout = noised_rollout(network, aqn, self._factors, recorder, sigma=sigma, seed=seed, step=step)
        with rollout as hidden, ExitStack() as audited:
            # On a noisy machine that runs already, the passes are audited by its own receipt.
            if not IN_USE.locked():
                phase = phase_noise(network, recorder.requested, "rollout", key, recorder, hidden_sigmas=hidden)
                audited.enter_context(phase)
            return own_generate(*args, **kwargs)
