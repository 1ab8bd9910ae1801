"""The private interfaces of TRL and transformers that the trainer relies on; an upgrade that changes them fails here.

Pinned are the signatures of overridden and called methods, and the source lines that the overrides depend on.
"""

import inspect

import pytest
import torch
import transformers
import trl
from accelerate import Accelerator
from transformers import Trainer
from transformers.integrations import TensorBoardCallback
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.trainer.utils import RepeatSampler, entropy_from_logits, selective_log_softmax

from aqnpipe.training.trainer import NoisyGRPOTrainer, PromptSampler


def parameters(function):
    return list(inspect.signature(function).parameters)


def source_of(thing):
    """Return the source with whitespace collapsed, so that formatting does not matter."""
    return " ".join(inspect.getsource(thing).split())


def test_versions_are_the_pinned_ones():
    assert trl.__version__.startswith("1.16.")
    assert transformers.__version__.startswith("5.19.")


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (GRPOTrainer._tokenize_prompts, ["prompts"]),
        (
            GRPOTrainer._generate_single_turn,
            ["prompt_ids", "images", "multimodal_fields", "num_generations", "has_tool_images"],
        ),
        (GRPOTrainer._generate_and_score_completions, ["inputs"]),
        (GRPOTrainer.training_step, ["model", "inputs", "num_items_in_batch"]),
        (GRPOTrainer._get_train_sampler, ["dataset"]),
        (GRPOTrainer._save_checkpoint, ["model", "trial"]),
        (GRPOTrainer._load_optimizer_and_scheduler, ["checkpoint"]),
        (Trainer.compute_loss_context_manager, []),
        (Trainer._load_from_checkpoint, ["resume_from_checkpoint", "model"]),
        (Trainer._load_rng_state, ["checkpoint"]),
        (Trainer._get_grad_norm, ["model", "grad_norm"]),
        (Trainer._clip_grad_norm, ["model"]),
        (Trainer._move_model_to_device, ["model", "device"]),
        (Trainer.create_optimizer, ["model"]),
        (
            RepeatSampler.__init__,
            ["data_source", "mini_repeat_count", "batch_size", "repeat_count", "shuffle", "seed"],
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_overridden_or_called_has_the_signature_that_it_had(function, expected):
    assert parameters(function) == ["self", *expected]


def test_accelerate_leaves_a_model_alone_that_has_its_mark():
    """Sharded models have it: accelerate would wrap them in data parallelism, or refuse them."""
    assert (
        'if getattr(model, "_is_accelerate_prepared", False): if model not in self._models: '
        "self._models.append(model) return model"
    ) in source_of(Accelerator.prepare_model)


def test_log_probabilities_are_asked_for_as_they_were():
    assert parameters(GRPOTrainer._get_per_token_logps_and_entropies)[:8] == [
        "self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy",
        "compute_aux_loss",
    ]  # fmt: skip


def test_all_that_is_overridden_is_pinned_here():
    """A new override must be pinned, too."""
    inherited = {name for kind in NoisyGRPOTrainer.__mro__[1:] for name in vars(kind)}
    overridden = {name for name in vars(NoisyGRPOTrainer) if name in inherited and not name.startswith("__")}
    assert overridden == {
        "_tokenize_prompts", "_generate_single_turn", "_get_per_token_logps_and_entropies", "training_step",
        "_get_grad_norm", "_get_train_sampler", "_save_checkpoint", "_load_from_checkpoint",
        "_load_optimizer_and_scheduler", "_load_rng_state", "_clip_grad_norm", "_move_model_to_device",
        "create_optimizer", "_generate_and_score_completions",
    } | (overridden & {"_abc_impl"})  # fmt: skip
    assert {name for name in vars(PromptSampler) if name in vars(RepeatSampler)} >= {"__init__", "__iter__"}


@pytest.mark.parametrize(
    "line",
    [
        "prompt_ids, images, multimodal_fields = self._tokenize_prompts(prompts)",
        "completion_ids, logprobs = self._generate_single_turn(",
        # Old log-probabilities are a forward pass of their own only if a rollout outlives its first optimiser step.
        "generate_every = self.args.steps_per_generation * self.num_iterations",
        "if self.args.gradient_accumulation_steps % generate_every != 0 or (",
        "old_per_token_logps, _, _ = self._get_per_token_logps_and_entropies( self.model,",
        "old_per_token_logps = per_token_logps.detach() if old_per_token_logps is None else old_per_token_logps",
        # The correction depends on these attributes only, not on the sampler.
        "self.use_vllm = args.use_vllm",
        "self.use_vllm and self.vllm_importance_sampling_correction",
        "per_token_logps_diff = (old_per_token_logps - sampling_per_token_logps) * mask",
        'per_token_loss = per_token_loss * inputs["importance_sampling_ratio"]',
        'output["sampling_per_token_logps"] = sampling_per_token_logps',
        'self._metrics[mode]["sampling/importance_sampling_ratio/mean"].append(',
        # The reference is whatever this attribute contains.
        "if self.ref_model is not None: ref_per_token_logps, _, _ = self._get_per_token_logps_and_entropies( "
        "self.ref_model,",
        "with torch.no_grad(), disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):",
        "per_token_logps, entropies, aux_loss = self._get_per_token_logps_and_entropies(",
        # Which micro-batch a step computes, and when rollouts are drawn.
        "if self._step % generate_every == 0 or self._buffered_inputs is None:",
        "inputs = self._buffered_inputs[self._step % self.args.steps_per_generation]",
        "self._step += 1",
        # A mean over all tokens of the rollouts, scaled to one optimiser step.
        "normalizer = normalizer * self.current_gradient_accumulation_steps / self.args.steps_per_generation",
        "loss = (per_token_loss * mask).sum() / normalizer",
        "per_token_loss = per_token_loss + self.beta * per_token_kl",
        "if self.beta != 0.0:",
        "metrics[key] = sum(valid) / len(valid) if valid else None",
        "logs.update(metrics)",
        'self._metrics[mode]["kl"].append(',
        'self._metrics[mode]["entropy"].append(',
        'self._metrics[mode]["clip_ratio/region_mean"].append(',
        'self._metrics[mode]["reward"].append(',
        'self._metrics[mode]["reward_std"].append(',
        'self._metrics[mode]["completions/mean_length"].append(',
        'self._metrics[mode]["completions/clipped_ratio"].append(',
    ],
)
def test_the_trainer_computes_as_it_did(line):
    assert line in source_of(GRPOTrainer)


@pytest.mark.parametrize(
    "line",
    [
        "model.train()",
        "inputs = self._prepare_inputs(inputs)",
        "with self.compute_loss_context_manager(): loss = self.compute_loss(model, inputs,",
        "if not loss_is_scaled_for_ga: loss = loss / self.current_gradient_accumulation_steps",
        "self.accelerator.backward(loss, **kwargs) return loss.detach()",
    ],
)
def test_a_step_that_is_replaced_does_what_ours_does(line):
    assert line in source_of(Trainer.training_step)
    # TRL scales the loss itself, so that the division is never made.
    assert GRPOTrainer.loss_is_scaled_for_ga is True


def test_without_kl_no_reference_is_loaded():
    """Policies with adapters are built this way and get their reference afterwards."""
    assert (
        "self.beta = args.beta if self.beta == 0.0: # If beta is 0.0, the reference model is not needed "
        "self.ref_model = None elif is_peft_model(model):" in source_of(GRPOTrainer.__init__)
    )


def are_in_order(*lines):
    """Whether the lines are in the loop over steps, in this order."""
    source = source_of(Trainer._run_epoch)
    places = [source.index(line) for line in lines]
    return places == sorted(places)


def test_a_step_goes_from_gradients_to_norm_to_optimiser_to_callbacks_to_log():
    """The norm is checked before the optimiser, the weights before anything is logged or saved."""
    assert are_in_order(
        "self.training_step(model, inputs, num_items_in_batch)",
        "grad_norm = self._clip_grad_norm(model)",
        "grad_norm = self._get_grad_norm(model, grad_norm=grad_norm)",
        "self.optimizer.step()",
        "self.state.global_step += 1",
        "self.callback_handler.on_step_end(",
        "self._maybe_log_save_evaluate(",
    )


def test_a_resumed_run_begins_after_its_state_is_loaded():
    """The clean weights are recorded when training begins."""
    assert "self._load_optimizer_and_scheduler(resume_from_checkpoint)" in source_of(Trainer._prepare_for_training)
    loop = source_of(Trainer._inner_training_loop)
    assert loop.index("self._prepare_for_training(") < loop.index("self.callback_handler.on_train_begin(")


@pytest.mark.parametrize("kind", [GRPOTrainer, RLOOTrainer])
def test_rollouts_are_drawn_where_the_aqn_callback_takes_the_place_of_generate(kind):
    source = source_of(kind)
    assert source.count("prompt_completion_ids = unwrapped_model.generate(") == 1
    # With these settings the policy draws by other methods, and the callback refuses them.
    assert "if self.use_vllm:" in source
    assert "elif self.use_transformers_continuous_batching:" in source
    settings = {GRPOTrainer: GRPOConfig, RLOOTrainer: RLOOConfig}[kind].__dataclass_fields__
    assert {"use_vllm", "use_transformers_continuous_batching", "deepspeed", "fsdp"} <= set(settings)
    # How many rollouts there must have been.
    assert {"steps_per_generation", "num_iterations"} <= set(settings)
    assert "generate_every = self.args.steps_per_generation * self.num_iterations" in source
    assert "self.num_iterations = args.num_iterations" in source


def test_a_rollout_is_between_the_beginning_of_a_step_and_its_end():
    assert are_in_order(
        "self.callback_handler.on_step_begin(",
        "self.training_step(model, inputs, num_items_in_batch)",
        "self.state.global_step += 1",
        "self.callback_handler.on_step_end(",
        "self.callback_handler.on_substep_end(",
    )


def test_trackers_are_pointed_by_the_environment():
    assert 'os.getenv("TENSORBOARD_LOGGING_DIR", None)' in source_of(TensorBoardCallback)


def test_lengths_of_prompts_are_ours_to_check():
    assert "max_prompt_length" not in GRPOConfig.__dataclass_fields__


def test_helpers_that_we_import_keep_their_meaning():
    logits, index = torch.randn(2, 3, 5), torch.randint(5, (2, 3))
    expected = logits.log_softmax(-1).gather(-1, index[..., None])[..., 0]
    torch.testing.assert_close(selective_log_softmax(logits, index), expected)
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(entropy_from_logits(logits), entropy)
