"""What operator noise costs on one CPU thread, as ratios measured in turn in one run.

    OMP_NUM_THREADS=1 python benchmarks/noise_overhead.py

Prints medians of the ratios over `ROUNDS` rounds: noise alone against the naive formula, a generation and a training
step of the tiny model with noise against the same without. The machine may be noisy: quote the ratios, not the seconds.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from aqnpipe.config.model import builtin_folder
from aqnpipe.config.noise import OperatorNoise, OperatorSet, Phase
from aqnpipe.generation.backend import Sampling
from aqnpipe.generation.transformers_backend import TransformersBackend
from aqnpipe.models.loading import load_model, load_tokenizer
from aqnpipe.noise.injection import NoiseKey, phase_noise
from aqnpipe.noise.operators import add_relative_error_
from aqnpipe.noise.recorder import ReceiptRecorder

ROUNDS = 5
SEQUENCES, PROMPT_TOKENS, RESPONSE_TOKENS = 64, 36, 16
KEY = NoiseKey(seed=0, step=0)


def seconds(work: Callable[[], object]) -> float:
    """Return the wall time of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def ratios(ours: Callable[[], object], reference: Callable[[], object]) -> list[float]:
    """Return time of `ours` over time of `reference`, measured in turn after one warm-up of each."""
    ours(), reference()
    return [seconds(ours) / seconds(reference) for _ in range(ROUNDS)]


def recorder(operators: OperatorSet | None, phases: tuple[Phase, ...]) -> ReceiptRecorder:
    """Return a recorder that asks for 5 % noise on `operators` in `phases`, or for none."""
    noise = OperatorNoise(operators=operators, relative_scale=0.05, phases=phases) if operators else None
    return ReceiptRecorder(
        operator_noise=noise, weight_noise=None, expected_phases=phases[:1], num_layers=6, num_norms=13
    )


def main() -> None:
    """Measure and print the table."""
    torch.set_num_threads(1)
    folder: Path = builtin_folder("tiny")
    model, tokenizer = load_model(folder, dtype="float32", attention="eager"), load_tokenizer(folder)
    ids = torch.randint(5, len(tokenizer), (SEQUENCES, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0))
    backend = TransformersBackend(model, tokenizer)

    def generate(operators: OperatorSet | None) -> None:
        account = recorder(operators, ("evaluation",))
        with phase_noise(model, account, "evaluation", KEY):
            backend.generate(ids.tolist(), Sampling(max_response_tokens=RESPONSE_TOKENS))
        account.receipt().check()

    def train_step(operators: OperatorSet | None) -> None:
        account = recorder(operators, ("actor_forward", "backward"))
        with phase_noise(model, account, "actor_forward", KEY, backward=True):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        account.count_forward("backward")
        model.zero_grad()
        account.receipt().check()

    output, generator = torch.randn(SEQUENCES * PROMPT_TOKENS, 320), torch.Generator()
    rows = [
        (
            "noise on one tensor",
            "naive x + randn_like(x)*x.abs()*s",
            ratios(
                lambda: add_relative_error_(output, 0.05, generator),
                lambda: output + torch.randn_like(output) * output.abs() * 0.05,
            ),
        )
    ]
    for operators in ("matmul", "all"):
        rows.append(
            (f"generation, {operators}", "clean", ratios(lambda o=operators: generate(o), lambda: generate(None)))
        )
        rows.append(
            (
                f"training step, {operators}",
                "clean",
                ratios(lambda o=operators: train_step(o), lambda: train_step(None)),
            )
        )
    table = Table("what", "against", "median ratio", "lowest", "highest")
    for what, against, found in rows:
        table.add_row(what, against, *(f"{value:.2f}" for value in (statistics.median(found), min(found), max(found))))
    Console().print(table)


if __name__ == "__main__":
    main()
