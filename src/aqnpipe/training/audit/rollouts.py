"""Audit of rollouts: prompts in the order of the run's seed, completions graded again, tokens drawn again."""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from aqnpipe.artifacts.files import read_table
from aqnpipe.artifacts.problems import ProblemTable
from aqnpipe.artifacts.training_facts import DRAWS, EXPERTS
from aqnpipe.config.run import TrainingSpec
from aqnpipe.data.examples import choose_examples
from aqnpipe.data.graders import grader
from aqnpipe.data.prompts import end_of_response, prompt_token_ids
from aqnpipe.data.rewards import weighted_rewards
from aqnpipe.generation.backend import Completion, RoutedCompletion, Sampling
from aqnpipe.generation.rollout_engines import Rollout, RolloutEngine
from aqnpipe.noise.receipts.recorder import ReceiptRecorder
from aqnpipe.reference import grpo
from aqnpipe.reference.decoder import Choice, DecodingTrace
from aqnpipe.seeding import derive_seed
from aqnpipe.training.audit.measure import Errors
from aqnpipe.training.audit.scoring import Completed, RolloutBook
from aqnpipe.training.ranks import gathered, rank_and_size


@dataclass(frozen=True)
class Questions:
    """The questions of one table, as this audit reads them: ids, prompts (token ids) and gold answers."""

    ids: list[str]
    prompts: list[list[int]]
    golds: list[str]

    @classmethod
    def read(
        cls, spec: TrainingSpec, table: Any, train_table: Any, tokenizer: Any, limit: int | None = None
    ) -> "Questions":
        """Return the first `limit` questions (None: all) of the file `table`; examples come from `train_table`."""
        problems = read_table(table, ProblemTable)
        problems = problems if limit is None else problems.head(limit)
        examples = choose_examples(spec.prompt, train_table)
        prompts = prompt_token_ids(problems["question"], spec.prompt, tokenizer, examples)
        return cls(problems["question_id"].to_list(), prompts, problems["gold_answer"].to_list())


def questions_of_rollout(num_questions: int, rollout: int, spec: TrainingSpec) -> list[int]:
    """Return the places of the questions of a rollout of all workers, each as often as it is completed.

    Every epoch is a permutation that the run's seed and the epoch key; an incomplete rollout at its end is dropped.
    """
    training = spec.training
    size = training.prompts_per_step * training.steps_per_rollout
    epoch, place = divmod(rollout, num_questions // size)
    generator = torch.Generator().manual_seed(derive_seed(spec.random_seed, "prompts", epoch))
    order = torch.randperm(num_questions, generator=generator).tolist()[place * size : (place + 1) * size]
    return [question for question in order for _ in range(training.rollouts_per_prompt)]


def strict_rewards(texts: Sequence[str], golds: Sequence[str]) -> list[float]:
    """Return 1 for every text with the gold answer behind `####`, otherwise 0."""
    grade = grader("strict")
    return [float(grade(text, gold).correct) for text, gold in zip(texts, golds, strict=True)]


class RolloutAudit:
    """Compares the rollouts of one worker with those that the study asks for."""

    def __init__(
        self, spec: TrainingSpec, questions: Questions, tokenizer: Any, errors: Errors, report: Callable[[str], None]
    ) -> None:
        self.rollouts = 0
        self.completions = 0
        self.correct: list[int] = []
        self.mean_reward = 0.0
        self.differing_groups = 0
        self.prompts_sha256 = ""
        self._spec = spec
        self._questions = questions
        self._tokenizer = tokenizer
        self._errors = errors
        self._report = report
        self._trace: DecodingTrace | None = None

    @property
    def trace(self) -> DecodingTrace | None:
        """The trace of the rollout that is under way, if its step is audited."""
        return self._trace

    def begin(self, rollout: Rollout, step: int, is_audited: bool) -> None:
        """Compare the request for the rollout after `step` updates with the study."""
        rank, workers = rank_and_size()
        share = self._share(rank, workers)
        self._check_prompts(rollout.prompts, share, step)
        rows = len(share)
        training = self._spec.training
        seed = derive_seed(self._spec.random_seed, "sampling", step)
        expected = {
            "max_response_tokens": training.max_response_tokens,
            "temperature": training.temperature,
            "seed": seed,
            "first_row": rank * rows,
            "num_rows": workers * rows,
            "stop_text": None,
        }
        self._check_sampling(rollout.sampling, expected, step)
        if rollout.key.step != step or rollout.key.seed != self._spec.random_seed or rollout.key.rank != rank:
            self._report(f"the noise of the rollout after step {step} has the key {rollout.key}")
        choice = Choice(training.temperature, seed, rank * rows, workers * rows)
        self._trace = DecodingTrace(rollout.prompts, self._tokenizer.pad_token_id, choice) if is_audited else None

    def end(self, completions: Sequence[Completion], step: int) -> RolloutBook:
        """Grade the completions, check the choice of their tokens, and return what must be trained on."""
        rank, workers = rank_and_size()
        share = self._share(rank, workers)
        responses = [list(completion.token_ids) for completion in completions]
        if len(responses) != len(share):
            self._report(f"{len(responses)} completions after step {step}, the study asks for {len(share)}")
            return RolloutBook()
        self._check_ends(responses, step)
        if self._trace is not None:
            check_decoding(DRAWS, self._trace, responses, self._errors, self._report)
            noted = [completion.log_probabilities or [] for completion in completions]
            if (problem := self._trace.noted_problem(noted, responses)) is not None:
                self._report(f"{DRAWS}: {problem}")
            self._check_experts(self._trace, completions)
            self._trace = None
        texts = self._tokenizer.batch_decode(responses, skip_special_tokens=True)
        golds = [self._questions.golds[question] for question in share]
        rewards = self._rewards(texts, golds)
        size = self._spec.training.rollouts_per_prompt
        differing = sum(len({*rewards[start : start + size]}) > 1 for start in range(0, len(rewards), size))
        rewarded = sum(reward > 0 for reward in rewards)
        every = gathered((sum(map(len, responses)), rewarded, len(rewards), differing))
        tokens, correct, count, groups = (sum(values) for values in zip(*every, strict=True))
        self.mean_reward = math.fsum(gathered(math.fsum(rewards))) / count
        self.rollouts += 1
        self.completions += count
        self.correct.append(correct)
        self.differing_groups += groups
        ids = "\n".join(self._questions.ids[question] for question in share)
        self.prompts_sha256 = hashlib.sha256(f"{self.prompts_sha256}{ids}".encode()).hexdigest()
        rows = [
            (tuple(self._questions.prompts[question]), tuple(response))
            for question, response in zip(share, responses, strict=True)
        ]
        sampled = [completion.log_probabilities or [] for completion in completions]
        experts = _experts_of(completions)
        centred, advantages = grpo.centred(rewards, size), grpo.advantages(rewards, size)
        values = zip(rows, rewards, centred, advantages, sampled, experts, strict=True)
        return RolloutBook([Completed(*of_row) for of_row in values], tokens / workers)

    def _check_experts(self, trace: DecodingTrace, completions: Sequence[Completion]) -> None:
        """Compare the experts that the sampler noted with those that ran."""
        ran = trace.experts([completion.token_ids for completion in completions])
        noted = _experts_of(completions)
        wrong = [
            row for row, own in enumerate(noted) if own is not None and not torch.equal(own, ran.get(row, own[:0]))
        ]
        compared = sum(len(own) for own in noted if own is not None)
        if compared:
            self._errors.note(EXPERTS, compared, 2.0 if wrong else 0.0)
        if wrong:
            self._report(f"{EXPERTS}: row {wrong[0]}: they are not those that ran ({len(wrong)} of {len(noted)} rows)")

    def _rewards(self, texts: Sequence[str], golds: Sequence[str]) -> list[float]:
        """Return the rewards of completions again: 1 for those that are correct, or by the study's own functions."""
        cut = [end_of_response(text, self._spec.prompt.stop_text) for text in texts]
        own = self._spec.training.rewards
        return weighted_rewards(own, cut, golds) if own else strict_rewards(cut, golds)

    def _share(self, rank: int, workers: int) -> list[int]:
        whole = questions_of_rollout(len(self._questions.ids), self.rollouts, self._spec)
        rows = len(whole) // workers
        return whole[rank * rows : (rank + 1) * rows]

    def _check_prompts(self, prompts: Sequence[Sequence[int]], share: Sequence[int], step: int) -> None:
        found = [tuple(prompt) for prompt in prompts]
        expected = [tuple(self._questions.prompts[question]) for question in share]
        if found == expected:
            return
        known = {tuple(prompt) for prompt in self._questions.prompts}
        unknown = sum(prompt not in known for prompt in found)
        if unknown:
            cause = f"{unknown} of {len(found)} are no prompts of the training questions"
        elif len(found) != len(expected):
            cause = f"{len(found)} prompts, the study asks for {len(expected)}"
        elif len(set(found)) < len(set(expected)):
            cause = f"{len(set(found))} different prompts, the study asks for {len(set(expected))}: some are repeated"
        elif sorted(found) == sorted(expected):
            cause = "they are in another order"
        else:
            cause = "they are not the questions of the seed's order (repeated, skipped or of another seed)"
        self._report(f"prompts of the rollout after step {step}: {cause}")

    def _check_sampling(self, sampling: Sampling, expected: dict[str, Any], step: int) -> None:
        for name, value in expected.items():
            if getattr(sampling, name) != value:
                self._report(
                    f"sampling {name} of the rollout after step {step} is {getattr(sampling, name)!r}, the study asks "
                    f"for {value!r}"
                )

    def _check_ends(self, responses: Sequence[Sequence[int]], step: int) -> None:
        end, limit = self._tokenizer.eos_token_id, self._spec.training.max_response_tokens
        for response in responses:
            if not response or len(response) > limit or (response[-1] != end and len(response) != limit):
                self._report(
                    f"a completion after step {step} has {len(response)} tokens and no end token, the study allows "
                    f"{limit}"
                )
                return
            if end in response[:-1]:
                self._report(f"a completion after step {step} continues behind its end token")
                return


def _experts_of(completions: Sequence[Completion]) -> list[Tensor | None]:
    return [completion.experts if isinstance(completion, RoutedCompletion) else None for completion in completions]


def check_decoding(
    name: str,
    trace: DecodingTrace,
    responses: Sequence[Sequence[int]],
    errors: Errors,
    report: Callable[[str], None],
) -> None:
    """Compare responses with the trace of their decoding; report the first row that differs."""
    verdict = trace.judge(responses)
    errors.note(name, verdict.compared, max(verdict.gaps, default=0.0))
    if trace.prompts_read != trace.prompts:
        report(f"{name}: the network read prompts that were not requested")
    for row, text in verdict.findings[:1]:
        others = f" ({len(verdict.findings)} of {len(responses)} rows)" if len(verdict.findings) > 1 else ""
        report(f"{name}: {'' if row is None else f'row {row}: '}{text}{others}")


class AuditedEngine:
    """A rollout engine whose requests and completions are audited. `begin` and `end` belong to the run's audit."""

    def __init__(
        self,
        engine: RolloutEngine,
        begin: Callable[[Rollout], None],
        end: Callable[[Sequence[Completion]], None],
    ) -> None:
        self._engine, self._begin, self._end = engine, begin, end

    def roll_out(self, policy: nn.Module, recorder: ReceiptRecorder, rollout: Rollout) -> list[Completion]:
        """Return the completions of the engine."""
        self._begin(rollout)
        completions = self._engine.roll_out(policy, recorder, rollout)
        self._end(completions)
        return completions

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()
