"""CPU time of a GRPO step on sequences with the lengths of GSM8K: padded micro-batches against micro-batches by tokens.

Two trainers of the default study's model take turns, one optimiser step each, on the same rollouts of random tokens.
Their prompts and responses have the lengths of `--questions`, a folder with GSM8K's train.jsonl; 4 steps learn from a
rollout, as in the published runs. Tokens per second: those of prompts and responses, without padding, by the CPU time
of everything but the generation of the responses (reference, old log-probabilities, forward and backward passes,
optimiser). A token is a word, a digit or another sign. Responses have the lengths of GSM8K's answers without
calculator annotations, times `--response-scale`. Without `--questions` lengths are drawn from normal distributions
with the means and deviations of GSM8K.
"""

import argparse
import json
import re
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from smallest import parse
from training_overhead import Bench, NoAudit, Stopwatch, Turns
from transformers.utils import logging as transformers_logging

from aqnpipe.config.run import TrainingSpec
from aqnpipe.generation.backend import Completion
from aqnpipe.generation.rollout_engines import Rollout
from aqnpipe.training import run
from aqnpipe.training.run import _build_trainer
from aqnpipe.training.workspace import Workspace

_TOKEN = re.compile(r"\d|[^\W\d]+|[^\w\s]")
_INSTRUCTION = 45
"""Tokens of the chat template and the published instruction."""
_MEANS, _DEVIATIONS = (55, 81.5), (20.6, 37.6)
"""Of the tokens of GSM8K's questions and answers."""


def lengths_of(questions: Path | None, response_scale: float) -> list[tuple[int, int]]:
    """Return pairs of lengths of prompt and response."""
    if questions is None:
        drawn = np.random.default_rng(0).normal(_MEANS, _DEVIATIONS, (2000, 2)).clip(20)
        pairs = [(int(question), int(answer)) for question, answer in drawn]
    else:
        rows = [json.loads(line) for line in (questions / "train.jsonl").read_text().splitlines()]
        texts = [(row["question"], re.sub(r"<<.*?>>", "", row["answer"])) for row in rows]
        pairs = [(len(_TOKEN.findall(question)), len(_TOKEN.findall(answer))) for question, answer in texts]
    return [(prompt + _INSTRUCTION, int(response * response_scale)) for prompt, response in pairs]


class Measured(NamedTuple):
    """CPU seconds of each step of one trainer, and the tokens of each of its rollouts."""

    seconds: list[float]
    tokens: dict[int, int]

    @property
    def by_rollout(self) -> list[float]:
        """CPU seconds of the four steps of each rollout."""
        return [sum(self.seconds[start : start + 4]) for start in range(0, len(self.seconds), 4)]


class Replayed:
    """A rollout engine and a tokenizer of prompts in one: random tokens with drawn lengths, equal for all trainers."""

    def __init__(self, lengths: Sequence[tuple[int, int]], spec: TrainingSpec, end_token: int) -> None:
        self.tokens: dict[int, int] = {}
        self._lengths, self._rollouts, self._end = lengths, spec.training.rollouts_per_prompt, end_token
        self._rng = np.random.default_rng(1)

    def prompts(self, texts: Sequence[str]) -> tuple[list[list[int]], None, dict[str, Any]]:
        """Return token ids in place of `texts`; the rollouts of a prompt are neighbours."""
        drawn = [self._draw(self._lengths[self._rng.integers(len(self._lengths))][0]) for _ in texts[:: self._rollouts]]
        return [prompt for prompt in drawn for _ in range(self._rollouts)], None, {}

    def roll_out(self, policy: Any, recorder: Any, rollout: Rollout) -> list[Completion]:
        """Return responses of drawn lengths; counts their tokens and those of their prompts by step."""
        responses = [self._draw(self._lengths[self._rng.integers(len(self._lengths))][1]) for _ in rollout.prompts]
        self.tokens[rollout.key.step] = sum(map(len, rollout.prompts)) + sum(map(len, responses))
        recorder.add("rollout", passes=1)
        return [Completion([*response[:-1], self._end], "stop", [-1.0] * len(response)) for response in responses]

    def close(self) -> None:
        """Nothing to close."""

    def _draw(self, length: int) -> list[int]:
        return [int(token) for token in self._rng.integers(3, 60, length)]


def spec_of(bench: Bench, arm: str, steps: int, sizes: dict[str, int | None], is_smallest: bool) -> TrainingSpec:
    """Return the default study's run of `arm`, with the published numbers of rollouts and of steps per rollout."""
    spec = bench.spec(arm, steps)
    training = spec.training.model_dump() | {
        "prompts_per_step": 2 if is_smallest else 8,
        "rollouts_per_prompt": 5,
        "steps_per_rollout": 4,
        "max_response_tokens": 1024,
        "stop_loss": 1e30,
        "stop_grad_norm": 1e30,
    }
    return TrainingSpec.model_validate(spec.model_dump() | {"training": training | sizes})


def measure(bench: Bench, specs: dict[str, TrainingSpec], lengths: Sequence[tuple[int, int]]) -> dict[str, Measured]:
    """Return what a trainer of each spec took for its steps, which it makes in turns with the others."""
    turns, tokenizer = Turns(len(specs)), bench.tokenizer()
    engines = [Replayed(lengths, spec, tokenizer.eos_token_id) for spec in specs.values()]
    watches = [Stopwatch(turns, place) for place in range(len(specs))]
    with ThreadPoolExecutor() as threads:
        trainings = [
            threads.submit(trainer_of(bench, spec, engine, watch, name).train)
            for (name, spec), engine, watch in zip(specs.items(), engines, watches, strict=True)
        ]
        for training in as_completed(trainings):
            if training.exception():
                turns.end()
            training.result()
    if any(engine.tokens != engines[0].tokens for engine in engines):
        raise RuntimeError("the trainers had different rollouts")
    # The last step saves and validates; it is one of a rollout that is not counted.
    return {
        name: Measured(
            watch.seconds[:-1], {step: n for step, n in engine.tokens.items() if step < len(watch.seconds) - 1}
        )
        for name, watch, engine in zip(specs, watches, engines, strict=True)
    }


def trainer_of(bench: Bench, spec: TrainingSpec, engine: "Replayed", watch: Stopwatch, name: str) -> Any:
    """Return our trainer on replayed rollouts, without the audit, which expects responses of the policy."""
    rows = spec.training.prompts_per_step * spec.training.steps_per_rollout
    dataset = Dataset.from_dict({"prompt": ["?"] * rows, "gold_answer": ["1"] * rows, "stop_text": [None] * rows})
    workspace = Workspace(bench.folder / f"{spec.arm_id} {name}")
    trainer = _build_trainer(spec, bench.inputs, workspace, bench.tokenizer(), dataset, engine, lambda _: None)
    trainer._tokenize_prompts = engine.prompts  # type: ignore[method-assign, assignment]
    trainer.add_callback(watch)
    return trainer


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=Path, help="folder with GSM8K as train.jsonl")
    parser.add_argument("--response-scale", type=float, default=1.0, help="lengths of responses (default: 1)")
    parser.add_argument("--rollouts", type=int, default=3, help="batches of rollouts, of 4 steps each (default: 3)")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens per micro-batch (default: 4096)")
    parser.add_argument("--rows", type=int, default=8, help="rows of a padded micro-batch (default: 8)")
    parser.add_argument("--arms", nargs="+", default=["baseline", "E5"], help="arms (default: baseline and E5)")
    options = parse(parser, rollouts=1, tokens=1500, rows=5, arms=["baseline"])
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    lengths = lengths_of(options.questions, options.response_scale)
    table = Table("arm", "tokens", "padded tokens/s", "by tokens/s", "ratio", "ratio by rollout")
    sizes: dict[str, dict[str, int | None]] = {
        "padded": {"micro_batch_size": options.rows},
        "by tokens": {"micro_batch_size": None, "tokens_per_micro_batch": options.tokens},
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(run, "TrainingAudit", NoAudit),
        patch.object(run, "reward_correct", lambda completions, **_: [float(n % 2) for n in range(len(completions))]),
    ):
        bench = Bench(Path(folder))
        for arm in options.arms:
            steps = 4 * options.rollouts
            specs = {name: spec_of(bench, arm, steps, size, options.smallest) for name, size in sizes.items()}
            padded, packed = measure(bench, specs, lengths).values()
            ratios = [a / b for a, b in zip(padded.by_rollout, packed.by_rollout, strict=True)]
            table.add_row(
                arm,
                f"{sum(padded.tokens.values()):,}",
                *(f"{sum(found.tokens.values()) / sum(found.by_rollout):,.0f}" for found in (padded, packed)),
                f"{sum(padded.by_rollout) / sum(packed.by_rollout):.2f}",
                f"{min(ratios):.2f} to {max(ratios):.2f}",
            )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
