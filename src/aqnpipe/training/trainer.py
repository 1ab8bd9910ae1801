"""TRL's GRPOTrainer with separate phases, each of which computes with exactly the noise requested for it.

The class overrides private methods of the pinned TRL: `_tokenize_prompts`, `_generate_single_turn` (rollout),
`_generate_and_score_completions`, `_get_per_token_logps_and_entropies` (reference and actor), `training_step`, and
`_get_grad_norm` of the Trainer.
tests/training/test_trl_contract.py pins their signatures.
"""

import math
import operator
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import set_seed
from transformers.trainer import TRAINER_STATE_NAME
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import RepeatSampler, entropy_from_logits, selective_log_softmax

from aqnpipe.config.noise import Phase
from aqnpipe.config.run import TrainingSpec
from aqnpipe.data.prompts import tokenize_prompts
from aqnpipe.generation.backend import Sampling
from aqnpipe.generation.rollout_engines import Rollout, RolloutEngine
from aqnpipe.machine.machine import NoiseKey
from aqnpipe.models.adapters import adapters_off, has_adapters
from aqnpipe.models.sharding import average_whole_gradients, is_sharded, local, shard_model, split_groups
from aqnpipe.noise.aqn import noised_actor
from aqnpipe.noise.injection.faults import ActiveFaults
from aqnpipe.noise.injection.phase import phase_noise
from aqnpipe.noise.receipts.table import SYNC
from aqnpipe.seeding import derive_seed
from aqnpipe.training.audit.auditor import TrainingAudit
from aqnpipe.training.callbacks import BreakdownGuard
from aqnpipe.training.micro_batches import Batch, Group, groups_by_tokens, micro_batches
from aqnpipe.training.noise_plan import NoisePlan
from aqnpipe.training.policy import BaseWeights, autocast_dtype, compute_in
from aqnpipe.training.ranks import gathered
from aqnpipe.training.resume import ResumePoints, load_rank_state, load_tensors, own_tensors, save_rank_state
from aqnpipe.training.sampler import RoutedRollouts, SamplerDistance
from aqnpipe.training.verification import LOSS, Verifier

_ROW = "sampler_row"
"""Number of a sequence among the rollouts of this worker, which TRL shuffles."""


class PromptSampler(RepeatSampler):
    """TRL's sampler, reshuffled in each epoch by a generator that is seeded with (seed, epoch) only.

    The epoch follows from `steps_done`, the optimiser steps of the whole run, at the start of an iteration.
    """

    def __init__(
        self,
        prompts: Sized,
        *,
        prompts_per_rollout: int,
        rollouts_per_prompt: int,
        micro_batches_per_rollout: int,
        steps_per_rollout: int,
        seed: int,
        steps_done: Callable[[], int],
    ) -> None:
        super().__init__(
            prompts,
            mini_repeat_count=rollouts_per_prompt,
            batch_size=prompts_per_rollout,
            repeat_count=micro_batches_per_rollout,
            seed=seed,
        )
        self._steps_per_epoch = len(prompts) // prompts_per_rollout * steps_per_rollout
        self._steps_done = steps_done

    def __iter__(self) -> Iterator[int]:
        """Yield the prompt indices of one epoch."""
        epoch = self._steps_done() // self._steps_per_epoch
        self.generator.manual_seed(derive_seed(self.seed, "prompts", epoch))
        yield from super().__iter__()


class NoisyGRPOTrainer(GRPOTrainer):
    """GRPO with separate rollout, reference, actor and backward phases, each recorded for the receipt."""

    def __init__(
        self,
        *,
        spec: TrainingSpec,
        model: Any,
        args: GRPOConfig,
        noise_plan: NoisePlan,
        rollouts: RolloutEngine,
        guard: BreakdownGuard,
        audit: TrainingAudit,
        verifier: Verifier,
        resume_points: ResumePoints,
        validation_accuracy: dict[int, float],
        **kwargs: Any,
    ) -> None:
        self.noise_plan = noise_plan
        self._spec, self.loss_scale, computes_in = spec, spec.loss_scale, autocast_dtype(spec)
        self._tokens_per_micro_batch = spec.training.tokens_per_micro_batch
        self._micro_batches: list[list[Batch]] = []
        self._micro_step = 0
        self.validation_accuracy = validation_accuracy
        self._rollouts = rollouts
        self._sampler_distance = SamplerDistance()
        self._guard = guard
        self.audit = audit
        self._verifier = verifier
        kl_coefficient = args.beta
        if has_adapters(model):
            # With beta 0 TRL does not load a second model for the reference.
            args.beta = 0.0
        if is_sharded(model):
            # accelerate would wrap it in data parallelism, which refuses shares. With this mark it leaves it alone.
            model._is_accelerate_prepared = True
        super().__init__(model=model, args=args, **kwargs)
        reference: Any = getattr(self, "ref_model", None)
        # accelerate computes in bfloat16 by itself (`args.bf16`), but for sharded models; float16 it refuses on CPUs.
        if computes_in is not None and (is_sharded(model) or not args.bf16):
            compute_in(model, computes_in)
        if computes_in is not None and reference is not None and not args.bf16:
            compute_in(reference, computes_in)
        if is_sharded(model) and reference is not None:
            shard_model(reference, self.accelerator.device, is_trained=False)
        if kl_coefficient and has_adapters(model):
            args.beta = self.beta = kl_coefficient
            self.ref_model = BaseWeights()
        # TRL applies its importance sampling correction only if this attribute names vLLM as the sampler. There is no
        # other effect here, because this class draws and scores the rollouts itself.
        self.use_vllm = args.vllm_importance_sampling_correction
        self.resume_points = resume_points
        self._routing = RoutedRollouts(self.policy, replays=spec.arm.routing_replay)
        audit.attach(self)
        verifier.attach(self.policy)

    @property
    def policy(self) -> Any:
        """The network itself, without the wrapper of data parallelism."""
        return self.accelerator.unwrap_model(self.model)

    def _key(self, micro_step: int = 0) -> NoiseKey:
        return NoiseKey(
            seed=self.noise_plan.seed,
            step=self.state.global_step,
            micro_step=micro_step,
            rank=self.accelerator.process_index,
        )

    def _tokenize_prompts(self, prompts: list[str]) -> tuple[list[list[int]], None, dict[str, Any]]:
        """Tokenize prompts as evaluation and diagnosis do; there are no images."""
        return tokenize_prompts(prompts, self._spec.prompt, self.processing_class), None, {}

    def _generate_single_turn(
        self, prompt_ids: Any, images: Any, multimodal_fields: Any, num_generations: int, has_tool_images: bool = False
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Roll out with the arm's noise and AQN; return tokens and their log-probabilities."""
        plan, step = self.noise_plan, self.state.global_step
        sampling = Sampling(
            max_response_tokens=self.max_completion_length,
            temperature=self.temperature,
            # Keyed by step, so that arms that differ only in noise have the same sampling draws at every step. Keyed by
            # the row in the batch of all workers, so that the draws do not depend on the number of workers.
            seed=derive_seed(plan.seed, "sampling", step),
            first_row=self.accelerator.process_index * len(prompt_ids),
            num_rows=self.accelerator.num_processes * len(prompt_ids),
            log_probabilities=True,
        )
        rollout = Rollout(
            prompts=prompt_ids,
            sampling=sampling,
            spec=plan.spec,
            faults=plan.faults,
            key=self._key(),
            sigma=plan.sigma(step),
            factors=plan.aqn_factors,
        )
        self.audit.begin_rollout(rollout)
        completions = self._rollouts.roll_out(self.policy, plan.recorder, rollout)
        self.audit.end_rollout(completions)
        self._routing.begin(completions)
        self._log_sigma()
        return [answer.token_ids for answer in completions], [answer.log_probabilities or [] for answer in completions]

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        """Return TRL's rollouts with the number of each row."""
        rollouts: dict[str, Any] = super()._generate_and_score_completions(inputs)
        return {**rollouts, _ROW: torch.arange(len(rollouts["prompt_ids"]))}

    def _log_sigma(self) -> None:
        syncs = [row for row in self.noise_plan.recorder.rows.values() if row.operator == SYNC]
        for sync in sorted(syncs, key=lambda row: row.step or 0)[-1:]:
            self._metrics["train"]["sigma_requested"].append(sync.sigma_requested)
            self._metrics["train"]["sigma_measured"].append(sync.sigma_measured)

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

        Replaces TRL's fused output projection, whose backward pass recomputes the logits without the forward noise.
        """
        phase: Phase = "reference" if model is self.ref_model else "actor_forward"
        if torch.is_grad_enabled():
            return self._trained_pass(model, input_ids, attention_mask, logits_to_keep, compute_entropy)
        # A whole batch of rollouts: for the reference, or for the old log-probabilities of a policy that makes several
        # steps with the batch. The latter are counted after the micro-steps of this step.
        first = 0 if phase == "reference" else self._most_micro_steps
        found = input_ids.new_zeros((len(input_ids), logits_to_keep), dtype=torch.float32)
        for index, group in enumerate(self._groups(attention_mask, logits_to_keep, batch_size or len(input_ids))):
            columns = slice(
                input_ids.shape[1] - logits_to_keep - group.prompt,
                input_ids.shape[1] - logits_to_keep + group.completion,
            )
            ids, mask = input_ids[group.rows][:, columns], attention_mask[group.rows][:, columns]
            routing = nullcontext() if phase == "reference" else self._routing.replayed(group.rows, mask)
            with routing, self._phase(model, phase, micro_step=first + index) as network:
                values, _ = self._computed(network, ids, mask, group.completion, compute_entropy=False)
            found[group.rows, : group.completion] = values
        return found, None, None

    @property
    def _most_micro_steps(self) -> int:
        """The most micro-batches of an optimiser step: one of each sequence, if they are divided by tokens."""
        is_by_tokens = self._tokens_per_micro_batch is not None
        return self.args.per_device_train_batch_size if is_by_tokens else self.args.gradient_accumulation_steps

    def _groups(self, attention_mask: Tensor, completion: int, rows: int) -> list[Group]:
        """Return the groups of rows that are scored together, by tokens or of `rows` rows each."""
        prompt = attention_mask.shape[1] - completion
        if self._tokens_per_micro_batch is not None:
            prompts, completions = attention_mask.split([prompt, completion], dim=1)
            return groups_by_tokens(prompts.sum(1).tolist(), completions.sum(1).tolist(), self._tokens_per_micro_batch)
        places = range(len(attention_mask))
        return [Group(list(places[start : start + rows]), prompt, completion) for start in places[::rows]]

    def _trained_pass(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, compute_entropy: bool
    ) -> tuple[Tensor, Tensor | None, None]:
        """Return log-probabilities and entropies of a micro-batch, whose sampler the policy is compared with."""
        place, accumulation = self._step % self.args.steps_per_generation, self.args.gradient_accumulation_steps
        batches = self._micro_batches[place]
        drawn, is_first_step = batches[self._micro_step], place < accumulation
        with self._routing.compared(drawn[_ROW].tolist(), attention_mask) if is_first_step else nullcontext():
            log_probabilities, entropies = self._computed(
                model, input_ids, attention_mask, logits_to_keep, compute_entropy
            )
        if is_first_step:
            # Sampler and policy have the same weights until the end of the first step after a rollout.
            sampled, mask = drawn["sampling_per_token_logps"], drawn["completion_mask"]
            self._sampler_distance.add(sampled, log_probabilities.detach(), mask)
            if place + 1 == accumulation and self._micro_step == len(batches) - 1:
                for name, value in {**self._sampler_distance.settle(), **self._routing.settle()}.items():
                    self._metrics["train"][name].append(value)
        return log_probabilities, entropies, None

    @contextmanager
    def _phase(self, model: Any, phase: Phase, micro_step: int, *, backward: bool = False) -> Iterator[Any]:
        """Run a phase of `model` in the body, with the backward pass if there is one; yield what is to be called."""
        adapted = isinstance(model, BaseWeights)
        model = self.model if adapted else model
        network, plan = self.accelerator.unwrap_model(model), self.noise_plan
        aqn, sigma = plan.spec.aqn if phase == "actor_forward" else None, plan.sigma(self.state.global_step)
        with (
            adapters_off(network) if adapted else nullcontext(),
            noised_actor(aqn, plan.aqn_factors, plan.recorder, sigma) as hidden_sigmas,
            phase_noise(
                network,
                plan.spec,
                phase,
                self._key(micro_step),
                plan.recorder,
                faults=plan.faults,
                backward=backward,
                hidden_sigmas=hidden_sigmas,
            ),
        ):
            yield model

    def _computed(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, compute_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        output = model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            logits_to_keep=logits_to_keep + 1,
            use_cache=False,
        )
        # bfloat16 has only two digits for a log-probability near -1: ratios and KL would be mostly rounding error.
        logits = output.logits[:, :-1].float() / self.temperature
        log_probabilities = selective_log_softmax(logits, input_ids[:, -logits_to_keep:])
        with torch.no_grad():
            entropy = entropy_from_logits(logits) if compute_entropy else None
        return log_probabilities, entropy

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Run one micro-batch forward and backward, or all of an optimiser step if they are divided by tokens.

        Gradients of several workers are averaged in the last backward pass of a step. Every backward pass is counted as
        a phase of its own.
        """
        if self._step % self.args.gradient_accumulation_steps == 0:
            # Draws from the global generators depend on seed and step only, so a resumed run repeats them.
            key = (self.state.global_step, self.accelerator.process_index)
            set_seed(derive_seed(self.noise_plan.seed, "trainer", *key) % 2**32)
        model.train()
        self._prepare_inputs(inputs)
        place = self._step % self.args.steps_per_generation
        if place == 0:
            self._micro_batches = [self._divided(batch) for batch in self._buffered_inputs or ()]
        batches = self._micro_batches[place]
        losses = []
        for self._micro_step, batch in enumerate(batches):
            is_last = self._micro_step == len(batches) - 1
            micro_step = self._step % self.args.gradient_accumulation_steps + self._micro_step
            mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
            with (
                self._routing.replayed(batch[_ROW].tolist(), mask),
                self._verified(model, batch, micro_step),
                nullcontext() if is_last else self.accelerator.no_sync(model),
            ):
                loss = self._learned_from(model, batch, micro_step)
            losses.append(loss.detach())
            self._guard.check("loss", loss.item(), self.state.global_step + 1)
            self.noise_plan.recorder.count_backward(self.state.global_step)
            self.noise_plan.recorder.settle()
        if len(batches) > 1:
            self._average_by_tokens(batches)
        self._step += 1
        return torch.stack(losses).sum()

    def _learned_from(self, model: Any, batch: Batch, micro_step: int) -> Tensor:
        """Add the gradients of a micro-batch to those of the step; return its loss."""
        with self._phase(model, "actor_forward", micro_step, backward=True), self._verifier.watching():
            with self.compute_loss_context_manager():
                loss: Tensor = self.compute_loss(model, batch)
            self._verifier.note(LOSS, loss)
            self.accelerator.backward(loss * self.loss_scale)
        return loss

    @contextmanager
    def _verified(self, model: Any, batch: Batch, micro_step: int) -> Iterator[None]:
        """Compute a micro-batch that is drawn for it once before the body, and compare both when the body has ended."""
        step, place = self.state.global_step + 1, self._step % self.args.steps_per_generation
        # One call of the trainer has all micro-batches of a step, or each has one.
        number = max(len(self._micro_batches[place]), self.args.gradient_accumulation_steps)
        if not self._verifier.is_drawn(step, micro_step, number):
            yield
            return
        with self._verifier.verified(self.policy, step, micro_step, lambda: self._rehearse(model, batch, micro_step)):
            yield

    def _rehearse(self, model: Any, batch: Batch, micro_step: int) -> None:
        """Compute a micro-batch of this step without a trace in receipt, audit, log and the thresholds of faults."""
        plan, distance, routing = self.noise_plan, self._sampler_distance, self._routing
        trainer: Any = self
        metrics = trainer._metrics
        faults = ActiveFaults.of(plan.spec.faults, plan.faults.states())
        self.noise_plan = replace(plan, recorder=plan.recorder.for_rehearsal(), faults=faults)
        trainer._metrics = {mode: defaultdict(list) for mode in metrics}
        self._sampler_distance, self._routing = SamplerDistance(), routing.uncounted()
        try:
            with self.audit.rehearsal(self.state.global_step + 1), self.accelerator.no_sync(model):
                self._learned_from(model, batch, micro_step)
        finally:
            self.noise_plan, trainer._metrics = plan, metrics
            self._sampler_distance, self._routing = distance, routing

    def _divided(self, batch: Batch) -> list[Batch]:
        most = self._tokens_per_micro_batch
        return [batch] if most is None else micro_batches(batch, most)

    def _average_by_tokens(self, batches: Sequence[Batch]) -> None:
        """Average TRL's means over micro-batches, which have unequal numbers of tokens, by those numbers."""
        of_workers = gathered([float(batch["completion_mask"].sum()) for batch in batches])
        tokens = [sum(of_batch) for of_batch in zip(*of_workers, strict=True)]
        for name, values in self._metrics["train"].items():
            if name in ("kl", "entropy") or (name.startswith("clip_ratio/") and name.endswith("_mean")):
                values[-len(tokens) :] = [math.fsum(map(operator.mul, values[-len(tokens) :], tokens)) / sum(tokens)]

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """Move the model; a sharded one is on its device."""
        if not is_sharded(model):
            super()._move_model_to_device(model, device)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Return TRL's optimiser; shares of weights and whole weights are in different parameter groups."""
        optimizer = super().create_optimizer(*args, **kwargs)
        if is_sharded(self.policy):
            optimizer.param_groups[:] = split_groups(optimizer.param_groups)
        return optimizer

    def _clip_grad_norm(self, model: Any) -> Any:
        """Clip the gradients of the step, after those that FSDP leaves to the workers have been averaged."""
        if self.loss_scale != 1:
            # A power of two, so that this rounds nothing.
            gradients = [local(weight.grad) for weight in model.parameters() if weight.grad is not None]
            torch._foreach_div_(gradients, self.loss_scale)
        if is_sharded(self.policy):
            average_whole_gradients(self.policy)
        return super()._clip_grad_norm(model)

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        """Return the norm of the step's gradients before clipping, after the guard has checked it."""
        norm = super()._get_grad_norm(*args, **kwargs)
        self._guard.check("grad_norm", float(norm), self.state.global_step + 1)
        return norm

    def _get_train_sampler(self, dataset: Any = None) -> PromptSampler:
        """Return the prompt order by seed and epoch; TRL's depends on how often this process began an iteration."""
        dataset = self.train_dataset if dataset is None else dataset
        return PromptSampler(
            dataset,
            prompts_per_rollout=self.args.generation_batch_size // self.num_generations,
            rollouts_per_prompt=self.num_generations,
            micro_batches_per_rollout=self.args.steps_per_generation,
            steps_per_rollout=self.args.steps_per_generation // self.args.gradient_accumulation_steps,
            seed=self.noise_plan.seed,
            steps_done=lambda: self.state.global_step,
        )

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Begin a resume point when `ResumePoints` requests it; the log of the step is complete by then."""
        self.resume_points.write(self.state.global_step, self._save_state)

    def _save_state(self, folder: Path) -> dict[str, Tensor]:
        rank, num_workers = self.accelerator.process_index, self.accelerator.num_processes
        if rank == 0:
            self.state.save_to_json(str(folder / TRAINER_STATE_NAME))
        save_rank_state(folder, rank, self.noise_plan, self.audit, self.validation_accuracy)
        return own_tensors(self.policy, self._plain_optimizer, rank, num_workers)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Restore nothing yet: the weights come with the optimiser's state."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Restore trained weights, optimiser, schedule, this rank's measurements and the count of micro-steps."""
        if checkpoint is None:
            return
        rank, point = self.accelerator.process_index, Path(checkpoint)
        load_tensors(self.policy, self._plain_optimizer, point, rank)
        self._restore_schedule()
        self.validation_accuracy.update(load_rank_state(point, rank, self.noise_plan, self.audit))
        self._step = self.state.global_step * self.args.gradient_accumulation_steps

    @property
    def _plain_optimizer(self) -> torch.optim.Optimizer:
        """The optimiser without accelerate's wrapper."""
        wrapper: Any = self.optimizer
        plain: torch.optim.Optimizer = getattr(wrapper, "optimizer", wrapper)
        return plain

    def _restore_schedule(self) -> None:
        """Set the learning rate to that after the steps done; it depends on nothing else."""
        schedule: Any = self.lr_scheduler
        with warnings.catch_warnings():
            # torch expects a step of the optimiser before; those were made before the resume point.
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            for _ in range(self.state.global_step):
                schedule.step()

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore nothing: every step seeds the generators again."""
