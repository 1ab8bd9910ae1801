"""TRL's GRPOTrainer with its phases kept apart, each computing with exactly the noise that was asked for it.

What is overridden of the pinned TRL's private interface: `_tokenize_prompts`, `_generate_single_turn` (rollout) and
`_get_per_token_logps_and_entropies` (reference and actor); tests/training/test_trl_contract.py pins their signatures.
"""

from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer
from trl.trainer.utils import entropy_from_logits, selective_log_softmax

from aqnpipe.config.dataset import PromptFormat
from aqnpipe.config.noise import Phase
from aqnpipe.data.prompts import tokenize_prompts
from aqnpipe.generation.backend import Sampling
from aqnpipe.generation.transformers_backend import TransformersBackend
from aqnpipe.noise.aqn import noised_rollout
from aqnpipe.noise.injection import NoiseKey, phase_noise
from aqnpipe.seeding import derive_seed
from aqnpipe.training.noise_plan import NoisePlan


class NoisyGRPOTrainer(GRPOTrainer):
    """GRPO whose rollout, reference, actor and backward phases are separate and receipted."""

    def __init__(self, *args: Any, noise_plan: NoisePlan, prompt_format: PromptFormat, **kwargs: Any) -> None:
        self.noise_plan = noise_plan
        self._prompt_format = prompt_format
        super().__init__(*args, **kwargs)
        self._backend = TransformersBackend(self._policy, self.processing_class)

    @property
    def _policy(self) -> Any:
        return self.accelerator.unwrap_model(self.model)

    def _key(self, micro_step: int = 0) -> NoiseKey:
        return NoiseKey(
            seed=self.noise_plan.seed,
            step=self.state.global_step,
            micro_step=micro_step,
            rank=self.accelerator.process_index,
        )

    def _tokenize_prompts(self, prompts: list[str]) -> tuple[list[list[int]], None, dict[str, Any]]:
        """Tokenize as evaluation and diagnosis do; no images."""
        return tokenize_prompts(prompts, self._prompt_format, self.processing_class), None, {}

    def _generate_single_turn(
        self, prompt_ids: Any, images: Any, multimodal_fields: Any, num_generations: int, has_tool_images: bool = False
    ) -> tuple[list[list[int]], None]:
        """Roll out with the arm's noise on operators and modules, and its AQN."""
        plan, step = self.noise_plan, self.state.global_step
        sampling = Sampling(
            max_response_tokens=self.max_completion_length,
            temperature=self.temperature,
            # Keyed by step, so that arms which differ only in noise have the same luck at every step.
            seed=derive_seed(plan.seed, "sampling", step),
        )
        with (
            noised_rollout(
                self._policy, plan.recorder, plan.aqn_factors, sigma=plan.sigma(step), seed=plan.seed, step=step
            ) as hidden_sigmas,
            phase_noise(self._policy, plan.recorder, "rollout", self._key(), hidden_sigmas=hidden_sigmas),
        ):
            completions = self._backend.generate(prompt_ids, sampling)
        return [completion.token_ids for completion in completions], None

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **multimodal: Any,
    ) -> tuple[Tensor, Tensor | None, None]:
        """Return log-probabilities (and entropies) of the last `logits_to_keep` tokens, shape [batch, logits_to_keep].

        Replaces TRL's fused output projection, whose backward recomputes the logits without the noise of the forward.
        """
        phase: Phase = "reference" if model is self.ref_model else "actor_forward"
        rows = batch_size or input_ids.size(0)
        chunks = [
            self._log_probabilities(
                model,
                phase,
                input_ids[start : start + rows],
                attention_mask[start : start + rows],
                logits_to_keep,
                compute_entropy,
                micro_step=index if phase == "reference" else self._step % self.args.gradient_accumulation_steps,
            )
            for index, start in enumerate(range(0, input_ids.size(0), rows))
        ]
        log_probabilities = torch.cat([chunk[0] for chunk in chunks])
        entropies = torch.cat([chunk[1] for chunk in chunks if chunk[1] is not None]) if compute_entropy else None
        return log_probabilities, entropies, None

    def _log_probabilities(
        self,
        model: Any,
        phase: Phase,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        compute_entropy: bool,
        micro_step: int,
    ) -> tuple[Tensor, Tensor | None]:
        network = self.accelerator.unwrap_model(model)
        backward = phase == "actor_forward" and torch.is_grad_enabled()
        with phase_noise(network, self.noise_plan.recorder, phase, self._key(micro_step), backward=backward):
            output = model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                logits_to_keep=logits_to_keep + 1,
                use_cache=False,
            )
        logits = output.logits[:, :-1] / self.temperature
        log_probabilities = selective_log_softmax(logits, input_ids[:, -logits_to_keep:])
        with torch.no_grad():
            entropy = entropy_from_logits(logits) if compute_entropy else None
        return log_probabilities, entropy

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run one micro-batch forward and backward; the backward pass is counted as its own phase."""
        loss = super().training_step(*args, **kwargs)
        self.noise_plan.recorder.count_forward("backward")
        self.noise_plan.recorder.settle()
        return loss
