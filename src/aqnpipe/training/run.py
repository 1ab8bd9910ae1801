"""One worker of a training run: builds the trainer with its data, noise and callbacks, trains, writes the results."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import torch
from datasets import Dataset
from transformers import PrinterCallback
from trl import GRPOConfig

from aqnpipe.artifacts.files import read_table, write_json, write_table
from aqnpipe.artifacts.problems import ProblemTable
from aqnpipe.artifacts.runs import CustomRewardMetrics, TrainingMetrics
from aqnpipe.config.model import read_model_config
from aqnpipe.config.run import TrainingSpec
from aqnpipe.data.graders import weighted_rewards
from aqnpipe.data.prompts import (
    check_context,
    check_prompt_lengths,
    choose_examples,
    end_of_response,
    format_prompt,
    prompt_token_ids,
    refuse_leak,
    refuse_overlap,
    tokenize_prompts,
)
from aqnpipe.data.scoring import is_correct
from aqnpipe.device import DeviceKind, local_device_index, refuse_other_numbers, resolve_device, torch_device
from aqnpipe.errors import ConfigError, NoRewardError, ReceiptError, RunInterruptedError, WorkerError
from aqnpipe.generation.rollout_engines import RolloutEngine, TransformersRolloutEngine
from aqnpipe.models.layout import is_mixture_of_experts
from aqnpipe.models.loading import load_tokenizer, weights_sha256
from aqnpipe.models.sharding import shard_model
from aqnpipe.noise.receipts.receipt import Receipt
from aqnpipe.noise.receipts.recorder import merged_receipt
from aqnpipe.noise.receipts.table import Row
from aqnpipe.training.audit.auditor import TrainingAudit
from aqnpipe.training.callbacks import (
    BreakdownGuard,
    CheckpointCallback,
    CleanWeightsCallback,
    ProgressCallback,
    ValidationCallback,
)
from aqnpipe.training.noise_plan import NoisePlan, build_noise_plan
from aqnpipe.training.policy import CheckpointWriter, autocast_dtype, load_policy
from aqnpipe.training.ranks import gathered, rank_and_size
from aqnpipe.training.resume import ResumePoints
from aqnpipe.training.rollout_backend import merges_adapters, open_rollouts
from aqnpipe.training.sampler import growth_line, growth_of
from aqnpipe.training.trainer import NoisyGRPOTrainer
from aqnpipe.training.verification import Verifier
from aqnpipe.training.workspace import Workspace

_EARLY_RECEIPTS = (1, 5)
"""Steps after which the receipt so far is checked."""

_COLUMNS = {
    "step": "step",
    "epoch": "epoch",
    "reward_mean": "reward",
    "reward_std": "reward_std",
    "kl": "kl",
    "entropy": "entropy",
    "loss": "loss",
    "grad_norm": "grad_norm",
    "clip_fraction": "clip_ratio/region_mean",
    "response_tokens_mean": "completions/mean_length",
    "truncated_fraction": "completions/clipped_ratio",
    "logp_difference_mean": "sampler/logp_difference_mean",
    "logp_difference_max": "sampler/logp_difference_max",
    "sampler_kl": "sampler/kl",
    "importance_ratio_mean": "sampling/importance_sampling_ratio/mean",
    "router_agreement": "routers/agreement",
    "tokens_routed_differently": "routers/tokens_differing",
}
"""Columns of metrics.parquet, in their order, by the names that the trainer logs."""
_OPTIONAL_COLUMNS = ("kl", "importance_ratio_mean", "router_agreement", "tokens_routed_differently")
"""Null where there is no KL term, no correction, or no router whose choice the sampler noted."""
_ROLLOUT_PREFIXES = ("reward", "completions/", "sampler/", "sampling/", "routers/")
"""Quantities that the trainer logs once per batch of rollouts."""


@dataclass(frozen=True)
class TrainingInputs:
    """Files that a training run reads; `sigmas` is set only for arms with per-layer sigmas."""

    model: Path
    train_problems: Path
    test_problems: Path
    sigmas: Path | None = None

    def absolute(self) -> "TrainingInputs":
        """Return the same files as absolute paths, for processes with another working directory."""
        return TrainingInputs(
            self.model.absolute(),
            self.train_problems.absolute(),
            self.test_problems.absolute(),
            self.sigmas.absolute() if self.sigmas else None,
        )


def run_worker(
    spec: TrainingSpec,
    inputs: TrainingInputs,
    workspace: Workspace,
    resume_from: Path | None,
    say: Callable[[str], None] = print,
) -> None:
    """Train `spec` in this process and write checkpoints, metrics.parquet and receipt.json to `workspace.run`.

    resume_from: a resume point from `prepare_resume`; None starts at step 0. Several workers run this together, each
    with its share of every batch; the first one writes the files. Raises WorkerError if the number of workers differs
    from the spec, ReceiptError if measured and requested noise differ, TrainingError if the numbers break down,
    NoRewardError if there was nothing to learn from, and RunInterruptedError after a stop request.
    """
    refuse_other_numbers()
    torch.set_num_threads(spec.training.threads)
    tokenizer = load_tokenizer(inputs.model)
    dataset = _train_dataset(spec, inputs, tokenizer)
    with closing(open_rollouts(spec, inputs.model, dataset["prompt"], tokenizer)) as rollouts:
        trainer = _build_trainer(spec, inputs, workspace, tokenizer, dataset, rollouts, say)
        _train(spec, trainer, resume_from)
    facts = trainer.audit.facts_of_all()
    try:
        receipt = _receipt_of_all(trainer)
    except ReceiptError as error:
        if trainer.audit.lacks_only_gradients(error):
            raise NoRewardError(f"{run_label(spec)}: {trainer.audit.why_no_gradient()}") from error
        raise
    if receipt is None:
        return
    if spec.num_steps not in trainer.validation_accuracy:
        raise ReceiptError(f"receipt invalid: {run_label(spec)}: the last step, {spec.num_steps}, was not validated")
    table = _metrics_table(trainer.state.log_history, receipt.weight_syncs, trainer.validation_accuracy)
    growth = growth_of(table, spec.training.steps_per_rollout)
    if growth is not None and growth.has_grown:
        say(f"{run_label(spec)}: {growth_line(growth)}")
    write_json(workspace.facts, facts.model_copy(update={"distance_growth": growth}))
    write_json(workspace.run / "receipt.json", receipt)
    schema = CustomRewardMetrics if spec.training.rewards else TrainingMetrics
    write_table(workspace.run / "metrics.parquet", table, schema)


def _train(spec: TrainingSpec, trainer: NoisyGRPOTrainer, resume_from: Path | None) -> None:
    """Train to the last step. Raises RunInterruptedError if a stop request ended the training earlier."""
    if trainer.accelerator.num_processes != spec.training.num_workers:
        raise WorkerError(
            f"{run_label(spec)}: {trainer.accelerator.num_processes} workers train, training.num_workers is "
            f"{spec.training.num_workers}"
        )
    with closing(trainer.resume_points):
        trainer.train(resume_from_checkpoint=str(resume_from) if resume_from else None)
    if trainer.state.global_step < spec.num_steps:
        raise RunInterruptedError(
            f"{run_label(spec)}: stopped by a signal after step {trainer.state.global_step} of {spec.num_steps}; the "
            "same command continues from there"
        )


def _receipt_of_all(trainer: NoisyGRPOTrainer) -> Receipt | None:
    """Return the checked receipt of all workers on the first worker, None on the others; a collective operation."""
    recorder, (rank, num_workers) = trainer.noise_plan.recorder, rank_and_size()
    if num_workers == 1:
        return recorder.receipt().check()
    states = gathered(recorder.state())
    return None if rank else merged_receipt(recorder, states, routed=is_mixture_of_experts(trainer.policy))


def reward_correct(
    completions: list[str], gold_answer: list[str], stop_text: list[str | None], **_: Any
) -> list[float]:
    """Return reward 1 if the number after `####` and before `stop_text` equals the gold answer, otherwise 0."""
    return [
        float(is_correct(end_of_response(text, stop), gold, "strict"))
        for text, gold, stop in zip(completions, gold_answer, stop_text, strict=True)
    ]


def reward_function(spec: TrainingSpec) -> Callable[..., list[float]]:
    """Return the reward of a run, in the form that TRL calls."""
    rewards = spec.training.rewards
    if not rewards:
        return reward_correct

    def reward_weighted(
        completions: list[str], gold_answer: list[str], stop_text: list[str | None], **_: Any
    ) -> list[float]:
        texts = [end_of_response(text, stop) for text, stop in zip(completions, stop_text, strict=True)]
        return weighted_rewards(rewards, texts, gold_answer)

    return reward_weighted


def _build_trainer(
    spec: TrainingSpec,
    inputs: TrainingInputs,
    workspace: Workspace,
    tokenizer: Any,
    dataset: Dataset,
    rollouts: RolloutEngine,
    say: Callable[[str], None],
) -> NoisyGRPOTrainer:
    model = load_policy(spec, inputs.model)
    device = resolve_device(spec.device).kind
    if spec.training.parallelism == "fsdp":
        shard_model(model, torch.device(torch_device(device, local_device_index(device))))
    weights = weights_sha256(inputs.model) if inputs.sigmas else None
    plan = build_noise_plan(spec, model, inputs.sigmas, weights)
    guard = BreakdownGuard(run_label(spec), spec.training, spec.loss_scale)
    audit = TrainingAudit(
        spec,
        model,
        tokenizer,
        model_folder=inputs.model,
        train_problems=inputs.train_problems,
        test_problems=inputs.test_problems,
        checkpoints=workspace.run / "checkpoints",
        sees_draws=isinstance(rollouts, TransformersRolloutEngine),
        receipt_steps=_EARLY_RECEIPTS,
    )
    validation = _validation(spec, inputs, tokenizer, plan, audit)
    resume_points = ResumePoints(workspace, spec.training)
    trainer = NoisyGRPOTrainer(
        spec=spec,
        noise_plan=plan,
        rollouts=rollouts,
        model=model,
        reward_funcs=reward_function(spec),
        args=grpo_arguments(spec, workspace.folder, device),
        train_dataset=dataset,
        processing_class=tokenizer,
        guard=guard,
        audit=audit,
        verifier=Verifier(spec, run_label(spec), workspace.folder.parent),
        resume_points=resume_points,
        validation_accuracy=validation.accuracy,
        callbacks=[
            guard,
            CleanWeightsCallback(plan.recorder),
            CheckpointCallback(
                workspace.run / "checkpoints",
                spec.training.checkpoint_steps(spec.num_steps),
                CheckpointWriter(spec, inputs.model, tokenizer, merges=merges_adapters(spec)),
                run_label(spec),
            ),
            validation,
            audit,
            ProgressCallback(run_label(spec), spec.num_steps, say),
            resume_points,
        ],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def run_label(spec: TrainingSpec) -> str:
    """Return the name of a run for messages."""
    return f"{spec.model_role}/{spec.arm_id} seed {spec.seed}"


def _train_dataset(spec: TrainingSpec, inputs: TrainingInputs, tokenizer: Any) -> Dataset:
    problems = read_table(inputs.train_problems, ProblemTable)
    examples = choose_examples(spec.prompt, inputs.train_problems)
    prompts = [format_prompt(question, spec.prompt, tokenizer, examples) for question in problems["question"]]
    token_ids = tokenize_prompts(prompts, spec.prompt, tokenizer)
    _check_context(spec, inputs, token_ids, tokenizer)
    if spec.training.max_prompt_tokens is not None:
        check_prompt_lengths(problems["question_id"], token_ids, spec.training.max_prompt_tokens)
    _check_micro_batch(spec, max(map(len, token_ids)))
    return Dataset.from_dict(
        {
            "prompt": prompts,
            "gold_answer": problems["gold_answer"].to_list(),
            "stop_text": [spec.prompt.stop_text] * len(prompts),
        }
    )


def _check_context(
    spec: TrainingSpec, inputs: TrainingInputs, prompts: Sequence[Sequence[int]], tokenizer: Any
) -> None:
    """Raise DataError if a prompt with its response may be longer than the model's positions, or its tokens unknown."""
    config = read_model_config(inputs.model)
    check_context(prompts, spec.training.max_response_tokens, config, tokenizer.pad_token_id)


def _check_micro_batch(spec: TrainingSpec, longest_prompt: int) -> None:
    """Raise ConfigError if the longest prompt with its response may be longer than a micro-batch by tokens."""
    most, longest = spec.training.tokens_per_micro_batch, longest_prompt + spec.training.max_response_tokens
    if most is not None and most < longest:
        raise ConfigError(
            f"training.tokens_per_micro_batch is {most}: the longest prompt has {longest_prompt} tokens and a response "
            f"may have {spec.training.max_response_tokens}, expected at least {longest}"
        )


def _validation(
    spec: TrainingSpec, inputs: TrainingInputs, tokenizer: Any, noise: NoisePlan, audit: TrainingAudit
) -> ValidationCallback:
    tests = read_table(inputs.test_problems, ProblemTable)
    problems = tests.head(spec.training.validation_questions)
    examples = choose_examples(spec.prompt, inputs.train_problems)
    refuse_overlap(examples, problems["question"])
    refuse_leak(read_table(inputs.train_problems, ProblemTable)["question"], tests["question"])
    prompts = prompt_token_ids(problems["question"], spec.prompt, tokenizer, examples)
    _check_context(spec, inputs, prompts, tokenizer)
    golds = problems["gold_answer"].to_list()
    return ValidationCallback(spec, prompts, golds, tokenizer=tokenizer, noise=noise, audit=audit)


def _metrics_table(
    log_history: Iterable[Mapping[str, float]],
    weight_syncs: Iterable[Row],
    validation_accuracy: Mapping[int, float],
) -> pl.DataFrame:
    """Return one row per optimiser step, with the columns of `artifacts.TrainingMetrics`.

    Rewards, lengths, sigmas and the distance between sampler and actor of step N belong to the rollout that step N
    learned from; several steps may share a rollout. Wall times are left out on purpose: the table must be reproducible.
    """
    syncs = {(sync.step or 0) + 1: sync for sync in weight_syncs}
    rows = []
    sync: Row | None = None
    rollout: dict[str, float] = {}
    for logged in log_history:
        if "loss" not in logged:
            continue
        step = int(logged["step"])
        sync = syncs.get(step, sync)
        if "reward" in logged:
            rollout = {key: value for key, value in logged.items() if key.startswith(_ROLLOUT_PREFIXES)}
        entry = {**rollout, **logged, "step": step}
        rows.append(
            {column: entry.get(key) if column in _OPTIONAL_COLUMNS else entry[key] for column, key in _COLUMNS.items()}
            | {
                "sigma_requested": sync.sigma_requested if sync else 0.0,
                "sigma_measured": sync.sigma_measured if sync else 0.0,
                "validation_accuracy": validation_accuracy.get(step),
            }
        )
    numbers = [*(column for column in _COLUMNS if column != "step"), "validation_accuracy"]
    return pl.DataFrame(rows, schema_overrides=dict.fromkeys(numbers, pl.Float64))


def grpo_arguments(spec: TrainingSpec, folder: Path, device: DeviceKind = "cpu") -> GRPOConfig:
    """Return the study's settings as TRL's; TRL's defaults that differ from the published recipe are set explicitly."""
    training, correction = spec.training, spec.arm.importance_sampling
    return GRPOConfig(
        output_dir=str(folder / "trainer"),
        seed=spec.random_seed,
        max_steps=spec.num_steps,
        num_train_epochs=training.epochs,
        learning_rate=training.learning_rate,
        lr_scheduler_type="constant_with_warmup" if training.learning_rate_schedule == "constant" else "linear",
        warmup_steps=training.warmup_steps,
        weight_decay=training.weight_decay,
        adam_beta1=training.adam_beta1,
        adam_beta2=training.adam_beta2,
        max_grad_norm=training.max_grad_norm,
        per_device_train_batch_size=training.sequences_per_call,
        gradient_accumulation_steps=training.accumulation_steps,
        steps_per_generation=training.accumulation_steps * training.steps_per_rollout,
        num_generations=training.rollouts_per_prompt,
        num_iterations=1,
        max_completion_length=training.max_response_tokens,
        temperature=training.temperature,
        beta=training.kl_coefficient,
        epsilon=training.clip_ratio,
        # TRL limits the ratio before it clips: for a positive advantage the clipped ratio is the smaller one anyway.
        delta=training.clip_ratio_c,
        vllm_importance_sampling_correction=correction is not None,
        vllm_importance_sampling_mode=correction.mode if correction else "sequence_mask",
        vllm_importance_sampling_clip_max=correction.clip_max if correction else 3.0,
        vllm_importance_sampling_clip_min=correction.clip_min if correction else None,
        loss_type="dapo",
        scale_rewards="group",
        use_bias_correction_kl=False,
        # The study has no term that balances experts.
        router_aux_loss_coef=0.0,
        bf16=autocast_dtype(spec) == torch.bfloat16,
        gradient_checkpointing=training.gradient_checkpointing,
        # A reentrant checkpoint recomputes layers without the hooks of the forward pass, and so without noise.
        gradient_checkpointing_kwargs={"use_reentrant": False},
        use_cpu=device == "cpu",
        save_strategy="no",
        eval_strategy="no",
        logging_steps=1,
        logging_nan_inf_filter=False,
        report_to=list(training.report_to) or "none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        ddp_find_unused_parameters=False,
        ddp_broadcast_buffers=False,
    )
