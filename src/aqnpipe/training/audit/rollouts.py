"""Audit of rollouts: prompts in the order of the run's seed, completions graded again, tokens drawn again.

Of a mixture, hooks of the audit's own at the modules that compute experts observe which of them run: what the sampler
noted must be what ran in an audited rollout. With routing replay every pass of the policy over sampled tokens must run
exactly these experts, and a backward pass that computes layers again those of its forward.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from aqnpipe.artifacts.training_facts import DRAWS, EXPERTS, REPLAYED
from aqnpipe.config.run import TrainingSpec
from aqnpipe.data.graders import grader, weighted_rewards
from aqnpipe.data.prompts import Questions, end_of_response
from aqnpipe.generation.backend import Completion, RoutedCompletion, Sampling
from aqnpipe.generation.rollout_engines import Rollout
from aqnpipe.reference import grpo
from aqnpipe.reference.decoder import Choice, DecodingTrace, Verdict, end_problem, unobserved
from aqnpipe.seeding import derive_seed
from aqnpipe.training.audit.measure import Ledger
from aqnpipe.training.ranks import gathered, rank_and_size

Row = tuple[tuple[int, ...], tuple[int, ...]]
"""Token ids of a prompt and of its completion."""


@dataclass
class Completed:
    """One completion of the current rollout, and its log-probabilities by place, as far as forwards computed them.

    `sampled` and `experts` are what the sampler noted.
    """

    row: Row
    reward: float
    centred: float
    advantage: float
    sampled: Sequence[float]
    experts: Tensor | None = None
    reference: dict[int, float] | None = None
    old: dict[int, float] | None = None
    is_trained: bool = False

    @property
    def has_advantage(self) -> bool:
        """Return whether the reward differs from the mean of its group by more than rounding."""
        return not math.isclose(self.reward, self.reward - self.centred)


@dataclass
class RolloutBook:
    """The completions of one rollout on this worker. `tokens`: of all workers together, as a mean per worker."""

    completions: list[Completed] = field(default_factory=list)
    tokens_per_worker: float = 0.0

    def __post_init__(self) -> None:
        self._by_row: dict[Row, list[Completed]] = defaultdict(list)
        for completed in self.completions:
            self._by_row[completed.row].append(completed)

    def candidates(self, row: Row) -> list[Completed]:
        """Return the completions with these tokens: several rows of a group may have the same."""
        return self._by_row.get(row, [])

    def take(self, row: Row) -> str | None:
        """Note that a row is trained on; return what is wrong with it."""
        found = self.candidates(row)
        if not found:
            return "a micro-batch has a row that is no completion of the rollout (other tokens, or another mask)"
        free = next((completed for completed in found if not completed.is_trained), None)
        if free is None:
            return "a completion was trained on twice"
        free.is_trained = True
        return None


def rows_of(kwargs: Mapping[str, Any]) -> tuple[list[Row], int]:
    """Return the rows that a scoring forward read, without padding, and its number of completion places."""
    ids, mask, columns = kwargs["input_ids"], kwargs["attention_mask"].bool(), int(kwargs["logits_to_keep"]) - 1
    prompts, completions = (
        [tuple(row[shown].tolist()) for row, shown in zip(ids[:, part].cpu(), mask[:, part].cpu(), strict=True)]
        for part in (slice(None, -columns), slice(-columns, None))
    )
    return list(zip(prompts, completions, strict=True)), columns


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
        self._spec, self._questions, self._tokenizer = spec, questions, tokenizer
        self._ledger, self._report = ledger, ledger.report

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
        if (rollout.key.step, rollout.key.seed, rollout.key.rank) != (step, spec.random_seed, rank):
            self._report(f"the noise of the rollout after step {step} has the key {rollout.key}")
        choice = Choice(expected.temperature, expected.seed, expected.first_row, expected.num_rows)
        self.trace = DecodingTrace(rollout.prompts, self._tokenizer.pad_token_id, choice) if is_audited else None

    def end(self, completions: Sequence[Completion], step: int) -> RolloutBook:
        """Grade the completions, check the choice of their tokens, and return what must be trained on."""
        rank, workers = rank_and_size()
        share, trace, self.trace = self._share(rank, workers), self.trace, None
        responses = [list(completion.token_ids) for completion in completions]
        if len(responses) != len(share):
            self._report(f"{len(responses)} completions after step {step}, the study asks for {len(share)}")
            return RolloutBook()
        limit, end = self._spec.training.max_response_tokens, self._tokenizer.eos_token_id
        ends = (end_problem(response, limit, end) for response in responses)
        if (problem := next(filter(None, ends), None)) is not None:
            self._report(f"a completion after step {step}: {problem}")
        sampled = [completion.log_probabilities or [] for completion in completions]
        experts = [one.experts if isinstance(one, RoutedCompletion) else None for one in completions]
        if trace is not None:
            verdict = check_decoding(DRAWS, trace, responses, self._ledger, sampled)
            self._check_experts(experts, verdict)
        texts = self._tokenizer.batch_decode(responses, skip_special_tokens=True)
        rewards = self._rewards(texts, [self._questions.golds[question] for question in share])
        self._count(rewards)
        size = self._spec.training.rollouts_per_prompt
        prompts = (tuple(self._questions.prompts[question]) for question in share)
        rows = zip(prompts, map(tuple, responses), strict=True)
        values = (rewards, grpo.centred(rewards, size), grpo.advantages(rewards, size), sampled, experts)
        tokens = sum(gathered(sum(map(len, responses))))
        return RolloutBook([Completed(*of_row) for of_row in zip(rows, *values, strict=True)], tokens / workers)

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

    def _check_experts(self, noted: Sequence[Tensor | None], verdict: Verdict) -> None:
        """Compare the experts that the sampler noted by row with those that ran."""
        own = {row: experts for row, experts in enumerate(noted) if experts is not None}
        wrong = [row for row in own if not torch.equal(own[row], verdict.experts.get(row, torch.empty(0)))]
        if own:
            self._ledger.note(EXPERTS, sum(map(len, own.values())), 2.0 if wrong else 0.0)
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
        if found != [tuple(self._questions.prompts[question]) for question in share]:
            known = {tuple(prompt) for prompt in self._questions.prompts}
            self._report(
                f"prompts of the rollout after step {step}: they are not the questions of the seed's order, "
                f"{sum(prompt not in known for prompt in found)} of {len(found)} are no training questions"
            )


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


class RoutingAudit:
    """Observes the experts of one worker's policy; of a dense model it observes nothing."""

    def __init__(self, model: nn.Module, ledger: Ledger, *, replays: bool) -> None:
        self._ledger, self._replays = ledger, replays
        self._running: dict[int, Tensor] = {}
        named = (module for name, module in model.named_modules() if name.endswith(".experts"))
        for number, module in enumerate(module for module in named if not isinstance(module, nn.ModuleList)):
            module.register_forward_pre_hook(partial(self._note, number))

    def _note(self, number: int, module: nn.Module, args: Sequence[Any]) -> None:
        found = [value for value in args if isinstance(value, Tensor) and not value.is_floating_point()]
        if not found:
            return
        if torch._C._current_autograd_node() is None:
            self._running[number] = found[0]
        elif self._replays:
            with unobserved():
                if not torch.equal(found[0], self._running[number]):
                    self._ledger.report(
                        "a backward pass has computed a layer again with other experts than its forward"
                    )

    def of_pass(self, rows: int) -> Tensor | None:
        """Return the experts of the last pass, [rows, places, slots] on the host; None if none ran."""
        if not self._running:
            return None
        with unobserved():
            experts = torch.cat([self._running[number] for number in sorted(self._running)], -1)
            return experts.unflatten(0, (rows, -1)).to("cpu", torch.int16)

    def check_replay(self, kwargs: Mapping[str, Any], book: RolloutBook) -> None:
        """Compare the experts of a pass of the policy over completions with those that the sampler noted."""
        if not self._replays:
            return
        rows, experts = rows_of(kwargs)[0], self.of_pass(len(kwargs["input_ids"]))
        for place, (row, visible) in enumerate(zip(rows, kwargs["attention_mask"].bool().cpu(), strict=True)):
            # The sampler did not read the last token.
            found = None if experts is None else experts[place][visible][:-1]
            noted = [completed.experts for completed in book.candidates(row) if completed.experts is not None]
            is_replayed = found is not None and any(torch.equal(found, of_row) for of_row in noted)
            self._ledger.note(REPLAYED, sum(map(len, row)) - 1, 0.0 if is_replayed else 2.0)
            if not is_replayed:
                self._ledger.report(
                    "a forward pass of the policy has not run the experts that the sampler's routers chose"
                )
