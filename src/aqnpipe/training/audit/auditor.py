"""The audit of one worker: observes the run, keeps its facts in resume points, and refuses the run.

Which steps are audited follows from the run's seed and the step, by a key of the audit's own: the first three, the
first with ratios other than 1, and one in 16 of the others. Checks that cost little, such as prompts, rewards and
learning rates, run at every step.
"""

import math
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import TrainerCallback

from aqnpipe.artifacts.provenance import sha256_of_files
from aqnpipe.artifacts.training_facts import (
    DRAWS,
    RATES,
    VALIDATION_DRAWS,
    TrainingFacts,
    audited_at_start,
    fact_problems,
)
from aqnpipe.config.run import TrainingSpec
from aqnpipe.data.graders import grader
from aqnpipe.data.prompts import Questions, end_of_response, read_questions
from aqnpipe.errors import ReceiptError
from aqnpipe.generation.backend import Completion
from aqnpipe.generation.rollout_engines import Rollout
from aqnpipe.models.loading import load_tokenizer
from aqnpipe.models.sharding import is_sharded
from aqnpipe.reference.decoder import Choice, DecodingTrace, unobserved
from aqnpipe.seeding import derive_seed
from aqnpipe.training.audit.measure import Ledger, WeightAudit, adapters_are_off
from aqnpipe.training.audit.rollouts import RolloutAudit, RoutingAudit, check_decoding
from aqnpipe.training.audit.scoring import ScoringAudit, reaches_around
from aqnpipe.training.audit.settings import check_adapters, check_dropout, check_trainable, check_trainer
from aqnpipe.training.audit.updates import Updates
from aqnpipe.training.ranks import gathered, rank_and_size

_ONE_AUDITED_IN = 16
_SHOWN = 3
_OF_A_GRADIENT = re.compile(r"(worker \d+ of \d+: )?backward ")
"""Problems of a receipt that are about the noise of a gradient."""


class TrainingAudit(TrainerCallback):
    """Observes a trainer; a difference between what it does and the study ends the run in one line.

    Create it with the policy before a resume point is loaded, then `attach` it to the trainer. As a callback it must
    come behind those that save and validate. After the steps `receipt_steps` the receipt so far is checked too, so that
    a wrong set-up costs minutes and not a day.
    """

    def __init__(
        self,
        spec: TrainingSpec,
        model: nn.Module,
        tokenizer: Any,
        *,
        model_folder: Path,
        train_problems: Path,
        test_problems: Path,
        checkpoints: Path,
        sees_draws: bool = True,
        receipt_steps: Collection[int] = (),
    ) -> None:
        self.ledger = ledger = Ledger()
        self._report = ledger.report
        self._spec, self._model, self._tokenizer = spec, model, tokenizer
        self._model_folder, self._checkpoint_folder = model_folder, checkpoints
        self._receipt_steps = frozenset(receipt_steps)
        self._always_audited = frozenset(audited_at_start(spec))
        # Without them only the request and the log-probabilities are compared: the logits are in another process.
        self._not_checked = () if sees_draws else (DRAWS,)
        self._is_rehearsal = False
        self._trainer: Any = None
        self._logits: Tensor | None = None
        self._referenced = -1
        self._validation: DecodingTrace | None = None
        self._test_files = (test_problems, train_problems)
        self._tests = self._test_questions(tokenizer)
        questions = read_questions(train_problems, spec.prompt, tokenizer, train_problems)
        self._rollouts = RolloutAudit(spec, questions, tokenizer, ledger)
        self._scoring = ScoringAudit(spec, ledger, tokenizer.eos_token_id)
        self._weights = WeightAudit(model, model_folder, spec.random_seed, ledger)
        self._routing = RoutingAudit(model, ledger, replays=spec.arm.routing_replay)
        self._updates = Updates(spec, model, ledger, self.is_audited)

    def attach(self, trainer: Any) -> None:
        """Observe the networks of `trainer`."""
        self._trainer = trainer
        backward = trainer.accelerator.backward

        def observed(loss: Tensor, **kwargs: Any) -> None:
            self._check_graph(loss)
            backward(loss, **kwargs)

        trainer.accelerator.backward = observed
        for network in {self._model, trainer.ref_model}:
            if isinstance(network, nn.Module):
                network.register_forward_hook(self._observe, with_kwargs=True)

    def is_audited(self, step: int) -> bool:
        """Return whether the numbers of optimiser step `step`, counted from 1, are recomputed."""
        is_drawn = derive_seed(self._spec.random_seed, "audited steps", step) % _ONE_AUDITED_IN == 0
        return step in self._always_audited or is_drawn

    @contextmanager
    def rehearsal(self, step: int) -> Iterator[None]:
        """Observe nothing in the body: a micro-batch of `step` is computed twice, and this time is not the training."""
        self.ledger.verified_steps.append(step)
        self._is_rehearsal, arrived = True, list(self._updates.arrived)
        yield
        self._is_rehearsal, self._updates.arrived = False, arrived

    # -- what a run does, in its order ---------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Compare the trainer's settings, and observe its optimiser."""
        optimizer = kwargs["optimizer"]
        self._updates.attach(getattr(optimizer, "optimizer", optimizer))
        counted = dict(self.ledger.recomputed)
        self._check_settings()
        check_trainable(self._model, self._spec, self.ledger)
        check_dropout(self._model, self._spec, self._model_folder, self.ledger)
        self._refuse(self.ledger.problems)
        # A run that is resumed begins more than once, and has the same record.
        self.ledger.recomputed = counted

    def begin_rollout(self, rollout: Rollout) -> None:
        """Compare the request for a rollout."""
        step = self.ledger.steps
        self._rollouts.begin(rollout, step, self._audits_rollout(step) and not self._not_checked)
        self._refuse(self.ledger.problems)

    def end_rollout(self, completions: Sequence[Completion]) -> None:
        """Compare the completions of the rollout."""
        self._scoring.book = self._rollouts.end(completions, self.ledger.steps)
        self._refuse(self.ledger.problems)

    def _audits_rollout(self, step: int) -> bool:
        """Return whether a step that learns from the rollout after `step` updates is audited."""
        return any(self.is_audited(step + later + 1) for later in range(self._spec.training.steps_per_rollout))

    def _observe(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if self._is_rehearsal:
            return
        with unobserved():
            trace = self._validation or self._rollouts.trace
            if kwargs.get("past_key_values") is not None:
                if trace is not None:
                    trace.note(kwargs, output.logits.detach(), self._routing.of_pass(len(output.logits)))
            # Log-probabilities of completions need the logits of several places, and no cache.
            elif isinstance(kwargs.get("logits_to_keep"), int) and kwargs.get("attention_mask") is not None:
                self._observe_scoring(kwargs, output.logits, module)

    def _observe_scoring(self, kwargs: dict[str, Any], logits: Any, module: nn.Module) -> None:
        kind, is_audited = "old", self._audits_rollout(self.ledger.steps)
        if logits.requires_grad:
            self._updates.end_micro_batch()
            kind, is_audited = "trained", self.is_audited(self.ledger.steps + 1)
            if is_audited:
                check_dropout(module, self._spec, self._model_folder, self.ledger)
            self._logits = logits if is_audited else None
        elif module is not self._model or adapters_are_off(module):
            if not is_audited:
                return
            kind = "reference"
            self._check_reference(module)
        if kind != "reference":
            self._routing.check_replay(kwargs, self._scoring.book)
        self._scoring.observe(kwargs, logits, kind, is_audited)

    def _check_graph(self, loss: Tensor) -> None:
        """Compare what the loss of an audited micro-batch depends on."""
        logits, self._logits = self._logits, None
        if logits is not None and reaches_around(loss, logits):
            self._report(
                f"the loss in step {self.ledger.steps + 1} depends on weights other than through the logits: it has "
                "a term that the study does not ask for (a penalty?), which no gradient of the study's loss explains"
            )

    def _check_reference(self, module: nn.Module) -> None:
        """Compare the weights of the reference, once per rollout."""
        if self._referenced != self.ledger.steps:
            self._referenced = self.ledger.steps
            self._weights.check_reference(module)

    def begin_validation(self, prompts: Sequence[Sequence[int]]) -> None:
        """Note that greedy validation of this worker's prompts begins."""
        rank, workers = rank_and_size()
        if [list(prompt) for prompt in prompts] != self._tests.prompts[rank::workers]:
            self._report(
                f"validation after step {self.ledger.steps}: its prompts are not the first "
                f"{self._spec.training.validation_questions} test questions in their order"
            )
        self._validation = DecodingTrace(prompts, self._tokenizer.pad_token_id, Choice())

    def end_validation(self, completions: Sequence[Completion]) -> None:
        """Grade the validation again; a collective operation."""
        rank, workers = rank_and_size()
        responses = [list(completion.token_ids) for completion in completions]
        step, spec = self.ledger.steps, self._spec
        if self._validation is not None:
            check_decoding(VALIDATION_DRAWS, self._validation, responses, self.ledger)
        self._validation = None
        texts = self._tokenizer.batch_decode(responses, skip_special_tokens=True)
        golds = self._tests.golds[rank::workers]
        if len(texts) != len(golds):
            return self._report(f"validation after step {step} has {len(texts)} answers to {len(golds)} questions")
        grade, stop = grader(spec.scorer, spec.scorer_sha256), spec.prompt.stop_text
        right = [grade(end_of_response(text, stop), gold).correct for text, gold in zip(texts, golds, strict=True)]
        self.ledger.validated[step] = sum(gathered(sum(right)))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Compare the step that ended with the study; the run is refused when the step is logged."""
        step = self.ledger.steps
        self._scoring.end_step(step)
        if state.global_step != step:
            self._report(
                f"the trainer counts {state.global_step} optimiser steps, the optimiser made {step}: a step was "
                "skipped or made twice"
            )
        if step % self._spec.training.steps_per_rollout == 0:
            self._scoring.end_rollout()
        if self.is_audited(step):
            self.ledger.audited_steps.append(step)
            if len(set(gathered(self._weights.check_frozen()))) > 1:
                self._report(f"the workers have different weights after step {step}: gradients were not averaged")
            self._check_settings()
        self._check_accuracies()
        self._check_checkpoint(step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """Compare the rewards of the step, then refuse the run if any worker found a problem."""
        if not logs or "loss" not in logs:
            return
        step, mean = self.ledger.steps, self._rollouts.mean_reward
        if "reward" in logs and abs(logs["reward"] - mean) > 1e-5:
            # The cause of wrong advantages and gradients, which need no line of their own.
            found = f"the trainer's mean is {logs['reward']:.4g}, the texts graded again give {mean:.4g}"
            self._refuse([f"rewards of step {step}: {found}"])
        if self.is_audited(step):
            self._refuse([problem for problems in gathered(self.ledger.problems) for problem in problems])
        self._refuse(self.ledger.problems)
        if step in self._receipt_steps:
            try:
                self._trainer.noise_plan.recorder.receipt().check(step)
            except ReceiptError as error:
                # Rewards of other workers, or of later steps on the same rollout, may differ within their groups.
                if self.ledger.had_advantage or not _is_about_gradients(error):
                    raise

    # -- the end of a run ----------------------------------------------------------------------------------------------

    def lacks_only_gradients(self, error: ReceiptError) -> bool:
        """Return whether a receipt was refused as no reward differed within a group: no gradient, so no noise on it."""
        return _is_about_gradients(error) and not self.ledger.differing_groups

    def why_no_gradient(self) -> str:
        """Return what the rewards of a run were in which no group had different ones."""
        completions = self.ledger.completions
        if self._spec.training.rewards or any(self.ledger.correct):
            return (
                f"no reward that differs within a group: each of {completions} responses has the reward of its whole "
                "group; expected other questions or training.rewards, or a higher training.temperature"
            )
        return (
            f"no reward in any group: all {completions} responses have reward 0; expected a model that sometimes ends "
            "with `#### number`, easier questions, or a larger training.max_response_tokens"
        )

    def facts(self) -> TrainingFacts:
        """Return the facts of this worker so far."""
        found = {name: value for name, value in self.ledger if name in TrainingFacts.model_fields}
        found["recomputed"] = dict(sorted(self.ledger.recomputed.items()))
        return TrainingFacts(**found, num_workers=rank_and_size()[1], not_checked=self._not_checked)

    def facts_of_all(self) -> TrainingFacts:
        """Return the checked facts of the run; a collective operation. Raises ReceiptError on any difference."""
        # Settings may have changed behind the last audited step.
        self._check_settings()
        self._check_accuracies()
        facts = merged_facts(gathered(self.facts()))
        self._refuse(facts.problems or fact_problems(facts, self._spec))
        return facts

    def _check_settings(self) -> None:
        check_trainer(self._trainer, self._spec, self.ledger)
        check_adapters(self._model, self._spec, self.ledger)

    def _check_accuracies(self) -> None:
        """Compare the accuracies that the run will store with the validations that were graded again."""
        for step, accuracy in self._trainer.validation_accuracy.items():
            found = self.ledger.validated.get(step, math.nan) / len(self._tests.golds)
            if not abs(accuracy - found) <= 1e-12:
                stored = f"validation after step {step} is stored with an accuracy of {accuracy:.4g}"
                self._report(f"{stored}, graded again it is {found:.4g}")

    def _refuse(self, problems: Sequence[str]) -> None:
        if problems:
            shown = "; ".join(list(dict.fromkeys(problems))[:_SHOWN])
            raise ReceiptError(f"receipt invalid: training: {shown}")

    def _check_checkpoint(self, step: int) -> None:
        folder, is_first = self._checkpoint_folder / f"step{step}", rank_and_size()[0] == 0
        is_declared = step in self._spec.training.checkpoint_steps(self._spec.num_steps)
        # Of a folder that is missing, the stage refuses the run.
        if not is_declared or not (is_first or is_sharded(self._model)) or not folder.is_dir():
            return
        are_those_in_memory = self._weights.check_checkpoint(folder, step)
        if not is_first:
            return
        if are_those_in_memory:
            files = {path.name: path for path in sorted(folder.glob("*.safetensors"))}
            self.ledger.checkpoints[step] = sha256_of_files(files)
        saved = load_tokenizer(folder)
        found, own = ((each.get_vocab(), each.eos_token_id, each.pad_token_id) for each in (saved, self._tokenizer))
        if found != own or self._test_questions(saved).prompts != self._tests.prompts:
            self._report(
                f"the checkpoint of step {step} has another tokenizer than the training: other token ids of the "
                "vocabulary, of the end and padding tokens or of test prompts"
            )

    def _test_questions(self, tokenizer: Any) -> Questions:
        table, examples = self._test_files
        return read_questions(table, self._spec.prompt, tokenizer, examples, self._spec.training.validation_questions)


def _is_about_gradients(error: ReceiptError) -> bool:
    return bool(error.problems) and all(map(_OF_A_GRADIENT.match, error.problems))


def merged_facts(facts: Sequence[TrainingFacts]) -> TrainingFacts:
    """Return the facts of all workers, by rank, as those of the run. Counts that all workers share must be equal."""
    first, recomputed = facts[0], Ledger()
    problems = [f"worker {rank}: {problem}" for rank, of in enumerate(facts) for problem in of.problems]
    for name in ("steps", "audited_steps", "verified_steps", "correct", "validated"):
        if any(getattr(of, name) != getattr(first, name) for of in facts):
            problems.append(f"the workers have different {name.replace('_', ' ')}")
    for name, entry in (pair for of in facts for pair in of.recomputed.items()):
        recomputed.note(name, entry.compared, entry.worst)
    # Every worker has compared the rate of every step.
    recomputed.recomputed[RATES] = min((of.recomputed[RATES] for of in facts), key=lambda entry: entry.compared)
    found = {"recomputed": recomputed.recomputed, "problems": tuple(problems if len(facts) > 1 else first.problems)}
    return first.model_copy(update=found)
