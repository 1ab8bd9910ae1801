"""Audit of rollouts: prompts in the order of the run's seed, completions graded again, tokens drawn again."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from aqnpipe.artifacts.training_facts import DRAWS, EXPERTS
from aqnpipe.config.run import TrainingSpec
from aqnpipe.data.graders import grader, weighted_rewards
from aqnpipe.data.prompts import Questions, end_of_response
from aqnpipe.generation.backend import Completion, RoutedCompletion, Sampling
from aqnpipe.generation.rollout_engines import Rollout
from aqnpipe.reference import grpo
from aqnpipe.reference.decoder import Choice, DecodingTrace, Verdict, end_problem
from aqnpipe.seeding import derive_seed
from aqnpipe.training.audit.measure import Ledger
from aqnpipe.training.audit.scoring import Completed, RolloutBook
from aqnpipe.training.ranks import gathered, rank_and_size


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
    """Compares the rollouts of one worker with those that the study asks for.

    trace: of the rollout that is under way, if its step is audited. mean_reward: of the last rollout, of all workers.
    """

    def __init__(self, spec: TrainingSpec, questions: Questions, tokenizer: Any, ledger: Ledger) -> None:
        self.trace: DecodingTrace | None = None
        self.mean_reward = 0.0
        self._spec = spec
        self._questions = questions
        self._tokenizer = tokenizer
        self._ledger = ledger
        self._report = ledger.report

    def begin(self, rollout: Rollout, step: int, is_audited: bool) -> None:
        """Compare the request for the rollout after `step` updates with the study."""
        rank, workers = rank_and_size()
        share, spec = self._share(rank, workers), self._spec
        self._check_prompts(rollout.prompts, share, step)
        expected = Sampling(
            max_response_tokens=spec.training.max_response_tokens,
            temperature=spec.training.temperature,
            seed=derive_seed(spec.random_seed, "sampling", step),
            first_row=rank * len(share),
            num_rows=workers * len(share),
            log_probabilities=True,
        )
        for name, value in vars(expected).items():
            if (found := getattr(rollout.sampling, name)) != value:
                where = f"sampling {name} of the rollout after step {step}"
                self._report(f"{where} is {found!r}, the study asks for {value!r}")
        if rollout.key.step != step or rollout.key.seed != spec.random_seed or rollout.key.rank != rank:
            self._report(f"the noise of the rollout after step {step} has the key {rollout.key}")
        choice = Choice(expected.temperature, expected.seed, expected.first_row, expected.num_rows)
        self.trace = DecodingTrace(rollout.prompts, self._tokenizer.pad_token_id, choice) if is_audited else None

    def end(self, completions: Sequence[Completion], step: int) -> RolloutBook:
        """Grade the completions, check the choice of their tokens, and return what must be trained on."""
        rank, workers = rank_and_size()
        share = self._share(rank, workers)
        responses = [list(completion.token_ids) for completion in completions]
        if len(responses) != len(share):
            self._report(f"{len(responses)} completions after step {step}, the study asks for {len(share)}")
            return RolloutBook()
        limit, end = self._spec.training.max_response_tokens, self._tokenizer.eos_token_id
        ends = (end_problem(response, limit, end) for response in responses)
        if (problem := next(filter(None, ends), None)) is not None:
            self._report(f"a completion after step {step}: {problem}")
        sampled = [completion.log_probabilities or [] for completion in completions]
        if self.trace is not None:
            verdict = check_decoding(DRAWS, self.trace, responses, self._ledger, sampled)
            self._check_experts(verdict, completions)
            self.trace = None
        texts = self._tokenizer.batch_decode(responses, skip_special_tokens=True)
        rewards = self._rewards(texts, [self._questions.golds[question] for question in share])
        self._count(rewards)
        size = self._spec.training.rollouts_per_prompt
        rows = [
            (tuple(self._questions.prompts[question]), tuple(response))
            for question, response in zip(share, responses, strict=True)
        ]
        centred, advantages = grpo.centred(rewards, size), grpo.advantages(rewards, size)
        values = zip(rows, rewards, centred, advantages, sampled, _experts_of(completions), strict=True)
        tokens = sum(gathered(sum(map(len, responses))))
        return RolloutBook([Completed(*of_row) for of_row in values], tokens / workers)

    def _count(self, rewards: Sequence[float]) -> None:
        """Add the rewards of a rollout, of all workers together."""
        ledger, size = self._ledger, self._spec.training.rollouts_per_prompt
        differing = sum(len({*rewards[start : start + size]}) > 1 for start in range(0, len(rewards), size))
        every = gathered((sum(reward > 0 for reward in rewards), len(rewards), differing, math.fsum(rewards)))
        correct, counts, groups, sums = zip(*every, strict=True)
        self.mean_reward = math.fsum(sums) / sum(counts)
        ledger.completions += sum(counts)
        ledger.correct.append(sum(correct))
        ledger.differing_groups += sum(groups)

    def _check_experts(self, verdict: Verdict, completions: Sequence[Completion]) -> None:
        """Compare the experts that the sampler noted with those that ran."""
        noted = _experts_of(completions)
        ran = [verdict.experts.get(row, torch.empty(0)) for row in range(len(noted))]
        pairs = enumerate(zip(noted, ran, strict=True))
        wrong = [row for row, (own, found) in pairs if own is not None and not torch.equal(own, found)]
        compared = sum(len(own) for own in noted if own is not None)
        if compared:
            self._ledger.note(EXPERTS, compared, 2.0 if wrong else 0.0)
        if wrong:
            rows = f"{len(wrong)} of {len(noted)} rows"
            self._report(f"{EXPERTS}: row {wrong[0]}: they are not those that ran ({rows})")

    def _rewards(self, texts: Sequence[str], golds: Sequence[str]) -> list[float]:
        """Return the rewards of completions again: 1 for those that are correct, or by the study's own functions."""
        cut = [end_of_response(text, self._spec.prompt.stop_text) for text in texts]
        own = self._spec.training.rewards
        return weighted_rewards(own, cut, golds) if own else strict_rewards(cut, golds)

    def _share(self, rank: int, workers: int) -> list[int]:
        whole = questions_of_rollout(len(self._questions.ids), len(self._ledger.correct), self._spec)
        rows = len(whole) // workers
        return whole[rank * rows : (rank + 1) * rows]

    def _check_prompts(self, prompts: Sequence[Sequence[int]], share: Sequence[int], step: int) -> None:
        found = [tuple(prompt) for prompt in prompts]
        expected = [tuple(self._questions.prompts[question]) for question in share]
        if found == expected:
            return
        known = {tuple(prompt) for prompt in self._questions.prompts}
        self._report(
            f"prompts of the rollout after step {step}: they are not the questions of the seed's order, "
            f"{sum(prompt not in known for prompt in found)} of {len(found)} are no training questions"
        )


def _experts_of(completions: Sequence[Completion]) -> list[Tensor | None]:
    return [completion.experts if isinstance(completion, RoutedCompletion) else None for completion in completions]


def check_decoding(
    name: str,
    trace: DecodingTrace,
    responses: Sequence[Sequence[int]],
    ledger: Ledger,
    noted: Sequence[Sequence[float]] = (),
) -> Verdict:
    """Compare responses with the trace of their decoding; report the first row that differs."""
    verdict = trace.judge(responses, noted)
    ledger.note(name, verdict.compared, max(verdict.gaps, default=0.0))
    if trace.prompts_read != trace.prompts:
        ledger.report(f"{name}: the network read prompts that were not requested")
    for row, text in verdict.findings[:1]:
        others = f" ({len(verdict.findings)} of {len(responses)} rows)" if len(verdict.findings) > 1 else ""
        ledger.report(f"{name}: {'' if row is None else f'row {row}: '}{text}{others}")
    if verdict.noted:
        ledger.report(f"{name}: {verdict.noted}")
    return verdict
